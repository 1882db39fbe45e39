"""What a row is worth before it was ever written: `init(seed, table, id)`, a pure function of its key.

No result depends on the number of servers, on who asks first, or on the order or grouping of ids (I1), so a row that
was never written needs no place in the store. `fill` runs compiled, `define` is its NumPy definition; equal to the bit.
"""

from __future__ import annotations

import hashlib
from abc import ABC, abstractmethod
from collections.abc import Sequence

import numpy as np
import numpy.typing as npt

from bagpipe.errors import ConfigError, ValueRangeError
from bagpipe.kernels import initial as kernels
from bagpipe.schedules import check_number

Floats = npt.NDArray[np.float32]
Ids = npt.NDArray[np.int64]


class Initial(ABC):
    """The initial vectors of the rows of a table."""

    @abstractmethod
    def fill(self, ids: Ids, out: Floats) -> None:
        """Write the initial vector of each id into out (ids, dim)."""

    def define(self, ids: Ids, out: Floats) -> None:
        """What `fill` must write, in plain NumPy."""
        self.fill(ids, out)


def table_key(seed: int, table: str) -> np.uint64:
    """The 64-bit key of a table's values: the seed and a stable hash of the name, mixed."""
    name = int.from_bytes(hashlib.blake2b(table.encode(), digest_size=8).digest(), "little")
    words = np.array([seed % 2**64], np.uint64)
    return np.uint64(kernels.mix_numpy(kernels.mix_numpy(words + kernels.GAMMA) ^ np.uint64(name))[0])


class Uniform(Initial):
    """Uniform in [-scale, scale): the top 24 bits of a hash of (seed, table, id, column), less 2**23, by scale / 2**23.

    `column` is where in the row this vector begins, so that two vectors of a row do not have the same values.
    """

    def __init__(self, seed: int, table: str, scale: float, *, column: int = 0) -> None:
        self.seed, self.table, self.scale, self.column = seed, table, check_number("Uniform", "scale", scale), column
        self._key = table_key(seed, table)
        self._unit = np.float32(self.scale * kernels.UNIFORM_UNIT)

    def fill(self, ids: Ids, out: Floats) -> None:
        """Write the initial vector of each id into out (ids, dim)."""
        _check(ids, out)
        kernels.fill_uniform(self._key, ids, self.column, self._unit, out)

    def define(self, ids: Ids, out: Floats) -> None:
        """What `fill` must write, in plain NumPy."""
        kernels.fill_uniform_numpy(self._key, ids, self.column, self._unit, out)


class Normal(Initial):
    """Close to normal, with mean 0: what `nn.Embedding` begins with, but the same bits everywhere.

    The sum of twelve 16-bit hashes, centred and scaled; the largest value is six standard deviations.
    """

    def __init__(self, seed: int, table: str, std: float = 1.0, *, column: int = 0) -> None:
        self.seed, self.table, self.std, self.column = seed, table, check_number("Normal", "std", std), column
        self._key = table_key(seed, table)
        self._unit = np.float32(self.std * kernels.NORMAL_UNIT)

    def fill(self, ids: Ids, out: Floats) -> None:
        """Write the initial vector of each id into out (ids, dim)."""
        _check(ids, out)
        kernels.fill_normal(self._key, ids, self.column, self._unit, out)

    def define(self, ids: Ids, out: Floats) -> None:
        """What `fill` must write, in plain NumPy."""
        kernels.fill_normal_numpy(self._key, ids, self.column, self._unit, out)


class Constant(Initial):
    """The same number everywhere, such as the 0 of a linear term."""

    def __init__(self, value: float = 0.0) -> None:
        self.value = check_number("Constant", "value", value, -np.inf, np.inf)

    def fill(self, ids: Ids, out: Floats) -> None:
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

    def fill(self, ids: Ids, out: Floats) -> None:
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

    def fill(self, ids: Ids, out: Floats) -> None:
        """Write the initial vector of each id into out (ids, dim)."""
        for part, start, dim in self._columns():
            part.fill(ids, out[:, start : start + dim])

    def define(self, ids: Ids, out: Floats) -> None:
        """What `fill` must write, in plain NumPy."""
        for part, start, dim in self._columns():
            part.define(ids, out[:, start : start + dim])

    def _columns(self) -> list[tuple[Initial, int, int]]:
        starts = np.cumsum((0, *self.dims[:-1])).tolist()
        return list(zip(self.parts, starts, self.dims, strict=True))


def _check(ids: Ids, out: Floats) -> None:
    """Kernels run without bounds checks, so a wrong shape must stop here."""
    assert ids.dtype == np.int64, ids.dtype
    assert out.dtype == np.float32, out.dtype
    assert out.ndim == 2, out.shape
    assert ids.shape == out.shape[:1], (ids.shape, out.shape)
