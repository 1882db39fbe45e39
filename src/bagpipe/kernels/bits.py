"""Small numbers in as few bits as they need: those of a segment have one width, and lie end to end, lowest bits first.

Where numbers rise, as lists of indices do, what is kept of each is the difference to the one before, of the first one
itself. Any numbers come back, rising or not: differences are taken modulo the size of the type.
"""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray

from bagpipe.arrays import Int64s, UInt32s
from bagpipe.kernels import kernel
from bagpipe.kernels.intrinsics import index

Numbers = NDArray[Any]
"""int32 or int64."""

WORD = 32
_WORD = np.uint64(WORD)
_ONE = np.uint64(1)
_ZERO = np.uint64(0)
_LOWER = np.uint64(0xFFFFFFFF)


@kernel
def find_widths(numbers: Numbers, bounds: Int64s, rising: bool, mask: Any, widths: Int64s) -> None:
    """The bits that each segment's numbers need; at least one, so that what is announced is there. 0.5 ns a number.

    `mask` has the bits of the type set. Segment s has numbers bounds[s] to bounds[s + 1].
    """
    for s in range(widths.shape[0]):
        every = last = _ZERO
        for i in range(bounds[s], bounds[s + 1]):
            number = np.uint64(numbers[index(i)])
            every |= (number - last) & mask
            if rising:
                last = number
        width = 1 if bounds[s + 1] > bounds[s] else 0
        while width and every >> np.uint64(width - 1) > _ONE:
            width += 1
        widths[s] = width


@kernel
def pack_bits(numbers: Numbers, bounds: Int64s, rising: bool, mask: Any, widths: Int64s, words: UInt32s) -> None:
    """Write the numbers of all segments. About 1 ns a number."""
    held = filled = at = _ZERO
    for s in range(widths.shape[0]):
        width, last = np.uint64(widths[s]), _ZERO
        for i in range(bounds[s], bounds[s + 1]):
            number = np.uint64(numbers[index(i)])
            part = (number - last) & mask
            if rising:
                last = number
            left = width
            while left:
                now = min(left, _WORD)
                held |= (part & _LOWER) << filled
                part >>= _WORD
                filled += now
                left -= now
                if filled >= _WORD:
                    words[at] = held & _LOWER
                    held >>= _WORD
                    filled -= _WORD
                    at += _ONE
    if filled:
        words[at] = held & _LOWER


@kernel
def unpack_bits(words: UInt32s, bounds: Int64s, rising: bool, mask: Any, widths: Int64s, numbers: Numbers) -> int:
    """Read them again; what is left in the last word, which `pack_bits` leaves 0. About 1 ns a number."""
    held = filled = at = _ZERO
    for s in range(widths.shape[0]):
        width, last = np.uint64(widths[s]), _ZERO
        for i in range(bounds[s], bounds[s + 1]):
            part = done = _ZERO
            while done < width:
                now = min(width - done, _WORD)
                if filled < now:
                    held |= np.uint64(words[at]) << filled
                    filled += _WORD
                    at += _ONE
                part |= (held & ((_ONE << now) - _ONE)) << done
                held >>= now
                filled -= now
                done += now
            number = (part + last) & mask
            if rising:
                last = number
            numbers[index(i)] = number
    return int(held)


def first_outside(numbers: Numbers, bounds: Int64s, ends: Int64s) -> int:
    """The first number that is negative, or not less than its segment's end; -1: there is none."""
    wrong = (numbers < 0) | (numbers >= np.repeat(ends, np.diff(bounds)))
    return int(wrong.argmax()) if wrong.any() else -1
