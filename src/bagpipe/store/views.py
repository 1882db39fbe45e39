"""One store of this process for several trainers, each with a view of its own.

A view writes as its trainer, and a read that must follow iteration y is done once every trainer has passed y (I3): the
watermark that embedding servers keep between processes. Writes never wait for reads; every wait has a deadline (I7).
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from threading import Condition, Lock
from typing import TYPE_CHECKING, cast

from bagpipe.arrays import Floats, Int64s
from bagpipe.errors import ConfigError, DeadlineError, StoreError
from bagpipe.store.base import NO_ITERATION, ROWS_PER_CHUNK, Marked, RowSource, Store, StoreStats, TablePart

if TYPE_CHECKING:
    from bagpipe.checkpoint.manifest import FileEntry
    from bagpipe.checkpoint.point import ResumePoint

DEADLINE_S = 600.0


def shared_views(
    store: Store, trainers: int, notify: Sequence[Callable[[], None]] = (), deadline_s: float = DEADLINE_S
) -> list[StoreView]:
    """One view of the store for each trainer; the store is closed with the last of them.

    Each of `notify` is called, by the trainer that wrote and without locks, when all have passed one iteration more:
    give `notify` of every trainer's driver. A read that comes too early waits for `deadline_s`; where only one trainer
    runs at a time give 0, and let `StoreView.reached` say when to read.
    """
    if trainers < 1:
        raise ConfigError(f"a store can't be shared by {trainers} trainers: give at least 1")
    shared = _Shared(store, trainers, tuple(notify), deadline_s)
    return [StoreView(shared, trainer) for trainer in range(trainers)]


class StoreView(Store):
    """The store as one trainer sees it."""

    def __init__(self, shared: _Shared, trainer: int) -> None:
        self._shared, self._trainer = shared, trainer
        self._closed = False

    @property
    def tables(self) -> Sequence[RowSource]:
        """The tables, by number."""
        return self._shared.store.tables

    def reached(self, after: int) -> bool:
        """Whether every trainer has passed iteration `after`, so that a read after it need not wait."""
        return self._shared.reached >= after

    def read(self, table: int, ids: Int64s, out: Floats) -> None:
        """Fill `out`: the row of each id as last written, else its initial value."""
        self._store().read(table, ids, out)

    def write(self, table: int, ids: Int64s, values: Floats) -> None:
        """Set the rows of these ids."""
        with self._shared.writing:
            self._store().write(table, ids, values)

    def read_many(self, parts: Sequence[TablePart], after: int = NO_ITERATION) -> None:
        """Fill the values of several tables' rows, once every trainer has passed iteration `after`."""
        store = self._store()
        if not self.reached(after):
            self._shared.wait(self._trainer, after, lambda: self._closed)
            store = self._store()
        store.read_many(parts, after)

    def write_many(self, parts: Sequence[TablePart], passed: int = NO_ITERATION) -> None:
        """Set rows of several tables; then this trainer has passed iteration `passed`, also without rows."""
        with self._shared.writing:
            self._store().write_many(parts, passed)
        self._shared.advance(self._trainer, passed)

    def num_rows(self, table: int) -> int:
        """The number of rows ever written, by any trainer."""
        return self._store().num_rows(table)

    def ids(self, table: int) -> Int64s:
        """The ids of the rows ever written, in order of first write."""
        return self._store().ids(table)

    def iterate(self, table: int, rows_per_chunk: int = ROWS_PER_CHUNK) -> Iterator[tuple[Int64s, Floats]]:
        """The rows ever written as (ids, values), so many at a time."""
        return self._while_open(self._store().iterate(table, rows_per_chunk))

    def close(self) -> None:
        """Close this view, and the store if it is the last one; a second call does nothing."""
        if not self._closed:
            self._closed = True
            self._shared.close()

    def stats(self) -> StoreStats:
        """What the store holds for all trainers, and what it takes."""
        return self._store().stats()

    # Marks, where the store has them: trainer 0 makes them for all.

    def mark(self, done: int, token: str = "") -> None:
        """Hold on to the rows as they are now."""
        store = self._marked_by_first("mark")
        with self._shared.writing:
            store.mark(done, token)

    def save(self, done: int, directory: Path, names: Sequence[str], *, since: int | None = None) -> list[FileEntry]:
        """Write the rows of a mark to files in a directory."""
        return self._marked_by_first("save").save(done, directory, names, since=since)

    def saved(self, done: int, checkpoint: Path) -> None:
        """The checkpoint of a mark is complete."""
        self._marked_by_first("saved").saved(done, checkpoint)

    def confirm(self) -> None:
        """Whether the run goes on with these rows."""
        self._marked_by_first("confirm").confirm()

    def restore(self, point: ResumePoint, names: Sequence[str]) -> None:
        """Make all rows those of a checkpoint; no trainer has passed any iteration since."""
        store = self._marked_by_first("restore")
        with self._shared.writing:
            store.restore(point, names)
            self._shared.begin_anew()

    def _marked_by_first(self, what: str) -> Marked:
        if self._trainer:
            raise StoreError(f"trainer {self._trainer} asks for {what}: trainer 0 does that for all")
        return self._marked()

    def _marked(self) -> Marked:
        store = self._store()
        if not hasattr(store, "restore"):
            raise StoreError(f"a {type(store).__name__} has no marks: wrap it in a VersionedStore")
        return cast("Marked", store)

    def _store(self) -> Store:
        if self._closed:
            raise StoreError(f"trainer {self._trainer}'s view of the store is closed: open another")
        return self._shared.store

    def _while_open(self, chunks: Iterator[tuple[Int64s, Floats]]) -> Iterator[tuple[Int64s, Floats]]:
        self._store()
        for chunk in chunks:
            yield chunk
            self._store()


class _Shared:
    """The store, and how far each trainer's writes are."""

    def __init__(self, store: Store, trainers: int, notify: Sequence[Callable[[], None]], deadline_s: float) -> None:
        self.store = store
        # Local stores take writes of several threads at once, but a mark wants none of them under way.
        self.writing = Lock()
        self.reached = NO_ITERATION
        """All trainers have passed it. Read without a lock: drivers ask for it while they hold theirs."""
        self._passed = [NO_ITERATION] * trainers
        self._open = trainers
        self._notify, self._deadline_s = notify, deadline_s
        self._changed = Condition()

    def advance(self, trainer: int, iteration: int) -> None:
        """The trainer has passed this iteration."""
        with self._changed:
            self._passed[trainer] = max(self._passed[trainer], iteration)
            reached = min(self._passed)
            if reached == self.reached:
                return
            self.reached = reached
            self._changed.notify_all()
        for notify in self._notify:
            notify()

    def begin_anew(self) -> None:
        """No trainer has passed any iteration."""
        with self._changed:
            self._passed = [NO_ITERATION] * len(self._passed)
            self.reached = NO_ITERATION

    def wait(self, trainer: int, after: int, closed: Callable[[], bool]) -> None:
        """Return when all trainers have passed this iteration, or the one that waits has closed its view."""
        with self._changed:
            if not self._changed.wait_for(lambda: self.reached >= after or closed(), self._deadline_s):
                behind = [f"trainer {other} ({passed})" for other, passed in enumerate(self._passed) if passed < after]
                raise DeadlineError(
                    f"trainer {trainer} waited {self._deadline_s:g} s to read rows after iteration {after}; "
                    f"still to write it, each with the last iteration that it wrote: {', '.join(behind)}"
                )

    def close(self) -> None:
        """One view less."""
        with self._changed:
            self._open -= 1
            last = self._open == 0
            self._changed.notify_all()
        if last:
            with self.writing:
                self.store.close()
