"""The ids of a batch, checked before the oracle notes anything: a bad batch leaves no trace (I8)."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from bagpipe.errors import BatchError, ValueRangeError
from bagpipe.kernels.plan import count_outside
from bagpipe.oracle.tables import OracleTable

Int32s = NDArray[np.int32]
Int64s = NDArray[np.int64]


@dataclass(frozen=True, slots=True, eq=False)
class CutIds:
    """The ids of a batch whose samples are those of trainer 0, then those of trainer 1, and so on."""

    ids: Sequence[NDArray[np.integer]]
    """One array a feature, in order of tables."""
    cuts: Int64s
    """[f, r]: where the ids of feature f begin that are trainer r's; one more for the end."""


@dataclass(frozen=True, slots=True, eq=False)
class CheckedIds:
    """The ids of a batch: for each feature a flat array of 64-bit numbers, all within their tables."""

    features: list[Int64s]
    positions: list[int]
    """Where each feature begins when all are laid end to end; one more for the end."""
    starts: Int64s
    """The same for each table."""

    @property
    def num_ids(self) -> int:
        """Ids of all features."""
        return self.positions[-1]

    def split(self, values: Int32s) -> tuple[Int32s, ...]:
        """One part for each feature of an array with one value an id."""
        return tuple([values[a:b] for a, b in zip(self.positions[:-1], self.positions[1:], strict=True)])


def check_ids(tables: Sequence[OracleTable], ids: Sequence[NDArray[np.integer]], number: int) -> CheckedIds:
    """Check the ids of batch `number`, one array for each feature of each table."""
    num_features = sum([len(table.features) for table in tables])
    if len(ids) != num_features:
        raise BatchError(f"batch {number} has ids of {len(ids)} features: give one array for each of {num_features}")
    features: list[Int64s] = []
    positions, starts = [0], []
    for table in tables:
        starts.append(positions[-1])
        for feature in table.features:
            values = _flat(feature, ids[len(features)], number)
            if table.rows is not None and count_outside(values, table.rows):
                raise _out_of_range(table, feature, values, number)
            features.append(values)
            positions.append(positions[-1] + len(values))
    return CheckedIds(features, positions, np.array([*starts, positions[-1]], np.int64))


def _flat(feature: str, values: NDArray[np.integer], number: int) -> Int64s:
    values = np.asarray(values)
    if values.size and not np.can_cast(values.dtype, np.int64):
        raise BatchError(f"batch {number}: ids of feature {feature!r} are {values.dtype}: give 64-bit integers")
    return np.ascontiguousarray(values, np.int64).reshape(-1)


def _out_of_range(table: OracleTable, feature: str, values: Int64s, number: int) -> ValueRangeError:
    assert table.rows is not None
    bad = int(values[(values < 0) | (values >= table.rows)][0])
    return ValueRangeError(
        f"batch {number}: feature {feature!r} has id {bad}, out of range for table {table.name!r} "
        f"({table.rows} rows): raise the table's rows or check the data"
    )
