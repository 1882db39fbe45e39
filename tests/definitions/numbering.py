"""What the kernels of `bagpipe.data.prepare.numbering` compute, in plain Python and NumPy."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from bagpipe.kernels.random import mix_numpy


def define_hash_rows(keys: NDArray[np.uint64], missing: NDArray[np.bool_], size: int, ids: NDArray[np.int64]) -> None:
    """Twin of `hash_rows`."""
    ids[:] = np.where(missing, 0, 1 + (mix_numpy(keys) % np.uint64(size - 1)).astype(np.int64))
