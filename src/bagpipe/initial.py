"""What a row is worth before it was ever written: `init(seed, table, id)`, a pure function of its key.

No result depends on the number of servers, on who asks first, or on the order or grouping of ids (I1), so a row that
was never written needs no place in the store. `fill` runs compiled, `define` is its NumPy definition; equal to the bit.

Every element is made of words mix(state + n * GOLDEN) of SplitMix64, with a state that the table's key and the id
determine; all is integer arithmetic until one last float32 multiplication, so any processor gives the same bits.
"""

from __future__ import annotations

import hashlib
from abc import ABC, abstractmethod
from collections.abc import Sequence

import numpy as np

from bagpipe.arrays import Floats, Int64s, UInt64s
from bagpipe.errors import ConfigError, ValueRangeError
from bagpipe.kernels import kernel
from bagpipe.kernels.random import GOLDEN, mix, mix_numpy
from bagpipe.schedules import check_number

_S16, _S32, _S40, _S48, _LOW16 = (np.uint64(number) for number in (16, 32, 40, 48, 0xFFFF))
_ONE, _THREE = np.uint64(1), np.uint64(3)
_UNIFORM_CENTRE, _UNIFORM_UNIT = np.int32(2**23), 2.0**-23
_NORMAL_CENTRE, _NORMAL_UNIT = np.int32(12 * (2**16 - 1)), 2.0**-17
"""What is subtracted from the integers, and what they are multiplied with to lie in [-1, 1) or have a variance of 1."""


class Initial(ABC):
    """The initial vectors of the rows of a table."""

    @abstractmethod
    def fill(self, ids: Int64s, out: Floats) -> None:
        """Write the initial vector of each id into out (ids, dim)."""

    def define(self, ids: Int64s, out: Floats) -> None:
        """What `fill` must write, in plain NumPy."""
        self.fill(ids, out)


def table_key(seed: int, table: str) -> np.uint64:
    """The 64-bit key of a table's values: the seed and a stable hash of the name, mixed."""
    name = int.from_bytes(hashlib.blake2b(table.encode(), digest_size=8).digest(), "little")
    words = np.array([seed % 2**64], np.uint64)
    return np.uint64(mix_numpy(mix_numpy(words + GOLDEN) ^ np.uint64(name))[0])


def _words(key: np.uint64, ids: Int64s, first: int, count: int) -> UInt64s:
    """Words first to first + count of the row of each id, (ids, count)."""
    state = mix_numpy(key ^ mix_numpy(ids.astype(np.uint64) + GOLDEN))
    return mix_numpy(state[:, None] + GOLDEN * np.arange(first + 1, first + count + 1, dtype=np.uint64))


class Uniform(Initial):
    """Uniform in [-scale, scale): the top 24 bits of a hash of (seed, table, id, column), less 2**23, by scale / 2**23.

    `column` is where in the row this vector begins, so that two vectors of a row do not have the same values.
    """

    def __init__(self, seed: int, table: str, scale: float, *, column: int = 0) -> None:
        self.seed, self.table, self.scale, self.column = seed, table, check_number("Uniform", "scale", scale), column
        self._key = table_key(seed, table)
        self._unit = np.float32(self.scale * _UNIFORM_UNIT)

    def fill(self, ids: Int64s, out: Floats) -> None:
        """Write the initial vector of each id into out (ids, dim)."""
        _check(ids, out)
        _fill_uniform(self._key, ids, self.column, self._unit, out)

    def define(self, ids: Int64s, out: Floats) -> None:
        """What `fill` must write, in plain NumPy."""
        words = _words(self._key, ids, self.column, out.shape[1])
        out[:] = ((words >> _S40).astype(np.int32) - _UNIFORM_CENTRE).astype(np.float32) * self._unit


@kernel
def _fill_uniform(key: np.uint64, ids: Int64s, column: int, unit: np.float32, out: Floats) -> None:
    """Cost: one hash an element."""
    for i in range(ids.shape[0]):
        state = mix(key ^ mix(np.uint64(ids[i]) + GOLDEN)) + GOLDEN * np.uint64(column)
        for c in range(out.shape[1]):
            word = mix(state + GOLDEN * (np.uint64(c) + _ONE))
            out[i, c] = np.float32(np.int32(word >> _S40) - _UNIFORM_CENTRE) * unit


class Normal(Initial):
    """Close to normal, with mean 0: what `nn.Embedding` begins with, but the same bits everywhere.

    Twice the sum of twelve 16-bit hashes, centred and scaled; the largest value is six standard deviations.
    """

    def __init__(self, seed: int, table: str, std: float = 1.0, *, column: int = 0) -> None:
        self.seed, self.table, self.std, self.column = seed, table, check_number("Normal", "std", std), column
        self._key = table_key(seed, table)
        self._unit = np.float32(self.std * _NORMAL_UNIT)

    def fill(self, ids: Int64s, out: Floats) -> None:
        """Write the initial vector of each id into out (ids, dim)."""
        _check(ids, out)
        _fill_normal(self._key, ids, self.column, self._unit, out)

    def define(self, ids: Int64s, out: Floats) -> None:
        """What `fill` must write, in plain NumPy."""
        words = _words(self._key, ids, 3 * self.column, 3 * out.shape[1])
        quarters = [(words >> np.uint64(shift)) & _LOW16 for shift in (0, 16, 32, 48)]
        total = np.sum(quarters, axis=0).reshape(len(ids), out.shape[1], 3).sum(axis=2)
        out[:] = ((total + total).astype(np.int32) - _NORMAL_CENTRE).astype(np.float32) * self._unit


@kernel
def _fill_normal(key: np.uint64, ids: Int64s, column: int, unit: np.float32, out: Floats) -> None:
    """Cost: three hashes an element."""
    for i in range(ids.shape[0]):
        state = mix(key ^ mix(np.uint64(ids[i]) + GOLDEN)) + GOLDEN * (_THREE * np.uint64(column))
        for c in range(out.shape[1]):
            total = np.uint64(0)
            for j in range(3):
                word = mix(state + GOLDEN * (_THREE * np.uint64(c) + np.uint64(j) + _ONE))
                total += (word & _LOW16) + ((word >> _S16) & _LOW16) + ((word >> _S32) & _LOW16) + (word >> _S48)
            out[i, c] = np.float32(np.int32(total + total) - _NORMAL_CENTRE) * unit


class Constant(Initial):
    """The same number everywhere, such as the 0 of a linear term."""

    def __init__(self, value: float = 0.0) -> None:
        self.value = check_number("Constant", "value", value, -np.inf, np.inf)

    def fill(self, ids: Int64s, out: Floats) -> None:
        """Write the initial vector of each id into out (ids, dim)."""
        _check(ids, out)
        out[:] = self.value


class Given(Initial):
    """Weights that exist already, such as those of a materialised layer: one array (rows, dim) a vector of the row."""

    def __init__(self, weights: Sequence[Floats]) -> None:
        sizes = {len(array) for array in weights}
        if len(sizes) != 1 or any(array.ndim != 2 for array in weights):
            raise ConfigError(
                f"given weights have shapes {[array.shape for array in weights]}: "
                "give one array (rows, dim) a vector, all with the same number of rows"
            )
        self.weights, self.rows = tuple(weights), sizes.pop()

    def fill(self, ids: Int64s, out: Floats) -> None:
        """Write the initial vector of each id into out (ids, dim)."""
        _check(ids, out)
        assert out.shape[1] == sum(array.shape[1] for array in self.weights), out.shape
        bad = np.flatnonzero((ids < 0) | (ids >= self.rows))
        if bad.size:
            raise ValueRangeError(
                f"id {ids[bad[0]]} is out of range for given weights of {self.rows} rows: "
                "check the data, or give weights for all ids"
            )
        start = 0
        for array in self.weights:
            out[:, start : start + array.shape[1]] = array[ids]
            start += array.shape[1]


class Joined(Initial):
    """Vectors of different origin in one row: the first fills the first dims[0] columns, and so on."""

    def __init__(self, parts: Sequence[Initial], dims: Sequence[int]) -> None:
        if len(parts) != len(dims):
            raise ConfigError(f"{len(parts)} initial values for vectors of lengths {tuple(dims)}: give one a vector")
        self.parts, self.dims = tuple(parts), tuple(dims)

    def fill(self, ids: Int64s, out: Floats) -> None:
        """Write the initial vector of each id into out (ids, dim)."""
        for part, start, dim in self._columns():
            part.fill(ids, out[:, start : start + dim])

    def define(self, ids: Int64s, out: Floats) -> None:
        """What `fill` must write, in plain NumPy."""
        for part, start, dim in self._columns():
            part.define(ids, out[:, start : start + dim])

    def _columns(self) -> list[tuple[Initial, int, int]]:
        starts = np.cumsum((0, *self.dims[:-1])).tolist()
        return list(zip(self.parts, starts, self.dims, strict=True))


def _check(ids: Int64s, out: Floats) -> None:
    """Kernels run without bounds checks, so a wrong shape must stop here."""
    assert ids.dtype == np.int64, ids.dtype
    assert out.dtype == np.float32, out.dtype
    assert out.ndim == 2, out.shape
    assert ids.shape == out.shape[:1], (ids.shape, out.shape)
