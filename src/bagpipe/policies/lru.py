"""Least recently used: rows stay until their slot is needed, the one used longest ago leaves first.

What a cache does that knows the past only; rows used by the same iteration leave in the order of that plan's rows.
"""

from __future__ import annotations

from collections.abc import Sequence

from bagpipe.oracle.slots import Group
from bagpipe.oracle.uses import Uses
from bagpipe.policies.base import Demand, Int32s, KeepingPolicy, Lookahead, Stays


class LruPolicy(KeepingPolicy):
    """Keeps everything; victims are the least recently used rows outside the batch."""

    name = "lru"

    def bind(self, groups: Sequence[Group], lookahead: Lookahead, ahead: int) -> None:
        """Begin a run."""
        super().bind(groups, lookahead, ahead)
        self._uses = {group.number: Uses(group.slots.capacity) for group in groups}

    def make_room(self, demand: Demand, needed: int) -> tuple[Int32s, int]:
        """The slots used longest ago."""
        uses = self._uses[demand.group.number]
        uses.last[demand.hits] = demand.iteration
        return uses.pop_oldest(needed)

    def planned(self, iteration: int, group: Group, slots: Int32s, stays: Stays) -> None:  # noqa: ARG002 - all stay
        """Remember the order of use."""
        self._uses[group.number].push(slots, iteration)
