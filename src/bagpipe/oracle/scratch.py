"""Arrays that the oracle fills: those that each batch overwrites, and the lists of a plan before they are known."""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray

from bagpipe.oracle.plan import Fetch
from bagpipe.oracle.row_list import RowList
from bagpipe.oracle.window import MaskType

Int32s = NDArray[np.int32]
Int64s = NDArray[np.int64]
Masks = NDArray[Any]


class Scratch:
    """Arrays that each `read` fills anew."""

    def __init__(self, num_tables: int, window_max: int, masks: MaskType | None) -> None:
        self._masks = masks
        self.users: Masks = np.empty(0, masks or np.uint8)
        self.entries: Int32s = np.empty(0, np.int32)
        self.previous: Int64s = np.empty(0, np.int64)
        self.gaps: Int64s = np.zeros((num_tables, window_max + 1), np.int64)

    def fit(self, num_ids: int) -> None:
        """Make room for a batch of so many ids."""
        if num_ids > len(self.entries):
            self.entries, self.previous = np.empty(num_ids, np.int32), np.empty(num_ids, np.int64)
            if self._masks is not None:
                self.users = np.empty(num_ids, self._masks)


def unfilled_list(counts: Int64s) -> RowList:
    """Room for so many rows of each table."""
    bounds = _bounds(counts)
    return RowList(np.empty(bounds[-1], np.int64), np.empty(bounds[-1], np.int32), bounds)


def unfilled_fetch(counts: Int64s) -> Fetch:
    """Room for so many rows of each table that are to be fetched."""
    bounds = _bounds(counts)
    slots, after, slot_after = np.empty((3, bounds[-1]), np.int32)
    return Fetch(np.empty(bounds[-1], np.int64), slots, bounds, after, slot_after)


def _bounds(counts: Int64s) -> Int64s:
    bounds = np.zeros(len(counts) + 1, np.int64)
    np.cumsum(counts, out=bounds[1:])
    return bounds
