"""What the kernels of `bagpipe.store.rowfile` compute, in plain Python and NumPy: tests compare them with it."""

from __future__ import annotations

from pathlib import Path

import numpy as np

from bagpipe.arrays import Floats, Int64s


def define_read(path: Path, positions: Int64s, width: int, out: Floats) -> None:
    """Twin of `_read_cached` and `_read_cold`."""
    rows = np.fromfile(path, np.float32)
    rows = rows[: rows.size // width * width].reshape(-1, width)
    out[positions >= 0] = rows[positions[positions >= 0], : out.shape[1]]


def define_write(path: Path, positions: Int64s, values: Floats) -> None:
    """Twin of `_write`."""
    with path.open("r+b") as file:
        for position, row in zip(positions.tolist(), values, strict=True):
            file.seek(position * row.nbytes)
            file.write(row.tobytes())
