"""What a cache does that knows the past only, and the two ends of the scale: no cache, and one that holds every row."""

from __future__ import annotations

from collections.abc import Sequence

from bagpipe.arrays import Int64s
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
    """Every row is fetched before its iteration and written back after it, and nothing overlaps: fetch and
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
    keeps_all = True

    def bind(self, groups: Sequence[Group], lookahead: Lookahead, ahead: int) -> None:
        """Begin a run."""
        super().bind(groups, lookahead, ahead)
        self._seen: Int64s | int = 0

    def needs(self, counts: Int64s, gaps: Int64s) -> Int64s:  # noqa: ARG002
        """All that occurred so far: nobody will leave."""
        seen: Int64s = self._seen + gaps[:, 0]
        return seen

    def grant(self, iteration: int, window: int, counts: Int64s, gaps: Int64s) -> bool:
        """Rows of the batch that are new will stay."""
        self._seen = self.needs(counts, gaps)
        return super().grant(iteration, window, counts, gaps)
