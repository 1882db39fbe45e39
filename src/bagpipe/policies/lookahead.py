"""Bagpipe's own policy (Algorithm 1 of the paper): a row stays exactly while its next use is in the window.

When the stays that the window shows would not fit the cache, the longest are not granted, which shortens the lookahead
for those iterations; a row that can't stay leaves right after its use, so no plan ever waits for victims. With "auto"
the window grows until the cache is full, and where it is not, rows stay idle until their slots may be needed; those
idle for longest leave first.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from bagpipe.arrays import Int32s, Int64s
from bagpipe.kernels.admit import admit
from bagpipe.oracle.slots import Group
from bagpipe.policies.base import Demand, Lookahead, Policy, checked

RAMP = 4
"""Batches by which the window grows with each plan, so that the first one does not wait for a full window."""
AUTO_MAX = 256
"""The longest window that "auto" grows to: its batches lie in memory."""


class LookaheadPolicy(Policy):
    """Stays from one use to the next within `lookahead` batches, the current one included."""

    name = "lookahead"
    early = True

    def bind(self, groups: Sequence[Group], lookahead: Lookahead, ahead: int) -> None:
        """Begin a run."""
        super().bind(groups, lookahead, ahead)
        self.idles = lookahead == "auto"
        self.window_max = checked(lookahead, AUTO_MAX)
        self.window = min(RAMP, self.window_max)
        self._step, self._patience = RAMP, 0
        self._num_refused = 0
        self._shortest_refused = np.zeros(1 << (self.window_max + 1).bit_length(), np.int64)
        for group in groups:
            group.loads = np.zeros((2, len(self._shortest_refused)), np.int64)

    def grant(self, iteration: int, window: int, counts: Int64s, gaps: Int64s) -> bool:
        """Grant stays from the shortest to the longest while they fit, prefetches in flight included."""
        self._shortest_refused[iteration & (len(self._shortest_refused) - 1)] = 0
        num_refused = 0
        for group in self.groups:
            need, (load, total) = int(counts[group.tables].sum()), group.loads
            num_refused += admit(
                group.tables, iteration, window, need, group.capacity, self.ahead, load, total, gaps,
                self._shortest_refused,
            )  # fmt: skip
        self._num_refused += num_refused
        return num_refused == 0

    def leaves(self, demand: Demand, *, ended: bool) -> bool | Int32s:
        """All that are not granted a stay; with "auto" they are idle until the data ends."""
        if ended or not self.idles:
            return True
        return False if demand.lone is None else demand.lone

    def advance(self, iteration: int, window: int) -> int:
        """Let the window grow to its full length; "auto" grows while everything fits and shrinks when it does not.

        It waits a little before it grows again: where some batches fit and others do not, longer windows cost memory
        and save next to nothing. The lookahead is the window, or the shortest stay that was not granted.
        """
        if self.idles and self._num_refused:
            self._step, self._patience = 1, RAMP
            self.window = max(1, self.window - 1)
        elif self._patience > 0:
            self._patience -= 1
        else:
            self.window = min(self.window_max, self.window + self._step)
        self._num_refused = 0
        return min(window, int(self._shortest_refused[iteration & (len(self._shortest_refused) - 1)]) or window)
