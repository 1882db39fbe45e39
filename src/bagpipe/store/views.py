"""One store of this process for several trainers, each with a view of its own.

A view writes as its trainer, and a read that must follow iteration y is made once every trainer has passed y (I3): the
watermark that embedding servers keep between processes. It is the driver of a trainer that waits, until `reached`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from threading import Semaphore

from bagpipe.arrays import Floats, Int64s
from bagpipe.errors import ConfigError, StoreError
from bagpipe.store.base import NO_ITERATION, ROWS_PER_CHUNK, RowSource, Store, StoreStats, TablePart
from bagpipe.store.watermark import Watermark


def shared_views(store: Store, trainers: int, notify: Sequence[Callable[[], None]] = ()) -> list[StoreView]:
    """One view for each trainer of a store that takes writes of several threads; it is closed with the last of them.

    Each of `notify` is called, by the trainer that wrote and without locks, when all have passed one iteration more:
    give `notify` of every trainer's driver.
    """
    if trainers < 1:
        raise ConfigError(f"a store can't be shared by {trainers} trainers: give at least 1")
    watermark, others = Watermark(trainers), Semaphore(trainers - 1)
    return [StoreView(store, trainer, watermark, others, notify) for trainer in range(trainers)]


class StoreView(Store):
    """The store as one trainer sees it."""

    def __init__(
        self,
        store: Store,
        trainer: int,
        watermark: Watermark,
        others: Semaphore,
        notify: Sequence[Callable[[], None]],
    ) -> None:
        """`others` counts the views that were not closed before the last one."""
        self.shared, self._trainer, self._watermark = store, trainer, watermark
        """The store itself, of which the first trainer makes checkpoints for all."""
        self._others, self._notify = others, notify
        self._closed = False

    @property
    def tables(self) -> Sequence[RowSource]:
        """The tables, by number."""
        return self.shared.tables

    def reached(self, after: int) -> bool:
        """Whether every trainer has passed iteration `after`, so that rows may be read that it wrote."""
        return self._watermark.reached >= after

    def read(self, table: int, ids: Int64s, out: Floats) -> None:
        """Fill `out`: the row of each id as last written, else its initial value."""
        self._store.read(table, ids, out)

    def write(self, table: int, ids: Int64s, values: Floats) -> None:
        """Set the rows of these ids."""
        self._store.write(table, ids, values)

    def read_many(self, parts: Sequence[TablePart], after: int = NO_ITERATION) -> None:
        """Fill the values of several tables' rows; StoreError before every trainer has passed iteration `after`."""
        if not self.reached(after):
            raise StoreError(
                f"trainer {self._trainer} reads rows after iteration {after}, which trainers "
                f"{self._watermark.behind(after)} have still to write: wait until it is reached"
            )
        self._store.read_many(parts, after)

    def write_many(self, parts: Sequence[TablePart], passed: int = NO_ITERATION) -> None:
        """Set rows of several tables; then this trainer has passed iteration `passed`, also without rows."""
        self._store.write_many(parts, passed)
        if self._watermark.advance(self._trainer, passed):
            for notify in self._notify:
                notify()

    def num_rows(self, table: int) -> int:
        """The number of rows ever written, by any trainer."""
        return self._store.num_rows(table)

    def ids(self, table: int) -> Int64s:
        """The ids of the rows ever written, in order of first write."""
        return self._store.ids(table)

    def iterate(self, table: int, rows_per_chunk: int = ROWS_PER_CHUNK) -> Iterator[tuple[Int64s, Floats]]:
        """The rows ever written as (ids, values), so many at a time."""
        return self._store.iterate(table, rows_per_chunk)

    def close(self) -> None:
        """Close this view, and the store if it is the last one; a second call does nothing."""
        if not self._closed:
            self._closed = True
            if not self._others.acquire(blocking=False):
                self.shared.close()

    def stats(self) -> StoreStats:
        """What the store holds for all trainers, and what it takes."""
        return self._store.stats()

    @property
    def _store(self) -> Store:
        if self._closed:
            raise StoreError(f"trainer {self._trainer}'s view of the store is closed: open another")
        return self.shared
