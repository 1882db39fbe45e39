"""A store in which iterations are counted on from an earlier training loop, where trainers wait for each other by them.

A second loop over the same rows begins again with iteration 0, and those of the first have all been passed: without
this, a read that must follow another trainer's write would not wait for it (I3).
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from bagpipe.arrays import Floats, Int64s
from bagpipe.store.base import NO_ITERATION, ROWS_PER_CHUNK, RowSource, Store, StoreStats, TablePart


class LaterStore(Store):
    """The same rows, `before` iterations later."""

    def __init__(self, store: Store, before: int) -> None:
        self._store: Store = store
        self._before: int = before
        if isinstance(store, LaterStore):
            self._store, self._before = store._store, before + store._before

    @property
    def tables(self) -> Sequence[RowSource]:
        """The tables, by number."""
        return self._store.tables

    def read(self, table: int, ids: Int64s, out: Floats) -> None:
        """As the store does."""
        self._store.read(table, ids, out)

    def write(self, table: int, ids: Int64s, values: Floats) -> None:
        """As the store does."""
        self._store.write(table, ids, values)

    def read_many(self, parts: Sequence[TablePart], after: int = NO_ITERATION) -> None:
        """Once every trainer has passed that iteration of this loop."""
        self._store.read_many(parts, self._counted(after))

    def write_many(self, parts: Sequence[TablePart], passed: int = NO_ITERATION) -> None:
        """Then this trainer has passed that iteration of this loop."""
        self._store.write_many(parts, self._counted(passed))

    def reached(self, after: int) -> bool:
        """Whether every trainer has passed that iteration of this loop."""
        return self._store.reached(self._counted(after))

    def num_rows(self, table: int) -> int:
        """As the store does."""
        return self._store.num_rows(table)

    def ids(self, table: int) -> Int64s:
        """As the store does."""
        return self._store.ids(table)

    def iterate(self, table: int, rows_per_chunk: int = ROWS_PER_CHUNK) -> Iterator[tuple[Int64s, Floats]]:
        """As the store does."""
        return self._store.iterate(table, rows_per_chunk)

    def close(self) -> None:
        """As the store does."""
        self._store.close()

    def stats(self) -> StoreStats:
        """As the store does."""
        return self._store.stats()

    def _counted(self, iteration: int) -> int:
        return iteration if iteration == NO_ITERATION else iteration + self._before
