"""What the kernels of `bagpipe.store.snapshot` compute, in plain Python and NumPy: tests compare them with it."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from bagpipe.arrays import Floats, Int32s, Int64s


def define_take_old(
    positions: Int64s,
    before: Int32s,
    values: Floats,
    first: int,
    index: Int32s,
    wanted: NDArray[np.bool_],
    epochs: Int32s,
    out: Floats,
) -> None:
    """Twin of `take_old`."""
    inside = np.flatnonzero((positions >= first) & (positions < first + len(index)))
    lines = index[positions[inside] - first]
    taken = (lines >= 0) & wanted[lines]
    inside, lines = inside[taken], lines[taken]
    wanted[lines], epochs[lines], out[lines] = False, before[inside], values[inside]
