"""The policies by name, and any other: functions from the future, or the past, to plans, all executed by the same
machinery."""

from __future__ import annotations

from collections.abc import Mapping
from copy import deepcopy
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


def make_policy(given: str | Policy, options: PolicyOptions | Mapping[str, Any] = DEFAULTS) -> Policy:
    """A policy by its name, or a copy of one, which stays as it is; options may be as they have travelled."""
    options = as_options(options)
    policy = _copy(given, options) if isinstance(given, Policy) else _named(given)
    policy.options, policy.exact = options, policy.is_exact(options)
    return policy


def is_own(policy: Policy) -> bool:
    """Whether a policy is none of those above."""
    return type(policy) not in POLICIES.values()


def _named(name: object) -> Policy:
    if isinstance(name, str) and name in POLICIES:
        return POLICIES[name]()
    if isinstance(name, str):
        raise ConfigError(f"there is no policy {name!r}: choose one of {', '.join(POLICIES)}")
    if isinstance(name, type) and issubclass(name, Policy):
        raise ConfigError(f"policy is the class {name.__name__}: give an object of it, {name.__name__}(...)")
    raise ConfigError(
        f"policy is {name!r}: give one of {', '.join(POLICIES)}, or an object of a class of your own that is derived "
        "from bagpipe.policies.Policy"
    )


def _copy(policy: Policy, options: PolicyOptions) -> Policy:
    if policy.options not in (DEFAULTS, options):
        raise ConfigError(
            f"policy {policy.name!r} has options of its own, {policy.options}: give them to bagpipe.Cache(options=...)"
        )
    try:
        return deepcopy(policy)
    except Exception as error:
        raise ConfigError(
            f"policy {policy.name!r} can't be copied ({type(error).__name__}: {error}), and each oracle needs one of "
            "its own: make in bind() what can't, or define __deepcopy__"
        ) from error
