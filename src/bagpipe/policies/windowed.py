"""cDLRM: windows of n batches, and a set-associative cache in which the rows of the current one keep their ways.

A row of a large table may be in the ways of one set, id modulo a prime; rows of small tables have a place each. A row
that the window needs and that is not there draws one of its set's ways that the window does not use. If there is none,
or another row has drawn the same, it is a *conflict victim*: it is fetched for its batch into the victim table, and
leaves right after (sections 3.2 and 5.2). The victim table holds a batch, as published, if the sets beside it hold a
window; in smaller caches, where a batch can have more conflict victims, the rows needed last make room, be they of the
window. Rows are placed with the first batch of the window that uses them, not all at its beginning: the executor
fetches ahead anyway. As published a read does not wait for the row's last write-back, which can lose an update; that is
mode `stale`, and not exact.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from bagpipe.arrays import Flags, Int32s, Int64s
from bagpipe.kernels.victims import choose_ways
from bagpipe.oracle.slots import HELD, AddressedSlots, Group
from bagpipe.policies.base import Demand, Extra, Lookahead, Wanted, checked
from bagpipe.policies.belady import ForesightedPolicy
from bagpipe.policies.windows import WINDOW, Times, Windows
from bagpipe.policy_options import PolicyOptions

VICTIM_SHARE = 8
"""The victim table takes this part of the slots at least, unless a batch has fewer rows."""
CROWDED = 8
"""A window is crowded if more than this part of the rows that it lacked got no way."""


class WindowedPolicy(ForesightedPolicy):
    """Keeps the rows of the current window where their sets have ways, and others as long as nobody draws theirs."""

    name = "windowed"

    def bind(self, groups: Sequence[Group], lookahead: Lookahead, ahead: int) -> None:
        """Begin a run."""
        super().bind(groups, lookahead, ahead)
        if not hasattr(self, "windows"):  # they go on where slots are divided anew
            self.windows = Windows(self.options.windows, checked(lookahead, WINDOW))
        self.window, self.window_max = max(2, self.windows.length), max(2, self.windows.most)
        self._first = self._end = -1
        self._lacked = self._refused = 0
        """Rows that this window had to place so far, and those that got no way."""
        self.layouts: dict[int, SetLayout] = {}
        """The sets of each group, once its first plan is made."""
        self._largest = np.zeros(len(groups), np.int64)
        self._used: Int64s | int = 0
        """Of what was read: the rows of the largest batch, and the different ones of each table."""

    @classmethod
    def is_exact(cls, options: PolicyOptions) -> bool:
        """Unless reads do not wait."""
        return options.mode == "strict"

    @classmethod
    def lead(cls, lookahead: Lookahead, options: PolicyOptions) -> int:
        """A window, if they may be old."""
        return 0 if cls.is_exact(options) else Windows(options.windows, checked(lookahead, WINDOW)).most

    def grant(self, iteration: int, window: int, counts: Int64s, gaps: Int64s) -> bool:
        """Every stay; what the first window needs says how large sets and victim tables are."""
        if self._end < 0:
            self._largest = np.maximum(self._largest, [counts[group.tables].sum() for group in self.groups])
            self._used = self._used + counts - gaps[:, 1 : window + 1].sum(1)
        return super().grant(iteration, window, counts, gaps)

    def place(self, demand: Demand) -> Int32s:
        """Ways for those that get one, places in the victim table for the others: where that is too small, those make
        room whose next use is farthest, be they of the window."""
        if demand.iteration >= self._end:
            self._first, self._end = demand.iteration, demand.iteration + self.windows.length
        group, number, facts = demand.group, demand.group.number, demand.group.facts
        if number not in self.layouts:
            used = np.asarray(self._used)[group.tables]
            self.layouts[number] = SetLayout(group, self.options.ways, used, int(self._largest[number]))
            group.slots = AddressedSlots(group.capacity, self.layouts[number].end, group.freed_by)
        pinned: Flags = (facts.last >= self._first) | ((facts.last >= 0) & (facts.next < self._end))
        brings = isinstance(demand, Extra)
        if brings:
            pinned[demand.slots] = True  # their use is not noted yet
        source = np.random.Philox(key=self.options.seed, counter=[0, int(brings), number, demand.iteration])
        draws = np.random.Generator(source).integers(0, 2**62, (2, len(demand.missing)))
        chosen = np.empty(len(demand.missing), np.int32)
        self.layouts[number].choose(*demand.misses, draws, pinned, chosen)
        self._conflicts = demand.missing[chosen < 0]
        self._lacked += len(chosen)
        self._refused += len(self._conflicts)
        return chosen

    def along(self, iteration: int) -> Wanted | None:
        """With the first plan of a window, if asked for, the rows of all its batches."""
        if not self.options.preload or iteration != self._first:
            return None
        return [group.absent(iteration + 1, self._end - 1) for group in self.groups]

    def leaves(self, demand: Demand, *, ended: bool) -> Int32s:  # noqa: ARG002
        """Conflict victims."""
        return self._conflicts

    def measure(self, times: Times) -> None:
        """How long windows are may follow from it."""
        self.windows.times = times

    def advance(self, iteration: int, window: int) -> int:
        """The lookahead is what is left of the window; behind its last plan the next one is chosen, which must have
        been read before it begins."""
        if iteration == self._end - 1:
            self.windows.advance(self._end, crowded=self._refused * CROWDED > self._lacked)
            self.window = max(2, self.windows.length)
            self._lacked = self._refused = 0
        return max(1, min(window, self._end - iteration))


class SetLayout:
    """Where the sets of each table of a group lie: slots 0 to `end`, the victim table behind them."""

    def __init__(self, group: Group, ways: int, used: Int64s, batch: int) -> None:
        """Divide the slots by the different rows that a window has of each table, and the rows of its largest batch."""
        capacity = group.capacity
        room = capacity - min(batch, max(-(-capacity // VICTIM_SHARE), capacity - int(used.sum())))
        rows: Int64s = np.array([HELD if most is None else most for most in group.rows], np.int64)

        def taken(level: int) -> tuple[Int64s, Int64s]:
            """The sets of each table and its slots, not more than rows: so many sets for each, but no more than its
            rows of the window fill by half, until all tables have those; from there on in proportion."""
            needs = -(-2 * used // ways)
            most = max(1, int(needs.max()))
            shares = np.minimum(level, needs * max(level, most) // most)
            sets = np.array([next_prime(share) for share in shares.tolist()], np.int64)
            return sets, np.minimum(rows, sets * ways)

        while ways > 1 and taken(0)[1].sum() > room:
            ways //= 2
        low, high = 0, room
        while low < high:  # the largest number of sets that fits
            middle = (low + high + 1) // 2
            low, high = (middle, high) if taken(middle)[1].sum() <= room else (low, middle - 1)
        sets, slots = taken(low)
        if slots.sum() > room:  # all rows go to the victim table
            sets = slots = np.zeros_like(rows)
        whole = slots == rows
        tables = group.tables.tolist()
        self.sets: Int64s = np.zeros(max(tables) + 1, np.int64)
        """Sets of each table; 0: it has none, and all its rows go to the victim table."""
        self.ways: Int64s = np.zeros_like(self.sets)
        self.firsts: Int64s = np.zeros_like(self.sets)
        self.sets[tables] = np.where(whole, slots, sets)
        self.ways[tables] = np.where(whole, 1, ways)
        self.firsts[tables] = np.cumsum(slots) - slots
        self.end = int(slots.sum())
        self._claims: Int32s = np.zeros(capacity, np.int32)
        self._winners: Int64s = np.zeros(capacity, np.int64)

    def choose(self, tables: Int64s, ids: Int64s, draws: Int64s, pinned: Flags, slots: Int32s) -> None:
        """The way that each row gets, or -1."""
        sets = self.sets[tables]
        firsts = self.firsts[tables] + ids % np.maximum(1, sets) * self.ways[tables]
        ways = np.where(sets > 0, self.ways[tables], 0)
        choose_ways(firsts, ways, draws, pinned, self._claims, self._winners, slots)


def next_prime(least: int) -> int:
    """The smallest prime that is not less."""
    number = max(2, least)
    while any(number % divisor == 0 for divisor in range(2, int(number**0.5) + 1)):
        number += 1
    return number
