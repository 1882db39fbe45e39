"""The interface of "where rows live": in memory, on disk, or on embedding servers.

A row is one embedding vector with its optimizer state, `width` float32 numbers that travel together. Its key is
(table, id), the id any 64-bit number; a row that was never written has a value all the same, computed from its key.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import TYPE_CHECKING, Protocol

import numpy as np

from bagpipe.arrays import Floats, Int64s
from bagpipe.errors import StoreError

if TYPE_CHECKING:
    from typing import Self

    from bagpipe.checkpoint.manifest import FileEntry
    from bagpipe.checkpoint.point import ResumePoint


ROWS_PER_CHUNK = 65_536
NO_ITERATION = -1
"""Before the first one."""

TablePart = tuple[int, Int64s, Floats]
"""Rows of one table: its number, their ids, their values (ids, width); to be read, maybe only their first columns."""


class RowSource(Protocol):
    """What a store knows of a table: the size of a row, and its value before it was ever written."""

    @property
    def width(self) -> int:
        """Float32 numbers a row, vector and optimizer state together."""

    def initialise(self, ids: Int64s, out: Floats) -> None:
        """Write the initial row of each id into `out`: a pure function of table and id.

        Where `out` has fewer columns than a row, those are its first ones.
        """


@dataclass(frozen=True, slots=True)
class StoreStats:
    """What a store holds and what it takes, over all tables."""

    num_rows: int
    bytes_in_memory: int
    bytes_on_disk: int


class Store(ABC):
    """Rows by table number and id.

    Several threads may read while another writes, as long as no row is read and written at once. `ids`, `iterate`
    and `close` want the writer at rest. An error leaves every row as it was; only an error of the medium itself
    in the middle of a write can't, and then the store refuses all further work. A closed store refuses everything but
    `close`.
    """

    @property
    @abstractmethod
    def tables(self) -> Sequence[RowSource]:
        """The tables, by number."""

    @abstractmethod
    def read(self, table: int, ids: Int64s, out: Floats) -> None:
        """Fill `out`, (ids, columns): the row of each id as last written, else its initial value. Stores nothing.

        Columns are 1 to `width`, the first ones of a row: all, or only its vectors and not the state behind them.
        """

    @abstractmethod
    def write(self, table: int, ids: Int64s, values: Floats) -> None:
        """Set the rows of these ids, all different, to `values`, (ids, width)."""

    def read_many(self, parts: Sequence[TablePart], after: int = NO_ITERATION) -> None:  # noqa: ARG002
        """Fill the values of several tables' rows, once every trainer has passed iteration `after`.

        A table may be named twice, as where some of its rows are read whole and of others the first columns only. Where
        a store has one trainer only, that one knows what it has passed, and `after` says nothing.
        """
        for part in parts:
            self.read(*part)

    def write_many(self, parts: Sequence[TablePart], passed: int = NO_ITERATION) -> None:  # noqa: ARG002
        """Set rows of several tables, each named once; then this trainer has passed iteration `passed`."""
        check_tables_differ(parts)
        for part in parts:
            self.write(*part)

    def reached(self, after: int) -> bool:  # noqa: ARG002
        """Whether `read_many` with this `after` may be called: over servers it would wait, in one process fail.

        True unless trainers of this process share the store: whom else to wait for is the business of the one trainer
        that writes, or of the servers.
        """
        return True

    @abstractmethod
    def num_rows(self, table: int) -> int:
        """The number of rows ever written."""

    @abstractmethod
    def ids(self, table: int) -> Int64s:
        """The ids of the rows ever written, in order of first write; where servers hold them, server by server.

        The array is the caller's own.
        """

    @abstractmethod
    def iterate(self, table: int, rows_per_chunk: int = ROWS_PER_CHUNK) -> Iterator[tuple[Int64s, Floats]]:
        """The rows ever written as (ids, values), in the order of `ids`, so many at a time."""

    @abstractmethod
    def close(self) -> None:
        """Give back memory, files and connections; a second call does nothing."""

    @abstractmethod
    def stats(self) -> StoreStats:
        """What is held, and what it takes."""

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()


class Marked(Protocol):
    """A store whose rows can be written to checkpoints while training goes on, and made those of one again.

    A mark is named by `done`, the number of iterations that are over. `mark` wants writers at rest, `restore` readers
    too; everything else may go on beside them. What fails has changed nothing, unless it says so.
    """

    def mark(self, done: int, token: str = "") -> None:
        """Hold on to the rows as they are now; where they can be returned to them, only with this token."""

    def save(self, done: int, directory: Path, names: Sequence[str], *, since: int | None = None) -> list[FileEntry]:
        """Write the rows of a mark to files in a directory, and return when they are there; training may go on.

        Names are those of the tables, by number. With `since`, an earlier checkpoint, only rows written after it are
        sure to be in the files; all are where this store does not remember that one.
        """

    def saved(self, done: int, checkpoint: Path) -> None:
        """The checkpoint of a mark is complete, in this directory: what was kept to go further back can go."""

    def confirm(self) -> None:
        """StoreError or WireError if another generation has begun: then nothing may be made durable any more."""

    def restore(self, point: ResumePoint, names: Sequence[str]) -> None:
        """Make all rows those of a checkpoint; that is then the only mark.

        If it fails in the middle, the store refuses all work until it is called again.
        """


def check_widths(tables: Sequence[RowSource]) -> tuple[RowSource, ...]:
    """The tables, each of which has rows of some width."""
    for number, source in enumerate(tables):
        if source.width < 1:
            raise StoreError(f"table {number}: rows of {source.width} floats can't be stored: give at least 1")
    return tuple(tables)


def check_table(tables: Sequence[RowSource], table: int) -> RowSource:
    """The table of this number."""
    if not 0 <= table < len(tables):
        raise StoreError(f"there is no table {table}: the store has {len(tables)}, numbered from 0")
    return tables[table]


def check_write(tables: Sequence[RowSource], table: int, ids: Int64s, values: Floats) -> None:
    """Refuse ids or values that do not have the announced type and shape."""
    width = check_table(tables, table).width
    _check_ids(table, ids)
    if not isinstance(values, np.ndarray) or values.dtype != np.float32 or values.shape != (len(ids), width):
        raise StoreError(f"table {table}: values is {_described(values)}: give float32 of shape ({len(ids)}, {width})")


def check_chunk(table: int, rows_per_chunk: int) -> None:
    """Refuse chunks without rows."""
    if rows_per_chunk < 1:
        raise StoreError(f"table {table}: rows_per_chunk is {rows_per_chunk}: give at least 1")


def check_span(table: int, start: int, stop: int) -> None:
    """Refuse places before the first row, and such as no 64-bit number names."""
    if not 0 <= start <= stop < 1 << 63:
        raise StoreError(f"table {table}: there are no rows {start} to {stop}: give 0 <= start <= stop < 2^63")


def check_read(tables: Sequence[RowSource], table: int, ids: Int64s, out: Floats) -> None:
    """Refuse ids of another type, and an output that rows, or their first columns, can't be copied into."""
    width = check_table(tables, table).width
    _check_ids(table, ids)
    fits = isinstance(out, np.ndarray) and out.dtype == np.float32 and out.ndim == 2
    if not fits or len(out) != len(ids) or not 1 <= out.shape[1] <= width:
        raise StoreError(
            f"table {table}: out is {_described(out)}: give float32 of shape ({len(ids)}, {width}), or fewer columns"
        )
    if not (out.flags.c_contiguous and out.flags.writeable):
        raise StoreError(f"table {table}: out is read-only or strided: give a C-contiguous array to write into")


def fill_initial(source: RowSource, ids: Int64s, missing: Int64s, out: Floats) -> None:
    """Fill the rows that were never written, at these places of `out`, or their first columns."""
    if len(missing) == len(ids):
        source.initialise(ids, out)
    elif len(missing):
        initial = np.empty((len(missing), out.shape[1]), np.float32)
        source.initialise(ids[missing], initial)
        out[missing] = initial


def check_tables_differ(parts: Sequence[TablePart]) -> None:
    """Refuse a table that is named twice: which of two values of a row should stay?"""
    tables = [table for table, _, _ in parts]
    for table in tables:
        if tables.count(table) > 1:
            raise StoreError(f"table {table} is named twice in one call: give all its rows at once")


def check_distinct(table: int, ids: Int64s) -> None:
    """Refuse ids that repeat: which of their values should stay?"""
    in_order = np.sort(ids)
    repeated = in_order[1:] == in_order[:-1]
    if repeated.any():
        raise StoreError(
            f"table {table}: id {in_order[1:][repeated][0]} is written twice in one call: give each row once"
        )


def _check_ids(table: int, ids: Int64s) -> None:
    if not isinstance(ids, np.ndarray) or ids.dtype != np.int64 or ids.ndim != 1:
        raise StoreError(f"table {table}: ids are {_described(ids)}: give a one-dimensional int64 array")


def _described(value: object) -> str:
    return f"{value.dtype} of shape {value.shape}" if isinstance(value, np.ndarray) else type(value).__name__
