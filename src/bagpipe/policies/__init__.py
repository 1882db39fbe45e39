"""The policies by name: functions from the future, or the past, to plans, all executed by the same machinery."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from bagpipe.errors import ConfigError
from bagpipe.policies.base import Policy
from bagpipe.policies.baselines import IdealPolicy, LfuPolicy, LruPolicy, NoCachePolicy
from bagpipe.policies.belady import BeladyPolicy
from bagpipe.policies.lookahead import LookaheadPolicy
from bagpipe.policies.sampled import FrequencyPolicy, StaticPolicy
from bagpipe.policies.scratchpipe import ScratchPipePolicy
from bagpipe.policies.windowed import WindowedPolicy
from bagpipe.policy_options import DEFAULTS, PolicyOptions, as_options

POLICIES: dict[str, type[Policy]] = {
    policy.name: policy
    for policy in (
        *(LookaheadPolicy, BeladyPolicy, ScratchPipePolicy, WindowedPolicy, FrequencyPolicy, StaticPolicy),
        *(LfuPolicy, LruPolicy, NoCachePolicy, IdealPolicy),
    )
}


def make_policy(name: str, options: PolicyOptions | Mapping[str, Any] = DEFAULTS) -> Policy:
    """A policy by its name; options may be as they have travelled."""
    options = as_options(options)
    if not isinstance(name, str) or name not in POLICIES:
        raise ConfigError(f"there is no policy {name!r}: choose one of {', '.join(POLICIES)}")
    policy = POLICIES[name]()
    policy.options, policy.exact = options, policy.is_exact(options)
    return policy
