"""Belady's rule in a cache of fixed size: the rows stay whose next use is nearest, as far as the window shows.

Who leaves is decided as soon as the window shows that the next batches need the slots, so that slots are free by the
time prefetching wants them. Rows that no batch of the window needs go first, the one used longest ago before others.
Training changes every row that it uses, so each stay saves a fetch and a write-back: to fetch least is to write least.
"""

from __future__ import annotations

from collections.abc import Sequence

from bagpipe.arrays import Int64s
from bagpipe.oracle.slots import Group
from bagpipe.policies.base import Lookahead, Policy, checked
from bagpipe.policies.lookahead import AUTO_MAX, RAMP


class ForesightedPolicy(Policy):
    """Victims are the rows outside the batch whose next use is farthest."""

    def grant(self, iteration: int, window: int, counts: Int64s, gaps: Int64s) -> bool:  # noqa: ARG002
        """Every stay, as there are victims for those that do not fit: next uses are known."""
        return True

    def keys(self, iteration: int, group: Group, count: int) -> Int64s:  # noqa: ARG002 - the same at any time
        """How far the next use is, the farthest first; then the last use."""
        return group.facts.keys(group.facts.next, largest_first=True)


class BeladyPolicy(ForesightedPolicy):
    """Keeps as much as fits; those leave whose next use is farthest."""

    name = "belady"
    early = True

    def bind(self, groups: Sequence[Group], lookahead: Lookahead, ahead: int) -> None:
        """Begin a run; the window grows as that of the policy `lookahead`."""
        super().bind(groups, lookahead, ahead)
        self.window_max = max(2, checked(lookahead, AUTO_MAX))
        self.window = min(RAMP, self.window_max)

    def advance(self, iteration: int, window: int) -> int:  # noqa: ARG002
        """Let the window grow to its full length; rows that it needs leave last."""
        self.window = min(self.window_max, self.window + RAMP)
        return window
