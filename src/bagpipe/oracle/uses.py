"""Slots in order of their last use: a queue of all uses, of which those that a later use has overtaken are skipped."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from bagpipe.kernels import kernel

Int32s = NDArray[np.int32]


class Uses:
    """The slots of one group, those used longest ago first; slots used by one iteration in the order given."""

    def __init__(self, capacity: int) -> None:
        self.last: Int32s = np.full(capacity, -1, np.int32)
        """The iteration that last used each slot."""
        self._queue: Int32s = np.empty((2, 2 * capacity + 64), np.int32)
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
