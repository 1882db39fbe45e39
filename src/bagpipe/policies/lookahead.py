"""Bagpipe's own policy (Algorithm 1 of the paper): a row stays exactly while its next use is in the window.

When the stays that the window shows would not fit the cache, the longest are not granted, which shortens the lookahead
for those iterations; a row that can't stay leaves right after its use, so no plan ever waits for victims. With "auto"
the window grows until the cache is full, and where it is not, rows stay idle until their slots may be needed; those
idle for longest leave first.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from bagpipe.errors import ConfigError
from bagpipe.kernels.admit import admit
from bagpipe.kernels.oracle import KEEP
from bagpipe.oracle.slots import Group
from bagpipe.policies.base import Int64s, Lookahead, Policy

RAMP = 4
"""Batches by which the window grows with each plan, so that the first one does not wait for a full window."""
AUTO_MAX = 256
"""The longest window that "auto" grows to: its batches lie in memory."""


class LookaheadPolicy(Policy):
    """Stays from one use to the next within `lookahead` batches, the current one included."""

    name = "lookahead"

    def bind(self, groups: Sequence[Group], lookahead: Lookahead, ahead: int) -> None:
        """Begin a run."""
        super().bind(groups, lookahead, ahead)
        if lookahead != "auto" and not 1 <= lookahead < KEEP:
            raise ConfigError(f'lookahead is {lookahead}: give a number from 1 to {KEEP - 1}, or "auto"')
        self._auto = self.idles = lookahead == "auto"
        self._ahead = ahead
        self.target_max = AUTO_MAX if lookahead == "auto" else lookahead
        self.target = min(RAMP, self.target_max)
        self._step, self._patience = RAMP, 0
        self._num_refused = 0
        columns = 1 << (self.target_max + 1).bit_length()
        self._loads = [np.zeros((2, columns), np.int64) for _ in groups]
        self._shortest_refused = np.zeros(columns, np.int64)

    def admit(self, iteration: int, window: int, counts: Int64s, gaps: Int64s) -> bool:
        """Grant stays from the shortest to the longest while they fit, prefetches in flight included."""
        self._shortest_refused[iteration & (len(self._shortest_refused) - 1)] = 0
        num_refused = 0
        for group, (load, total) in zip(self.groups, self._loads, strict=True):
            need, capacity = int(counts[group.tables].sum()), group.slots.capacity
            num_refused += admit(
                group.tables, iteration, window, need, capacity, self._ahead, load, total, gaps, self._shortest_refused
            )
        self._num_refused += num_refused
        return num_refused == 0

    def room(self, iteration: int, window: int, group: Group) -> int:
        """What the next batch, the rows that stay across it and the prefetches after it leave of the cache."""
        total = self._loads[group.number][1]
        return max(0, group.slots.capacity - int(total[(iteration + 1) & (len(total) - 1)])) if window > 1 else 0

    def lookahead_at(self, iteration: int, window: int) -> int:
        """The window, or the shortest stay of this batch's rows that was not granted."""
        refused = int(self._shortest_refused[iteration & (len(self._shortest_refused) - 1)])
        return min(window, refused) if refused else window

    def advance(self) -> None:
        """Let the window grow to its full length; "auto" grows while everything fits and shrinks when it does not.

        It waits a little before it grows again: where some batches fit and others do not, longer windows cost memory
        and save next to nothing.
        """
        if self._auto and self._num_refused:
            self._step, self._patience = 1, RAMP
            self.target = max(1, self.target - 1)
        elif self._patience > 0:
            self._patience -= 1
        else:
            self.target = min(self.target_max, self.target + self._step)
        self._num_refused = 0
