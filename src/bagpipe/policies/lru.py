"""Least recently used: rows stay until their slot is needed, the one used longest ago leaves first.

What a cache does that knows the past only; rows used by the same iteration leave in the order of that plan's rows.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from bagpipe.kernels import kernel
from bagpipe.oracle.slots import Group
from bagpipe.policies.base import Demand, Int32s, Lookahead, Policy


class LruPolicy(Policy):
    """Keeps everything; victims are the least recently used rows outside the batch."""

    name = "lru"
    keeps = True

    def bind(self, groups: Sequence[Group], lookahead: Lookahead, ahead: int) -> None:
        """Begin a run."""
        super().bind(groups, lookahead, ahead)
        self.target = self.target_max = 2  # the second batch only tells whether the first is the last one
        self._uses = {group.number: Uses(group.slots.capacity) for group in groups}

    def make_room(self, demand: Demand, needed: int) -> tuple[Int32s, int]:
        """The slots used longest ago."""
        uses = self._uses[demand.group.number]
        uses.last[demand.hits] = demand.iteration
        return uses.pop_oldest(needed)

    def planned(self, iteration: int, group: Group, slots: Int32s) -> None:
        """Remember the order of use."""
        self._uses[group.number].push(slots, iteration)


class Uses:
    """Slots in order of their last use: a queue of all uses, of which those with a later use are skipped."""

    def __init__(self, capacity: int) -> None:
        self.last: Int32s = np.full(capacity, -1, np.int32)
        """The iteration that last used each slot."""
        self._queue: NDArray[np.int32] = np.empty((2, 2 * capacity + 64), np.int32)
        self._begin = self._end = 0

    def push(self, slots: Int32s, iteration: int) -> None:
        """All of these slots are used now."""
        if self._end + len(slots) > self._queue.shape[1]:
            self._compact(len(slots))
        self.last[slots] = iteration
        self._queue[0, self._end : self._end + len(slots)] = slots
        self._queue[1, self._end : self._end + len(slots)] = iteration
        self._end += len(slots)

    def pop_oldest(self, count: int) -> tuple[Int32s, int]:
        """Take out the slots used longest ago, and the last use of any of them."""
        slots = np.empty(count, np.int32)
        self._begin = _pop_oldest(self._queue, self._begin, self._end, self.last, slots)
        return slots, int(self.last[slots].max(initial=-1))

    def _compact(self, room: int) -> None:
        """Drop skipped uses; at most one a slot remains, so this happens once per as many uses as there are slots."""
        slots, iterations = self._queue[:, self._begin : self._end]
        live = self.last[slots] == iterations
        self._begin, self._end = 0, int(live.sum())
        queue = self._queue
        if self._end + room > queue.shape[1] // 2:
            queue = np.empty((2, 2 * (self._end + room)), np.int32)
        queue[:, : self._end] = slots[live], iterations[live]
        self._queue = queue


@kernel
def _pop_oldest(queue: Int32s, begin: int, end: int, last: Int32s, slots: Int32s) -> int:
    count = 0
    while count < slots.shape[0] and begin < end:
        if last[queue[0, begin]] == queue[1, begin]:
            slots[count] = queue[0, begin]
            count += 1
        begin += 1
    assert count == slots.shape[0]
    return begin
