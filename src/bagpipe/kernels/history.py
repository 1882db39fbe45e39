"""The loops of a store that remembers old values: which rows a write changes first, and what they were at a mark.

An epoch is the time from one mark to the next; a table has one number a position, the epoch of its row's last write.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from bagpipe.kernels import kernel

Int64s = NDArray[np.int64]
Int32s = NDArray[np.int32]
Floats = NDArray[np.float32]
Flags = NDArray[np.bool_]

NEVER = np.iinfo(np.int32).max
"""The epoch of a position that holds no row yet."""


def pick_earlier(epochs: Int32s, positions: Int64s, epoch: int) -> tuple[Int64s, Int32s]:
    """The positions, from 0 up, of rows last written before an epoch, and the epoch of that."""
    there = positions[positions >= 0]
    earlier = there[epochs[there] < epoch]
    return earlier, epochs[earlier]


@kernel
def take_old(
    positions: Int64s,
    before: Int32s,
    values: Floats,
    first: int,
    index: Int32s,
    wanted: Flags,
    epochs: Int32s,
    out: Floats,
) -> None:
    """Put old values, and their epochs, where rows are wanted that are not there yet: so the first call has its way.

    The row at position `first + k` goes to line index[k] of `wanted`, `epochs` and `out`; nowhere if that is -1.
    Cost: one read of the positions, and of the values that are taken.
    """
    for i in range(positions.shape[0]):
        k = positions[i] - first
        if 0 <= k < index.shape[0]:
            line = index[k]
            if line >= 0 and wanted[line]:
                wanted[line] = False
                epochs[line] = before[i]
                for column in range(out.shape[1]):
                    out[line, column] = values[i, column]
