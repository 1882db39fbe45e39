"""What the kernels of `bagpipe.kernels.window_map` compute, in plain Python and NumPy: tests compare them with it."""

from __future__ import annotations

import numpy as np

from bagpipe.arrays import Int32s, Int64s
from bagpipe.kernels.oracle import HALF
from bagpipe.kernels.window_map import WindowMap


def define_forget(words: Int64s, places: Int32s, keep_read: int, keep_plan: int, free: Int32s) -> int:
    """Twin of `forget`."""
    gone = (words >> HALF <= keep_read) & (places <= 0) & (-places.astype(np.int64) - 1 < keep_plan)
    words[gone] = 0
    places[gone] = 0
    num_free = int(gone.sum())
    free[:num_free] = np.flatnonzero(gone)[::-1]
    return num_free


class WindowMapByDict(WindowMap):
    """Twin of `WindowMap` that looks ids up in a plain dict of the rows in use."""

    def number(self, table: int, ids: Int64s) -> Int64s:
        """The row of each id; `reserve` came before."""
        row_of = {(int(self.tables[row]), int(self.ids[row])): int(row) for row in np.flatnonzero(self.last_use)}
        rows = np.empty(len(ids), np.int64)
        for i, key in enumerate(ids.tolist()):
            if (table, key) not in row_of:
                self._num_free -= 1
                row = row_of[table, key] = int(self._free[self._num_free[0]])
                self.tables[row], self.ids[row] = table, key
            rows[i] = row_of[table, key]
        return rows
