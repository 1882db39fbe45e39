"""What the kernels of `bagpipe.data.prepare.words` compute, in plain Python and NumPy: tests compare them with it."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray


def define_gather_texts(
    data: NDArray[np.uint8], begins: NDArray[np.int64], ends: NDArray[np.int64], out: NDArray[np.uint8]
) -> None:
    """Twin of `gather_texts`."""
    pieces = [data[begin:end] for begin, end in zip(begins, ends, strict=True)]
    out[:] = np.concatenate([np.empty(0, np.uint8), *pieces])
