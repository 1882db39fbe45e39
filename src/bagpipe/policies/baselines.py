"""What a cache does that knows the past only, and the two ends of the scale: no cache, and one that holds every row."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from bagpipe.arrays import Int64s
from bagpipe.errors import CapacityError
from bagpipe.oracle.slots import Group
from bagpipe.policies.base import Demand, Lookahead, Policy


class LruPolicy(Policy):
    """Least recently used: the row used longest ago leaves first; those of one iteration in the order of its rows."""

    name = "lru"


class LfuPolicy(Policy):
    """Least frequently used: the row leaves first that the fewest batches have used since it came."""

    name = "lfu"

    def keys(self, iteration: int, group: Group, count: int) -> Int64s:  # noqa: ARG002 - the same at any time
        """Uses, then the last of them."""
        return group.facts.keys(group.facts.uses)


class NoCachePolicy(Policy):
    """Every row is fetched before its iteration and written back after it, with nothing overlapped: fetch and
    write-back of each iteration are on the critical path (the baseline of the paper's section 2)."""

    name = "nocache"
    window = window_max = 1
    horizon = 0
    idles = False

    def leaves(self, demand: Demand, *, ended: bool) -> bool:  # noqa: ARG002
        """All."""
        return True


class IdealPolicy(Policy):
    """Every row is fetched once and stays for good, in a cache that must hold all of them: what an iteration costs
    with no embedding traffic at all."""

    name = "ideal"
    idles = False

    def bind(self, groups: Sequence[Group], lookahead: Lookahead, ahead: int) -> None:
        """Begin a run."""
        super().bind(groups, lookahead, ahead)
        self._num_seen = np.zeros(len(groups), np.int64)

    def grant(self, iteration: int, window: int, counts: Int64s, gaps: Int64s) -> bool:
        """Count the rows seen so far: nobody will leave, so all of them need a slot."""
        num_seen = self._num_seen + [gaps[group.tables, 0].sum() for group in self.groups]
        for group, needed in zip(self.groups, num_seen, strict=True):
            if needed > group.capacity:
                raise CapacityError(
                    f"policy 'ideal' keeps every row, and iteration {iteration} raises those of {group.label} to "
                    f"{needed:,}, and the cache has places for {group.capacity:,}: raise `cache`, or choose "
                    "another policy"
                )
        self._num_seen = num_seen
        return super().grant(iteration, window, counts, gaps)
