"""What the kernels of `bagpipe.kernels.idmap` compute, in plain Python and NumPy: tests compare them with it."""

from __future__ import annotations

import numpy as np

from bagpipe.arrays import Int64s


class IdMapByDict:
    """Twin of `IdMap` over a plain dict."""

    def __init__(self) -> None:
        self._position_of: dict[int, int] = {}

    def __len__(self) -> int:
        return len(self._position_of)

    def ids(self, start: int = 0, stop: int | None = None) -> Int64s:
        """The ids of positions start to stop."""
        return np.array(list(self._position_of)[start:stop], np.int64)

    def find(self, ids: Int64s, positions: Int64s) -> int:
        """Write the position of each id, -1 where it has none; the number of those."""
        positions[: len(ids)] = [self._position_of.get(key, -1) for key in ids.tolist()]
        return int((positions[: len(ids)] < 0).sum())

    def find_or_insert(self, ids: Int64s, positions: Int64s) -> int:
        """Write the position of each id, giving the next one to each id not seen before; the number of those."""
        size_before = len(self)
        positions[: len(ids)] = [self._position_of.setdefault(key, len(self._position_of)) for key in ids.tolist()]
        return len(self) - size_before

    def truncate(self, size: int) -> None:
        """Forget the ids of all positions from `size` on."""
        self._position_of = dict(list(self._position_of.items())[:size])
