"""Belady's rule in a cache of fixed size: the rows stay whose next use is nearest, as far as the window shows.

Who leaves is decided as soon as the window shows that the next batches need the slots, so that slots are free by the
time prefetching wants them. Rows that no batch of the window needs go first, the one used longest ago before others.
Training changes every row that it uses, so each stay saves a fetch and a write-back: to fetch least is to write least.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import numpy as np

from bagpipe.errors import ConfigError
from bagpipe.kernels.oracle import KEEP
from bagpipe.kernels.victims import HELD, NEVER, hold, lowest
from bagpipe.oracle.slots import Group
from bagpipe.policies.base import NONE, Int32s, Int64s, Lookahead, RankingPolicy, SlotFacts
from bagpipe.policies.lookahead import AUTO_MAX, RAMP


class BeladyPolicy(RankingPolicy):
    """Keeps as much as fits; those leave whose next use is farthest."""

    name = "belady"
    foresees = True

    def bind(self, groups: Sequence[Group], lookahead: Lookahead, ahead: int) -> None:
        """Begin a run; the window grows as that of the policy `lookahead`."""
        super().bind(groups, lookahead, ahead)
        if lookahead != "auto" and not 1 <= lookahead < KEEP:
            raise ConfigError(f'lookahead is {lookahead}: give a number from 1 to {KEEP - 1}, or "auto"')
        self._ahead = ahead
        self.target_max = max(2, AUTO_MAX if lookahead == "auto" else lookahead)
        self.target = min(RAMP, self.target_max)

    def keys(self, iteration: int, facts: SlotFacts) -> Int64s:  # noqa: ARG002 - next uses are known by their iteration
        """How far the next use is, the farthest first; then the last use."""
        return facts.keys(facts.next, largest_first=True)

    def leaving(self, iteration: int, group: Group, absent: Callable[[int], int]) -> Int32s:
        """Make room for the next batch and the prefetches behind it; what these use themselves stays."""
        soon = iteration + 1 + self._ahead
        needed = absent(soon) - group.slots.num_free
        if needed <= 0:
            return NONE
        facts = self.facts[group.number]
        worth = self.keys(iteration, facts)
        hold(facts.last, facts.next, NEVER, soon, HELD, worth)
        slots = np.empty(needed, np.int32)
        slots = slots[: lowest(worth, needed, slots)]
        facts.last[slots] = -1
        return slots

    def lookahead_at(self, iteration: int, window: int) -> int:  # noqa: ARG002
        """The window: rows that it needs leave last."""
        return window

    def advance(self) -> None:
        """Let the window grow to its full length."""
        self.target = min(self.target_max, self.target + RAMP)
