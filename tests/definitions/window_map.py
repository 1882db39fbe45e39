"""What the kernels of `bagpipe.kernels.window_map` compute, in plain Python and NumPy: tests compare them with it."""

from __future__ import annotations

import numpy as np

from bagpipe.kernels.oracle import HALF
from bagpipe.kernels.window_map import Int32s, Int64s, WindowMap


def define_forget(words: Int64s, places: Int32s, keep_read: int, keep_plan: int, free: Int32s) -> int:
    """Twin of `forget`."""
    gone = (words >> HALF <= keep_read) & (places <= 0) & (-places.astype(np.int64) - 1 < keep_plan)
    words[gone] = 0
    places[gone] = 0
    num_free = int(gone.sum())
    free[:num_free] = np.flatnonzero(gone)[::-1]
    return num_free


class WindowMapByDict(WindowMap):
    """Twin of `WindowMap` that looks ids up in a plain dict of the entries in use."""

    def find_or_take(self, ids: Int64s, entries: Int64s) -> None:
        """Write the entry of each id; `reserve` came before."""
        entry_of = {int(self.keys[entry]): int(entry) for entry in np.flatnonzero(self.words)}
        for i, key in enumerate(ids.tolist()):
            if key not in entry_of:
                self._num_free -= 1
                entry_of[key] = int(self._free[self._num_free])
                self.keys[entry_of[key]] = key
            entries[i] = entry_of[key]
