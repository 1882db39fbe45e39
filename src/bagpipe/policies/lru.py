"""Least recently used: rows stay until their slot is needed, the one used longest ago leaves first.

What a cache does that knows the past only; rows used by the same iteration leave in the order of that plan's rows.
"""

from __future__ import annotations

from collections.abc import Sequence

from bagpipe.oracle.slots import Group, IdleQueue
from bagpipe.policies.base import Demand, Int32s, KeepingPolicy, Lookahead, Stays


class LruPolicy(KeepingPolicy):
    """Keeps everything; victims are the least recently used rows outside the batch."""

    name = "lru"

    def bind(self, groups: Sequence[Group], lookahead: Lookahead, ahead: int) -> None:
        """Begin a run."""
        super().bind(groups, lookahead, ahead)
        self._idle = {group.number: IdleQueue(group.slots.capacity) for group in groups}

    def make_room(self, demand: Demand, needed: int) -> tuple[Int32s, int]:
        """The slots used longest ago."""
        idle = self._idle[demand.group.number]
        idle.wake(demand.hits)
        return idle.pop(needed)

    def planned(self, iteration: int, group: Group, slots: Int32s, stays: Stays) -> None:
        """All of them stay, idle until they are used again."""
        self._idle[group.number].settle(slots, stays, iteration)
