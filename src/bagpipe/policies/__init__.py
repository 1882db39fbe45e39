"""The policies by name: functions from the future, or the past, to plans, all executed by the same machinery."""

from __future__ import annotations

from bagpipe.errors import ConfigError
from bagpipe.policies.base import Policy
from bagpipe.policies.ideal import IdealPolicy
from bagpipe.policies.lookahead import LookaheadPolicy
from bagpipe.policies.lru import LruPolicy
from bagpipe.policies.nocache import NoCachePolicy

POLICIES: dict[str, type[Policy]] = {
    policy.name: policy for policy in (LookaheadPolicy, LruPolicy, NoCachePolicy, IdealPolicy)
}


def make_policy(name: str) -> Policy:
    """A policy by its name."""
    if name not in POLICIES:
        raise ConfigError(f"there is no policy {name!r}: choose one of {', '.join(POLICIES)}")
    return POLICIES[name]()
