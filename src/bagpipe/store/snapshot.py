"""The rows of a mark, read beside writers that go on: copies that are too new are replaced by old values.

No lock is held while rows are copied, so a checkpoint in the background delays nobody.
"""

from __future__ import annotations

from collections.abc import Iterator
from types import TracebackType
from typing import TYPE_CHECKING

import numpy as np
from numpy.typing import NDArray

from bagpipe.arrays import Floats, Int32s, Int64s
from bagpipe.errors import StoreError
from bagpipe.kernels import kernel
from bagpipe.store.base import ROWS_PER_CHUNK, check_chunk, check_table
from bagpipe.store.history import History, Mark
from bagpipe.store.local import LocalStore

if TYPE_CHECKING:
    from typing import Self

_ROWS_PER_SEARCH = 1 << 20
_ROWS_PER_LOOK = 1 << 18
_BYTES_PER_LOOK = 32 << 20
"""Rows that are copied at once: each time all old values of the table are gone through."""


@kernel
def take_old(
    positions: Int64s,
    before: Int32s,
    values: Floats,
    first: int,
    index: Int32s,
    wanted: NDArray[np.bool_],
    epochs: Int32s,
    out: Floats,
) -> None:
    """Put old values, and their epochs, where rows are wanted that are not there yet: so the first call has its way.

    The row at position `first + k` goes to line index[k] of `wanted`, `epochs` and `out`; nowhere if that is -1.
    Cost: one read of the positions, and of the values that are taken.
    """
    for i in range(positions.shape[0]):
        k = positions[i] - first
        if 0 <= k < index.shape[0]:
            line = index[k]
            if line >= 0 and wanted[line]:
                wanted[line] = False
                epochs[line] = before[i]
                for column in range(out.shape[1]):
                    out[line, column] = values[i, column]


class Snapshot:
    """All rows as they were at a mark, until it is closed. For one thread at a time, any one."""

    def __init__(self, store: LocalStore, history: History, done: int) -> None:
        self.done = done
        self._store, self._history = store, history
        self._mark: Mark | None = history.pin(done)

    def num_rows(self, table: int) -> int:
        """The number of rows that had been written."""
        check_table(self._store.tables, table)
        return self._pinned().num_rows[table]

    def iterate(
        self, table: int, since: int | None = None, rows_per_chunk: int = ROWS_PER_CHUNK
    ) -> Iterator[tuple[Int64s, Floats]]:
        """Rows as (ids, values), in order of first write, at most so many at a time.

        With `since`, an earlier mark, only those written after it; all where that mark is not remembered.
        """
        num_rows = self.num_rows(table)
        check_chunk(table, rows_per_chunk)
        if since is not None and since > self.done:
            raise StoreError(f"rows of mark {self.done} written since mark {since}: give an earlier mark")
        epoch = None if since is None else self._history.epoch_of(since)
        if epoch is None:
            return self._all(table, num_rows, rows_per_chunk)
        return self._newer(table, num_rows, epoch, rows_per_chunk)

    def close(self) -> None:
        """Let the old values go; a second call does nothing."""
        mark, self._mark = self._mark, None
        if mark is not None:
            self._history.unpin(mark)

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def _all(self, table: int, num_rows: int, rows_per_chunk: int) -> Iterator[tuple[Int64s, Floats]]:
        rows_per_look = self._rows_per_look(table, rows_per_chunk)
        for start in range(0, num_rows, rows_per_look):
            stop = min(start + rows_per_look, num_rows)
            ids, _ = self._store.scan(table, start, stop, values=False)
            values, _ = self._read(table, start, np.arange(start, stop))
            yield from _in_chunks(ids, values, rows_per_chunk)

    def _newer(self, table: int, num_rows: int, epoch: int, rows_per_chunk: int) -> Iterator[tuple[Int64s, Floats]]:
        """Rows written in this epoch or later, but before the mark; after it is seen by what `_read` puts right."""
        rows_per_look = self._rows_per_look(table, rows_per_chunk)
        rows_per_search = max(rows_per_look, _ROWS_PER_SEARCH)
        for start in range(0, num_rows, rows_per_search):
            stop = min(start + rows_per_search, num_rows)
            with self._history.lock:
                self._check_there(self._pinned())
                newer = np.flatnonzero(self._history.epochs[table][start:stop] >= epoch) + start
            if not len(newer):
                continue
            ids, _ = self._store.scan(table, start, stop, values=False)
            for positions in np.split(newer, range(rows_per_look, len(newer), rows_per_look)):
                values, epochs = self._read(table, start, positions)
                kept = epochs >= epoch
                if not kept.all():
                    positions, values = positions[kept], values[kept]
                yield from _in_chunks(ids[positions - start], values, rows_per_chunk)

    def _read(self, table: int, first: int, positions: Int64s) -> tuple[Floats, Int32s]:
        """The rows at ascending positions from `first` on, and the epoch of each, as they were at the mark."""
        history, mark = self._history, self._pinned()
        values = np.empty((len(positions), self._store.tables[table].width), np.float32)
        while True:
            with history.lock:
                returns = history.returns
            self._store.gather(table, positions, values)
            with history.lock:
                self._check_there(mark)
                epochs = history.epochs[table][positions]
                too_new = epochs >= mark.epoch
                pieces = history.pieces_since(mark, table) if too_new.any() else []
            if pieces:
                index = np.full(int(positions[-1]) + 1 - first, -1, np.int32)
                index[positions - first] = np.arange(len(positions), dtype=np.int32)
                for piece in pieces:
                    take_old(*piece, first, index, too_new, epochs, values)
            with history.lock:
                history.blocks.unmap()
                self._check_there(mark)  # else its memory may have been used again meanwhile
                if history.returns == returns:
                    break
        assert not too_new.any(), "every row that was changed after a mark has an old value"
        return values, epochs

    def _rows_per_look(self, table: int, rows_per_chunk: int) -> int:
        """Whole chunks of rows."""
        rows = min(_ROWS_PER_LOOK, _BYTES_PER_LOOK // (4 * self._store.tables[table].width))
        return max(rows // rows_per_chunk, 1) * rows_per_chunk

    def _check_there(self, mark: Mark) -> None:
        if mark.gone is not None:
            raise StoreError(f"the rows of mark {self.done} can't be read any more: {mark.gone}")

    def _pinned(self) -> Mark:
        if self._mark is None:
            raise StoreError(f"the snapshot of mark {self.done} is closed: take another")
        return self._mark


def _in_chunks(ids: Int64s, values: Floats, rows_per_chunk: int) -> Iterator[tuple[Int64s, Floats]]:
    for start in range(0, len(ids), rows_per_chunk):
        yield ids[start : start + rows_per_chunk], values[start : start + rows_per_chunk]
