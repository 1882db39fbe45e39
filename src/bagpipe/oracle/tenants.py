"""Who lives in which slot, for the rare lists that do not follow a batch: victims, flushes and the end of the data."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from bagpipe.kernels.plan import HALF, LOWER
from bagpipe.oracle.parts import Part
from bagpipe.oracle.plan import RowList
from bagpipe.oracle.tables import OracleTable, Rows

Int32s = NDArray[np.int32]
Int64s = NDArray[np.int64]


class Tenants:
    """The last tenant of each slot, as table and entry; it lives there still if its place says so."""

    def __init__(self, tables: Sequence[OracleTable], capacity: Sequence[int], parts: Sequence[Part]) -> None:
        begins = np.cumsum([0, *capacity])
        self._group_begins: Int64s = begins.astype(np.int64)
        self.begins: Int64s = np.array([begins[table.group] for table in tables], np.int64)
        """Where the slots of table t begin in `codes`."""
        self.codes: Int64s = np.full(begins[-1], -1, np.int64)
        """Table in the upper half, entry in the lower; -1: never had a tenant."""
        self.noted: dict[int, Rows] = {int(t): part.rows for part in parts for t in part.tables}

    def residents(self) -> RowList:
        """All rows in the cache, by table and slot."""
        places = np.flatnonzero(self.codes >= 0)
        groups = np.searchsorted(self._group_begins, places, side="right") - 1
        return self._list(self.codes[places], (places - self._group_begins[groups]).astype(np.int32))

    def evict(self, slots: Sequence[Int32s], plan: int) -> RowList:
        """Note that this plan evicts the tenants of these slots of each group; their rows, by table."""
        codes = [self.codes[begin + own] for begin, own in zip(self._group_begins, slots, strict=False)]
        rows = self._list(np.concatenate(codes), np.concatenate(list(slots)))
        self.evict_rows(rows, plan)
        return rows

    def evict_rows(self, rows: RowList, plan: int) -> None:
        """Note that this plan evicts these rows."""
        for t, noted in self.noted.items():
            _, slots = rows.of_table(t)
            if len(slots):
                noted.places[self.codes[self.begins[t] + slots] & LOWER] = -(plan + 1)

    def _list(self, codes: Int64s, slots: Int32s) -> RowList:
        """The tenants that still live in their slots."""
        order = np.argsort(codes >> HALF, kind="stable")
        codes, slots = codes[order], slots[order]
        num_tables = len(self.begins)
        edges = np.searchsorted(codes >> HALF, np.arange(num_tables + 1))
        ids, homes, counts = [], [], [0]
        for t in range(num_tables):
            entries, own = codes[edges[t] : edges[t + 1]] & LOWER, slots[edges[t] : edges[t + 1]]
            live = self.noted[t].places[entries] == own + 1
            ids.append(self.noted[t].ids(t, entries[live]))
            homes.append(own[live])
            counts.append(int(live.sum()))
        return RowList(np.concatenate(ids), np.concatenate(homes), np.cumsum(counts))
