"""Rows of this process, in memory or in files: ids to positions, initial values, locks.

Chunks hold rows by position and know nothing of ids. A lock a table is held while ids are looked up and room is
made, never while rows are copied: rows do not move, so a reader's positions stay good while a writer adds more, and
several writers may work at once, as long as no row is in two of their calls. A new row has its position before it has
its value, and is found only once it has both: until then something of an abandoned row may lie there (I3).
"""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack
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
    check_span,
    check_table,
    check_tables_differ,
    check_widths,
    check_write,
    fill_initial,
)
from bagpipe.store.chunks import CHUNK_BYTES, ChunkedRows

_BYTES_PER_ID = 25


class _Table:
    def __init__(self, source: RowSource, chunks: ChunkedRows) -> None:
        self.source = source
        self.chunks = chunks
        self.positions = IdMap()
        self.unwritten: list[range] = []
        """Positions whose rows have an id and no value yet, a range for each write under way."""
        self.lock = Lock()


class NumberedStore(Store):
    """Rows of this process, each with a number: how many of its table were written before it was."""

    _refusal: str | None = None
    """Why all work is refused."""

    @abstractmethod
    def scan(self, table: int, start: int, stop: int, values: bool = True) -> tuple[Int64s, Floats]:
        """Ids of rows number `start` to `stop`, and their values unless only the ids are wanted."""

    def write(self, table: int, ids: Int64s, values: Floats) -> None:
        """Set the rows of these ids, all different, to `values`."""
        self.write_many([(table, ids, values)])

    def ids(self, table: int) -> Int64s:
        """The ids of the rows ever written, in order of first write."""
        return self.scan(table, 0, self.num_rows(table), values=False)[0]

    def iterate(self, table: int, rows_per_chunk: int = ROWS_PER_CHUNK) -> Iterator[tuple[Int64s, Floats]]:
        """The rows ever written as (ids, values), in order of first write, so many at a time."""
        check_chunk(table, rows_per_chunk)
        num_rows = self.num_rows(table)
        return (self.scan(table, at, at + rows_per_chunk) for at in range(0, num_rows, rows_per_chunk))

    def _check_usable(self) -> None:
        if self._refusal is not None:
            raise StoreError(self._refusal)


class LocalStore(NumberedStore):
    """Rows of this process, each table in chunks of its own."""

    def __init__(self, tables: Sequence[RowSource], make_chunks: Callable[[int, int], ChunkedRows]) -> None:
        """`make_chunks(table, width)` makes those of a table."""
        self._sources = check_widths(tables)
        self.bytes_in_memory_max: int | None = None
        """Rows that would take more memory are refused."""
        self._tables = [_Table(source, make_chunks(number, source.width)) for number, source in enumerate(tables)]

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
        ids = np.ascontiguousarray(ids)
        positions, num_missing = self.find(table, ids)
        if num_missing < len(ids):
            self.gather(table, positions, out)
        if num_missing:
            fill_initial(self._sources[table], ids, np.flatnonzero(positions < 0), out)

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
        self._part(table).chunks.gather(positions, out)

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
        found = self._write(written)
        return [(part[0], positions) for part, positions in zip(written, found, strict=True)]

    def num_rows(self, table: int) -> int:
        """The number of rows ever written."""
        self._check_usable()
        check_table(self._sources, table)
        return len(self._part(table).positions)

    def scan(self, table: int, start: int, stop: int, values: bool = True) -> tuple[Int64s, Floats]:
        """Ids of rows number `start` to `stop`, and their values unless only the ids are wanted."""
        self._check_usable()
        check_span(table, start, stop)
        part = self._part(table)
        with part.lock:
            ids = part.positions.ids(start, stop)
        rows = np.empty((len(ids) if values else 0, part.source.width), np.float32)
        part.chunks.gather(np.arange(start, start + len(rows)), rows)
        return ids, rows

    def put(self, table: int, ids: Int64s, values: Floats) -> Int64s:
        """Set rows of ids that are known to differ, and tell where they are."""
        self._check_usable()
        return self._write([(table, ids, values)])[0]

    def truncate(self, table: int, num_rows: int) -> None:
        """Forget that any but the first rows of a table were ever written; readers and writers are at rest.

        Their room stays, for those who are written next.
        """
        self._check_usable()
        if num_rows < self.num_rows(table):
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
            bytes_in_memory=sum(part.positions.nbytes + part.chunks.bytes_in_memory for part in parts),
            bytes_on_disk=sum(part.chunks.bytes_on_disk for part in parts),
        )

    def _part(self, table: int) -> _Table:
        try:
            return self._tables[table]
        except IndexError:
            self._check_usable()  # it may have been closed since this call began
            raise

    def _write(self, written: Sequence[TablePart]) -> list[Int64s]:
        """Give rows their values and tell where they are; tables ascend, so that no two writers wait for each other."""
        parts = [self._part(table) for table, _, _ in written]
        found = [np.empty(len(ids), np.int64) for _, ids, _ in written]
        hidden: list[tuple[_Table, range]] = []
        begun = False
        try:
            with ExitStack() as locked:
                for part in parts:
                    locked.enter_context(part.lock)
                num_new = self._make_room(written, found)
                begun = True
                for part, (_, ids, _), positions, more in zip(parts, written, found, num_new, strict=True):
                    if more:
                        start = len(part.positions)
                        hidden.append((part, range(start, start + more)))
                        part.unwritten.append(hidden[-1][1])
                        part.positions.find_or_insert(ids, positions)
            for part, (_, _, values), positions in zip(parts, written, found, strict=True):
                part.chunks.scatter(positions, values)
            for part, rows in hidden:
                with part.lock:
                    part.unwritten.remove(rows)
        except BaseException as error:
            if begun:  # rows may be there that have no values, or parts of some
                self._refusal = self._refusal or f"a write failed halfway ({error}): start again from a checkpoint"
            raise
        return found

    def _make_room(self, written: Sequence[TablePart], found: Sequence[Int64s]) -> list[int]:
        """Find rows; how many of each table are not there yet, for which there is room: or raise and change nothing."""
        num_new = [
            self._part(table).positions.find(ids, positions)
            for (table, ids, _), positions in zip(written, found, strict=True)
        ]
        if any(num_new):
            self.check_memory([table for table, _, _ in written], num_new)
        for (table, _, _), more in zip(written, num_new, strict=True):
            part = self._part(table)
            num_rows = len(part.positions) + more
            try:
                if more:
                    part.chunks.reserve(num_rows)
                    part.positions.reserve(more)
            except MemoryError as error:
                raise StoreError(
                    f"table {table}: no memory for {num_rows:,} rows of {part.source.width * 4} B: "
                    "keep rows on disk (store = mapped) or spread them over servers"
                ) from error
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


class MemoryStore(LocalStore):
    """Rows in this process's memory, the default; 19-25 B a touched row more for its id."""

    def __init__(
        self, tables: Sequence[RowSource], *, chunk_bytes: int = CHUNK_BYTES, bytes_max: int | None = None
    ) -> None:
        super().__init__(tables, lambda _, width: ChunkedRows(width, chunk_bytes))
        self.bytes_in_memory_max = bytes_max
