"""The slot spaces of the cache, one a group of tables: which slots are free, and who leaves the others first.

Slots are only ever handed out from the free ones, so a cache can't overflow and a slot has one tenant (I5). A row in
the cache is granted a stay until its next use, or it is idle: idle rows make room, in the order of the `IdleQueue`, or
in that of the keys that the policy makes from `SlotFacts`.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, TypeVar

import numpy as np
from numpy.typing import NDArray

from bagpipe.arrays import Int32s, Int64s, NextUses
from bagpipe.kernels.oracle import KEEP, pop_idle, rest

if TYPE_CHECKING:
    from bagpipe.policies.base import Demand, Extra, Policy

Value = TypeVar("Value", bound=np.generic)

NONE: Int32s = np.empty(0, np.int32)
HELD = 2**62
"""The key of a slot whose row may not leave; those of others are less, and not negative."""
NEVER = 2**31 - 1
"""The next use of a row that no batch of the window needs."""


class Slots:
    """The free slots of one group, oldest first, so that reuse rarely waits for the last tenant to be copied out."""

    def __init__(self, capacity: int, freed_by: int = -1) -> None:
        """All are free, as freed by this plan."""
        self.capacity = capacity
        self._ring: Int32s = np.arange(capacity, dtype=np.int32)
        self._freed_by: Int32s = np.full(capacity, freed_by, np.int32)
        self._first = 0
        self.num_free = capacity

    def take(self, count: int) -> tuple[Int32s, Int32s]:
        """The oldest free slots, and the plan that freed each (-1: none, or as a victim)."""
        assert count <= self.num_free, "the policy left too few free slots"
        first, split = self._first, min(count, self.capacity - self._first)
        slots, freed_by = np.empty((2, count), np.int32)
        for target, ring in ((slots, self._ring), (freed_by, self._freed_by)):
            target[:split] = ring[first : first + split]
            target[split:] = ring[: count - split]
        self._first = (first + count) % max(1, self.capacity)
        self.num_free -= count
        return slots, freed_by

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

    def __init__(self, capacity: int, begin: int = 0, freed_by: int = -1) -> None:
        """Rows that may be anywhere take slots from `begin` on before others."""
        super().__init__(capacity, freed_by)
        self._begin = begin
        self._taken: NDArray[np.bool_] = np.zeros(capacity, np.bool_)

    def claim(self, slots: Int32s) -> Int32s:
        """Take these free slots; the plan that freed each (-1: none, or as a victim)."""
        assert not self._taken[slots].any(), "the policy chose a slot that has a tenant"
        self._taken[slots] = True
        self.num_free -= len(slots)
        return self._freed_by[slots]

    def take(self, count: int) -> tuple[Int32s, Int32s]:
        """So many free slots: those from `begin` on before others, and of these what was freed longest ago."""
        behind = self._longest_free(count, self._begin, self.capacity)
        before = self._longest_free(count - len(behind), 0, self._begin)
        slots = np.concatenate([behind, before])
        return slots, self.claim(slots)

    def _longest_free(self, count: int, first: int, stop: int) -> Int32s:
        """At most so many of the free slots in a range; of those freed by one plan the lowest. Sorts no others."""
        if not count:
            return NONE
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

    def __init__(self, since: Int32s) -> None:
        """`since` may be a part of a larger array; -1 all over."""
        self.since = since
        """The iteration that used each slot's row last, if it is idle; else -1."""
        self._queue: Int32s = np.empty((2, 2 * len(since) + 64), np.int32)
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


class SlotFacts:
    """What is known of the tenants of one group's slots, for policies that rank them."""

    def __init__(self, next_uses: Int32s) -> None:
        """`next_uses` may be a part of a larger array; NEVER all over."""
        capacity = len(next_uses)
        self.next = next_uses
        """When the window needs each tenant, or NEVER; if the policy grants every stay."""
        self.last: Int32s = np.full(capacity, -1, np.int32)
        """The iteration that last used each tenant; -1: the slot is free."""
        self.uses: Int32s = np.zeros(capacity, np.int32)
        """The number of batches that have used each tenant since it came."""
        self.mark: Int32s = np.full(capacity, -1, np.int32)
        """A number that the policy has given each tenant; -1: none since it came."""
        self._keys: Int64s = np.empty(capacity, np.int64)

    def keys(self, values: Int32s, *, largest_first: bool = False) -> Int64s:
        """Keys by these values of slots, then by the last use; HELD for free slots. Valid until the next call."""
        keys = self._keys
        keys[:] = values
        if largest_first:
            np.subtract(NEVER, keys, out=keys)
        keys <<= 31
        keys += self.last
        keys[self.last < 0] = HELD
        return keys

    def came(self, slots: Int32s) -> None:
        """These have new tenants."""
        self.uses[slots], self.mark[slots] = 0, -1

    def settle(self, slots: Int32s, next_use: NextUses, iteration: int) -> None:
        """An iteration used these rows: those whose next use is 0 are gone."""
        self.last[slots] = np.where(next_use == 0, -1, iteration)
        self.uses[slots] += 1
        self.next[slots] = np.where(next_use == KEEP, NEVER, iteration + next_use.astype(np.int32))

    def vacate(self, slots: Int32s) -> tuple[Int32s, int]:
        """Let the tenants of these slots go: the slots that have one, and the last iteration that used any of them."""
        slots = slots[self.last[slots] >= 0]
        last = int(self.last[slots].max(initial=-1))
        self.last[slots] = -1
        return slots, last


def lowest(keys: Int64s, count: int) -> Int32s:
    """At most `count` slots with the smallest keys, in order of slots; among equal keys the first."""
    open_slots = np.flatnonzero(keys < HELD).astype(np.int32)
    if count >= len(open_slots):
        return open_slots
    values = keys[open_slots]
    largest = np.partition(values, count - 1)[count - 1] if count else -1
    taken = values < largest
    taken[np.flatnonzero(values == largest)[: count - np.count_nonzero(taken)]] = True
    return open_slots[taken]


class Group:
    """Tables of equal row width and the slot space that they share."""

    def __init__(
        self,
        number: int,
        tables: Sequence[int],
        capacity: int,
        label: str = "",
        rows: Sequence[int | None] = (),
        freed_by: int = -1,
    ) -> None:
        """Its slots are vacant since the evictions of plan `freed_by`."""
        self.number, self.capacity, self.freed_by = number, capacity, freed_by
        self.label = label or f"group {number}"
        """What messages call it."""
        self.tables: Int64s = np.array(tables, np.int64)
        self.rows = tuple(rows) or (None,) * len(tables)
        """How many rows each table has, where known."""
        self.slots = Slots(capacity, freed_by)
        self.idle: IdleQueue | None = None
        self.ranked: SlotFacts | None = None
        """Who makes room: one of the two, or neither where nobody ever has to."""
        self.loads: Int64s = np.zeros((2, 1), np.int64)
        """For each iteration of the window its rows and those that stay across it; and the same with those on their way
        for the next ones: the sums of `kernels.admit`, if the policy keeps them."""
        self.rows_in: Callable[[Int64s], tuple[Int64s, Int64s]] = lambda slots: (slots[:0], slots[:0])
        """Table and id of the tenants of some slots."""
        self.absent: Callable[[int, int], tuple[Int64s, Int64s]]
        """Table and id of the rows that batches of the window, from one iteration to another, need and that are not in
        the cache."""
        firsts = [t for t in tables if t - 1 not in tables]
        lasts = [t for t in tables if t + 1 not in tables]
        self._runs = [(first, last + 1) for first, last in zip(firsts, lasts, strict=True)]

    @property
    def facts(self) -> SlotFacts:
        """What is known of tenants, if the policy has keys."""
        assert self.ranked is not None
        return self.ranked

    def assign(self, policy: Policy, demand: Demand) -> tuple[Int32s, int]:
        """Slots for the rows that are missing, as the policy wants, or the oldest free ones; and what freed each.

        Returns the slots of the rows that leave for them, and the last iteration that used any of those.
        """
        chosen, count = policy.place(demand), len(demand.missing)
        if chosen is None:
            more, last = self.make_room(policy, demand, count - self.slots.num_free)
            demand.new, demand.slot_after = self.slots.take(count)
        else:
            victims, last = self._claim(demand, chosen)
            rest = chosen < 0
            others = int(np.count_nonzero(rest))
            more, used = self.make_room(policy, demand, others - self.slots.num_free)
            demand.new[rest], demand.slot_after[rest] = self.slots.take(others)
            more, last = np.concatenate([victims, more]), max(last, used)
        if self.ranked is not None:
            self.ranked.came(demand.new)
        return more, last

    def admit(self, policy: Policy, demand: Extra) -> tuple[Int32s, int]:
        """The same for rows that a plan brings along: as far as they find a place; -1 for those that do not."""
        chosen, count = policy.place(demand), len(demand.missing)
        if chosen is None:
            count = min(count, self.slots.num_free)
            demand.new, demand.slot_after = np.full((2, len(demand.missing)), -1, np.int32)
            demand.new[:count], demand.slot_after[:count] = self.slots.take(count)
            victims, last = NONE, -1
        else:
            victims, last = self._claim(demand, chosen)
        slots = demand.new[demand.new >= 0]
        self.facts.came(slots)
        self.facts.last[slots], self.facts.next[slots] = demand.iteration, NEVER
        return victims, last

    def _claim(self, demand: Demand, chosen: Int32s) -> tuple[Int32s, int]:
        """Take the slots that the policy has chosen (-1: none) from whoever is there; as `assign`."""
        assert isinstance(self.slots, AddressedSlots)
        given = chosen >= 0
        victims, last = self.facts.vacate(chosen[given])
        self.slots.free(victims, -1)
        demand.new, demand.slot_after = chosen.copy(), np.full(len(chosen), -1, np.int32)
        demand.slot_after[given] = self.slots.claim(chosen[given])
        return victims, last

    def make_room(self, policy: Policy, demand: Demand, count: int) -> tuple[Int32s, int]:
        """Free the slots of so many rows outside the batch; them, and the last iteration that used any of the rows."""
        if count <= 0:
            return NONE, -1
        hits = demand.slots[demand.slots >= 0]
        if self.idle is not None:
            self.idle.wake(hits)
            victims, last = self.idle.pop(count)
        else:
            assert self.ranked is not None, f"iteration {demand.iteration} lacks {count} slots of {self.label}"
            keys = policy.keys(demand.iteration, self, count)
            keys[hits] = HELD
            victims, last = self.facts.vacate(lowest(keys, count))
        assert len(victims) == count, f"iteration {demand.iteration} lacks slots of {self.label}"
        self.slots.free(victims, -1)
        return victims, last

    def collect(self, values: NDArray[Value], bounds: Int64s) -> NDArray[Value]:
        """The group's part of an array in which table t has positions bounds[t] to bounds[t + 1]."""
        pieces = [values[part] for part in self.parts(bounds)]
        return pieces[0] if len(pieces) == 1 else np.concatenate([values[:0], *pieces])

    def spread(self, own: NDArray[Value], values: NDArray[Value], bounds: Int64s) -> None:
        """The reverse of `collect`."""
        done = 0
        for part in self.parts(bounds):
            piece = values[part]
            piece[:] = own[done : done + len(piece)]
            done += len(piece)

    def parts(self, bounds: Int64s) -> list[slice]:
        """Where the group's tables are in such an array."""
        return [slice(bounds[first], bounds[stop]) for first, stop in self._runs]
