"""The slot spaces of the cache, one a group of tables: which slots are free, and who lives in the others.

Slots are only ever handed out from the ring of free ones, so a cache can't overflow and a slot has one tenant (I5).
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TypeVar

import numpy as np
from numpy.typing import NDArray

from bagpipe.kernels.oracle import pop_idle, rest

Int32s = NDArray[np.int32]
Int64s = NDArray[np.int64]
NextUses = NDArray[np.uint16]
Value = TypeVar("Value", bound=np.generic)


class Slots:
    """The free slots of one group, oldest first, so that reuse rarely waits for the last tenant to be copied out."""

    def __init__(self, capacity: int) -> None:
        self.capacity = capacity
        self._ring: Int32s = np.arange(capacity, dtype=np.int32)
        self._freed_by: Int32s = np.full(capacity, -1, np.int32)
        self._first = 0
        self.num_free = capacity

    def take(self, slots: Int32s, freed_by: Int32s) -> None:
        """Fill `slots` with the oldest free slots, and with the plan that freed each (-1: none, or as a victim)."""
        count = len(slots)
        assert count <= self.num_free, "the policy left too few free slots"
        first, split = self._first, min(count, self.capacity - self._first)
        for target, ring in ((slots, self._ring), (freed_by, self._freed_by)):
            target[:split] = ring[first : first + split]
            target[split:] = ring[: count - split]
        self._first = (first + count) % max(1, self.capacity)
        self.num_free -= count

    def free(self, slots: Int32s, plan: int) -> None:
        """Put slots behind the free ones, as freed by this plan."""
        count = len(slots)
        first = (self._first + self.num_free) % max(1, self.capacity)
        split = min(count, self.capacity - first)
        self._ring[first : first + split] = slots[:split]
        self._ring[: count - split] = slots[split:]
        self._freed_by[first : first + split] = plan
        self._freed_by[: count - split] = plan
        self.num_free += count
        assert self.num_free <= self.capacity, "a slot was freed twice"


class AddressedSlots(Slots):
    """The slots of one group for a policy that says itself which of them its rows take."""

    def __init__(self, capacity: int) -> None:
        super().__init__(capacity)
        self._taken: NDArray[np.bool_] = np.zeros(capacity, np.bool_)

    def claim(self, slots: Int32s) -> Int32s:
        """Take these free slots; the plan that freed each (-1: none, or as a victim)."""
        assert not self._taken[slots].any(), "the policy chose a slot that has a tenant"
        self._taken[slots] = True
        self.num_free -= len(slots)
        return self._freed_by[slots]

    def oldest(self, count: int, first: int) -> Int32s:
        """So many free slots: those from `first` on before others, and of these what was freed longest ago."""
        behind = self._longest_free(count, first, self.capacity)
        before = self._longest_free(count - len(behind), 0, first)
        return np.concatenate([behind, before])

    def _longest_free(self, count: int, first: int, stop: int) -> Int32s:
        """At most so many of the free slots in a range; of those freed by one plan the lowest. Sorts no others."""
        if not count:
            return np.empty(0, np.int32)
        free = (first + np.flatnonzero(~self._taken[first:stop])).astype(np.int32)
        if len(free) > count:
            freed_by = self._freed_by[free]
            last = np.partition(freed_by, count - 1)[count - 1]
            earlier = free[freed_by < last]
            free = np.concatenate([earlier, free[freed_by == last][: count - len(earlier)]])
        return free[np.argsort(self._freed_by[free], kind="stable")]

    def free(self, slots: Int32s, plan: int) -> None:
        """Let go of slots, as freed by this plan."""
        assert self._taken[slots].all(), "a slot was freed twice"
        self._taken[slots] = False
        self._freed_by[slots] = plan
        self.num_free += len(slots)


class IdleQueue:
    """Slots of one group whose rows are idle: in the cache, and no batch is known to need them. Those idle for longest
    are taken first; of one iteration in the order given. Rows that were used since are skipped."""

    def __init__(self, capacity: int, since: Int32s | None = None) -> None:
        """`since` may be a part of a larger array; -1 all over."""
        self.since: Int32s = np.full(capacity, -1, np.int32) if since is None else since
        """The iteration that used each slot's row last, if it is idle; else -1."""
        self._queue: Int32s = np.empty((2, 2 * capacity + 64), np.int32)
        self._begin = self._end = 0
        self._count = 0

    def __len__(self) -> int:
        return self._count

    def settle(self, slots: Int32s, next_use: NextUses, iteration: int) -> None:
        """An iteration used these rows: those whose next use is KEEP are idle from now on, and the others are not."""
        if self._end + len(slots) > self._queue.shape[1]:
            self._compact(len(slots))
        more, self._end = rest(slots, next_use, iteration, self.since, self._queue, self._end)
        self._count += more

    def granted(self, count: int) -> None:
        """So many were idle, and are no more."""
        self._count -= count

    def wake(self, slots: Int32s) -> None:
        """These are not idle any more."""
        self._count -= int(np.count_nonzero(self.since[slots] >= 0))
        self.since[slots] = -1

    def pop(self, count: int) -> tuple[Int32s, int]:
        """Take out so many of those idle for longest; the last iteration that used any of them, or -1."""
        slots = np.empty(count, np.int32)
        self._begin = pop_idle(self._queue, self._begin, self._end, self.since, slots)
        self._count -= count
        return slots, int(self._queue[1, self._begin - 1]) if count else -1

    def _compact(self, room: int) -> None:
        """Drop what is skipped; at most one a slot remains, so it happens once per as many uses as there are slots."""
        slots, iterations = self._queue[:, self._begin : self._end]
        live = self.since[slots] == iterations
        self._begin, self._end = 0, int(live.sum())
        queue = self._queue
        if self._end + room > queue.shape[1] // 2:
            queue = np.empty((2, 2 * (self._end + room)), np.int32)
        queue[:, : self._end] = slots[live], iterations[live]
        self._queue = queue


class Group:
    """Tables of equal row width and the slot space that they share."""

    def __init__(
        self,
        number: int,
        tables: Sequence[int],
        capacity: int,
        label: str = "",
        rows: Sequence[int | None] = (),
    ) -> None:
        self.number = number
        self.label = label or f"group {number}"
        """What messages call it."""
        self.tables: Int64s = np.array(tables, np.int64)
        self.rows = tuple(rows) or (None,) * len(tables)
        """How many rows each table has, where known."""
        self.slots = Slots(capacity)
        firsts = [t for t in tables if t - 1 not in tables]
        lasts = [t for t in tables if t + 1 not in tables]
        self._runs = [(first, last + 1) for first, last in zip(firsts, lasts, strict=True)]

    def collect(self, values: NDArray[Value], bounds: Int64s) -> NDArray[Value]:
        """The group's part of an array in which table t has positions bounds[t] to bounds[t + 1]."""
        pieces = [values[bounds[first] : bounds[stop]] for first, stop in self._runs]
        return pieces[0] if len(pieces) == 1 else np.concatenate([values[:0], *pieces])

    def spread(self, own: NDArray[Value], values: NDArray[Value], bounds: Int64s) -> None:
        """The reverse of `collect`."""
        done = 0
        for first, stop in self._runs:
            piece = values[bounds[first] : bounds[stop]]
            piece[:] = own[done : done + len(piece)]
            done += len(piece)
