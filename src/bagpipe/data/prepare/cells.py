"""A column of texts, as cells in the bytes of a file or of an Arrow array, and what it can be converted to."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Generic, TypeVar

import numpy as np
import pyarrow as pa
from numpy.typing import NDArray

from bagpipe.data.prepare import cell_kernels as kernels
from bagpipe.data.prepare.block import Category
from bagpipe.data.prepare.texts import hash_buffers, text_buffers
from bagpipe.data.prepare.times import read_times
from bagpipe.kernels.intrinsics import WORD

Number = TypeVar("Number", bound=np.generic)
Mask = NDArray[np.bool_]
_EMPTY = np.empty(0, np.int32)


@dataclass(frozen=True, slots=True)
class Values(Generic[Number]):
    """What the cells of a column say: a number, nothing, or something wrong."""

    values: NDArray[Number]
    """0 where missing or wrong."""
    missing: Mask
    wrong: Mask


@dataclass(frozen=True, slots=True)
class Cells:
    """A column of texts; one without bytes is missing."""

    data: NDArray[np.uint8]
    """Not to be written."""
    starts: NDArray[np.int32]
    lengths: NDArray[np.int32]

    def __len__(self) -> int:
        return len(self.starts)

    def text(self, row: int) -> bytes:
        """One of them."""
        return self.data[self.starts[row] : self.starts[row] + self.lengths[row]].tobytes()

    def numbers(self) -> Values[np.float64]:
        """As numbers."""
        values, states = np.empty(len(self)), np.empty(len(self), np.uint8)
        kernels.read_numbers(self.data, self.starts, self.lengths, values, states)
        for row in map(int, np.flatnonzero(states == kernels.UNSURE)):
            values[row], states[row] = kernels.read_number_reference(self.text(row))
        return _values(values, states)

    def integers(self) -> Values[np.int64]:
        """As whole numbers of 64 bits."""
        values, states = np.empty(len(self), np.int64), np.empty(len(self), np.uint8)
        kernels.read_integers(self.data, self.starts, self.lengths, values, states)
        return _values(values, states)

    def times(self, way: int) -> Values[np.int64]:
        """As seconds since 1970, of times written as HOURS or ISO."""
        values, states = np.empty(len(self), np.int64), np.empty(len(self), np.uint8)
        read_times(self.data, self.starts, self.lengths, way, values, states)
        return _values(values, states)

    def category(self, offsets: NDArray[np.int64] | None = None) -> Category:
        """As categories of texts; with offsets, of lists."""
        ends = np.zeros(len(self) + 1, np.int32)
        np.cumsum(self.lengths, out=ends[1:])
        texts = np.empty(int(ends[-1]) + WORD, np.uint8)
        kernels.gather(self.data, self.starts, ends, texts)
        keys, checks = hash_buffers(ends, texts)
        missing = self.lengths == 0
        buffers = [*validity(missing), pa.py_buffer(ends), pa.py_buffer(texts)]
        values = pa.Array.from_buffers(pa.string(), len(self), buffers)
        return Category(values, keys, checks, missing, offsets)

    def split(self, separator: str) -> tuple[NDArray[np.int64], Cells]:
        """As lists: where each one begins among all their cells, and these."""
        offsets, code = np.empty(len(self) + 1, np.int64), ord(separator)
        kernels.split_cells(self.data, self.starts, self.lengths, code, offsets, _EMPTY, _EMPTY)
        starts, lengths = np.empty(offsets[-1], np.int32), np.empty(offsets[-1], np.int32)
        kernels.split_cells(self.data, self.starts, self.lengths, code, offsets, starts, lengths)
        return offsets, Cells(self.data, starts, lengths)

    def without(self, texts: tuple[str, ...]) -> Cells:
        """The same, missing also where it is one of the texts."""
        lengths = self.lengths
        for text in texts:
            wanted = text.encode()
            candidates = np.flatnonzero(lengths == len(wanted))
            places = self.starts[candidates, None] + np.arange(len(wanted))
            found = (self.data[places] == np.frombuffer(wanted, np.uint8)).all(axis=1)
            lengths = lengths.copy()
            lengths[candidates[found]] = 0
        return Cells(self.data, self.starts, lengths)


def cells_of(array: pa.Array) -> Cells:
    """The cells of an Arrow array of strings or bytes with 32-bit offsets, missing where it is null."""
    offsets, data = text_buffers(array)
    lengths = np.diff(offsets).astype(np.int32, copy=False)
    if array.null_count:
        lengths[array.is_null().to_numpy(zero_copy_only=False)] = 0
    return Cells(data, offsets[:-1].astype(np.int32), lengths)


def category_of_integers(
    values: NDArray[np.int64], missing: Mask, offsets: NDArray[np.int64] | None = None
) -> Category:
    """Categories of whole numbers; `values` are 0 where missing."""
    array = pa.Array.from_buffers(pa.int64(), len(values), [*validity(missing), pa.py_buffer(values)])
    return Category(array, values.view(np.uint64), np.zeros(len(values), np.uint32), missing, offsets)


def validity(missing: Mask) -> list[Any]:
    """The first buffer of an Arrow array with nulls there."""
    return [pa.py_buffer(np.packbits(~missing, bitorder="little")) if missing.any() else None]


def _values(values: NDArray[Number], states: NDArray[np.uint8]) -> Values[Number]:
    return Values(values, states == kernels.MISSING, states == kernels.WRONG)
