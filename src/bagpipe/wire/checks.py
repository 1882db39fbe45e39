"""Do the buffers of a message hold what its record says? Checked before they are used, then seen as NumPy arrays.

The functions take buffers apart from the message, because between processes of one host they lie in shared memory.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from bagpipe.arrays import Floats, Int64s
from bagpipe.errors import WireError
from bagpipe.wire.messages import ALL_COLUMNS, Part, Read, Rows, Scan, Scanned, Write

Buffers = Sequence[memoryview]


def check_read(read: Read, buffers: Buffers, widths: Sequence[int]) -> Int64s:
    """The ids asked for, part after part."""
    _check_number("Read", buffers, 1)
    num_rows, _ = totals("Read", read.parts, widths)
    return _ids("Read", buffers[0], num_rows)


def check_write(write: Write, buffers: Buffers, widths: Sequence[int]) -> tuple[Int64s, Floats]:
    """The ids written and all their values in one dimension, part after part."""
    _check_number("Write", buffers, 2)
    num_rows, num_floats = totals("Write", write.parts, widths)
    for part in write.parts:
        if part.columns != ALL_COLUMNS:
            raise WireError(f"Write has {part.columns} columns of rows of table {part.table}: rows are written whole")
    return _ids("Write", buffers[0], num_rows), _floats("Write", buffers[1], num_floats)


def check_rows(
    rows: Rows, buffers: Buffers, asked: Sequence[Part], widths: Sequence[int]
) -> tuple[NDArray[np.bool_], Floats]:
    """Which of the ids asked for were ever written, and the values of those in one dimension."""
    _check_number("Rows", buffers, 2)
    num_rows, _ = totals("Rows", asked, widths)
    if buffers[0].nbytes != num_rows:
        raise WireError(f"Rows has flags for {buffers[0].nbytes} ids: {num_rows} were asked for")
    flags = np.frombuffer(buffers[0], np.uint8)
    if num_rows and flags.max() > 1:
        raise WireError(f"Rows has the flag {flags.max()}: 0 or 1 are allowed")
    there, start = [], 0
    for part in asked:
        there.append(int(np.count_nonzero(flags[start : start + part.count])))
        start += part.count
    if rows.count != sum(there):
        raise WireError(f"Rows announces {rows.count} rows: its flags name {sum(there)}")
    num_floats = sum(count * columns_of(part, widths) for part, count in zip(asked, there, strict=True))
    return flags.view(np.bool_), _floats("Rows", buffers[1], num_floats)


def check_scanned(scanned: Scanned, buffers: Buffers, asked: Scan, width: int) -> tuple[Int64s, Floats]:
    """The ids found and their rows; no rows where only ids were asked for."""
    _check_number("Scanned", buffers, 2 if asked.values else 1)
    if scanned.count > asked.count:
        raise WireError(f"Scanned has {scanned.count} rows: {asked.count} were asked for")
    ids = _ids("Scanned", buffers[0], scanned.count)
    if not asked.values:
        return ids, np.empty((0, width), np.float32)
    return ids, _floats("Scanned", buffers[1], scanned.count * width).reshape(scanned.count, width)


def columns_of(part: Part, widths: Sequence[int]) -> int:
    """How many columns of its rows a part has."""
    return widths[part.table] if part.columns == ALL_COLUMNS else part.columns


def totals(name: str, parts: Sequence[Part], widths: Sequence[int]) -> tuple[int, int]:
    """Rows and floats of all parts, which name tables and columns that there are."""
    for part in parts:
        if not 0 <= part.table < len(widths):
            raise WireError(f"{name} names table {part.table}: there are {len(widths)}, counted from 0")
        if part.count < 0:
            raise WireError(f"{name} has {part.count} rows of table {part.table}: 0 or more are allowed")
        if not 0 <= part.columns <= widths[part.table]:
            raise WireError(
                f"{name} has {part.columns} columns of rows of table {part.table}: there are {widths[part.table]}"
            )
    return sum(part.count for part in parts), sum(part.count * columns_of(part, widths) for part in parts)


def _check_number(name: str, buffers: Buffers, expected: int) -> None:
    if len(buffers) != expected:
        raise WireError(f"{name} has {len(buffers)} buffers: it needs {expected}")


def _ids(name: str, buffer: memoryview, num_rows: int) -> Int64s:
    if buffer.nbytes != 8 * num_rows:
        raise WireError(f"{name} has {buffer.nbytes} bytes of ids: {num_rows} rows need {8 * num_rows}")
    ids = np.frombuffer(buffer, np.int64)
    return ids if ids.flags.aligned else ids.copy()  # short buffers come as they lay between others, kernels mind


def _floats(name: str, buffer: memoryview, num_floats: int) -> Floats:
    if buffer.nbytes != 4 * num_floats:
        raise WireError(f"{name} has {buffer.nbytes} bytes of values: its rows need {4 * num_floats}")
    values = np.frombuffer(buffer, np.float32)
    return values if values.flags.aligned else values.copy()
