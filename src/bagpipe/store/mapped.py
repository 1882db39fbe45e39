"""Rows on disk, for tables larger than memory: one file a table, rows in order of first write.

Disk and memory follow the rows touched: a row takes its own size on disk and 19-25 B of memory for its id; the page
cache that the files take stays under `resident_bytes_max` (on a file system that is memory itself it can't). A full
disk is noticed before a row changes (as far as a copy-on-write file system keeps what it allocated).
"""

from __future__ import annotations

import weakref
from collections.abc import Sequence
from pathlib import Path
from threading import Lock

import numpy as np

from bagpipe.errors import StoreError
from bagpipe.store.base import RowSource, StoreStats, check_widths
from bagpipe.store.directory import Index, StoreDirectory, TableIndex
from bagpipe.store.local import LocalStore
from bagpipe.store.residency import Residency
from bagpipe.store.rowfile import RowFile

RESIDENT_BYTES_MAX = 1 << 30
_IDS_PER_APPEND = 1 << 20


class MappedStore(LocalStore):
    """Rows in files of a directory of its own; `create` a new one or `open` one that was kept."""

    def __init__(
        self, tables: Sequence[RowSource], directory: StoreDirectory, residency: Residency, labels: Sequence[str]
    ) -> None:
        self._directory, self._labels = directory, labels
        # Also when nobody closes the store: descriptors, lock and temporary directory go with it.
        self._finalizer = weakref.finalize(self, directory.close)
        self._residency = residency
        self._index_lock = Lock()
        self._published = False
        self._row_files: list[RowFile] = []
        super().__init__(tables, self._row_file)

    @classmethod
    def create(
        cls,
        path: str | Path,
        tables: Sequence[RowSource],
        *,
        keep: bool = False,
        labels: Sequence[str] | None = None,
        resident_bytes_max: int = RESIDENT_BYTES_MAX,
    ) -> MappedStore:
        """A store without rows, in a directory that is new or empty; removed on close unless `keep`.

        `labels` say what the rows of each table are; whoever opens a kept store can have them compared.
        """
        tables, residency = check_widths(tables), Residency(resident_bytes_max)
        directory = StoreDirectory.create(Path(path), len(tables), keep=keep)
        return cls(tables, directory, residency, labels or [""] * len(tables))

    @classmethod
    def open(
        cls,
        path: str | Path,
        tables: Sequence[RowSource],
        *,
        labels: Sequence[str] | None = None,
        resident_bytes_max: int = RESIDENT_BYTES_MAX,
    ) -> MappedStore:
        """A store that was kept, as it was when it was closed or last synced; `labels` are compared, if given."""
        residency = Residency(resident_bytes_max)
        directory, index = StoreDirectory.open(Path(path), [table.width for table in tables], labels)
        store = cls(tables, directory, residency, [table.label for table in index.tables])
        try:
            store._load(index)
        except BaseException:
            directory.close()
            raise
        return store

    @property
    def path(self) -> Path:
        """The directory."""
        return self._directory.path

    def truncate(self, table: int, num_rows: int) -> None:
        """Forget that any but the first rows of a table were ever written."""
        super().truncate(table, num_rows)
        files = self._directory.tables[table]
        if num_rows < files.num_ids:
            files.forget_ids()

    def sync(self) -> None:
        """Make the directory readable as it is now, also if this process is killed, until the next write."""
        with self._index_lock:
            if self._directory.keep and not self._published:
                self._publish()

    def close(self) -> None:
        """Sync and keep the files, or remove them; a second call does nothing.

        After a failure the files are left as they are, without an index: nobody can take them for whole.
        """
        if not self._finalizer.alive:
            return
        try:
            whole = self._refusal is None and self._residency.failure is None
            if self._directory.keep and self._directory.mine and whole:
                self.sync()
                for part, file in zip(self._tables, self._row_files, strict=True):
                    file.trim(len(part.positions))
        finally:
            super().close()
            self._finalizer()

    def stats(self) -> StoreStats:
        """What is held, and what it takes; memory includes page cache that may have been reclaimed meanwhile."""
        stats = super().stats()
        return StoreStats(stats.num_rows, stats.bytes_in_memory + self._residency.bytes_now, stats.bytes_on_disk)

    def _before_write(self) -> None:
        with self._index_lock:
            if self._published:
                self._directory.withdraw()
                self._published = False

    def _check_usable(self) -> None:
        super()._check_usable()
        if not self._directory.mine:
            raise StoreError(
                f"{self._directory.path} belongs to the process that opened it, and this one was forked from it: "
                "use the store there"
            )
        if self._residency.failure is not None:
            raise self._residency.failure

    def _row_file(self, table: int, width: int) -> RowFile:
        files = self._directory.tables[table]
        self._row_files.append(RowFile(files.rows_fd, files.rows_path, width, self._residency))
        return self._row_files[-1]

    def _publish(self) -> None:
        self._residency.write_out()
        for part, files in zip(self._tables, self._directory.tables, strict=True):
            starts = range(files.num_ids, len(part.positions), _IDS_PER_APPEND)
            files.save_ids(part.positions.ids(start, start + _IDS_PER_APPEND) for start in starts)
        tables = [
            TableIndex(label=label, width=source.width, num_rows=files.num_ids, ids_crc32=files.ids_crc32)
            for label, source, files in zip(self._labels, self.tables, self._directory.tables, strict=True)
        ]
        self._directory.publish(Index(tables=tables))
        self._published = True

    def _load(self, index: Index) -> None:
        for part, files, table in zip(self._tables, self._directory.tables, index.tables, strict=True):
            ids = files.load_ids(table)
            part.positions.reserve(len(ids))
            if part.positions.find_or_insert(ids, np.empty(len(ids), np.int64)) < len(ids):
                raise StoreError(f"{files.ids_path} is damaged (an id repeats): start again from a checkpoint")
        self._published = True
