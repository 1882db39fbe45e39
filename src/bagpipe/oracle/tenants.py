"""Who lives in which slot, for lists that do not follow a batch: victims, idle rows, the last plan's."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import numpy as np
from numpy.typing import NDArray

from bagpipe.kernels.oracle import HALF, LOWER, Rows, list_tenants
from bagpipe.oracle.row_list import RowList
from bagpipe.oracle.shard import Shard
from bagpipe.oracle.tables import OracleTable

Int32s = NDArray[np.int32]
Int64s = NDArray[np.int64]
Flags = NDArray[np.bool_]


class Tenants:
    """The last tenant of each slot, as table and row; it lives there still if its location says so."""

    def __init__(self, tables: Sequence[OracleTable], capacity: Sequence[int], shards: Sequence[Shard]) -> None:
        begins = np.cumsum([0, *capacity])
        self._group_begins: Int64s = begins.astype(np.int64)
        self.begins: Int64s = np.array([begins[table.group] for table in tables], np.int64)
        """Where the slots of table t begin in `codes`."""
        self.codes: Int64s = np.full(begins[-1], -1, np.int64)
        """Table in the upper half, row of its shard in the lower; -1: never had a tenant."""
        self.shards = shards
        self.of_table: Int64s = np.zeros(len(tables), np.int64)
        """The number of each table's shard."""
        for number, shard in enumerate(shards):
            self.of_table[shard.tables] = number

    def shard_of(self, table: int) -> Shard:
        """Where a table's rows are known."""
        return self.shards[int(self.of_table[table])]

    def residents(self) -> RowList:
        """All rows in the cache, by table and slot."""
        places = np.flatnonzero(self.codes >= 0)
        groups = np.searchsorted(self._group_begins, places, side="right") - 1
        return self._list(self.codes[places], (places - self._group_begins[groups]).astype(np.int32))

    def evict(self, slots: Sequence[Int32s], plan: int) -> RowList:
        """Note that this plan evicts the tenants of these slots of each group; their rows, by table."""
        codes = [self.codes[begin + own] for begin, own in zip(self._group_begins, slots, strict=False)]
        counts = np.bincount(np.concatenate(codes) >> HALF, minlength=len(self.begins))
        bounds = np.zeros(len(counts) + 1, np.int64)
        np.cumsum(counts, out=bounds[1:])
        rows = Rows(np.empty(bounds[-1], np.int64), np.empty(bounds[-1], np.int32), bounds)
        at = bounds[:-1].copy()
        for number, shard in enumerate(self.shards):
            for begin, own in zip(self._group_begins, slots, strict=False):
                list_tenants(shard.state, number, self.of_table, own, begin, self.codes, plan, at, rows)
        return RowList(*rows)

    def evict_rows(self, rows: RowList, plan: int) -> None:
        """Note that this plan evicts these rows."""
        tables = np.repeat(np.arange(len(self.begins)), np.diff(rows.bounds))
        entries = self.codes[self.begins[tables] + rows.slots] & LOWER
        for shard, own in self._by_shard(tables):
            shard.state.location[entries[own]] = -(plan + 1)

    def _list(self, codes: Int64s, slots: Int32s) -> RowList:
        """The tenants that still live in their slots."""
        order = np.argsort(codes >> HALF, kind="stable")
        tables, entries, slots = codes[order] >> HALF, codes[order] & LOWER, slots[order]
        ids, live = np.empty(len(order), np.int64), np.empty(len(order), np.bool_)
        for shard, own in self._by_shard(tables):
            ids[own] = shard.ids_of(tables[own], entries[own])
            live[own] = shard.state.location[entries[own]] == slots[own] + 1
        bounds = np.searchsorted(tables[live], np.arange(len(self.begins) + 1))
        return RowList(ids[live], slots[live], bounds.astype(np.int64))

    def _by_shard(self, tables: Int64s) -> Iterator[tuple[Shard, Flags]]:
        """Every shard, and which of these tables are its own."""
        at = self.of_table[tables]
        return ((shard, at == number) for number, shard in enumerate(self.shards))
