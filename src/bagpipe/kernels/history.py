"""The loops of a store that remembers old values: which rows a write changes first, and what they were at a mark.

An epoch is the time from one mark to the next; a table has one number a position, the epoch of its row's last write.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from bagpipe.kernels import kernel
from bagpipe.kernels.lanes import prefetch

Int64s = NDArray[np.int64]
Int32s = NDArray[np.int32]
Floats = NDArray[np.float32]
Flags = NDArray[np.bool_]

NEVER = np.iinfo(np.int32).max
"""The epoch of a position that holds no row yet."""

_AHEAD = 16


@kernel
def pick_earlier(epochs: Int32s, positions: Int64s, epoch: int, picked: Int64s, before: Int32s) -> int:
    """List the positions, from 0 up, of rows last written before an epoch, with the epoch of that; how many.

    Cost: one cache miss a row, eight and more of which overlap.
    """
    size = positions.shape[0]
    count = 0
    for i in range(size):
        if i + _AHEAD < size and positions[i + _AHEAD] >= 0:
            prefetch(epochs, positions[i + _AHEAD], 0)
        position = positions[i]
        if position >= 0 and epochs[position] < epoch:
            picked[count] = position
            before[count] = epochs[position]
            count += 1
    return count


def pick_earlier_by_numpy(epochs: Int32s, positions: Int64s, epoch: int, picked: Int64s, before: Int32s) -> int:
    """Twin of `pick_earlier`."""
    there = positions[positions >= 0]
    earlier = there[epochs[there] < epoch]
    picked[: len(earlier)], before[: len(earlier)] = earlier, epochs[earlier]
    return len(earlier)


@kernel
def stamp(epochs: Int32s, positions: Int64s, epoch: int) -> None:
    """epochs[positions[i]] = epoch. Cost: as `pick_earlier`, and then the lines are near."""
    size = positions.shape[0]
    for i in range(size):
        if i + _AHEAD < size:
            prefetch(epochs, positions[i + _AHEAD], 0)
        epochs[positions[i]] = epoch


def stamp_by_numpy(epochs: Int32s, positions: Int64s, epoch: int) -> None:
    """Twin of `stamp`."""
    epochs[positions] = epoch


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


def take_old_by_numpy(
    positions: Int64s,
    before: Int32s,
    values: Floats,
    first: int,
    index: Int32s,
    wanted: Flags,
    epochs: Int32s,
    out: Floats,
) -> None:
    """Twin of `take_old`."""
    inside = np.flatnonzero((positions >= first) & (positions < first + len(index)))
    lines = index[positions[inside] - first]
    taken = (lines >= 0) & wanted[lines]
    inside, lines = inside[taken], lines[taken]
    wanted[lines], epochs[lines], out[lines] = False, before[inside], values[inside]
