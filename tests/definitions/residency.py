"""What the kernels of `bagpipe.store.residency` compute, in plain Python and NumPy: tests compare them with it."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from bagpipe.arrays import Int64s
from bagpipe.store.residency import _PAGES_PER_EXTENT, PAGE_BYTES


def define_count(touched: NDArray[np.int32], positions: Int64s, row_bytes: int) -> int:
    """Twin of `_count`."""
    before = int(touched.sum())
    first, last = positions * row_bytes // PAGE_BYTES, ((positions + 1) * row_bytes - 1) // PAGE_BYTES
    spans = [np.arange(a, b + 1) for a, b in zip(first, last, strict=True)]
    pages = np.unique(np.concatenate([np.empty(0, np.int64), *spans]))
    np.add.at(touched, pages // _PAGES_PER_EXTENT, 1)
    np.minimum(touched, _PAGES_PER_EXTENT, out=touched)
    return int(touched.sum()) - before
