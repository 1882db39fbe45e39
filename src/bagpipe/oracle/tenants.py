"""The row in each slot, for lists that do not follow a batch: victims, idle rows, rows that are brought along."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise

import numpy as np

from bagpipe.arrays import Int32s, Int64s
from bagpipe.kernels.oracle import HALF, LOWER, Rows, list_tenants
from bagpipe.oracle.row_list import RowList
from bagpipe.oracle.shard import Shard
from bagpipe.oracle.tables import OracleTable


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

    def rows_in(self, group: int, slots: Int64s) -> tuple[Int64s, Int64s]:
        """Table and id of the tenants of these slots of a group."""
        codes = self.codes[self._group_begins[group] + slots]
        tables, rows, ids = codes >> HALF, codes & LOWER, np.empty(len(codes), np.int64)
        for number, shard in enumerate(self.shards):
            own = self.of_table[tables] == number
            ids[own] = shard.ids_of(tables[own], rows[own])
        return tables, ids

    def absent(self, tables: Int64s, ids: Int64s) -> tuple[Int64s, Int64s, Int32s]:
        """Which of these rows can be brought along, where they are known, and which plan evicted them (-1: none). Not
        what is in the cache, and of mapped tables only rows of the window, as their maps have room for no others."""
        rows: Int64s = np.full(len(ids), -1, np.int64)
        evicted: Int32s = np.full(len(ids), -1, np.int32)
        for t in np.unique(tables).tolist():
            own, shard = np.flatnonzero(tables == t), self.shard_of(t)
            own = own[shard.is_known(t, ids[own])]
            found = shard.rows_of(t, ids[own])
            location = shard.state.location[found]
            rows[own], evicted[own] = np.where(location > 0, -1, found), -location - 1
        chosen = np.flatnonzero(rows >= 0)
        return chosen, rows[chosen], evicted[chosen]

    def move_in(self, tables: Int64s, rows: Int64s, slots: Int32s) -> None:
        """These rows live in these slots from now on."""
        for t in np.unique(tables).tolist():
            own = tables == t
            self.shard_of(t).state.location[rows[own]] = slots[own] + 1
            self.codes[self.begins[t] + slots[own]] = (t << HALF) | rows[own]

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

    def evict_all(self, plan: int) -> RowList:
        """The same of all rows in the cache, by table and slot."""
        live = self.codes >= 0
        for number, shard in enumerate(self.shards):
            own = np.flatnonzero((self.codes >= 0) & (self.of_table[self.codes >> HALF] == number))
            slots = own - self.begins[self.codes[own] >> HALF]
            live[own] = shard.state.location[self.codes[own] & LOWER] == slots + 1
        return self.evict([np.flatnonzero(live[a:b]).astype(np.int32) for a, b in pairwise(self._group_begins)], plan)
