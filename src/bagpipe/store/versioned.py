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
import mmap
import os
import tempfile
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from threading import Condition, Lock
from types import TracebackType
from typing import TYPE_CHECKING
from weakref import WeakSet

import numpy as np

from bagpipe.arrays import Flags, Floats, Int32s, Int64s
from bagpipe.checkpoint.disk import Disk
from bagpipe.checkpoint.manifest import FileEntry
from bagpipe.checkpoint.point import ResumePoint
from bagpipe.checkpoint.reading import ALL, load_initial_rows, load_rows
from bagpipe.checkpoint.shards import Report, write_rows
from bagpipe.errors import StoreError
from bagpipe.failpoints import reach
from bagpipe.store.base import (
    NO_ITERATION,
    ROWS_PER_CHUNK,
    RowSource,
    Store,
    StoreStats,
    TablePart,
    check_chunk,
    check_read,
    check_table,
)
from bagpipe.store.local import LocalStore
from bagpipe.store.memory import CHUNK_BYTES, ChunkedRows

if TYPE_CHECKING:
    from typing import Self

LAYER_BYTES = 1_000_000_000
"""Of memory for layers, as `recovery.history` is unless it is set."""
CLEAN = -1
"""Of a row of the base: no layer that is not saved was merged into it."""


class Layer:
    """The rows written since a mark, or since the layer below had become too large; later ones are in the next."""

    def __init__(self, number: int, since: int | None, token: str, rows: LocalStore) -> None:
        self.number, self.since, self.token, self.rows = number, since, token, rows
        self.num_writers = 0
        """Calls that write to it just now."""
        self.half_merged = False
        """Some of its rows may be in the base already."""
        self._new: dict[int, tuple[int, Int64s]] = {}

    def new_positions(self, table: int, below: Sequence[LocalStore]) -> Int64s:
        """Where the rows are that no store below has, in order of first write."""
        nothing = 0, np.empty(0, np.int64)
        count, known = nothing if self.half_merged else self._new.get(table, nothing)
        more = self.rows.num_rows(table)
        if more > count:
            ids, _ = self.rows.scan(table, count, more, values=False)
            known = np.concatenate([known, count + np.flatnonzero(~_in_any(below, table, ids))])
            self._new[table] = more, known
        return known


class Found:
    """Where the rows of some ids are, as long as somebody has this: in which stores, the newest of which counts."""

    there: Flags
    """Which were ever written."""

    def __init__(self, table: int, stores: Sequence[LocalStore]) -> None:
        self.stores = stores
        """None of which is emptied meanwhile."""
        self._table = table
        self._lines: list[tuple[LocalStore, Int64s]] = []

    def look(self, ids: Int64s) -> Found:
        """Find them; self."""
        self.there = np.zeros(len(ids), np.bool_)
        for store in self.stores:
            positions, num_missing = store.find(self._table, ids)
            if num_missing < len(ids):
                self._lines.append((store, positions))
                self.there |= positions >= 0
        return self

    def gather(self, out: Floats) -> None:
        """Copy the rows that are there, or their first columns, into `out`, without gaps."""
        for store, positions in self._lines:
            store.gather(self._table, positions if self.there.all() else positions[self.there], out)

    def fill(self, out: Floats) -> None:
        """The same, each row at its own place; `out` stays as it is where there is none."""
        for store, positions in self._lines:
            store.gather(self._table, positions, out)


class VersionedStore(Store):
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
        self._disk: Disk = Disk() if disk is None else disk
        self._layers: tuple[Layer, ...] = ()
        """Replaced, not changed: a reader keeps what it began with."""
        self._spare: list[LocalStore] = []
        """Layers that are gone, emptied: fresh pages cost more than the rows that are copied to them."""
        self._readers: WeakSet[Found] = WeakSet()
        self._number, self._last_mark = 0, -1
        self._saved = CLEAN
        """The first layer that the last complete checkpoint does not have."""
        self._saved_mark: int | None = None
        """That checkpoint."""
        self._changed: list[Int32s] = [np.empty(0, np.int32) for _ in base.tables]
        """Of each row of the base the last layer merged into it."""
        self._pins = 0
        """Marks that are being saved."""
        self._to_save: int | None = None
        """The last mark, until that begins."""
        self._state = Condition(Lock())
        self._merging, self._noting = Lock(), Lock()
        self._moving = Lock()
        """Held while some rows of a layer go to the base: who counts rows counts each once."""
        self._refusal: str | None = None

    # Marks

    def mark(self, done: int, token: str = "") -> None:
        """Make the rows as they are now a point to return to, later than all others; a token tells it from others."""
        self.check_mark(done)
        if done > self._last_mark:
            self._push(done, token)
        else:
            self._layers[-1].token = token
        self._to_save = done

    def check_mark(self, done: int) -> None:
        """StoreError if such a mark can't be made."""
        self._check_usable()
        last = self._last_mark
        if done < last or done < 0 or (done == last and (not self._layers or self._newest_has_rows())):
            raise StoreError(f"mark {done} comes after mark {last}: they are made in ascending order from 0 on")
        if any(layer.num_writers for layer in self._layers):
            raise StoreError("a mark while writes are under way: wait for the writers first")

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
        with self._state:
            dropped, self._layers = self._layers[first:], self._layers[:first]
        self._spare += [layer.rows for layer in dropped]
        self._to_save = None
        reach("layer.dropped")
        self._push(done, dropped[0].token)

    def changes(self, done: int, *, full: bool = False) -> RowReader:
        """The rows as they were at a mark, for another thread to read: all, or those written since the last `saved`.

        Until it is closed nothing is merged.
        """
        self._check_usable()
        with self._merging, self._state:
            layers = self._layers[: self._first_since(done)]
            self._pins += 1
            self._not_to_save(done)
        return RowReader(self, [layer.rows for layer in layers], full=full or self._saved == CLEAN)

    def saved(self, done: int, checkpoint: Path | None = None) -> None:  # noqa: ARG002 - its rows are known here
        """The checkpoint of a mark is complete: what lies below it is merged, and need not be saved again.

        Nothing happens if rows were returned to an earlier mark meanwhile. A merge that fails is done again next time.
        """
        self._check_usable()
        if done not in self.marks():
            return
        self._saved, self._saved_mark = self._layers[self._first_since(done)].number, done
        self._not_to_save(done)
        if self._rollback:
            self.release(done)
        else:
            self._fold(done)

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
        self._spare += [layer.rows for layer in self._layers]
        self._layers, self._saved, self._saved_mark, self._last_mark = (), CLEAN, None, -1
        self._to_save = None
        for table in range(len(self.tables)):
            self.base.truncate(table, 0)
            self._changed[table] = np.empty(0, np.int32)
        yield self.base
        self._refusal = None
        if done is not None:
            self._number += 1
            self._saved, self._saved_mark, self._last_mark = self._number, done, done
            if self._rollback:
                self._push(done, token)
                self._saved = self._number

    # Checkpoints

    def save(
        self,
        done: int,
        directory: Path,
        names: Sequence[str],
        *,
        since: int | None = None,
        report: Report | None = None,
        reader: RowReader | None = None,
    ) -> list[FileEntry]:
        """Write the rows of a mark to files in a directory; `report` is told how many bytes are done.

        With `since`, the checkpoint that this one builds on, only rows written after it. A `reader` of the mark may
        have been made before, and is closed.
        """
        tables = [(name, source.width) for name, source in zip(names, self.tables, strict=True)]
        with reader or self.begin_save(done, directory, since) as rows:
            return write_rows(
                self._disk, directory, rows, tables, part=str(self.shard[0]), shard=self.shard, report=report
            )

    def begin_save(self, done: int, directory: Path, since: int | None) -> RowReader:
        """Hold on to what `save` will write."""
        self.spill = self.spill or directory.parent
        return self.changes(done, full=since is None or since != self._saved_mark)

    def confirm(self) -> None:
        """Rows of this process have one generation."""
        self._check_usable()

    def restore(self, point: ResumePoint, names: Sequence[str], report: Report | None = None) -> None:
        """Make all rows those of a checkpoint, by dropping layers where that does, else by reading its files.

        If it fails in the middle, the store refuses all work until it is done again. `report` is told how many rows
        are done.
        """
        checkpoint = point.open(self._disk)
        if point.is_initial:  # its rows are of no checkpoint of this run: the first one has to have them all
            with self.replacing(None) as rows:
                load_initial_rows(checkpoint, rows, names, shard=self.shard, report=report)
            return
        token = checkpoint.manifest.token
        if token and self.has_mark(point.done, token):
            self.rollback(point.done)
            self.saved(point.done)
        else:
            with self.replacing(point.done, token) as rows:
                load_rows(checkpoint, rows, names, shard=self.shard, report=report)

    # Rows

    @property
    def tables(self) -> Sequence[RowSource]:
        """The tables, by number."""
        return self.base.tables

    def find(self, table: int, ids: Int64s) -> Found:
        """Where the rows of these ids are."""
        self._check_usable()
        with self._state:
            found = Found(table, self._stores())
            self._readers.add(found)
        return found.look(ids)

    def read(self, table: int, ids: Int64s, out: Floats) -> None:
        """Fill `out` with the row of each id, or its first columns: as last written, else its initial value."""
        self._check_usable()
        check_read(self.tables, table, ids, out)
        found = self.find(table, np.ascontiguousarray(ids))
        found.fill(out)
        if not found.there.all():
            missing = np.flatnonzero(~found.there)
            initial = np.empty((len(missing), out.shape[1]), np.float32)
            self.tables[table].initialise(ids[missing], initial)
            out[missing] = initial

    def write(self, table: int, ids: Int64s, values: Floats) -> None:
        """Set the rows of these ids, all different, to `values`."""
        self.write_many([(table, ids, values)])

    def write_many(self, parts: Sequence[TablePart], passed: int = NO_ITERATION) -> None:
        """Set rows of several tables, each named once: all, or none where one of them is refused."""
        self._check_usable()
        if self._layers and self.base.bytes_in_memory_max is not None:
            self._check_memory(parts)
        with self._newest() as layer:
            if layer is None:
                written = self.base.place(parts)
                if self._saved != CLEAN:
                    for table, positions in written:
                        self._note_changed(table, positions, self._number)
            else:
                layer.rows.write_many(parts, passed)
        if self._layers and self._bytes_max is not None and self.layer_bytes > self._bytes_max and not self._pins:
            self._give_up_marks()

    def num_rows(self, table: int) -> int:
        """The number of rows ever written."""
        self._check_usable()
        check_table(self.tables, table)
        with self._moving:
            return sum(count for _, count, _ in self._in_order(table))

    def ids(self, table: int) -> Int64s:
        """The ids of the rows ever written, in order of first write."""
        return self.scan(table, 0, self.num_rows(table), values=False)[0]

    def iterate(self, table: int, rows_per_chunk: int = ROWS_PER_CHUNK) -> Iterator[tuple[Int64s, Floats]]:
        """The rows ever written as (ids, values), in order of first write, so many at a time."""
        check_chunk(table, rows_per_chunk)
        num_rows = self.num_rows(table)
        return (self.scan(table, at, at + rows_per_chunk) for at in range(0, num_rows, rows_per_chunk))

    def scan(self, table: int, start: int, stop: int, values: bool = True) -> tuple[Int64s, Floats]:
        """Ids of the rows that were first written as number `start` to `stop`, and their values unless only ids are
        wanted."""
        self._check_usable()
        ids, first = [np.empty(0, np.int64)], 0
        with self._moving:
            for store, count, new in self._in_order(table):
                begin, end = max(0, start - first), min(count, max(0, stop - first))
                if new is None:
                    ids.append(store.scan(table, begin, max(begin, end), values=False)[0])
                else:
                    ids.append(_ids_at(store, table, new[begin:end]))
                first += count
        found = np.concatenate(ids)
        rows = np.empty((len(found) if values else 0, self.tables[table].width), np.float32)
        if values:
            self.find(table, found).fill(rows)
        return found, rows

    def close(self) -> None:
        """Close the store; a second call does nothing."""
        self._refusal = "the store is closed: open another"
        for store in [layer.rows for layer in self._layers] + self._spare:
            store.close()
        self._layers, self._spare = (), []
        self.base.close()

    def stats(self) -> StoreStats:
        """What is held, layers included, and what it takes."""
        self._check_usable()
        base, layers = self.base.stats(), [store.stats() for store in self._stores()[1:]]
        num_rows = sum(self.num_rows(table) for table in range(len(self.tables)))
        changed = sum(changed.nbytes for changed in self._changed)
        return StoreStats(
            num_rows,
            base.bytes_in_memory + changed + sum(layer.bytes_in_memory for layer in layers),
            base.bytes_on_disk + sum(layer.bytes_on_disk for layer in layers),
        )

    # Layers

    def _stores(self) -> list[LocalStore]:
        return [self.base, *(layer.rows for layer in self._layers)]

    def _in_order(self, table: int) -> Iterator[tuple[LocalStore, int, Int64s | None]]:
        """Of each store how many rows it has that no store below it has, and where; None: all of its rows."""
        stores, layers = self._stores(), self._layers
        yield self.base, self.base.num_rows(table), None
        for number, layer in enumerate(layers):
            new = layer.new_positions(table, stores[: number + 1])
            yield layer.rows, len(new), new

    def _not_to_save(self, done: int) -> None:
        """A mark is not to be saved any more: that has begun, or nobody will."""
        if self._to_save == done:
            self._to_save = None

    def _push(self, since: int | None, token: str = "") -> None:
        """New writes go to a new layer, at a mark to one that is gone: nobody finds rows there any more."""
        self._number += 1
        rows = LocalStore(self.tables, self._make_rows)
        if since is not None and self._spare and not self._pins:
            with self._state:
                found = {id(store) for reader in self._readers for store in reader.stores}
            unused = [store for store in self._spare if id(store) not in found]
            self._spare = []  # one is enough: marks come one at a time
            if unused:
                rows = unused[0]
                for table in range(len(self.tables)):
                    rows.truncate(table, 0)
        with self._state:
            self._layers = (*self._layers, Layer(self._number, since, token, rows))
            self._last_mark = self._last_mark if since is None else since

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
        """Merge the lowest layers into the base up to the first mark, in any thread, unless a mark is being saved."""
        with self._merging:
            while True:
                with self._state:
                    if self._pins or len(self._layers) < 2 or self._layers[0].since is not None:
                        return
                    layer = self._layers[0]
                    while layer.num_writers:
                        self._state.wait()
                    layer.half_merged = True
                self._copy_down(layer)
                with self._state:
                    self._layers = self._layers[1:]

    def _copy_down(self, layer: Layer) -> None:
        """Copy the rows of the lowest layer into the base, where it still shadows them."""
        for table in range(len(self.tables)):
            for ids, values in layer.rows.iterate(table):
                with self._moving:
                    positions = self.base.put(table, ids, values)
                if layer.number >= self._saved:
                    self._note_changed(table, positions, layer.number)
            reach("layer.merged")
        self._spare.append(layer.rows)  # as it is: somebody may have found rows there just now

    def _fold(self, done: int) -> None:
        """Merge everything, and have rows written to the base again. What comes meanwhile goes to a layer of its own;
        who writes waits only for that little one."""
        self._push(None)
        self.release(done + 1)
        with self._merging, self._state:
            if self._pins or len(self._layers) != 1:
                return  # there is a later mark, which is folded in its turn
            while self._layers[0].num_writers:
                self._state.wait()
            self._layers[0].half_merged = True
            self._copy_down(self._layers[0])
            self._layers = ()

    def _check_memory(self, parts: Sequence[TablePart]) -> None:
        """StoreError if the base will not have room for all rows."""
        tables = range(len(self.tables))
        more = [self.num_rows(table) - self.base.num_rows(table) for table in tables]
        for table, ids, _ in parts:
            if 0 <= table < len(more):
                more[table] += int(np.count_nonzero(~_in_any(self._stores(), table, ids)))
        self.base.check_memory(tables, more)

    def _note_changed(self, table: int, positions: Int64s, number: int) -> None:
        with self._noting:
            changed, num_rows = self._changed[table], self.base.num_rows(table)
            if num_rows > len(changed):
                larger = np.full(max(num_rows, len(changed) * 3 // 2), CLEAN, np.int32)
                larger[: len(changed)] = changed
                self._changed[table] = changed = larger
            changed[positions] = number

    def _give_up_marks(self) -> None:
        """Layers take more memory than they may: merge them all, or those below a mark that is still to be saved."""
        lost = [done for done in self.marks() if done != self._to_save]
        if self._to_save is None:
            self._push(None)
        elif not lost:
            return
        self.release(max(lost, default=0) + 1)
        if lost:
            logging.getLogger("bagpipe").warning(
                "rows changed since mark %s take more than the %s B for them: the way back in memory is given up, and "
                "after a fault rows are read from the last checkpoint; allow more (recovery.history)",
                lost[0],
                f"{self._bytes_max:,}",
            )

    @property
    def layer_bytes(self) -> int:
        """Memory that layers take."""
        return sum(layer.rows.stats().bytes_in_memory for layer in self._layers)

    def _make_rows(self, _: int, width: int) -> LayerRows:
        return LayerRows(width, self._chunk_bytes, self)

    def has_room(self) -> bool:
        """Whether layers may take more memory; yes if they will be merged as soon as they take too much."""
        wanted = self._pins or self._to_save is not None
        return not wanted or self._bytes_max is None or self.layer_bytes < self._bytes_max

    def has_any_changed(self, table: int) -> bool:
        """Whether there is a row of the base that the last complete checkpoint does not have."""
        return bool((self._changed[table] >= max(self._saved, 0)).any())

    def has_changed(self, table: int, positions: Int64s) -> Flags:
        """Which rows of the base, -1: none, the last complete checkpoint does not have."""
        changed = self._changed[table]
        known = (positions >= 0) & (positions < len(changed))
        found: Flags = np.zeros(len(positions), np.bool_)
        found[known] = changed[positions[known]] >= max(self._saved, 0)
        return found

    def unpin(self) -> None:
        """A mark is not being saved any more."""
        with self._state:
            self._pins -= 1
        if self._refusal is None:
            self._merge()

    def _check_usable(self) -> None:
        if self._refusal is not None:
            raise StoreError(self._refusal)


class LayerRows(ChunkedRows):
    """Rows of a layer, in memory as long as there is room for layers, else in files without names."""

    def __init__(self, width: int, chunk_bytes: int, versions: VersionedStore) -> None:
        super().__init__(width, chunk_bytes)
        self._versions, self._num_in_files = versions, 0

    @property
    def bytes_in_memory(self) -> int:
        """Memory that rows take: files hold the last ones."""
        return max(0, super().bytes_in_memory - self.bytes_on_disk)

    @property
    def bytes_on_disk(self) -> int:
        """What the files take."""
        return self._num_in_files * ((self._width * 4) << self._shift)

    def _new_chunk(self, first: bool) -> Floats:
        if self._versions.has_room():
            return super()._new_chunk(first)
        num_bytes = (self._width * 4) << self._shift
        try:
            with tempfile.TemporaryFile(dir=self._versions.spill) as file:
                os.posix_fallocate(file.fileno(), 0, num_bytes)
                memory = mmap.mmap(file.fileno(), num_bytes)
        except OSError as error:
            raise StoreError(
                f"no room for {num_bytes:,} B of rows in {self._versions.spill or tempfile.gettempdir()} while a "
                f"checkpoint is written ({error}): make room there, or allow more memory (recovery.history)"
            ) from error
        self._num_in_files += 1
        return np.frombuffer(memory, np.float32).reshape(-1, self._width)


class RowReader:
    """The rows of a mark, all or those that changed, until it is closed. For one thread at a time, any one."""

    def __init__(self, versions: VersionedStore, layers: Sequence[LocalStore], *, full: bool) -> None:
        self._versions, self._stores, self._full = versions, [versions.base, *layers], full
        self._is_open = True

    def num_rows(self, table: int) -> int:
        """How many rows there are."""
        return sum(len(positions) for _, positions in self._pieces(table, ROWS_PER_CHUNK))

    def iterate(self, table: int, rows_per_chunk: int = ROWS_PER_CHUNK) -> Iterator[tuple[Int64s, Floats]]:
        """Rows as (ids, values), in order of first write, at most so many at a time."""
        check_chunk(table, rows_per_chunk)
        for number, positions in self._pieces(table, rows_per_chunk):
            store, above = self._stores[number], self._stores[number + 1 :]
            ids = _ids_at(store, table, positions)
            values = np.empty((len(ids), self._versions.tables[table].width), np.float32)
            store.gather(table, positions, values)
            Found(table, above).look(ids).fill(values)
            yield ids, values

    def close(self) -> None:
        """Let layers be merged again; a second call does nothing."""
        if self._is_open:
            self._is_open = False
            self._versions.unpin()

    def _pieces(self, table: int, size: int) -> Iterator[tuple[int, Int64s]]:
        """Of each store, by number, where rows are that come with it: those that did not come with one below."""
        if not self._is_open:
            raise StoreError("the rows of this mark are closed: ask for them again")
        base = self._stores[0]
        num_in_base = base.num_rows(table) if self._full or self._versions.has_any_changed(table) else 0
        for start in range(0, num_in_base, size):
            positions = np.arange(start, min(start + size, num_in_base))
            if not self._full:
                positions = positions[self._versions.has_changed(table, positions)]
            if len(positions):
                yield 0, positions
        for number, store in enumerate(self._stores[1:], 1):
            for start in range(0, store.num_rows(table), size):
                ids, _ = store.scan(table, start, start + size, values=False)
                there = _in_any(self._stores[1:number], table, ids)
                if num_in_base:
                    at = base.find(table, ids)[0]
                    there |= (at >= 0) if self._full else self._versions.has_changed(table, at)
                if not there.all():
                    yield number, start + np.flatnonzero(~there)

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()


def _ids_at(store: LocalStore, table: int, positions: Int64s) -> Int64s:
    """The ids at ascending positions."""
    if not len(positions):
        return np.empty(0, np.int64)
    ids, _ = store.scan(table, int(positions[0]), int(positions[-1]) + 1, values=False)
    chosen: Int64s = ids[positions - positions[0]]
    return chosen


def _in_any(stores: Sequence[LocalStore], table: int, ids: Int64s) -> Flags:
    there = np.zeros(len(ids), np.bool_)
    for store in stores:
        there |= store.find(table, ids)[0] >= 0
    return there
