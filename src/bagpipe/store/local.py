"""What the stores of this machine share: ids to positions, initial values, locks.

A backing holds rows by position and knows nothing of ids. A lock a table is held while ids are looked up and room is
made, never while rows are copied: rows do not move, so a reader's positions stay good while a writer adds more.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Sequence
from threading import Lock

import numpy as np

from bagpipe.errors import StoreError
from bagpipe.kernels.idmap import IdMap
from bagpipe.store.base import (
    ROWS_PER_CHUNK,
    Floats,
    Int64s,
    RowSource,
    Store,
    StoreStats,
    check_distinct,
    check_rows,
    check_table,
    check_widths,
)


class Backing(ABC):
    """The rows of one table by position, where position 0, 1, 2, ... is the order of first write."""

    @abstractmethod
    def reserve(self, num_rows: int) -> None:
        """Make room for that many rows in all, or raise and change nothing. Rows that are there stay where they are."""

    @abstractmethod
    def gather(self, positions: Int64s, out: Floats) -> None:
        """Copy the row at each position into `out`; where the position is -1, leave `out` as it is."""

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
        self.lock = Lock()


class LocalStore(Store):
    """Rows of this process, by table in a backing each."""

    def __init__(self, tables: Sequence[RowSource], make_backing: Callable[[int, int], Backing]) -> None:
        """`make_backing(table, width)` makes the backing of a table."""
        self._sources = check_widths(tables)
        self._tables = [_Table(source, make_backing(number, source.width)) for number, source in enumerate(tables)]
        self._refusal: str | None = None

    @property
    def tables(self) -> Sequence[RowSource]:
        """The tables, by number."""
        return self._sources

    def read(self, table: int, ids: Int64s, out: Floats) -> None:
        """Fill `out` with the row of each id: as last written, else its initial value."""
        self._check_usable()
        check_rows(self._sources, table, ids, out, "out")
        if not (out.flags.c_contiguous and out.flags.writeable):
            raise StoreError(f"table {table}: out is read-only or strided: give a C-contiguous array to write into")
        if not len(ids):
            return
        part = self._tables[table]
        ids = np.ascontiguousarray(ids)
        positions = np.empty(len(ids), np.int64)
        with part.lock:
            num_missing = part.positions.find(ids, positions)
        if num_missing < len(ids):
            part.backing.gather(positions, out)
        if num_missing == len(ids):
            part.source.initialise(ids, out)
        elif num_missing:
            missing = np.flatnonzero(positions < 0)
            initial = np.empty((num_missing, part.source.width), np.float32)
            part.source.initialise(ids[missing], initial)
            out[missing] = initial

    def write(self, table: int, ids: Int64s, values: Floats) -> None:
        """Set the rows of these ids, all different, to `values`."""
        self._check_usable()
        check_rows(self._sources, table, ids, values, "values")
        check_distinct(table, ids)
        if not len(ids):
            return
        self._before_write()
        part = self._tables[table]
        ids, values = np.ascontiguousarray(ids), np.ascontiguousarray(values)
        positions = np.empty(len(ids), np.int64)
        with part.lock:
            if num_new := part.positions.find(ids, positions):
                self._make_room(table, num_new)
                part.positions.find_or_insert(ids, positions)
        try:
            part.backing.scatter(positions, values)
        except BaseException as error:
            self._refusal = f"a write to table {table} failed halfway ({error}): start again from a checkpoint"
            raise

    def num_rows(self, table: int) -> int:
        """The number of rows ever written."""
        self._check_usable()
        check_table(self._sources, table)
        return len(self._tables[table].positions)

    def ids(self, table: int) -> Int64s:
        """The ids of the rows ever written, in order of first write."""
        self._check_usable()
        check_table(self._sources, table)
        with self._tables[table].lock:
            return self._tables[table].positions.ids()

    def iterate(self, table: int, rows_per_chunk: int = ROWS_PER_CHUNK) -> Iterator[tuple[Int64s, Floats]]:
        """The rows ever written as (ids, values), in order of first write, so many at a time."""
        self._check_usable()
        check_table(self._sources, table)
        if rows_per_chunk < 1:
            raise StoreError(f"table {table}: rows_per_chunk is {rows_per_chunk}: give at least 1")
        return self._chunks(self._tables[table], rows_per_chunk)

    def sync(self) -> None:
        """Return once everything written outlives this process, where the store promises that at all."""
        self._check_usable()

    def close(self) -> None:
        """Give back memory and files; a second call does nothing."""
        self._refusal = "the store is closed: open another"
        self._tables.clear()

    def stats(self) -> StoreStats:
        """What is held, and what it takes."""
        self._check_usable()
        return StoreStats(
            num_rows=sum(len(part.positions) for part in self._tables),
            bytes_in_memory=sum(part.positions.nbytes + part.backing.bytes_in_memory for part in self._tables),
            bytes_on_disk=sum(part.backing.bytes_on_disk for part in self._tables),
        )

    def _before_write(self) -> None:
        """A hook for stores that must note that they are about to change."""

    def _check_usable(self) -> None:
        if self._refusal is not None:
            raise StoreError(self._refusal)

    def _make_room(self, table: int, num_new: int) -> None:
        part = self._tables[table]
        num_rows = len(part.positions) + num_new
        try:
            part.backing.reserve(num_rows)
            part.positions.reserve(num_new)
        except MemoryError as error:
            raise StoreError(
                f"table {table}: no memory for {num_rows:,} rows of {part.source.width * 4} B: "
                "keep rows on disk (store = mapped) or spread them over servers"
            ) from error

    def _chunks(self, part: _Table, rows_per_chunk: int) -> Iterator[tuple[Int64s, Floats]]:
        for start in range(0, len(part.positions), rows_per_chunk):
            self._check_usable()
            ids = part.positions.ids(start, start + rows_per_chunk)
            values = np.empty((len(ids), part.source.width), np.float32)
            part.backing.gather(np.arange(start, start + len(ids)), values)
            yield ids, values
