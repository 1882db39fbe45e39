"""What the kernels of `bagpipe.data.samples` compute, in plain Python and NumPy: tests compare them with it."""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray

from bagpipe.data.samples import Ints


def define_copy_places(values: NDArray[Any], places: Ints, width: int, out: NDArray[Any], slots: Ints) -> None:
    """`copy_places` in NumPy."""
    steps = np.arange(width)
    out[(slots[:, None] * width + steps).ravel()] = values[(places[:, None] * width + steps).ravel()]
