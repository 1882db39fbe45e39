"""A local store whose rows can be returned to marks, and saved as they were at one while training goes on.

Old values in memory bring rows back at once; a journal on disk brings them back after this process died, from the last
checkpoint on, and also to marks whose old values took too much memory. Both give the same bits (I2).
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from threading import Lock

from bagpipe.arrays import Floats, Int64s
from bagpipe.checkpoint.directory import Checkpoints
from bagpipe.checkpoint.disk import Disk, SystemDisk
from bagpipe.checkpoint.manifest import FileEntry
from bagpipe.checkpoint.reading import ALL, Checkpoint, load_rows
from bagpipe.checkpoint.shards import Compression, Report, write_rows
from bagpipe.errors import StoreError
from bagpipe.failpoints import reach
from bagpipe.store.base import NO_ITERATION, ROWS_PER_CHUNK, RowSource, Store, StoreStats, TablePart
from bagpipe.store.condensed import Condensed
from bagpipe.store.journal import Journal
from bagpipe.store.journal_record import START
from bagpipe.store.local import Change, LocalStore
from bagpipe.store.mapped import MappedStore
from bagpipe.store.starts import Starts
from bagpipe.store.versioned import LAYER_BYTES, Found, RowReader, VersionedStore

HISTORY_BYTES = LAYER_BYTES
JOURNAL_BYTES = 1 << 30
"""A journal may have so many bytes, or twice those of all rows if that is more; then it is condensed."""


class Recorded(Store):
    """The rows of a local store, and what they were at marks (`Marked`). It is closed with its store and journal."""

    def __init__(
        self,
        store: LocalStore,
        journal: Journal | None = None,
        history_bytes_max: int | None = HISTORY_BYTES,
        *,
        checkpoints: Path | None = None,
        places: Sequence[Path] | None = None,
        shard: tuple[int, int] = ALL,
        disk: Disk | None = None,
        journal_bytes: int = JOURNAL_BYTES,
    ) -> None:
        """`checkpoints` is the directory of those that a journal may go on from, `shard` (server, servers).

        Where the journal says that they are in another one, that must be in or below one of `places`, if given.
        Old values beyond `history_bytes_max` lie beside the journal or the rows, or where checkpoints are written.
        A journal that holds something wants an empty store, and a return to one of its marks before anything else.
        """
        self.checkpoints, self.shard = checkpoints, shard
        self._store, self._journal = store, journal
        place = journal.directory if journal is not None else store.path if isinstance(store, MappedStore) else None
        self._versions = VersionedStore(store, layer_bytes_max=history_bytes_max, spill=place, watch=self)
        self._settled: int | None = None
        """The last mark whose checkpoint was complete."""
        self._disk: Disk = SystemDisk() if disk is None else disk
        self._journal_bytes = journal_bytes
        self._condensed: Condensed | None = None
        self._starts: Starts | None = None
        self._kept: dict[int, dict[str, bytes]] = {}
        self._keeping = Lock()
        self._forgotten = 0
        """Marks below were forgotten, though the journal may still lead to them."""
        self._logging = journal is not None
        self._is_whole = True
        """Rows are what the history says; not so from the moment they are thrown away until others are there."""
        self._refusal: str | None = None
        if journal is not None:
            widths = [source.width for source in store.tables]
            self._condensed = Condensed(journal.directory / "condensed", self._disk, widths)
            self._starts = Starts(journal, self._condensed, shard, self._disk, places)
            if not journal.starts:
                self._condensed.discard(lambda _: True)  # of a journal that is gone
            else:
                self._is_whole = False
                self._refusal = f"{journal.directory} holds earlier writes: return to a mark, or load a checkpoint"
            journal.begin(widths)

    # Marked

    def mark(self, done: int) -> None:
        """Make the rows as they are now a point to return to; on the disk too where there is a journal."""
        self._check_usable()
        self._versions.check_mark(done)
        if self._journal is not None:
            self._journal.mark(done)
        self._versions.mark(done)
        there = self._known_marks()
        self._drop_kept(lambda mark: mark < done and mark not in there)  # was kept for a mark that was never made

    def marks(self) -> list[int]:
        """The marks that rows can be returned to, in ascending order."""
        marks = set(self._versions.marks())
        if self._journal is not None and self._starts is not None:
            first = min(self._starts.marks(self.checkpoints), default=None)
            if first is not None:
                marks |= {mark for mark in self._journal.marks() if mark >= max(first, self._forgotten)}
        return sorted(marks)

    def forget(self, before: int) -> None:
        """Drop the marks below `before`, and what was kept with them."""
        self._versions.release(before)
        self._forgotten = max(self._forgotten, before)
        self._drop_kept(lambda mark: mark < before)
        if self._journal is not None and self._condensed is not None:
            newest = max((mark for mark in self._condensed.marks() if mark <= before), default=None)
            if newest is not None and newest in self._journal.marks():
                self._journal.drop(newest)
                self._condensed.discard(lambda mark: mark < newest)

    def settle(self, done: int) -> None:
        """The checkpoint of mark `done` is complete: earlier marks are forgotten, and the journal begins there."""
        if self._refusal is not None or done not in self._versions.marks():
            return  # rows were returned to an earlier mark meanwhile
        self._versions.saved(done)
        self._settled = done
        self.forget(done)
        if self._journal is not None and self._starts is not None:
            if self.checkpoints is not None:
                self._starts.note(done, self.checkpoints)
            self._journal.drop(done)
            self._drop_condensed(lambda mark: mark < done)

    def return_to(self, done: int) -> None:
        """Make all rows what they were at a mark; later ones are gone."""
        if done not in self.marks():
            raise StoreError(
                f"there is no mark {done}: there are {self.marks()}; return to one of these, or load a checkpoint"
            )
        if self._is_whole and done in self._versions.marks():
            if self._journal is not None:
                self._journal.rollback(done)
            self._versions.rollback(done)
        else:
            self._rebuild(done)
        self._drop_kept(lambda mark: mark > done)
        self._drop_condensed(lambda mark: mark > done)

    def keep(self, done: int, name: str, blob: bytes) -> None:
        """Keep bytes with a mark that is there, or the next one."""
        self._check_usable()
        there = self._known_marks()
        if done < self._forgotten or (done not in there and done <= max(there, default=-1)):
            raise StoreError(f"{name!r} can't be kept with mark {done}, which is gone: there are {self.marks()}")
        if self._journal is not None:
            self._journal.keep(done, name, blob)
        else:
            with self._keeping:
                self._kept.setdefault(done, {})[name] = bytes(blob)

    def kept(self, done: int) -> dict[str, bytes]:
        """What was kept with a mark, by name."""
        if self._journal is not None:
            return self._journal.kept(done)
        with self._keeping:
            return dict(self._kept.get(done, {}))

    def kept_bytes(self) -> int:
        """Of all that is kept with marks."""
        if self._journal is not None:
            return self._journal.kept_bytes()
        with self._keeping:
            return sum(len(blob) for blobs in self._kept.values() for blob in blobs.values())

    def save(
        self,
        done: int,
        directory: Path,
        names: Sequence[str],
        *,
        since: int | None = None,
        compress: Compression | None = None,
        report: Report | None = None,
        snapshot: RowReader | None = None,
    ) -> list[FileEntry]:
        """Write the rows of a mark to files in a directory; `report` is told how many bytes are done.

        A `snapshot` of it may have been taken before, and is closed.
        """
        tables = [(name, source.width) for name, source in zip(names, self.tables, strict=True)]
        with snapshot or self.snapshot(done, directory.parent, since=since) as rows:
            return write_rows(
                self._disk,
                directory,
                rows,
                tables,
                part=str(self.shard[0]),
                shard=self.shard,
                compress=compress,
                report=report,
            )

    def load(self, done: int, directory: Path, names: Sequence[str], *, report: Report | None = None) -> None:
        """Replace all rows by those of a checkpoint; `report` is told how many are done."""
        checkpoint = Checkpoints(directory, disk=self._disk).open(done)
        self._load(checkpoint, names, self.shard, report)
        if self._journal is not None and self._starts is not None:
            self._starts.forget(done)  # a crash must not leave the place of one with the log of another
            self._journal.restart(done)
            self._starts.note(done, directory)
        self.checkpoints, self._forgotten = directory, done
        self._is_whole, self._refusal = True, None
        self._drop_kept(lambda _: True)
        self._drop_condensed(lambda _: True)

    # Beyond it

    @property
    def store(self) -> LocalStore:
        """Where the rows are."""
        return self._store

    def clear(self) -> None:
        """Go back to the very beginning: no row was ever written, and there are no marks."""
        self._is_whole = False
        with self._versions.replacing(None):
            pass
        if self._journal is not None:
            self._journal.restart(None)
        self._forgotten, self._settled = 0, None
        self._is_whole, self._refusal = True, None
        self._drop_kept(lambda _: True)
        self._drop_condensed(lambda _: True)

    def snapshot(self, done: int, place: Path | None = None, *, since: int | None = None) -> RowReader:
        """The rows as they were at a mark, for another thread to read; layers stay until it is closed.

        With `since`, the mark of the last checkpoint, only those written after it; all if it is not that mark. What
        memory has no room for meanwhile goes to `place`, unless there is a better one.
        """
        self._check_usable()
        self._versions.spill = self._versions.spill or place
        return self._versions.changes(done, full=since is None or since != self._settled)

    def has_snapshot(self, done: int) -> bool:
        """Whether `snapshot` can be had of a mark: not of one that only the journal leads to."""
        return done in self._versions.marks()

    def is_long(self) -> bool:
        """Whether the journal has grown so long that it should be condensed."""
        if self._journal is None:
            return False
        rows = sum(self._store.num_rows(table) * 4 * source.width for table, source in enumerate(self.tables))
        return self._journal.num_bytes() > max(self._journal_bytes, 2 * rows)

    def condense(self, done: int, snapshot: RowReader, report: Report | None = None) -> None:
        """Write all rows of a mark beside the journal, in another thread; `forget` then drops what was logged before.

        Nobody may return or load meanwhile. `report` is told how many bytes are done.
        """
        assert self._condensed is not None, "there is a journal"
        self._condensed.write(done, snapshot, report)

    @property
    def history_bytes(self) -> int:
        """Memory that old values take."""
        return self._versions.layer_bytes

    def look(self, parts: Sequence[TablePart], found: Sequence[Int64s]) -> Change:  # noqa: ARG002
        """Log rows that are about to change; called by the store."""
        if self._logging and self._journal is not None:
            self._journal.append(parts)
        return _Logged()

    # Store

    @property
    def tables(self) -> Sequence[RowSource]:
        """The tables, by number."""
        return self._store.tables

    def read(self, table: int, ids: Int64s, out: Floats) -> None:
        """Fill `out` with the row of each id: as last written, else its initial value."""
        self._check_usable()
        self._versions.read(table, ids, out)

    def find(self, table: int, ids: Int64s) -> Found:
        """Where the rows of these ids are."""
        self._check_usable()
        return self._versions.find(table, ids)

    def scan(self, table: int, start: int, stop: int, values: bool = True) -> tuple[Int64s, Floats]:
        """Ids of the rows at these positions, and their values unless only the ids are wanted."""
        self._check_usable()
        return self._versions.scan(table, start, stop, values)

    def write(self, table: int, ids: Int64s, values: Floats) -> None:
        """Set the rows of these ids, all different, to `values`."""
        self.write_many([(table, ids, values)])

    def write_many(self, parts: Sequence[TablePart], passed: int = NO_ITERATION) -> None:
        """Set rows of several tables, each named once: all, or none where one of them is refused."""
        self._check_usable()
        self._versions.write_many(parts, passed)

    def num_rows(self, table: int) -> int:
        """The number of rows ever written."""
        self._check_usable()
        return self._versions.num_rows(table)

    def ids(self, table: int) -> Int64s:
        """The ids of the rows ever written, in order of first write."""
        self._check_usable()
        return self._versions.ids(table)

    def iterate(self, table: int, rows_per_chunk: int = ROWS_PER_CHUNK) -> Iterator[tuple[Int64s, Floats]]:
        """The rows ever written as (ids, values), in order of first write, so many at a time."""
        self._check_usable()
        return self._versions.iterate(table, rows_per_chunk)

    def sync(self) -> None:
        """As the store does; it is marks that the journal makes durable."""
        self._check_usable()
        self._store.sync()

    def close(self) -> None:
        """Close the store and the journal; a second call does nothing."""
        self._refusal = "the store is closed: open another"
        try:
            self._versions.close()
        finally:
            if self._journal is not None:
                self._journal.close()

    def stats(self) -> StoreStats:
        """What is held, layers included, and what it takes."""
        return self._versions.stats()

    def _check_usable(self) -> None:
        if self._refusal is not None:
            raise StoreError(self._refusal)

    def _drop_kept(self, which: Callable[[int], bool]) -> None:
        if self._journal is not None:
            self._journal.forget_kept(which)
        with self._keeping:
            self._kept = {mark: blobs for mark, blobs in self._kept.items() if not which(mark)}

    def _drop_condensed(self, which: Callable[[int], bool]) -> None:
        if self._condensed is not None:
            self._condensed.discard(which)

    def _known_marks(self) -> set[int]:
        """Marks that were made and not left behind, whether or not there is a way back to them."""
        return {*self._versions.marks(), *(self._journal.marks() if self._journal is not None else ())}

    def _rebuild(self, done: int) -> None:
        """Put rows together again from a checkpoint and the journal."""
        assert self._journal is not None
        assert self._starts is not None
        start = max(start for start in self._starts.marks(self.checkpoints) if start <= done)
        checkpoint = None if start == START else self._starts.open(start, self.checkpoints)
        self._is_whole = False
        self._refusal = f"rows were half returned to mark {done}: return to a mark again, or load a checkpoint"
        with self._unlogged():
            with self._versions.replacing(None if checkpoint is None else start) as rows:
                if checkpoint is not None:
                    load_rows(checkpoint[0], rows, checkpoint[1], shard=checkpoint[2])
            for step in self._journal.replay(start, done) if start < done else ():
                if not isinstance(step, int):
                    self._versions.write_many(step)
                elif step == done:
                    self._versions.mark(step)
        reach("journal.replayed")
        self._journal.rollback(done)
        self._versions.release(done)
        self._is_whole, self._refusal, self._settled = True, None, None if checkpoint is None else start

    def _load(
        self, checkpoint: Checkpoint, names: Sequence[str], shard: tuple[int, int], report: Report | None = None
    ) -> None:
        self._is_whole, self._refusal = False, None
        with self._unlogged(), self._versions.replacing(checkpoint.done) as rows:
            load_rows(checkpoint, rows, names, shard=shard, report=report)
        self._settled = checkpoint.done

    @contextmanager
    def _unlogged(self) -> Iterator[None]:
        self._logging = False
        try:
            yield
        finally:
            self._logging = True


class _Logged:
    """A write that is in the journal."""

    def commit(self, found: Sequence[Int64s]) -> None:
        """Nothing more is to be done."""

    def end(self) -> None:
        """Nothing more is to be done."""
