"""What the kernels of `bagpipe.kernels.bits` compute, in plain Python and NumPy: tests compare them with it."""

from __future__ import annotations

from typing import Any

import numpy as np

from bagpipe.arrays import Int64s, UInt32s
from bagpipe.kernels.bits import Numbers


def _parts(numbers: Numbers, bounds: Int64s, rising: bool, mask: Any) -> list[list[int]]:
    """What is kept of each number, segment by segment."""
    segments = [numbers[bounds[s] : bounds[s + 1]].tolist() for s in range(len(bounds) - 1)]
    before = [[0, *segment][: len(segment)] if rising else [0] * len(segment) for segment in segments]
    return [
        [(number - last) & int(mask) for number, last in zip(segment, lasts, strict=True)]
        for segment, lasts in zip(segments, before, strict=True)
    ]


def define_find_widths(numbers: Numbers, bounds: Int64s, rising: bool, mask: Any, widths: Int64s) -> None:
    """Twin of `find_widths`."""
    for s, parts in enumerate(_parts(numbers, bounds, rising, mask)):
        widths[s] = max((max(part.bit_length(), 1) for part in parts), default=0)


def define_pack_bits(numbers: Numbers, bounds: Int64s, rising: bool, mask: Any, widths: Int64s, words: UInt32s) -> None:
    """Twin of `pack_bits`."""
    everything = position = 0
    for s, parts in enumerate(_parts(numbers, bounds, rising, mask)):
        for part in parts:
            everything |= part << position
            position += int(widths[s])
    words[:] = np.frombuffer(everything.to_bytes(4 * len(words), "little"), "<u4")


def define_unpack_bits(
    words: UInt32s, bounds: Int64s, rising: bool, mask: Any, widths: Int64s, numbers: Numbers
) -> int:
    """Twin of `unpack_bits`."""
    everything = int.from_bytes(words.astype("<u4").tobytes(), "little")
    unsigned = numbers.view(f"u{numbers.dtype.itemsize}")
    for s, width in enumerate(widths.tolist()):
        last = 0
        for i in range(bounds[s], bounds[s + 1]):
            unsigned[i] = (everything % 2**width + last) & int(mask)
            last = int(unsigned[i]) if rising else 0
            everything >>= width
    return everything
