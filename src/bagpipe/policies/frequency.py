"""The frequency-aware cache: rows are known from hot to cold before training, and the coldest not in use leave first.

Frequencies come from a sample, the batches that are read before the first plan, or from a scan of all data (section 4.2
of the paper). The first plan brings the hottest rows with it. Unlike LFU nothing is counted while training runs, so a
row that was hot before never has to prove itself.
"""

from __future__ import annotations

from collections.abc import Sequence

from bagpipe.oracle.sample import TableSample
from bagpipe.oracle.slots import Group
from bagpipe.policies.base import Demand, Int32s, Int64s, Lookahead, RankingPolicy, SlotFacts
from bagpipe.policies.popularity import Popularity

BATCHES = 64
"""Read before the first plan where all data was scanned."""


class SamplingPolicy(RankingPolicy):
    """Ranks rows by what a sample of the data shows of them, or all of it."""

    samples = True

    def bind(self, groups: Sequence[Group], lookahead: Lookahead, ahead: int) -> None:
        """Begin a run: the first plan waits for the sample."""
        super().bind(groups, lookahead, ahead)
        self._ahead = ahead
        self.scans = self.options.sample == 0
        self._counts: Sequence[TableSample] | None = None
        self.target = self.target_max = max(2, BATCHES if self.scans else self.options.sample)

    def know(self, counts: Sequence[TableSample]) -> None:
        """Keep them until the first plan."""
        self._counts = counts

    def learn(self, sample: Sequence[TableSample]) -> None:
        """Rank the rows; from now on one batch at a time is read."""
        assert self._counts is not None or not self.scans, "the scan comes before the first plan"
        self.popularity = Popularity(self.groups, sample if self._counts is None else self._counts)
        self._counts = None

    def hottest(self, group: Group) -> tuple[Int64s, Int64s]:
        """Rows of the sample from hot to cold, as many as there are slots."""
        return self.popularity.hottest(group.number, group.slots.capacity)

    def warmed(self, iteration: int, group: Group, chosen: Int64s, slots: Int32s) -> None:
        """Note them as if they had been used."""
        facts = self.facts[group.number]
        facts.last[slots], facts.rank[slots] = iteration, chosen

    def advance(self) -> None:
        """The sample is in memory; read on once it has been planned."""
        self.target = 2

    def assign(self, demand: Demand, slots: Int32s, slot_after: Int32s) -> tuple[Int32s, int]:
        """Note the ranks of the rows that come."""
        result = super().assign(demand, slots, slot_after)
        if demand.num_misses:
            self.facts[demand.group.number].rank[slots] = self.popularity.ranks(*demand.misses())
        return result

    def keys(self, iteration: int, facts: SlotFacts) -> Int64s:  # noqa: ARG002 - the same at any time
        """The coldest first, and of rows that the sample does not know the one used longest ago."""
        return facts.keys(facts.rank, largest_first=True)


class FrequencyPolicy(SamplingPolicy):
    """Keeps everything; victims are the coldest rows outside the batch."""

    name = "frequency"
