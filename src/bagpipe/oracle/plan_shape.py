"""What the plans of a run must fit, and lists of rows as arrays that are checked against it when they arrive (I8)."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from bagpipe.cache import group_by_width
from bagpipe.errors import WireError
from bagpipe.oracle.row_list import RowList
from bagpipe.types import Table
from bagpipe.wire.arrays import Packing, Unpacking
from bagpipe.wire.plan_messages import DividedBy, PlansDescribed


@dataclass(frozen=True)
class PlanShape:
    """What all plans of a run must fit."""

    tables: tuple[Table, ...]
    group: tuple[int, ...]
    """The slot space of each table."""
    capacity: tuple[int, ...]
    """The slots of each space."""
    accumulate: int = 1
    fingerprint: str = ""
    division: DividedBy | None = None
    """How plans are divided, where several trainers share them."""
    trainer: int = 0
    """Whose parts come."""

    @classmethod
    def of(cls, described: PlansDescribed, trainer: int = 0) -> PlanShape:
        """What an oracle has described to a trainer; WireError if it contradicts itself."""
        tables = tuple(Table(table.name, table.rows, tuple(table.features)) for table in described.tables)
        groups, widths = group_by_width([table.width for table in described.tables])
        features = [name for table in tables for name in table.features]
        if not tables or len(widths) != len(described.capacity) or len(set(features)) != len(features):
            raise WireError(
                f"plans of {len(tables)} tables with rows of {len(widths)} widths for {len(described.capacity)} slot "
                "spaces, or of a feature in two tables: run the same release on both sides"
            )
        capacity, accumulate = tuple(described.capacity), described.accumulate
        return cls(tables, tuple(groups), capacity, accumulate, described.fingerprint, described.division, trainer)

    @property
    def features(self) -> list[tuple[str, int]]:
        """The features of all plans, in order, each with its table."""
        return [(name, number) for number, table in enumerate(self.tables) for name in table.features]

    @property
    def slots(self) -> list[int]:
        """How many slots the rows of each table may be in."""
        return [self.capacity[group] for group in self.group]


def pack_rows(rows: RowList, packing: Packing) -> None:
    """Their number by table, then ids and slots."""
    packing.add(np.diff(rows.bounds).astype(np.int32))
    packing.add(rows.ids)
    packing.add(rows.slots)


def unpack_rows(unpacking: Unpacking, shape: PlanShape, name: str, count: int) -> RowList:
    """So many rows, of ids and slots that exist."""
    counts = unpacking.int32s(len(shape.tables), "rows by table")
    if counts.min() < 0 or int(counts.sum(dtype=np.int64)) != count:
        raise WireError(f"{name}: {count} rows, by table {counts[:8].tolist()}: their sum must be that")
    ids, slots = unpacking.int64s(count, "ids"), unpacking.int32s(count, "slots")
    bounds = np.zeros(len(counts) + 1, np.int64)
    np.cumsum(counts, out=bounds[1:])
    rows = RowList(ids, slots, bounds)
    for number, (table, end) in enumerate(zip(shape.tables, shape.slots, strict=True)):
        of_table, places = rows.of_table(number)
        check_range(f"{name}, slots of table {table.name!r}", places, 0, end)
        if table.rows is not None:
            check_range(f"{name}, ids of table {table.name!r}", of_table, 0, table.rows)
    return rows


def check_range(what: str, values: NDArray[Any], least: int, end: int) -> None:
    """WireError if one of these is less, or is `end` or more."""
    if not len(values):
        return
    smallest, largest = int(values.min()), int(values.max())
    if smallest < least or largest >= end:
        wrong = smallest if smallest < least else largest
        raise WireError(f"{what}: {wrong} is there, {least} to {end - 1} are allowed")
