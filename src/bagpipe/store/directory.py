"""The directory of a mapped store: its files, the lock on them, and the index that makes them readable again.

    table-00000.rows   rows of table 0 by position, float32; may be longer than its rows
    table-00000.ids    their ids by position, int64
    index.json         one line of JSON, `Index` below, and on a second line the CRC-32 of the first in hex

The index is there only while it is true: `sync` writes it, atomically and after everything else; the next write removes
it. So a process that dies leaves a directory that can be read exactly as it was at the last `sync`, or one that says it
can't. A temporary store unlinks its files as soon as it has opened them, and a dead process leaves an empty directory.
"""

from __future__ import annotations

import fcntl
import json
import os
import sys
import zlib
from collections.abc import Iterable, Sequence
from contextlib import ExitStack, suppress
from pathlib import Path
from typing import Literal

import numpy as np
from pydantic import BaseModel, ConfigDict, NonNegativeInt, PositiveInt, ValidationError

from bagpipe.arrays import Int64s
from bagpipe.errors import StoreError
from bagpipe.store.failures import failing, medium_failure, too_short

VERSION = 2
INDEX_NAME = "index.json"
_INDEX_BYTES_MAX = 64 << 20


class TableIndex(BaseModel):
    """What the index says of one table."""

    model_config = ConfigDict(strict=True, extra="forbid")
    label: str
    """What its rows are, in the words of whoever wrote them."""
    width: PositiveInt
    num_rows: NonNegativeInt
    ids_crc32: NonNegativeInt


class Index(BaseModel):
    """What is in the files of a directory."""

    model_config = ConfigDict(strict=True, extra="forbid")
    format: Literal["bagpipe rows"] = "bagpipe rows"
    version: int = VERSION
    byte_order: Literal["little", "big"] = sys.byteorder
    tables: list[TableIndex]


class TableFiles:
    """The files of one table: rows are open all the time, ids only while they are written or read."""

    def __init__(self, directory: Path, number: int, *, new: bool) -> None:
        self.rows_path = directory / f"table-{number:05d}.rows"
        self.ids_path = directory / f"table-{number:05d}.ids"
        self.num_ids = 0
        self.ids_crc32 = 0
        self.rows_fd = _open(self.rows_path, os.O_RDWR | (os.O_CREAT | os.O_EXCL if new else 0))

    def save_ids(self, ids: Iterable[Int64s]) -> None:
        """Write the ids that follow those already there; they count once the index says so."""
        fd = _open(self.ids_path, os.O_WRONLY | os.O_CREAT)
        try:
            with failing("writing", self.ids_path):
                for some in ids:
                    self._append_ids(fd, some)
                os.ftruncate(fd, self.num_ids * 8)  # there were more before rows were returned to a mark
                os.fsync(fd)
        finally:
            os.close(fd)

    def forget_ids(self) -> None:
        """The ids that are there are not true any more: the next ones to be saved are the first."""
        self.num_ids = self.ids_crc32 = 0

    def load_ids(self, table: TableIndex) -> Int64s:
        """All ids, as many as the index says and as it sums them up."""
        with open(_open(self.ids_path, os.O_RDONLY), "rb") as file, failing("reading", self.ids_path):
            num_bytes = os.fstat(file.fileno()).st_size
            if num_bytes != table.num_rows * 8:
                raise too_short(self.ids_path, num_bytes, table.num_rows * 8)
            ids = np.fromfile(file, np.int64)
        self.num_ids, self.ids_crc32 = len(ids), zlib.crc32(ids.data)
        if self.ids_crc32 != table.ids_crc32:
            raise StoreError(f"{self.ids_path} is damaged (its checksum differs): start again from a checkpoint")
        return ids

    def _append_ids(self, fd: int, ids: Int64s) -> None:
        data, offset = ids.data.cast("B"), self.num_ids * ids.itemsize
        while data:
            done = os.pwrite(fd, data, offset)
            data, offset = data[done:], offset + done
        self.ids_crc32 = zlib.crc32(ids.data, self.ids_crc32)
        self.num_ids += len(ids)


class StoreDirectory:
    """A directory that belongs to this store alone, until it is closed or the process ends."""

    def __init__(self, path: Path, *, keep: bool) -> None:
        self.path = path
        self.keep = keep
        self.tables: list[TableFiles] = []
        self._pid = os.getpid()
        self._fd = _open(path, os.O_RDONLY | os.O_DIRECTORY)
        self._closed = False
        try:
            fcntl.flock(self._fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError as error:
            os.close(self._fd)
            raise StoreError(f"{path} is in use by another store: close that one, or give another directory") from error

    @classmethod
    def create(cls, path: Path, num_tables: int, *, keep: bool) -> StoreDirectory:
        """A directory without rows, where there is none yet or an empty one."""
        path = path.resolve()
        with ExitStack() as undo:
            with failing("creating", path):
                if not path.exists():
                    path.mkdir(mode=0o700, parents=True)
                    undo.callback(_remove_if_empty, path)
            directory = cls(path, keep=keep)
            undo.callback(directory._close_files)
            if any(path.iterdir()):
                raise StoreError(f"{path} is not empty: give another directory, or open the store that is in it")
            for number in range(num_tables):
                files = TableFiles(path, number, new=True)
                directory.tables.append(files)
                if keep:
                    undo.callback(files.rows_path.unlink)
                else:
                    files.rows_path.unlink()
            undo.pop_all()
        return directory

    @classmethod
    def open(cls, path: Path, widths: Sequence[int], labels: Sequence[str] | None) -> tuple[StoreDirectory, Index]:
        """A directory that was kept, whose tables have these widths and labels (None: any), and what is in it."""
        directory = cls(path.resolve(), keep=True)
        with ExitStack() as undo:
            undo.callback(directory.close)
            index = _read_index(directory.path)
            _check_tables(path, index, widths, labels)
            for number, table in enumerate(index.tables):
                files = TableFiles(directory.path, number, new=False)
                directory.tables.append(files)
                num_bytes, needed = os.fstat(files.rows_fd).st_size, table.num_rows * table.width * 4
                if num_bytes < needed:
                    raise too_short(files.rows_path, num_bytes, needed)
            undo.pop_all()
        return directory, index

    @classmethod
    def clear(cls, path: Path) -> None:
        """Remove the files of a store that nobody has open; others stay, and a directory that is not there may be."""
        if not path.is_dir():
            return
        directory = cls(path.resolve(), keep=True)
        try:
            with failing("removing files in", path):
                for pattern in (INDEX_NAME, f"{INDEX_NAME}.new", "table-*.rows", "table-*.ids"):
                    for file in directory.path.glob(pattern):
                        file.unlink()
        finally:
            directory.close()

    def publish(self, index: Index) -> None:
        """Make the directory readable as the index says, once rows and ids are on the disk."""
        line = index.model_dump_json().encode()
        path, draft = self.path / INDEX_NAME, self.path / f"{INDEX_NAME}.new"
        with failing("writing", path), ExitStack() as undo:
            undo.callback(path.unlink, missing_ok=True)
            undo.callback(draft.unlink, missing_ok=True)
            with draft.open("wb") as file:
                file.write(b"%s\n%08x\n" % (line, zlib.crc32(line)))
                file.flush()
                os.fsync(file.fileno())
            draft.replace(path)
            os.fsync(self._fd)
            undo.pop_all()

    def withdraw(self) -> None:
        """Take the index away, because what it says is about to change."""
        with failing("removing", self.path / INDEX_NAME):
            (self.path / INDEX_NAME).unlink(missing_ok=True)
            os.fsync(self._fd)

    def close(self) -> None:
        """Close all files, and remove the directory of a temporary store; a second call does nothing."""
        if self._closed:
            return
        if self.mine and not self.keep:
            _remove_if_empty(self.path)
        self._close_files()

    @property
    def mine(self) -> bool:
        """Whether this process opened it: one that was forked has the descriptors too, and must leave things alone."""
        return os.getpid() == self._pid

    def _close_files(self) -> None:
        self._closed = True
        for files in self.tables:
            os.close(files.rows_fd)
        if self.mine:
            fcntl.flock(self._fd, fcntl.LOCK_UN)  # else it would stay while a forked process lives
        os.close(self._fd)


def _check_tables(path: Path, index: Index, widths: Sequence[int], labels: Sequence[str] | None) -> None:
    remedy = "use the model, row optimizer and seed that it was written with, or another directory"
    found = [table.width for table in index.tables]
    if found != list(widths):
        raise StoreError(f"{path} holds rows of {found} floats by table, and {list(widths)} are asked for: {remedy}")
    for table, label in zip(index.tables, labels or [table.label for table in index.tables], strict=True):
        if table.label != label:
            raise StoreError(f"{path} holds rows of {table.label!r}, and those of {label!r} are asked for: {remedy}")


def _read_index(path: Path) -> Index:
    file = path / INDEX_NAME
    try:
        with file.open("rb") as stream:
            content = stream.read(_INDEX_BYTES_MAX)
    except FileNotFoundError as error:
        if any(path.glob("table-*.rows")):
            raise StoreError(
                f"{path} was not closed: its rows are from different moments; start again from a checkpoint, or "
                "in another directory"
            ) from error
        raise StoreError(f"{path} holds no store ({INDEX_NAME} is missing): check the path") from error
    except OSError as error:
        raise medium_failure(file, "reading", error.errno or 0) from error
    line, _, checksum = content.partition(b"\n")
    if checksum != b"%08x\n" % zlib.crc32(line):
        raise StoreError(f"{file} is damaged (its checksum differs): start again from a checkpoint")
    try:
        version = json.loads(line)["version"]
        if version != VERSION:
            raise StoreError(
                f"{file} is of version {version!r}, and this Bagpipe reads version {VERSION}: "
                "use the Bagpipe that wrote it"
            )
        index = Index.model_validate_json(line)
    except (ValueError, KeyError, TypeError, RecursionError, ValidationError) as error:
        raise StoreError(f"{file} is not the index of a store: start again from a checkpoint ({error})") from error
    if index.byte_order != sys.byteorder:
        raise StoreError(f"{file} is from a {index.byte_order}-endian machine: read it on one of that kind")
    return index


def _remove_if_empty(path: Path) -> None:
    with suppress(OSError):  # someone else put a file there: theirs to remove
        path.rmdir()


def _open(path: Path, flags: int) -> int:
    with failing("opening", path):
        return os.open(path, flags | os.O_CLOEXEC | os.O_NOFOLLOW, 0o600)
