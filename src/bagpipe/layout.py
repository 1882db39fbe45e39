"""What lies where in the rows of a table: its vectors, then the state that its optimizer keeps for them.

Vectors of several layers that are fed by the same ids share a row, so one slot and one transfer serve them all.
"""

from __future__ import annotations

import zlib
from collections.abc import Callable
from dataclasses import dataclass, field

import numpy as np

from bagpipe.arrays import Floats, Int64s
from bagpipe.errors import ConfigError
from bagpipe.initial import Initial
from bagpipe.optim import RowOptimizer
from bagpipe.types import Table


@dataclass(frozen=True, slots=True)
class RowLayout:
    """The rows of one table: float32 numbers [vector | vector ... | state]."""

    table: Table
    dims: tuple[int, ...]
    """Lengths of the vectors, usually one."""
    optimizer: RowOptimizer
    initial: Initial
    dim: int = field(init=False)
    """Columns of all vectors together, which is also the length of a row's gradient."""
    width: int = field(init=False)
    """Columns of a row: vectors and state."""
    columns: tuple[int, ...] = field(init=False)
    """First column of each vector."""

    def __post_init__(self) -> None:
        if not self.dims or any(dim < 1 for dim in self.dims):
            raise ConfigError(f"table {self.table.name!r}: vectors of lengths {self.dims}: give each at least 1 column")
        dim = sum(self.dims)
        object.__setattr__(self, "dim", dim)
        object.__setattr__(self, "width", dim + self.optimizer.state_width(self.dims))
        object.__setattr__(self, "columns", tuple(sum(self.dims[:i]) for i in range(len(self.dims))))

    def columns_of(self, part: int) -> Int64s:
        """All columns of a row that belong to one of its vectors: its own, and those of its state."""
        per_column, per_vector = self.optimizer.state_per_column, self.optimizer.state_per_vector
        first, own = self.columns[part], np.arange(self.dims[part], dtype=np.int64)
        of_columns = [own + first + number * self.dim for number in range(1 + per_column)]
        of_vector = (1 + per_column) * self.dim + part + len(self.dims) * np.arange(per_vector, dtype=np.int64)
        return np.concatenate([*of_columns, of_vector])

    @property
    def move_cost(self) -> float:
        """What a row that changes its owner sends beside its vector, its state and a flag, in vectors."""
        return (self.width - self.dim + 1) / self.dim

    @property
    def label(self) -> str:
        """What the rows are, for comparisons; their first values are told by those of a few ids."""
        dims = "+".join(map(str, self.dims))
        return (
            f"table {self.table.name}, {self.table.rows or 'any number of'} rows of {dims} floats, "
            f"{self.optimizer.name}, first values {self.first_values}"
        )

    @property
    def first_values(self) -> str:
        """A checksum of what a few rows begin with, which tells a seed from another."""
        last = (self.table.rows or 2**63) - 1
        ids = np.unique(np.linspace(0, last, 16).astype(np.uint64).clip(max=last).astype(np.int64))
        values = np.empty((len(ids), self.width), np.float32)
        self.initialise(ids, values)
        return f"{zlib.crc32(values.data):08x}"

    def initialise(self, ids: Int64s, out: Floats) -> None:
        """Write the row of each id as it is before its first update into out (ids, width), or its first columns."""
        self._write(self.initial.fill, ids, out)

    def define(self, ids: Int64s, out: Floats) -> None:
        """What `initialise` must write, in plain NumPy."""
        self._write(self.initial.define, ids, out)

    def _write(self, fill: Callable[[Int64s, Floats], None], ids: Int64s, out: Floats) -> None:
        if out.shape[1] < self.dim:
            vectors = np.empty((len(ids), self.dim), np.float32)
            fill(ids, vectors)
            out[:] = vectors[:, : out.shape[1]]
            return
        fill(ids, out[:, : self.dim])
        out[:, self.dim :] = self.optimizer.initial_state(self.dims)[: out.shape[1] - self.dim]
