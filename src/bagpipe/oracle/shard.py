"""What the oracle remembers of some tables: two numbers a row, and the batches that were read and have no plan yet.

A shard shares nothing with others, so that each pass of the oracle runs over all of them on several threads at once;
whatever depends on several tables is decided between passes, and no plan depends on how tables are divided.

Tables of known, moderate size use arrays addressed by id. The others are mapped, in shards of their own: memory follows
the rows that are in the cache, in the window, or were written back lately (I5). Plans are the same either way.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from bagpipe.arrays import Flags, Int32s, Int64s
from bagpipe.kernels.oracle import Batch, Rings, RowState
from bagpipe.kernels.sharing import UserRings
from bagpipe.kernels.window_map import Numbers, WindowMap
from bagpipe.oracle.tables import OracleTable

MaskType = type[np.unsignedinteger[Any]]

ROWS_DIRECT_MAX = 64_000_000
"""Tables with more rows are mapped."""
BYTES_DIRECT_MAX = 4_000_000_000
"""So are the largest ones when the arrays of all would take more."""
_BYTES_A_ROW = 12
_NO_INT32S, _NO_INT64S = np.empty(0, np.int32), np.empty(0, np.int64)
NO_NUMBERS = Numbers(
    slots=np.empty(0, np.uint64), ids=_NO_INT64S, tables=_NO_INT32S, free=_NO_INT32S, num_free=_NO_INT64S,
    keys=_NO_INT64S, given=_NO_INT64S, found=_NO_INT32S, memo=_NO_INT32S,
)  # fmt: skip


class Shard:
    """Some tables: their rows, and their part of the window, in rings that grow to the largest window met (I5)."""

    def __init__(
        self,
        all_tables: Sequence[OracleTable],
        members: Sequence[int],
        window_max: int,
        masks: MaskType | None = None,
        *,
        mapped: bool = False,
    ) -> None:
        self.tables: Int64s = np.array(members, np.int64)
        self._map = WindowMap() if mapped else None
        bases = np.zeros(len(all_tables), np.int64)
        sizes = [0 if mapped else all_tables[t].rows or 0 for t in members]
        bases[self.tables] = np.cumsum([0, *sizes])[:-1]
        last_use, location = np.zeros(sum(sizes), np.int64), np.zeros(sum(sizes), np.int32)
        self._direct = RowState(last_use, location, bases, NO_NUMBERS)
        columns = 1 << int(window_max + 1).bit_length()
        begins = np.zeros((len(members) + 1, columns), np.int64)
        self.rings = Rings(self.tables, begins, np.empty(0, np.int32), np.empty(0, np.uint16))
        self._masks = masks
        self.users = UserRings(*(np.empty(0, kind) for kind in (masks, np.int64, masks, masks)))
        self.previous: Int64s = np.empty(0, np.int64)
        """The last use of each row of the batch read last, before it."""
        self.idle_slots: Int32s = np.empty(0, np.int32)
        """Those of its rows that are in the cache, and that no batch before it needs, table by table."""
        self._end = 0

    @property
    def state(self) -> RowState:
        """What is known of the rows, until the next batch is read."""
        if self._map is None:
            return self._direct
        return RowState(self._map.last_use, self._map.location, self._direct.bases, self._map.numbers)

    @property
    def mapped(self) -> bool:
        """Whether rows are numbered as they come."""
        return self._map is not None

    def members(self, tables: Int64s) -> Int64s:
        """Which of the shard's tables are among these, by their numbers in it."""
        members: Int64s = np.flatnonzero(np.isin(self.tables, tables))
        return members

    def rows_of(self, table: int, ids: Int64s) -> Int64s:
        """The rows with these ids; of a mapped table, new ones as far as there was room for the last batch's ids."""
        if self._map is not None:
            return self._map.number(table, ids).copy()
        rows: Int64s = ids + self._direct.bases[table]
        return rows

    def ids_of(self, tables: int | Int64s, rows: Int64s) -> Int64s:
        """The ids of these rows of a table, or of one table each."""
        ids: Int64s = rows - self._direct.bases[tables] if self._map is None else self._map.ids[rows]
        return ids

    def is_known(self, table: int, ids: Int64s) -> Flags:
        """Which of these ids have a row: all, or those that the window or the cache has, if the table is mapped."""
        if self._map is None:
            return np.ones(len(ids), np.bool_)
        return np.isin(ids, self._map.ids[(self._map.last_use != 0) & (self._map.tables == table)])

    def enter(self, batch: Batch, iteration: int, window: int, keep_plan: int) -> None:
        """Make room for a batch behind `window` others.

        Rows of mapped tables are forgotten that were last read before the window and evicted before plan `keep_plan`.
        """
        first, stop = batch.features[self.tables], batch.features[self.tables + 1]
        num_ids = int((batch.positions[stop] - batch.positions[first]).sum())
        if num_ids > len(self.previous):
            self.previous = np.empty(num_ids, np.int64)
            self.idle_slots = np.empty(num_ids, np.int32)
        if self._map is not None:
            self._map.reserve(num_ids, iteration - window, keep_plan)
        column = iteration & (self.rings.begins.shape[1] - 1)
        self.rings.begins[0, column] = self._allocate(num_ids, iteration - window, window)

    def entered(self, iteration: int) -> None:
        """The batch stays in the window."""
        self._end = int(self.rings.begins[-1, iteration & (self.rings.begins.shape[1] - 1)])

    def _allocate(self, count: int, first: int, window: int) -> int:
        """A free stretch of the rings, right behind the newest batch or at the beginning."""
        begins, size = self.rings.begins, len(self.rings.rows)
        if not window:
            self._end = 0
        oldest = int(begins[0, first & (begins.shape[1] - 1)]) if window else size
        wrapped = window > 0 and self._end <= oldest
        if self._end + count <= (oldest if wrapped else size):
            return self._end
        if window and not wrapped and count <= oldest:
            return 0
        return self._grow(count, first, window)

    def _grow(self, count: int, first: int, window: int) -> int:
        """Move all batches to the beginning of larger rings; the end of them."""
        begins = self.rings.begins
        columns = np.arange(first, first + window) & (begins.shape[1] - 1)
        used = int((begins[-1, columns] - begins[0, columns]).sum())
        size = 64 + count + used * 3 // 2
        olds = [self.rings.rows, self.rings.next_use, *(self.users if self._masks is not None else ())]
        news: list[Any] = [np.empty(size, old.dtype) for old in olds]
        end = 0
        for column in columns.tolist():
            own = begins[:, column]
            length = int(own[-1] - own[0])
            for old, new in zip(olds, news, strict=True):
                new[end : end + length] = old[own[0] : own[-1]]
            own += end - own[0]
            end += length
        self.rings = Rings(self.tables, begins, *news[:2])
        if self._masks is not None:
            self.users = UserRings(*news[2:])
        return end


def make_shards(
    tables: Sequence[OracleTable],
    window_max: int,
    masks: MaskType | None,
    *,
    threads: int = 1,
    rows_direct_max: int = ROWS_DIRECT_MAX,
    bytes_direct_max: int = BYTES_DIRECT_MAX,
) -> list[Shard]:
    """Tables with arrays and mapped ones, each spread evenly over two shards a thread, or one for one thread."""
    direct = is_direct(tables, rows_direct_max, bytes_direct_max)
    shards = []
    for mapped in (False, True):
        members: list[list[int]] = [[] for _ in range(1 if threads == 1 else 2 * threads)]
        costs = [0.0] * len(members)
        own = [t for t in range(len(tables)) if direct[t] != mapped]
        for t in sorted(own, key=lambda t: -_cost(tables[t])):
            lightest = costs.index(min(costs))
            members[lightest].append(t)
            costs[lightest] += _cost(tables[t])
        shards += [Shard(tables, sorted(own), window_max, masks, mapped=mapped) for own in members if own]
    return shards


def is_direct(tables: Sequence[OracleTable], rows_max: int, bytes_max: int) -> list[bool]:
    """Which tables get arrays: those of at most rows_max rows, smallest first, as long as bytes_max is kept."""
    direct = [False] * len(tables)
    left = min(bytes_max // _BYTES_A_ROW, 2**31 - 1)
    for t in sorted(range(len(tables)), key=lambda t: tables[t].rows or 0):
        rows = tables[t].rows
        if rows is not None and rows <= min(rows_max, left):
            direct[t] = True
            left -= rows
    return direct


def _cost(table: OracleTable) -> float:
    """Reading a feature costs more the less of its table fits the processor's caches."""
    return len(table.features) * (1 + float(np.log2(table.rows or 2**30)) / 4)
