"""Rows of all tables with their cache slots: what every list of a plan is made of."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np

from bagpipe.arrays import Int32s, Int64s
from bagpipe.errors import WireError
from bagpipe.oracle.plan_shape import PlanShape, check_bounds


@dataclass(frozen=True, slots=True, eq=False)
class RowList:
    """Rows of all tables, table by table, with the cache slot of each."""

    ids: Int64s
    slots: Int32s
    """Slots of tables of one group (equal row width) come from one slot space."""
    bounds: Int64s
    """Table t has positions bounds[t] to bounds[t + 1]."""

    def __len__(self) -> int:
        return len(self.ids)

    def of_table(self, table: int) -> tuple[Int64s, Int32s]:
        """Ids and slots of one table."""
        start, stop = self.bounds[table], self.bounds[table + 1]
        return self.ids[start:stop], self.slots[start:stop]

    def by_table(self) -> Iterator[tuple[int, Int64s, Int32s]]:
        """The parts that are not empty: table, ids, slots."""
        for table in np.flatnonzero(np.diff(self.bounds)).tolist():
            yield table, *self.of_table(table)

    def blocks(self, rows_max: int) -> list[RowList]:
        """The list in blocks of at most so many rows; at least one."""
        if len(self) <= rows_max:
            return [self]
        blocks = []
        for first in range(0, len(self), rows_max):
            part = slice(first, first + rows_max)
            blocks.append(RowList(self.ids[part], self.slots[part], np.clip(self.bounds - first, 0, rows_max)))
        return blocks

    def joined(self, other: RowList) -> RowList:
        """The rows of both, in each table those of the other behind."""
        if not len(self) or not len(other):
            return self if len(self) else other
        tables = range(len(self.bounds) - 1)
        parts = [part for table in tables for part in (self.of_table(table), other.of_table(table))]
        ids, slots = (np.concatenate(column) for column in zip(*parts, strict=True))
        return RowList(ids, slots, self.bounds + other.bounds)

    def check(self, name: str, shape: PlanShape) -> None:
        """WireError unless these are rows and slots that exist (I8)."""
        if self.ids.ndim != 1 or self.slots.shape != self.ids.shape:
            raise WireError(f"{name}: ids of shape {self.ids.shape} have slots of shape {self.slots.shape}")
        check_bounds(name, self.bounds, len(shape.tables), len(self.ids))
        shape.check_slots(name, self.slots, self.bounds)
        shape.check_ids(name, self.ids, self.bounds)
