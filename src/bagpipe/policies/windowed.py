"""cDLRM: windows of n batches, and a set-associative cache in which the rows of the current one keep their ways.

A row of a large table may be in the ways of one set, id modulo a prime; rows of small tables have a place each. A row
that the window needs and that is not there draws one of its set's ways that the window does not use. If there is none,
or another row has drawn the same, it is a *conflict victim*: it is fetched for its batch into the victim table, and
leaves right after (sections 3.2 and 5.2). The paper's victim table holds a batch. Here it is a part of the cache, and
where a batch has more conflict victims, the rows needed last make room, be they of the window. Rows are placed with the
first batch of the window that uses them, not all at its beginning: the executor fetches ahead anyway. As published a
read does not wait for the row's last write-back, which can lose an update; that is mode `stale`, and not exact.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from bagpipe.errors import ConfigError
from bagpipe.kernels.oracle import KEEP
from bagpipe.kernels.victims import HELD, choose_ways
from bagpipe.oracle.slots import AddressedSlots, Group
from bagpipe.policies.base import Demand, Flags, Int32s, Int64s, Lookahead, RankingPolicy, SlotFacts
from bagpipe.policy_options import PolicyOptions

WINDOW = 16
"""Batches of a window where the lookahead is "auto"."""
VICTIM_SHARE = 8
"""The victim table takes this part of the slots, and what sets and ways do not divide."""


class WindowedPolicy(RankingPolicy):
    """Keeps the rows of the current window where their sets have ways, and others as long as nobody draws theirs."""

    name = "windowed"
    foresees = True

    def bind(self, groups: Sequence[Group], lookahead: Lookahead, ahead: int) -> None:
        """Begin a run: lay out the sets of each table."""
        if lookahead != "auto" and not 1 <= lookahead < KEEP:
            raise ConfigError(f'lookahead is {lookahead}: give a number from 1 to {KEEP - 1}, or "auto"')
        for group in groups:
            group.slots = AddressedSlots(group.slots.capacity)
        super().bind(groups, lookahead, ahead)
        self.length = WINDOW if lookahead == "auto" else lookahead
        self.target = self.target_max = max(2, self.length)
        self._first = self._end = -1
        self.layouts = [SetLayout(group, self.options.ways) for group in groups]

    @classmethod
    def is_exact(cls, options: PolicyOptions) -> bool:
        """Unless reads do not wait."""
        return options.mode == "strict"

    def lookahead_at(self, iteration: int, window: int) -> int:
        """What is left of the window."""
        return max(1, min(window, self._end - iteration))

    def assign(self, demand: Demand, slots: Int32s, slot_after: Int32s) -> tuple[Int32s, int]:
        """Ways for those that get one, places in the victim table for the others."""
        self._enter(demand.iteration)
        number = demand.group.number
        facts, layout, free = self.facts[number], self.layouts[number], demand.group.slots
        assert isinstance(free, AddressedSlots)
        pinned = self._pinned(facts, demand.hits)
        if demand.num_misses:
            source = np.random.Philox(key=self.options.seed, counter=[0, 0, number, demand.iteration])
            draws = np.random.Generator(source).integers(0, 2**62, (2, demand.num_misses))
            layout.choose(*demand.misses(), draws, pinned, slots)
        demand.passing[:] = slots < 0
        placed = slots[~demand.passing]
        victims = placed[facts.last[placed] >= 0]
        evict_after = int(facts.last[victims].max(initial=-1))
        facts.last[victims] = -1
        free.free(victims, -1)
        slot_after[~demand.passing] = free.claim(placed)
        num_conflicts = demand.num_misses - len(placed)
        lacking = num_conflicts - free.num_free  # by so many the victim table is too small: even pinned rows make room
        more, used = self.make_room(demand, max(0, lacking))
        free.free(more, -1)
        slots[demand.passing] = free.oldest(num_conflicts, layout.end)
        slot_after[demand.passing] = free.claim(slots[demand.passing])
        return np.concatenate([victims, more]), max(evict_after, used)

    def keys(self, iteration: int, facts: SlotFacts) -> Int64s:  # noqa: ARG002 - next uses are known by their iteration
        """The farthest next use first."""
        return facts.keys(facts.next, largest_first=True)

    def _enter(self, iteration: int) -> None:
        """Begin the next window, if the last one is over."""
        if iteration >= self._end:
            self._first, self._end = iteration, iteration + self.length

    def _pinned(self, facts: SlotFacts, hits: Int32s) -> Flags:
        """The slots of rows that the window has used or will use."""
        pinned: Flags = (facts.last >= self._first) | ((facts.last >= 0) & (facts.next < self._end))
        pinned[hits] = True
        return pinned


class SetLayout:
    """Where the sets of each table of a group lie: slots 0 to `end`, the victim table behind them."""

    def __init__(self, group: Group, ways: int) -> None:
        capacity = group.slots.capacity
        room = capacity - -(-capacity // VICTIM_SHARE)
        rows = [HELD if most is None else most for most in group.rows]
        while ways > 1 and _slots_of(rows, 2, ways).sum() > room:
            ways //= 2
        low, high = 0, max(1, room)
        while low < high:  # the largest number of sets that fits
            middle = (low + high + 1) // 2
            low, high = (middle, high) if _slots_of(rows, next_prime(middle), ways).sum() <= room else (low, middle - 1)
        num_sets = next_prime(low) if low else 0
        taken = _slots_of(rows, num_sets, ways)
        whole = taken == rows
        tables = group.tables.tolist()
        self.sets: Int64s = np.zeros(max(tables) + 1, np.int64)
        """Sets of each table; 0: it has none, and all its rows go to the victim table."""
        self.ways: Int64s = np.zeros_like(self.sets)
        self.firsts: Int64s = np.zeros_like(self.sets)
        self.sets[tables] = np.where(whole, taken, num_sets)
        self.ways[tables] = np.where(whole, 1, ways)
        self.firsts[tables] = np.cumsum(taken) - taken
        self.end = int(taken.sum())
        self._claims: Int32s = np.zeros(capacity, np.int32)
        self._winners: Int64s = np.zeros(capacity, np.int64)

    def choose(self, tables: Int64s, ids: Int64s, draws: Int64s, pinned: Flags, slots: Int32s) -> None:
        """The way that each row gets, or -1."""
        sets = self.sets[tables]
        firsts = self.firsts[tables] + ids % np.maximum(1, sets) * self.ways[tables]
        ways = np.where(sets > 0, self.ways[tables], 0)
        choose_ways(firsts, ways, draws, pinned, self._claims, self._winners, slots)


def _slots_of(rows: Sequence[int], num_sets: int, ways: int) -> Int64s:
    """The slots of each table: its sets times ways, or its rows, where these are not more."""
    return np.minimum(np.array(rows, np.int64), num_sets * ways)


def next_prime(least: int) -> int:
    """The smallest prime that is not less."""
    number = max(2, least)
    while any(number % divisor == 0 for divisor in range(2, int(number**0.5) + 1)):
        number += 1
    return number
