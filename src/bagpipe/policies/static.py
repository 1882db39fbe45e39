"""Static: the hottest rows of a sample are pinned, all others are fetched for their batch and leave right after it.

As many are pinned as leave room for the others, those of prefetches in flight included. Where a later batch needs more,
the coldest pinned rows make room.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from bagpipe.oracle.sample import TableSample
from bagpipe.oracle.slots import Group
from bagpipe.policies.base import Demand, Int32s, Int64s
from bagpipe.policies.frequency import SamplingPolicy

STEPS = 32


class StaticPolicy(SamplingPolicy):
    """Keeps the top rows of a sample, and only those."""

    name = "static"

    def learn(self, sample: Sequence[TableSample]) -> None:
        """Rank the rows, and decide how many of each group are pinned."""
        super().learn(sample)
        self.num_pinned = [self._most_pinned(group, sample) for group in self.groups]

    def hottest(self, group: Group) -> tuple[Int64s, Int64s]:
        """The rows that are pinned."""
        return self.popularity.hottest(group.number, self.num_pinned[group.number])

    def assign(self, demand: Demand, slots: Int32s, slot_after: Int32s) -> tuple[Int32s, int]:
        """Rows that are not pinned pass."""
        result = super().assign(demand, slots, slot_after)
        number = demand.group.number
        demand.passing[:] = self.facts[number].rank[slots] >= self.num_pinned[number]
        return result

    def _most_pinned(self, group: Group, sample: Sequence[TableSample]) -> int:
        """The largest number of pinned rows beside which the others of a batch and of those in flight have room."""
        own = [sample[t] for t in group.tables.tolist()]
        ranks = [self.popularity.ranks(np.full(len(s.ids), t), s.ids) for t, s in zip(group.tables, own, strict=True)]
        rank, batch = np.concatenate(ranks), np.concatenate([s.batches for s in own])
        capacity = group.slots.capacity

        def fits(num_pinned: int, num_batches: int) -> bool:
            others = np.bincount(batch[rank >= num_pinned], minlength=1)
            at_once = np.convolve(others, np.ones(num_batches, np.int64))
            return num_pinned + int(at_once.max()) <= capacity

        steps = np.unique(np.linspace(0, capacity, STEPS + 1).astype(np.int64)).tolist()
        for num_batches in range(1 + self._ahead, 0, -1):  # a cache that is too small for prefetches may do without
            # From above: beyond the hottest rows, which every batch has, each more that is pinned leaves less room.
            low = next((step for step in reversed(steps) if step and fits(step, num_batches)), 0)
            if low:
                high = next((step for step in steps if step > low), low + 1) - 1
                while low < high:
                    middle = (low + high + 1) // 2
                    low, high = (middle, high) if fits(middle, num_batches) else (low, middle - 1)
                return low
        return 0
