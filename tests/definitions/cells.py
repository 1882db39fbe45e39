"""What the kernels of `bagpipe.data.prepare.cell_kernels` compute, in plain Python: tests compare them with it."""

from __future__ import annotations

import re

from bagpipe.data.prepare.cell_kernels import GOOD, MISSING, WRONG, Bytes, Ints


def define_read_integer(cell: bytes) -> tuple[int, int]:
    """`read_integers` of one cell, in plain Python."""
    if not cell:
        return 0, MISSING
    if not re.fullmatch(rb"[+-]?[0-9]+", cell) or not -(2**63) <= int(cell) < 2**63:
        return 0, WRONG
    return int(cell), GOOD


def define_gather(data: Bytes, starts: Ints, offsets: Ints, out: Bytes) -> None:
    """`gather` in NumPy."""
    for start, to, end in zip(starts, offsets[:-1], offsets[1:], strict=True):
        out[to:end] = data[start : start + end - to]
