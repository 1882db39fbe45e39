"""What the stores of this machine share: ids to positions, initial values, locks.

A backing holds rows by position and knows nothing of ids. A lock a table is held while ids are looked up and room is
made, never while rows are copied: rows do not move, so a reader's positions stay good while a writer adds more, and
several writers may work at once, as long as no row is in two of their calls. A new row has its position before it has
its value, and is found only once it has both: until then something of an abandoned row may lie there (I3).
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from threading import Lock

import numpy as np

from bagpipe.arrays import Floats, Int64s
from bagpipe.errors import StoreError
from bagpipe.kernels.idmap import IdMap
from bagpipe.store.base import (
    NO_ITERATION,
    ROWS_PER_CHUNK,
    RowSource,
    Store,
    StoreStats,
    TablePart,
    check_chunk,
    check_distinct,
    check_read,
    check_table,
    check_tables_differ,
    check_widths,
    check_write,
)

_BYTES_PER_ID = 25


class Backing(ABC):
    """The rows of one table by position, where position 0, 1, 2, ... is the order of first write."""

    @abstractmethod
    def reserve(self, num_rows: int) -> None:
        """Make room for that many rows in all, or raise and change nothing. Rows that are there stay where they are."""

    @abstractmethod
    def gather(self, positions: Int64s, out: Floats) -> None:
        """Copy the row at each position into `out`; where the position is -1, leave `out` as it is.

        Where `out` has fewer columns than a row, those are its first ones.
        """

    @abstractmethod
    def scatter(self, positions: Int64s, values: Floats) -> None:
        """Copy `values` to the rows at these positions."""

    @property
    @abstractmethod
    def bytes_in_memory(self) -> int:
        """Memory that rows take."""

    @property
    @abstractmethod
    def bytes_on_disk(self) -> int:
        """Disk that rows take."""


class _Table:
    def __init__(self, source: RowSource, backing: Backing) -> None:
        self.source = source
        self.backing = backing
        self.positions = IdMap()
        self.unwritten: list[range] = []
        """Positions whose rows have an id and no value yet, a range for each write under way."""
        self.lock = Lock()


class LocalStore(Store):
    """Rows of this process, by table in a backing each."""

    def __init__(self, tables: Sequence[RowSource], make_backing: Callable[[int, int], Backing]) -> None:
        """`make_backing(table, width)` makes the backing of a table."""
        self._sources = check_widths(tables)
        self.bytes_in_memory_max: int | None = None
        """Rows that would take more memory are refused."""
        self._tables = [_Table(source, make_backing(number, source.width)) for number, source in enumerate(tables)]
        self._refusal: str | None = None

    @property
    def tables(self) -> Sequence[RowSource]:
        """The tables, by number."""
        return self._sources

    def read(self, table: int, ids: Int64s, out: Floats) -> None:
        """Fill `out` with the row of each id, or its first columns: as last written, else its initial value."""
        self._check_usable()
        check_read(self._sources, table, ids, out)
        if not len(ids):
            return
        part = self._part(table)
        ids = np.ascontiguousarray(ids)
        positions, num_missing = self.find(table, ids)
        if num_missing < len(ids):
            part.backing.gather(positions, out)
        if num_missing == len(ids):
            part.source.initialise(ids, out)
        elif num_missing:
            missing = np.flatnonzero(positions < 0)
            initial = np.empty((num_missing, out.shape[1]), np.float32)
            part.source.initialise(ids[missing], initial)
            out[missing] = initial

    def find(self, table: int, ids: Int64s) -> tuple[Int64s, int]:
        """Where the row of each id is, -1 if it was never written, and the number of those. Rows do not move."""
        self._check_usable()
        part = self._part(table)
        positions = np.empty(len(ids), np.int64)
        with part.lock:
            num_missing = part.positions.find(ids, positions)
            unwritten = part.unwritten.copy()
        for hidden in unwritten:
            places = np.flatnonzero((positions >= hidden.start) & (positions < hidden.stop))
            positions[places] = -1
            num_missing += len(places)
        return positions, num_missing

    def gather(self, table: int, positions: Int64s, out: Floats) -> None:
        """Copy the rows that `find` has found, or their first columns, into `out`, (positions, columns)."""
        self._check_usable()
        self._part(table).backing.gather(positions, out)

    def write(self, table: int, ids: Int64s, values: Floats) -> None:
        """Set the rows of these ids, all different, to `values`."""
        self.write_many([(table, ids, values)])

    def write_many(self, parts: Sequence[TablePart], passed: int = NO_ITERATION) -> None:  # noqa: ARG002
        """Set rows of several tables, each named once: all, or none where there is no room for them."""
        self.place(parts)

    def place(self, parts: Sequence[TablePart]) -> list[tuple[int, Int64s]]:
        """The same; tells where the rows are now, by table."""
        self._check_usable()
        check_tables_differ(parts)
        for table, ids, values in parts:
            check_write(self._sources, table, ids, values)
            check_distinct(table, ids)
        contiguous = [(table, np.ascontiguousarray(ids), np.ascontiguousarray(values)) for table, ids, values in parts]
        written = sorted((part for part in contiguous if len(part[1])), key=lambda part: part[0])
        if not written:
            return []
        self._before_write()
        added: list[tuple[_Table, range]] = []
        try:
            found = self._write(written, added)
            for part, positions in added:
                with part.lock:
                    part.unwritten.remove(positions)
        except BaseException as error:
            if added:  # new rows are there and have no values
                self._refuse(f"a write failed halfway ({error}): start again from a checkpoint")
            raise
        return [(part[0], positions) for part, positions in zip(written, found, strict=True)]

    def num_rows(self, table: int) -> int:
        """The number of rows ever written."""
        self._check_usable()
        check_table(self._sources, table)
        return len(self._part(table).positions)

    def ids(self, table: int) -> Int64s:
        """The ids of the rows ever written, in order of first write."""
        self._check_usable()
        check_table(self._sources, table)
        part = self._part(table)
        with part.lock:
            return part.positions.ids()

    def iterate(self, table: int, rows_per_chunk: int = ROWS_PER_CHUNK) -> Iterator[tuple[Int64s, Floats]]:
        """The rows ever written as (ids, values), in order of first write, so many at a time."""
        self._check_usable()
        check_table(self._sources, table)
        check_chunk(table, rows_per_chunk)
        return self._chunks(table, rows_per_chunk)

    def scan(self, table: int, start: int, stop: int, values: bool = True) -> tuple[Int64s, Floats]:
        """Ids of the rows at these positions, and their values unless only the ids are wanted."""
        self._check_usable()
        part = self._part(table)
        with part.lock:
            ids = part.positions.ids(start, stop)
        rows = np.empty((len(ids) if values else 0, part.source.width), np.float32)
        part.backing.gather(np.arange(start, start + len(rows)), rows)
        return ids, rows

    def put(self, table: int, ids: Int64s, values: Floats) -> Int64s:
        """Set rows of ids that are known to differ, and tell where they are."""
        self._check_usable()
        self._before_write()
        added: list[tuple[_Table, range]] = []
        positions = self._write([(table, ids, values)], added)[0]
        for part, hidden in added:
            with part.lock:
                part.unwritten.remove(hidden)
        return positions

    def truncate(self, table: int, num_rows: int) -> None:
        """Forget that any but the first rows of a table were ever written; readers and writers are at rest.

        Their room stays, for those who are written next.
        """
        self._check_usable()
        if num_rows < self.num_rows(table):
            self._before_write()
            part = self._part(table)
            with part.lock:
                part.positions.truncate(num_rows)

    def close(self) -> None:
        """Give back memory and files; a second call does nothing."""
        self._refusal = "the store is closed: open another"
        self._tables.clear()

    def stats(self) -> StoreStats:
        """What is held, and what it takes."""
        self._check_usable()
        parts = [self._part(table) for table in range(len(self._sources))]
        return StoreStats(
            num_rows=sum(len(part.positions) for part in parts),
            bytes_in_memory=sum(part.positions.nbytes + part.backing.bytes_in_memory for part in parts),
            bytes_on_disk=sum(part.backing.bytes_on_disk for part in parts),
        )

    def _before_write(self) -> None:
        """A hook for stores that must note that they are about to change."""

    def _check_usable(self) -> None:
        if self._refusal is not None:
            raise StoreError(self._refusal)

    def _refuse(self, why: str) -> None:
        """From now on, unless there was a reason before."""
        self._refusal = self._refusal or why

    def _part(self, table: int) -> _Table:
        try:
            return self._tables[table]
        except IndexError:
            self._check_usable()  # it may have been closed since this call began
            raise

    def _write(self, written: Sequence[TablePart], added: list[tuple[_Table, range]]) -> list[Int64s]:
        """Find rows, add new ones, and give all of them their values; `added` lists those who stay hidden meanwhile.

        Returns where the rows are."""
        parts = [(table, ids) for table, ids, _ in written]
        found = [np.empty(len(ids), np.int64) for _, ids in parts]
        with self._locked(parts):
            num_new = self._find_or_make_room(parts, found)
            self._add(parts, found, num_new, added)
        self._scatter(written, found)
        return found

    def _add(
        self,
        parts: Sequence[tuple[int, Int64s]],
        found: Sequence[Int64s],
        num_new: Sequence[int],
        added: list[tuple[_Table, range]],
    ) -> None:
        """Give new rows their positions, hidden from readers; there is room, and the locks are held."""
        for (table, ids), positions, more in zip(parts, found, num_new, strict=True):
            if more:
                part = self._part(table)
                start = len(part.positions)
                hidden = range(start, start + more)
                added.append((part, hidden))
                part.unwritten.append(hidden)
                part.positions.find_or_insert(ids, positions)

    def _scatter(self, written: Sequence[TablePart], found: Sequence[Int64s]) -> None:
        for (table, _, values), positions in zip(written, found, strict=True):
            try:
                self._part(table).backing.scatter(positions, values)
            except BaseException as error:
                self._refuse(f"a write to table {table} failed halfway ({error}): start again from a checkpoint")
                raise

    @contextmanager
    def _locked(self, parts: Sequence[tuple[int, Int64s]]) -> Iterator[None]:
        """The locks of these tables, which ascend so that no two writers wait for each other."""
        with ExitStack() as locked:
            for table, _ in parts:
                locked.enter_context(self._part(table).lock)
            yield

    def _find_or_make_room(self, parts: Sequence[tuple[int, Int64s]], found: Sequence[Int64s]) -> list[int]:
        """Where rows are; how many of each table are not there yet, which will find room."""
        num_new = [
            self._part(table).positions.find(ids, positions)
            for (table, ids), positions in zip(parts, found, strict=True)
        ]
        if any(num_new):
            self.check_memory([table for table, _ in parts], num_new)
        for (table, _), more in zip(parts, num_new, strict=True):
            if more:
                self._make_room(table, more)
        return num_new

    def check_memory(self, tables: Sequence[int], num_new: Sequence[int]) -> None:
        """StoreError if there is no memory for so many more rows."""
        if self.bytes_in_memory_max is None:
            return
        row_bytes = [self._sources[table].width * 4 + _BYTES_PER_ID for table in tables]
        needed = self.stats().bytes_in_memory + sum(a * b for a, b in zip(row_bytes, num_new, strict=True))
        if needed > self.bytes_in_memory_max:
            raise StoreError(
                f"{sum(num_new):,} more rows would take {needed:,} B of memory, and {self.bytes_in_memory_max:,} are "
                "allowed: allow more, keep rows on disk (store = mapped), or spread them over more servers"
            )

    def _make_room(self, table: int, num_new: int) -> None:
        part = self._part(table)
        num_rows = len(part.positions) + num_new
        try:
            part.backing.reserve(num_rows)
            part.positions.reserve(num_new)
        except MemoryError as error:
            raise StoreError(
                f"table {table}: no memory for {num_rows:,} rows of {part.source.width * 4} B: "
                "keep rows on disk (store = mapped) or spread them over servers"
            ) from error

    def _chunks(self, table: int, rows_per_chunk: int) -> Iterator[tuple[Int64s, Floats]]:
        self._check_usable()
        for start in range(0, len(self._part(table).positions), rows_per_chunk):
            yield self.scan(table, start, start + rows_per_chunk)
