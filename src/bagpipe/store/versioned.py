"""A local store with marks: rows written after a mark lie in a layer of their own, above the base.

To go back to a mark is to drop the layers since. What has changed since the last checkpoint is the layers between two
marks; once their checkpoint is complete they are merged into the base. A merge changes only rows of the base that the
layer still shadows, so readers need not know of it, and it may stop anywhere and be done again. Nothing but the newest
layer is ever written to, and a mark that is being saved keeps everything below it from being merged: who reads the rows
of a mark needs neither locks nor copies of old values.

Where nobody goes back there is a layer only while a mark is being saved; else rows are written to the base, where those
that the last checkpoint does not have are noted.
"""

from __future__ import annotations

import logging
import tempfile
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from threading import Condition, Lock
from types import TracebackType
from typing import TYPE_CHECKING, Any

import numpy as np

from bagpipe.arrays import Flags, Floats, Int64s
from bagpipe.checkpoint.disk import Disk
from bagpipe.checkpoint.manifest import FileEntry
from bagpipe.checkpoint.point import ResumePoint, load_rows
from bagpipe.checkpoint.rows import ALL, Report, write_rows
from bagpipe.errors import StoreError
from bagpipe.failpoints import reach
from bagpipe.store.base import (
    NO_ITERATION,
    ROWS_PER_CHUNK,
    RowSource,
    StoreStats,
    TablePart,
    check_chunk,
    check_read,
    check_span,
    check_table,
    fill_initial,
)
from bagpipe.store.chunks import CHUNK_BYTES, ChunkedRows, ScratchFile
from bagpipe.store.local import LocalStore, NumberedStore

if TYPE_CHECKING:
    from typing import Self

LAYER_BYTES = 1_000_000_000
"""Of memory for layers, as `recovery.history` is unless it is set."""


class Layer:
    """The rows written since a mark, or since the layer below had become too large; later ones are in the next."""

    def __init__(self, rows: LocalStore, since: int | None, token: str, spare: list[LocalStore]) -> None:
        self.rows, self.since, self.token = rows, since, token
        self.is_saved = False
        """The last complete checkpoint has its rows."""
        self.num_writers = 0
        """Calls that write to it just now."""
        self._spare = spare
        self._new: dict[int, tuple[int, Int64s]] = {}

    def __del__(self) -> None:
        self._spare.append(self.rows)  # neither the store nor a reader has it any more

    def new_positions(self, table: int, below: Sequence[LocalStore]) -> Int64s:
        """Where the rows are that no store below has, in order of first write."""
        count, known = self._new.get(table, (0, np.empty(0, np.int64)))
        more = self.rows.num_rows(table)
        if more > count:
            ids, _ = self.rows.scan(table, count, more, values=False)
            known = np.concatenate([known, count + np.flatnonzero(~_in_any(below, table, ids))])
            self._new[table] = more, known
        return known

    def merges(self) -> None:
        """From now on some of its rows may be below, too."""
        self._new.clear()


class Found:
    """Where the rows of some ids are, as long as somebody has this: in which stores, the newest of which counts."""

    def __init__(self, table: int, ids: Int64s, base: LocalStore | None, layers: Sequence[Layer]) -> None:
        self._table, self._layers = table, layers  # whose memory is not used again meanwhile
        self._lines: list[tuple[LocalStore, Int64s]] = []
        self.there: Flags = np.zeros(len(ids), np.bool_)
        """Which were ever written."""
        for store in _stores(base, layers):
            positions, num_missing = store.find(table, ids)
            if num_missing < len(ids):
                self._lines.append((store, positions))
                self.there |= positions >= 0

    def gather(self, out: Floats) -> None:
        """Copy the rows that are there, or their first columns, into `out`, without gaps."""
        for store, positions in self._lines:
            store.gather(self._table, positions if self.there.all() else positions[self.there], out)

    def fill(self, out: Floats) -> None:
        """The same, each row at its own place; `out` stays as it is where there is none."""
        for store, positions in self._lines:
            store.gather(self._table, positions, out)


class VersionedStore(NumberedStore):
    """The rows of a local store, which is closed with it, and what they were at marks.

    A mark is named by `done`, the number of iterations that are over. `mark` wants writers at rest, `rollback` and
    `replacing` readers too; everything else may go on beside them. What fails has changed nothing, unless it says so.
    """

    def __init__(
        self,
        base: LocalStore,
        *,
        rollback: bool = True,
        layer_bytes_max: int | None = LAYER_BYTES,
        spill: Path | None = None,
        chunk_bytes: int = CHUNK_BYTES,
        shard: tuple[int, int] = ALL,
        disk: Disk | None = None,
    ) -> None:
        """Without `rollback` marks are there to be saved, and gone then.

        Layers that take more memory are merged early, which loses the marks that they lead to; until a new mark is
        saved they lie in files in `spill` instead, without names, or else beside the checkpoint. `shard` is (server,
        servers): whose rows these are.
        """
        self.base, self.spill, self.shard = base, spill, shard
        self._rollback, self._bytes_max, self._chunk_bytes = rollback, layer_bytes_max, chunk_bytes
        self.disk: Disk = Disk() if disk is None else disk
        self._layers: tuple[Layer, ...] = ()
        """Replaced, not changed: a reader keeps what it began with."""
        self._spare: list[LocalStore] = []
        """Rows of layers that are gone: fresh pages cost more than the rows that are copied to them."""
        self._last_mark = -1
        self._saved: int | None = None
        """The last complete checkpoint."""
        self._changed: list[Flags] = []
        """Which rows of the base, by table, it does not have. Replaced when there is another one."""
        self._to_save: int | None = None
        """The last mark, until that begins or is known not to."""
        self._pins = 0
        """Marks that are being saved: nothing is merged."""
        self._state = Condition()
        self._merging = Lock()
        """Held while rows of a layer go to the base: who counts rows counts each once."""

    # Marks

    def mark(self, done: int, token: str = "") -> None:
        """Make the rows as they are now a point to return to, later than all others; a token tells it from others."""
        self._check_usable()
        last = self._last_mark
        is_again = done == last and bool(self._layers) and not self._newest_has_rows()
        if done < 0 or (done <= last and not is_again):
            raise StoreError(f"mark {done} comes after mark {last}: they are made in ascending order from 0 on")
        if any(layer.num_writers for layer in self._layers):
            raise StoreError("a mark while writes are under way: wait for the writers first")
        if is_again:
            self._layers[-1].token = token
        else:
            self._push(done, token)
        self._to_save = done

    def marks(self) -> list[int]:
        """The marks that rows can be returned to, in ascending order."""
        return [layer.since for layer in self._layers if layer.since is not None]

    def has_mark(self, done: int, token: str) -> bool:
        """Whether rows can be returned to the mark that was made with this token."""
        return self._refusal is None and any((layer.since, layer.token) == (done, token) for layer in self._layers)

    def rollback(self, done: int) -> None:
        """Make all rows what they were at a mark; later marks are gone."""
        self._check_usable()
        first = self._first_since(done)
        token = self._layers[first].token
        with self._state:
            self._layers = self._layers[:first]
        self._to_save = None
        reach("layer.dropped")
        self._push(done, token)

    def changes(self, done: int, *, full: bool = False) -> RowReader:
        """The rows as they were at a mark, for another thread to read: all, or those written since the last `saved`.

        Until it is closed nothing is merged.
        """
        self._check_usable()
        with self._merging, self._state:
            layers = self._layers[: self._first_since(done)]
            self._pins += 1
            self._not_to_save(done)
        return RowReader(self, layers, None if full or self._saved is None else list(self._changed))

    def saved(self, done: int, checkpoint: Path | None = None) -> None:  # noqa: ARG002 - its rows are known here
        """The checkpoint of a mark is complete: what lies below it is merged, and need not be saved again.

        Nothing happens if rows were returned to an earlier mark meanwhile. A merge that fails is done again next time.
        """
        self._check_usable()
        if done not in self.marks():
            return
        with self._state:
            self._note_saved(done)
            for layer in self._layers[: self._first_since(done)]:
                layer.is_saved = True
        self._not_to_save(done)
        if not self._rollback:
            self._push(None)  # what comes while all the others are merged; who writes waits only for that little one
        self.release(done if self._rollback else done + 1)

    def release(self, before: int) -> None:
        """Drop the marks below `before`; what was kept for them is merged, or when no mark is being saved any more."""
        self._check_usable()
        with self._state:
            for layer in self._layers:
                if layer.since is not None and layer.since < before:
                    self._not_to_save(layer.since)
                    layer.since = None
        self._merge()

    @contextmanager
    def replacing(self, done: int | None, token: str = "") -> Iterator[LocalStore]:
        """An empty store for the rows of a checkpoint, which is then the only mark; None: there is no mark.

        If it fails in the middle, the store refuses all work until it is done again.
        """
        if self._pins:
            raise StoreError("rows can't be replaced while they are being saved: wait until that is over")
        self._refusal = "rows were half replaced: load a checkpoint"
        self._layers, self._last_mark, self._to_save = (), -1, None
        self._note_saved(None)
        for table in range(len(self.tables)):
            self.base.truncate(table, 0)
        yield self.base
        self._refusal = None
        if done is not None:
            self._note_saved(done)
            self._last_mark = done
            if self._rollback:
                self._push(done, token)

    # Checkpoints

    def save(self, done: int, directory: Path, names: Sequence[str], *, since: int | None = None) -> list[FileEntry]:
        """Write the rows of a mark to files in a directory.

        With `since`, the checkpoint that this one builds on, only rows written after it.
        """
        return self.begin_save(done, directory, since).write(directory, names)

    def begin_save(self, done: int, directory: Path, since: int | None) -> RowReader:
        """What `save` does, up to writing: for servers, where that is done later."""
        self.spill = self.spill or directory.parent
        return self.changes(done, full=since is None or since != self._saved)

    def confirm(self) -> None:
        """Rows of this process have one generation."""
        self._check_usable()

    def restore(self, point: ResumePoint, names: Sequence[str], report: Report | None = None) -> None:
        """Make all rows those of a checkpoint, by dropping layers where that does, else by reading its files.

        If it fails in the middle, the store refuses all work until it is done again. `report` is told how many rows
        are done.
        """
        checkpoint = point.open(self.disk)
        token = "" if point.is_initial else checkpoint.manifest.token
        if token and self.has_mark(point.done, token):
            self.rollback(point.done)
            self.saved(point.done)
            return
        # Rows to begin with are of no checkpoint of this run: its first one has to have them all.
        with self.replacing(None if point.is_initial else point.done, token) as rows:
            load_rows(checkpoint, rows, names, shard=self.shard, initial=point.is_initial, report=report)

    # Rows

    @property
    def tables(self) -> Sequence[RowSource]:
        """The tables, by number."""
        return self.base.tables

    def find(self, table: int, ids: Int64s) -> Found:
        """Where the rows of these ids are."""
        self._check_usable()
        return Found(table, ids, self.base, self._layers)

    def read(self, table: int, ids: Int64s, out: Floats) -> None:
        """Fill `out` with the row of each id, or its first columns: as last written, else its initial value."""
        self._check_usable()
        check_read(self.tables, table, ids, out)
        ids = np.ascontiguousarray(ids)
        found = self.find(table, ids)
        found.fill(out)
        if not found.there.all():
            fill_initial(self.tables[table], ids, np.flatnonzero(~found.there), out)

    def write_many(self, parts: Sequence[TablePart], passed: int = NO_ITERATION) -> None:  # noqa: ARG002
        """Set rows of several tables, each named once: all, or none where one of them is refused."""
        self._check_usable()
        if self._layers and self.base.bytes_in_memory_max is not None:
            self._check_memory(parts)
        with self._newest() as layer:
            if layer is not None:
                layer.rows.write_many(parts)
            else:
                for table, positions in self.base.place(parts):
                    self._note_changed(table, positions)
        if self._layers and not self._is_held and not self._has_room():
            self._give_up_marks()

    def num_rows(self, table: int) -> int:
        """The number of rows ever written."""
        self._check_usable()
        check_table(self.tables, table)
        with self._merging:
            return sum(len(positions) for _, positions in self._in_order(table))

    def scan(self, table: int, start: int, stop: int, values: bool = True) -> tuple[Int64s, Floats]:
        """Ids of rows number `start` to `stop`, and their values unless only the ids are wanted."""
        self._check_usable()
        check_span(table, start, stop)
        ids, first = [np.empty(0, np.int64)], 0
        with self._merging:
            for store, positions in self._in_order(table):
                ids.append(_ids_at(store, table, positions[max(0, start - first) : max(0, stop - first)]))
                first += len(positions)
        found = np.concatenate(ids)
        rows = np.empty((len(found) if values else 0, self.tables[table].width), np.float32)
        if values:
            self.find(table, found).fill(rows)
        return found, rows

    def close(self) -> None:
        """Close the store; a second call does nothing."""
        self._refusal = "the store is closed: open another"
        for store in [*_stores(self.base, self._layers), *self._spare]:
            store.close()
        self._layers = ()
        self._spare.clear()

    def stats(self) -> StoreStats:
        """What is held, layers included, and what it takes."""
        self._check_usable()
        base, layers = self.base.stats(), [layer.rows.stats() for layer in self._layers]
        num_rows = sum(self.num_rows(table) for table in range(len(self.tables)))
        changed = sum(changed.nbytes for changed in self._changed)
        return StoreStats(
            num_rows,
            base.bytes_in_memory + changed + sum(layer.bytes_in_memory for layer in layers),
            base.bytes_on_disk + sum(layer.bytes_on_disk for layer in layers),
        )

    # Layers

    def _in_order(self, table: int) -> Iterator[tuple[LocalStore, range | Int64s]]:
        """Of each store where the rows are that no store below it has, in order of first write."""
        layers = self._layers
        yield self.base, range(self.base.num_rows(table))
        for number, layer in enumerate(layers):
            yield layer.rows, layer.new_positions(table, _stores(self.base, layers[:number]))

    def _push(self, since: int | None, token: str = "") -> None:
        """New writes go to a new layer."""
        spare = next(filter(self._is_worth_keeping, self._spare), None)
        self._spare.clear()  # one is enough: marks come one at a time
        rows = LocalStore(self.tables, self._make_rows) if spare is None else spare
        for table in range(len(self.tables)):
            rows.truncate(table, 0)
        with self._state:
            self._layers = (*self._layers, Layer(rows, since, token, self._spare))
            self._last_mark = self._last_mark if since is None else since

    def _is_worth_keeping(self, spare: LocalStore) -> bool:
        """Whether rows of a layer lie in memory, of which enough remains for those of another."""
        stats = spare.stats()
        return not stats.bytes_on_disk and (self._bytes_max is None or 2 * stats.bytes_in_memory < self._bytes_max)

    def _newest_has_rows(self) -> bool:
        return any(self._layers[-1].rows.num_rows(table) for table in range(len(self.tables)))

    def _first_since(self, done: int) -> int:
        """The first layer whose rows a mark does not have."""
        for number, layer in enumerate(self._layers):
            if layer.since == done:
                return number
        raise StoreError(
            f"there is no mark {done}: there are {self.marks()}; return to one of these, or load a checkpoint"
        )

    @contextmanager
    def _newest(self) -> Iterator[Layer | None]:
        """Where to write, None: the base; it is not merged before that is over."""
        with self._state:
            layer = self._layers[-1] if self._layers else None
            if layer is not None:
                layer.num_writers += 1
        try:
            yield layer
        finally:
            if layer is not None:
                with self._state:
                    layer.num_writers -= 1
                    self._state.notify_all()

    def _merge(self) -> None:
        """Merge the lowest layers into the base up to the first mark, in any thread, unless a mark is being saved.

        Where nobody goes back to marks, the last layer too: then rows are written to the base again.
        """
        with self._merging:
            while True:
                with self._state:
                    is_last = len(self._layers) == 1
                    if self._pins or not self._layers or self._layers[0].since is not None:
                        return
                    if is_last and self._rollback:
                        return
                    layer = self._layers[0]
                    if layer.num_writers:
                        self._state.wait()
                        continue
                    if is_last:  # nobody begins to write meanwhile
                        self._copy_down(layer)
                        self._layers = ()
                        return
                self._copy_down(layer)
                with self._state:
                    self._layers = self._layers[1:]

    def _copy_down(self, layer: Layer) -> None:
        """Copy the rows of the lowest layer into the base, where it still shadows them."""
        layer.merges()
        for table in range(len(self.tables)):
            for ids, values in layer.rows.iterate(table):
                positions = self.base.put(table, ids, values)
                if not layer.is_saved:
                    self._note_changed(table, positions)
            reach("layer.merged")

    def _check_memory(self, parts: Sequence[TablePart]) -> None:
        """StoreError if the base will not have room for all rows."""
        tables = range(len(self.tables))
        most = [sum(layer.rows.num_rows(table) for layer in self._layers) for table in tables]
        for table, ids, _ in parts:
            if 0 <= table < len(most):
                most[table] += len(ids)
        with suppress(StoreError):  # then they are counted, which takes look-ups, and waits for a merge
            return self.base.check_memory(tables, most)
        more = [self.num_rows(table) - self.base.num_rows(table) for table in tables]
        for table, ids, _ in parts:
            if 0 <= table < len(more):
                more[table] += int(np.count_nonzero(~_in_any(_stores(self.base, self._layers), table, ids)))
        return self.base.check_memory(tables, more)

    def _note_saved(self, done: int | None) -> None:
        """This is the last complete checkpoint, and has all rows of the base."""
        self._saved = done
        self._changed = [np.empty(0, np.bool_) for _ in self.tables]

    def _note_changed(self, table: int, positions: Int64s) -> None:
        """The last complete checkpoint, if there is one, does not have these rows of the base."""
        if self._saved is None:
            return
        with self._state:
            changed, num_rows = self._changed[table], self.base.num_rows(table)
            if num_rows > len(changed):
                larger = np.zeros(max(num_rows, len(changed) * 3 // 2), np.bool_)
                larger[: len(changed)] = changed
                self._changed[table] = changed = larger
            changed[positions] = True

    def _not_to_save(self, done: int) -> None:
        """A mark is not to be saved any more: that has begun, or nobody will."""
        if self._to_save == done:
            self._to_save = None

    def _give_up_marks(self) -> None:
        """Layers take more memory than they may: merge them all."""
        lost = self.marks()
        self._push(None)
        self.release(self._last_mark + 1)
        if lost:
            logging.getLogger("bagpipe").warning(
                "rows changed since mark %s take more than the %s B for them: the way back in memory is given up, and "
                "after a fault rows are read from the last checkpoint; allow more (recovery.history)",
                lost[0],
                f"{self._bytes_max:,}",
            )

    def _make_rows(self, _: int, width: int) -> LayerRows:
        return LayerRows(width, self._chunk_bytes, self)

    @property
    def _is_held(self) -> bool:
        """Whether a mark is being saved, or will be: until then layers that have no room in memory lie in files."""
        return self._pins > 0 or self._to_save is not None

    def _has_room(self) -> bool:
        """Whether layers may take more memory."""
        layer_bytes = sum(layer.rows.stats().bytes_in_memory for layer in self._layers)
        return self._bytes_max is None or layer_bytes < self._bytes_max

    def is_in_memory(self) -> bool:
        """Whether more rows of layers go to memory; also if there is no room, where all are merged in a moment."""
        return not self._is_held or self._has_room()

    def unpin(self) -> None:
        """A mark is not being saved any more."""
        with self._state:
            self._pins -= 1
        if self._refusal is None:
            self._merge()


class LayerRows(ChunkedRows):
    """Rows of a layer, in memory as long as there is room for layers, else in a file."""

    def __init__(self, width: int, chunk_bytes: int, versions: VersionedStore) -> None:
        super().__init__(width, chunk_bytes)
        self._versions = versions
        self._file: ScratchFile | None = None

    @property
    def bytes_in_memory(self) -> int:
        """Memory that rows take: a file holds the last ones."""
        return max(0, super().bytes_in_memory - self.bytes_on_disk)

    @property
    def bytes_on_disk(self) -> int:
        """What the file takes."""
        return 0 if self._file is None else self._file.num_bytes

    def _map(self, number: int) -> Any:
        if self._versions.is_in_memory():
            return super()._map(number)
        directory = self._versions.spill
        try:
            self._file = self._file or ScratchFile(directory)
            begin = self._file.num_bytes
            self._file.allocate(begin + self._chunk_bytes)
            return self._file.map(begin, self._chunk_bytes)
        except OSError as error:
            raise StoreError(
                f"no room for {self._chunk_bytes:,} B of rows in {directory or tempfile.gettempdir()} while a "
                f"checkpoint is written ({error}): make room there, or allow more memory (recovery.history)"
            ) from error


class RowReader:
    """The rows of a mark, all or those that changed, until it is closed. For one thread at a time, any one."""

    def __init__(self, versions: VersionedStore, layers: Sequence[Layer], changed: Sequence[Flags] | None) -> None:
        """`changed` tells which rows of the base are wanted, None: all of them."""
        self._versions, self._layers, self._changed = versions, layers, changed
        self._is_open = True

    def iterate(self, table: int, rows_per_chunk: int = ROWS_PER_CHUNK) -> Iterator[tuple[Int64s, Floats]]:
        """Rows as (ids, values), in order of first write, at most so many at a time."""
        check_chunk(table, rows_per_chunk)
        for store, positions, above in self._pieces(table, rows_per_chunk):
            ids = _ids_at(store, table, positions)
            values = np.empty((len(ids), self._versions.tables[table].width), np.float32)
            store.gather(table, positions, values)
            Found(table, ids, None, above).fill(values)
            yield ids, values

    def write(self, directory: Path, names: Sequence[str], report: Report | None = None) -> list[FileEntry]:
        """Write the rows to files in a directory, and close; `report` is told how many bytes are done."""
        disk, shard = self._versions.disk, self._versions.shard
        tables = [(name, source.width) for name, source in zip(names, self._versions.tables, strict=True)]
        with self:
            return write_rows(disk, directory, self, tables, part=str(shard[0]), shard=shard, report=report)

    def close(self) -> None:
        """Let layers be merged again; a second call does nothing."""
        if self._is_open:
            self._is_open = False
            self._versions.unpin()

    def _pieces(self, table: int, size: int) -> Iterator[tuple[LocalStore, Int64s, Sequence[Layer]]]:
        """Of each store where the rows are that come with it, as no store below has them, and the layers above it."""
        if not self._is_open:
            raise StoreError("the rows of this mark are closed: ask for them again")
        base = self._versions.base
        num_in_base = base.num_rows(table)
        if self._changed is not None and not self._changed[table].any():
            num_in_base = 0
        for start in range(0, num_in_base, size):
            positions = np.arange(start, min(start + size, num_in_base))
            positions = positions[self._come_with_base(table, positions)]
            if len(positions):
                yield base, positions, self._layers
        for number, layer in enumerate(self._layers):
            for start in range(0, layer.rows.num_rows(table), size):
                ids, _ = layer.rows.scan(table, start, start + size, values=False)
                there = _in_any(_stores(None, self._layers[:number]), table, ids)
                if num_in_base:
                    there |= self._come_with_base(table, base.find(table, ids)[0])
                if not there.all():
                    yield layer.rows, start + np.flatnonzero(~there), self._layers[number + 1 :]

    def _come_with_base(self, table: int, positions: Int64s) -> Flags:
        """Which rows of the base, -1: none, are wanted."""
        found: Flags = positions >= 0
        if self._changed is not None:
            changed = self._changed[table]
            found &= positions < len(changed)
            found[found] = changed[positions[found]]
        return found

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()


def _stores(base: LocalStore | None, layers: Sequence[Layer]) -> list[LocalStore]:
    return [*(() if base is None else (base,)), *(layer.rows for layer in layers)]


def _ids_at(store: LocalStore, table: int, positions: range | Int64s) -> Int64s:
    """The ids at ascending positions."""
    if not len(positions):
        return np.empty(0, np.int64)
    first, last = int(positions[0]), int(positions[-1])
    ids, _ = store.scan(table, first, last + 1, values=False)
    return ids if len(ids) == len(positions) else ids[np.asarray(positions) - first]


def _in_any(stores: Sequence[LocalStore], table: int, ids: Int64s) -> Flags:
    there = np.zeros(len(ids), np.bool_)
    for store in stores:
        there |= store.find(table, ids)[0] >= 0
    return there
