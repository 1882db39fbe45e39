"""Many arrays in three buffers, one a type of number, end to end; and back, into memory of their own.

What an array's length is, is said elsewhere; that the buffers hold exactly the arrays taken from them is checked (I8).
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from bagpipe.errors import WireError

Floats = NDArray[np.float32]
Int32s = NDArray[np.int32]
Int64s = NDArray[np.int64]

TYPES: tuple[type[np.generic], ...] = (np.float32, np.int32, np.int64)


class Packing:
    """Collects arrays of float32, int32 and int64."""

    def __init__(self) -> None:
        self._arrays: dict[np.dtype[Any], list[NDArray[Any]]] = {np.dtype(kind): [] for kind in TYPES}

    def add(self, array: NDArray[Any]) -> None:
        """Put an array behind the others of its type."""
        self._arrays[array.dtype].append(array.reshape(-1))

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
