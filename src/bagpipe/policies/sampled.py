"""Policies that know from hot to cold how often rows are used before training begins: `frequency` and `static`.

What they know comes from batches spread over all data, or from all of them (section 4.2 of the paper on the
frequency-aware cache, which sorts rows by frequency and evicts the largest index). Here a row keeps its place in the
store and the rank stands beside its id, so that index and weights can't part. Unlike LFU nothing is counted while
training runs, so a row that was hot before never has to prove itself.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from bagpipe.arrays import Int32s, Int64s
from bagpipe.kernels.idmap import IdMap
from bagpipe.oracle.slots import NEVER, Group
from bagpipe.policies.base import Demand, Lookahead, Policy, Wanted

BATCHES = 64
"""Read before the first plan where all data was counted."""
STEPS = 32


class Sample:
    """How often each row is used, table by table; about 31 bytes for each that occurs.

    Rows are counted in batches spread over all data before the first is read, or else in those that are entered.
    """

    def __init__(self, features: Sequence[int]) -> None:
        """Table t has so many features."""
        self._tables = np.repeat(np.arange(len(features)), features).tolist()
        self._maps = [IdMap() for _ in features]
        self._counts: list[Int64s] = [np.zeros(0, np.int64) for _ in features]
        self._ranks: list[Int32s] = []
        self.batches: list[list[Int64s]] = []
        """Of each batch that was entered the different ids of each table."""
        self.whole = False
        """Whether batches of all data were counted, so that those that are entered do not count."""

    def enter(self, ids: Sequence[NDArray[np.integer]]) -> None:
        """A batch that was read, one array a feature: it counts, unless batches of all data were counted."""
        own: list[list[Int64s]] = [[] for _ in self._maps]
        for t, values in zip(self._tables, ids, strict=True):
            own[t].append(np.asarray(values, np.int64).reshape(-1))
        self.batches.append([np.unique(np.concatenate(each)) for each in own])
        if not self.whole:
            self.count(ids)

    def count(self, ids: Sequence[NDArray[np.integer]]) -> None:
        """Count the ids of some samples, one array a feature; their order makes no difference."""
        for t, values in zip(self._tables, ids, strict=True):
            flat = np.ascontiguousarray(values, np.int64).reshape(-1)
            positions = np.empty(len(flat), np.int64)
            self._maps[t].find_or_insert(flat, positions)
            missing = len(self._maps[t]) - len(self._counts[t])
            if missing > 0:  # by at least a quarter, so that growing costs little for each row
                more = np.zeros(max(missing, len(self._counts[t]) // 4), np.int64)
                self._counts[t] = np.concatenate([self._counts[t], more])
            np.add.at(self._counts[t], positions, 1)

    def rank(self, groups: Sequence[Group]) -> Wanted:
        """The rows of each group from hot to cold; of equals the first in order of tables and ids is hotter."""
        self._ranks = [np.empty(len(rows), np.int32) for rows in self._maps]
        hottest = []
        for group in groups:
            own = group.tables.tolist()
            sizes = [len(self._maps[t]) for t in own]
            tables, ids = np.repeat(group.tables, sizes), np.concatenate([self._maps[t].ids() for t in own])
            counts = np.concatenate([self._counts[t][:size] for t, size in zip(own, sizes, strict=True)])
            order = np.lexsort((ids, tables, -counts))
            ranks = np.empty(len(order), np.int32)
            ranks[order] = np.arange(len(order), dtype=np.int32)
            for t, part in zip(own, np.split(ranks, np.cumsum(sizes)[:-1]), strict=True):
                self._ranks[t] = part
            hottest.append((tables[order], ids[order]))
        return hottest

    def ranks(self, tables: Int64s, ids: Int64s) -> Int32s:
        """How many rows of the group are hotter than each; NEVER for rows that do not occur."""
        ranks = np.full(len(ids), NEVER, np.int32)
        for t in np.unique(tables).tolist():
            here = np.flatnonzero(tables == t)
            positions = np.empty(len(here), np.int64)
            self._maps[t].find(ids[here], positions)
            known = positions >= 0
            ranks[here[known]] = self._ranks[t][positions[known]]
        return ranks


class FrequencyPolicy(Policy):
    """Keeps everything; victims are the coldest rows outside the batch. The first plan brings the hottest rows."""

    name = "frequency"
    samples = True

    def bind(self, groups: Sequence[Group], lookahead: Lookahead, ahead: int) -> None:
        """Begin a run: the first plan waits for the sample."""
        super().bind(groups, lookahead, ahead)
        self.window = self.window_max = max(2, self.options.sample or BATCHES)

    def learn(self, sample: Sample) -> None:
        """Rank the rows; the sample is in memory, and from now on one batch at a time is read."""
        self.window = 2
        self.sample = sample
        hottest = sample.rank(self.groups)
        sizes = self._most_brought()
        self._hottest: Wanted | None = [
            (tables[:size], ids[:size]) for size, (tables, ids) in zip(sizes, hottest, strict=True)
        ]

    def _most_brought(self) -> Sequence[int]:
        """How many of each group's hottest rows the first plan brings along, if there is room."""
        return [group.capacity for group in self.groups]

    def along(self, iteration: int) -> Wanted | None:  # noqa: ARG002
        """The hottest rows, with the first plan."""
        hottest, self._hottest = self._hottest, None
        return hottest

    def keys(self, iteration: int, group: Group, count: int) -> Int64s:  # noqa: ARG002 - the same at any time
        """The coldest first, and of rows that the sample does not know the one used longest ago."""
        facts = group.facts
        came = np.flatnonzero((facts.mark < 0) & (facts.last >= 0))
        facts.mark[came] = self.sample.ranks(*group.rows_in(came))
        return facts.keys(facts.mark, largest_first=True)


class StaticPolicy(FrequencyPolicy):
    """The hottest rows are pinned, all others are fetched for their batch and leave right after it.

    As many are pinned as leave room for the others, those of prefetches in flight included. Where a later batch needs
    more, the coldest pinned rows make room.
    """

    name = "static"

    def _most_brought(self) -> Sequence[int]:
        """As many as are pinned."""
        self.num_pinned = [self._most_pinned(group) for group in self.groups]
        return self.num_pinned

    def leaves(self, demand: Demand, *, ended: bool) -> Int32s:  # noqa: ARG002
        """Rows that are not pinned."""
        return demand.missing[self.sample.ranks(*demand.misses) >= self.num_pinned[demand.group.number]]

    def _most_pinned(self, group: Group) -> int:
        """The largest number of pinned rows beside which the others of a batch and of those in flight have room."""
        ranks = [
            np.concatenate([self.sample.ranks(np.full(len(batch[t]), t), batch[t]) for t in group.tables.tolist()])
            for batch in self.sample.batches
        ]
        rank, number = np.concatenate(ranks), np.repeat(np.arange(len(ranks)), [len(each) for each in ranks])

        def fits(num_pinned: int, num_batches: int) -> bool:
            others = np.bincount(number[rank >= num_pinned], minlength=1)
            at_once = np.convolve(others, np.ones(num_batches, np.int64))
            return num_pinned + int(at_once.max()) <= group.capacity

        steps = np.unique(np.linspace(0, group.capacity, STEPS + 1).astype(np.int64)).tolist()
        for num_batches in range(1 + self.ahead, 0, -1):  # a cache that is too small for prefetches may do without
            # From above: beyond the hottest rows, which every batch has, each more that is pinned leaves less room.
            low = next((step for step in reversed(steps) if step and fits(step, num_batches)), 0)
            if low:
                high = next((step for step in steps if step > low), low + 1) - 1
                while low < high:
                    middle = (low + high + 1) // 2
                    low, high = (middle, high) if fits(middle, num_batches) else (low, middle - 1)
                return low
        return 0
