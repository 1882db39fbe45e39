"""Files of rows: written where the rows are, by a thread beside whoever trains on, and read back before they count.

A file has, for each table with rows in it, the tensors `TABLE.ids` (int64) and `TABLE.rows` (float32, vectors with
optimizer state). Memory is bounded (I5): a file is gathered, summed, written and synced before the next one begins.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Protocol, TypeAlias

import numpy as np
from xxhash import xxh64, xxh64_hexdigest

from bagpipe.arrays import Floats, Int64s
from bagpipe.checkpoint.disk import Bytes, Disk
from bagpipe.checkpoint.manifest import FileEntry, RowCount, ShardOf
from bagpipe.checkpoint.tensors import Kind, check_kinds, decode, encode_header
from bagpipe.errors import CheckpointError
from bagpipe.os_errors import failing

Report: TypeAlias = Callable[[int], None]
"""Told how many bytes are done."""

FILE_BYTES = 1 << 25
"""A file of rows is closed once it has so many."""
FILE_BYTES_MAX = 1 << 31
"""What is read of one file of rows: a manifest that asks for more memory than that is wrong."""
CHUNK_BYTES = 1 << 22


class RowSnapshot(Protocol):
    """Rows as they were at a mark, whatever is written meanwhile."""

    def iterate(self, table: int, rows_per_chunk: int) -> Iterator[tuple[Int64s, Floats]]:
        """Ids and values of the rows of a table, so many at a time.

        Nobody changes the arrays later.
        """


def write_rows(
    disk: Disk,
    directory: Path,
    snapshot: RowSnapshot,
    tables: Sequence[tuple[str, int]],
    *,
    part: str = "0",
    shard: tuple[int, int] | None = None,
    report: Report | None = None,
) -> list[FileEntry]:
    """Write the rows of all tables (name and width of each) into `rows-PART-N` files; each is synced and read back.

    `shard` says which server of how many has these rows. The directory is the caller's to sync.
    """
    writer = _Writer(disk, directory, tables, part, shard, report)
    for table, (_, width) in enumerate(tables):
        rows_per_chunk = max(1, CHUNK_BYTES // (8 + 4 * width))
        for ids, values in snapshot.iterate(table, rows_per_chunk):
            if len(ids):
                writer.add(table, ids, values)
    writer.flush()
    return writer.entries


class _Writer:
    """Gathers rows until they make a file."""

    def __init__(
        self,
        disk: Disk,
        directory: Path,
        tables: Sequence[tuple[str, int]],
        part: str,
        shard: tuple[int, int] | None,
        report: Report | None,
    ) -> None:
        self._disk, self._directory, self._tables = disk, directory, tables
        self._part, self._report = part, report
        self._shard = None if shard is None else ShardOf(*shard)
        self._chunks: list[tuple[int, Int64s, Floats]] = []
        self._num_bytes = 0
        self._num_bytes_written = 0
        self.entries: list[FileEntry] = []

    def add(self, table: int, ids: Int64s, values: Floats) -> None:
        name, width = self._tables[table]
        if ids.dtype != np.int64 or values.dtype != np.float32 or values.shape != (len(ids), width):
            raise CheckpointError(
                f"rows of table {name!r} are {values.dtype} of shape {values.shape} for {len(ids)} ids of {ids.dtype}, "
                f"not {width} floats each: save them with the tables that they were trained with"
            )
        self._chunks.append((table, np.ascontiguousarray(ids), np.ascontiguousarray(values)))
        self._num_bytes += ids.nbytes + values.nbytes
        if self._num_bytes >= FILE_BYTES:
            self.flush()

    def flush(self) -> None:
        if not self._chunks:
            return
        counts: dict[int, int] = {}
        for table, ids, _ in self._chunks:
            counts[table] = counts.get(table, 0) + len(ids)
        header = encode_header(_kinds(self._tables, counts))
        parts: list[Bytes] = [header]
        parts += [ids.data.cast("B") for _, ids, _ in self._chunks]
        parts += [values.data.cast("B") for _, _, values in self._chunks]
        name = f"rows-{self._part}-{len(self.entries):05d}.safetensors"
        total = xxh64()
        for data in parts:
            total.update(data)
        entry = FileEntry(
            name=name,
            bytes=sum(memoryview(data).nbytes for data in parts),
            checksum=total.hexdigest(),
            rows=tuple(RowCount(table, counts[table]) for table in sorted(counts)),
            shard=self._shard,
        )
        write_file(self._disk, self._directory, entry, parts)
        self.entries.append(entry)
        self._num_bytes_written += self._num_bytes
        self._chunks.clear()
        self._num_bytes = 0
        if self._report is not None:
            self._report(self._num_bytes_written)


def write_file(disk: Disk, directory: Path, entry: FileEntry, parts: Sequence[Bytes]) -> None:
    """Write a new file, sync it, and read it back."""
    path = directory / entry.name
    with failing(CheckpointError, "write", path), disk.create(path) as file:
        for data in parts:
            file.write(data)
        file.sync()
    check_file(disk, directory, entry)


def check_file(disk: Disk, directory: Path, entry: FileEntry) -> None:
    """CheckpointError unless a file has the size and checksum that its entry says. Memory: one chunk."""
    path, total = directory / entry.name, xxh64()
    with failing(CheckpointError, "read", path), disk.open(path) as file:
        _check_size(path, file.num_bytes, entry)
        buffer = memoryview(bytearray(min(CHUNK_BYTES, entry.bytes)))
        for start in range(0, entry.bytes, CHUNK_BYTES):
            piece = buffer[: min(CHUNK_BYTES, entry.bytes - start)]
            total.update(piece[: file.read_into(piece, start)])
    _check_sum(path, total.hexdigest(), entry)


def read_file(disk: Disk, directory: Path, entry: FileEntry) -> bytes:
    """The contents of a file, checked against its entry."""
    path = directory / entry.name
    with failing(CheckpointError, "read", path), disk.open(path) as file:
        _check_size(path, file.num_bytes, entry)
        data = bytearray(entry.bytes)
        count = file.read_into(data)
    _check_sum(path, xxh64_hexdigest(memoryview(data)[:count]), entry)
    return bytes(data)


def read_rows(
    disk: Disk, directory: Path, entry: FileEntry, tables: Sequence[tuple[str, int]]
) -> Iterator[tuple[int, Int64s, Floats]]:
    """The rows in a file as (table, ids, values), to be read only; every byte was checked before the first comes."""
    path = directory / entry.name
    if entry.bytes > FILE_BYTES_MAX:
        raise CheckpointError(
            f"{path} has {entry.bytes:,} B, a file of rows at most {FILE_BYTES_MAX:,}: use another checkpoint"
        )
    found, _ = decode(str(path), read_file(disk, directory, entry))
    counts = {part.table: part.rows for part in entry.rows or ()}
    check_kinds(str(path), found, _kinds(tables, counts))
    for table, rows in counts.items():
        name, width = tables[table]
        ids = np.frombuffer(found[f"{name}.ids"].data, np.int64)
        values = np.frombuffer(found[f"{name}.rows"].data, np.float32).reshape(rows, width)
        yield table, ids, values


def _kinds(tables: Sequence[tuple[str, int]], counts: dict[int, int]) -> dict[str, Kind]:
    """The tensors of a file with so many rows of each table: all ids first, so that everything is aligned."""
    parts = [(*tables[table], counts[table]) for table in sorted(counts)]
    ids = {f"{name}.ids": Kind("I64", (rows,)) for name, _, rows in parts}
    return ids | {f"{name}.rows": Kind("F32", (rows, width)) for name, width, rows in parts}


def _check_size(path: Path, num_bytes: int, entry: FileEntry) -> None:
    if num_bytes != entry.bytes:
        raise CheckpointError(
            f"{path} has {num_bytes:,} B and should have {entry.bytes:,}: it was cut off or replaced; "
            "use another checkpoint, or a copy of this one"
        )


def _check_sum(path: Path, checksum: str, entry: FileEntry) -> None:
    if checksum != entry.checksum:
        raise CheckpointError(
            f"{path} has checksum {checksum} and should have {entry.checksum}: it is damaged; "
            "use another checkpoint, or a copy of this one"
        )
