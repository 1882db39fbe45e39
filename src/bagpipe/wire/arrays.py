"""Many arrays in three buffers, one a type of number, end to end; and back, into memory of their own.

What an array's length is, is said elsewhere; that the buffers hold exactly the arrays taken from them is checked (I8).
Integers that are mostly small can be packed: the width of each segment, a byte each, then all of them in that many bits
(`bagpipe.kernels.bits`); both are filled up to whole words of 32 bits, and lie among the int32.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from bagpipe.errors import WireError
from bagpipe.kernels.bits import WORD, find_widths, pack_bits, unpack_bits

Floats = NDArray[np.float32]
Int32s = NDArray[np.int32]
Int64s = NDArray[np.int64]

TYPES: tuple[type[np.generic], ...] = (np.float32, np.int32, np.int64)
_BITS = {np.dtype(np.int32): np.uint64(2**32 - 1), np.dtype(np.int64): np.uint64(2**64 - 1)}


class Packing:
    """Collects arrays of float32, int32 and int64."""

    def __init__(self) -> None:
        self._arrays: dict[np.dtype[Any], list[NDArray[Any]]] = {np.dtype(kind): [] for kind in TYPES}

    def add(self, array: NDArray[Any]) -> None:
        """Put an array behind the others of its type."""
        self._arrays[array.dtype].append(array.reshape(-1))

    def add_packed(self, numbers: NDArray[Any], bounds: Int64s | None = None, *, rising: bool = False) -> None:
        """Put int32 or int64 there in few bits; segment s of them is bounds[s] to bounds[s + 1], None: all are one.

        `rising`: each is mostly greater than the one before, in its segment.
        """
        bounds = np.array([0, len(numbers)]) if bounds is None else bounds
        widths, mask = np.empty(len(bounds) - 1, np.int64), _BITS[numbers.dtype]
        find_widths(numbers, bounds, rising, mask, widths)
        words = np.zeros(_num_words(widths, bounds), np.uint32)
        pack_bits(numbers, bounds, rising, mask, widths, words)
        self.add(_as_words(widths.astype(np.uint8)))
        self.add(words.view(np.int32))

    def buffers(self) -> list[memoryview]:
        """All arrays, in memory that nobody else has."""
        empty = {kind: np.empty(0, kind) for kind in self._arrays}
        return [np.concatenate([empty[kind], *arrays]).data for kind, arrays in self._arrays.items()]


class Unpacking:
    """Gives the arrays back in the order in which they were added; they share memory that is theirs alone."""

    def __init__(self, name: str, buffers: Sequence[memoryview]) -> None:
        if len(buffers) != len(TYPES):
            raise WireError(f"{name} has {len(buffers)} buffers: it needs {len(TYPES)}")
        self._name = name
        self._numbers: list[NDArray[Any]] = []
        for kind, buffer in zip(TYPES, buffers, strict=True):
            dtype = np.dtype(kind)
            if buffer.nbytes % dtype.itemsize:
                raise WireError(f"{name} has {buffer.nbytes} bytes of {dtype}: they are no whole numbers")
            # copied: what is received can't be written to, may lie at any address, and is freed as a whole
            self._numbers.append(np.frombuffer(buffer, dtype).copy())
        self._taken = [0] * len(TYPES)

    def floats(self, count: int, what: str) -> Floats:
        """The next so many float32."""
        return self._take(0, count, what)

    def int32s(self, count: int, what: str) -> Int32s:
        """The next so many int32."""
        return self._take(1, count, what)

    def int64s(self, count: int, what: str) -> Int64s:
        """The next so many int64."""
        return self._take(2, count, what)

    def packed_int32s(self, bounds: Int64s, what: str, *, rising: bool = False) -> Int32s:
        """The next so many, which were packed in these segments."""
        return self._take_packed(np.dtype(np.int32), bounds, what, rising)

    def packed_int64s(self, bounds: Int64s, what: str, *, rising: bool = False) -> Int64s:
        """The same of int64."""
        return self._take_packed(np.dtype(np.int64), bounds, what, rising)

    def _take_packed(self, dtype: np.dtype[Any], bounds: Int64s, what: str, rising: bool) -> NDArray[Any]:
        counts = np.diff(bounds)
        raw = self.int32s(-(-len(counts) // 4), f"widths of {what}").view(np.uint8)
        widths = raw[: len(counts)].astype(np.int64)
        if raw[len(counts) :].any() or (widths > 8 * dtype.itemsize).any() or ((widths == 0) != (counts == 0)).any():
            raise WireError(
                f"{self._name}, {what}: widths {widths[:8].tolist()} of {counts[:8].tolist()} numbers: 1 to "
                f"{8 * dtype.itemsize} bits are allowed, 0 of none"
            )
        words = self.int32s(_num_words(widths, bounds), what).view(np.uint32)
        numbers = np.empty(int(counts.sum()), dtype)
        if unpack_bits(words, bounds, rising, _BITS[dtype], widths, numbers):
            raise WireError(f"{self._name}, {what}: there are more bits than of {len(numbers)} numbers")
        return numbers

    def finish(self) -> None:
        """WireError if something is left."""
        for numbers, taken in zip(self._numbers, self._taken, strict=True):
            if taken != len(numbers):
                raise WireError(f"{self._name} has {len(numbers)} {numbers.dtype} numbers: {taken} are accounted for")

    def _take(self, kind: int, count: int, what: str) -> NDArray[Any]:
        numbers, start = self._numbers[kind], self._taken[kind]
        if count > len(numbers) - start:
            raise WireError(
                f"{self._name} has {len(numbers)} {numbers.dtype} numbers: {what} needs {count} from {start} on"
            )
        self._taken[kind] = start + count
        return numbers[start : start + count]


def pack_flags(flags: NDArray[np.bool_]) -> Int32s:
    """Flags as numbers, 32 in each, from its lowest bit up."""
    return _as_words(np.packbits(flags, bitorder="little"))


def unpack_flags(unpacking: Unpacking, count: int, name: str) -> NDArray[np.bool_]:
    """So many flags."""
    words = unpacking.int32s(-(-count // WORD), name)
    bits = np.unpackbits(words.view(np.uint8), bitorder="little")
    if bits[count:].any():
        raise WireError(f"{name}: there are flags of more than {count} rows")
    return bits[:count].view(np.bool_)


def _num_words(widths: Int64s, bounds: Int64s) -> int:
    """Words that numbers of these widths take."""
    return -(-int(widths @ np.diff(bounds)) // WORD)


def _as_words(octets: NDArray[np.uint8]) -> Int32s:
    """Bytes in whole words."""
    padded = np.zeros(-(-len(octets) // 4) * 4, np.uint8)
    padded[: len(octets)] = octets
    return padded.view(np.int32)
