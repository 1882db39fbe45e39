"""The ideal: every row is fetched once and stays for good, in a cache that must hold all of them.

What an iteration costs with no embedding traffic at all; other policies are measured against it.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from bagpipe.errors import CapacityError
from bagpipe.oracle.slots import Group
from bagpipe.policies.base import Int64s, KeepingPolicy, Lookahead


class IdealPolicy(KeepingPolicy):
    """Keeps everything; no victims."""

    name = "ideal"

    def bind(self, groups: Sequence[Group], lookahead: Lookahead, ahead: int) -> None:
        """Begin a run."""
        super().bind(groups, lookahead, ahead)
        self._num_seen = np.zeros(len(groups), np.int64)

    def admit(self, iteration: int, window: int, counts: Int64s, gaps: Int64s) -> bool:
        """Count the rows seen so far: nobody will leave, so all of them need a slot."""
        num_seen = self._num_seen + [gaps[group.tables, 0].sum() for group in self.groups]
        for group, needed in zip(self.groups, num_seen, strict=True):
            if needed > group.slots.capacity:
                raise CapacityError(
                    f"policy 'ideal' keeps every row, and iteration {iteration} raises those of {group.label} to "
                    f"{needed:,}, and the cache has places for {group.slots.capacity:,}: raise `cache`, or choose "
                    "another policy"
                )
        self._num_seen = num_seen
        return super().admit(iteration, window, counts, gaps)
