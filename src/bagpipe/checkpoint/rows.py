"""Files of rows: written where the rows are, by a thread beside whoever trains on, and read by any number of servers.

A file has, for each table with rows in it, the tensors `TABLE.ids` (int64) and `TABLE.rows` (float32, vectors with
optimizer state). It is synced and read back before it counts, and every byte is checked before it is used (I8). Memory
is bounded (I5): a file is gathered, written and synced before the next one begins.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Protocol, TypeAlias

import numpy as np
from xxhash import xxh64, xxh64_hexdigest

from bagpipe.arrays import Floats, Int64s
from bagpipe.checkpoint.disk import Bytes, Disk
from bagpipe.checkpoint.manifest import FileEntry, Manifest, RowCount, ShardOf, TableEntry
from bagpipe.checkpoint.tensors import Kind, check_kinds, decode, encode_header
from bagpipe.errors import CheckpointError
from bagpipe.os_errors import failing
from bagpipe.server.shards import divide

Report: TypeAlias = Callable[[int], None]
"""Told how many bytes are done."""

ALL: tuple[int, int] = (0, 1)
"""The shard of one server, which is all rows."""
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
    entries: list[FileEntry] = []
    num_bytes = 0
    for chunks in _files(snapshot, tables):
        counts: dict[int, int] = {}
        for table, ids, values in chunks:
            counts[table] = counts.get(table, 0) + len(ids)
            num_bytes += ids.nbytes + values.nbytes
        parts: list[Bytes] = [encode_header(_kinds(tables, counts))]
        parts += [ids.data.cast("B") for _, ids, _ in chunks]
        parts += [values.data.cast("B") for _, _, values in chunks]
        held = tuple(RowCount(table, counts[table]) for table in sorted(counts))
        name = f"rows-{part}-{len(entries):05d}.safetensors"
        entries.append(write_file(disk, directory, name, parts, held, None if shard is None else ShardOf(*shard)))
        chunks.clear()
        del parts, ids, values  # the next file is gathered in the room of this one
        if report is not None:
            report(num_bytes)
    return entries


def _files(snapshot: RowSnapshot, tables: Sequence[tuple[str, int]]) -> Iterator[list[tuple[int, Int64s, Floats]]]:
    """The rows of all tables, so many at a time as make a file."""
    chunks: list[tuple[int, Int64s, Floats]] = []
    num_bytes = 0
    for table, (name, width) in enumerate(tables):
        for ids, values in snapshot.iterate(table, max(1, CHUNK_BYTES // (8 + 4 * width))):
            if not len(ids):
                continue
            if ids.dtype != np.int64 or values.dtype != np.float32 or values.shape != (len(ids), width):
                raise CheckpointError(
                    f"rows of table {name!r} are {values.dtype} of shape {values.shape} for {len(ids)} ids of "
                    f"{ids.dtype}, not {width} floats each: save them with the tables that they were trained with"
                )
            chunks.append((table, np.ascontiguousarray(ids), np.ascontiguousarray(values)))
            num_bytes += ids.nbytes + values.nbytes
            if num_bytes >= FILE_BYTES:
                yield chunks
                chunks, num_bytes = [], 0
    if chunks:
        yield chunks


def write_file(
    disk: Disk,
    directory: Path,
    name: str,
    parts: Sequence[Bytes],
    rows: tuple[RowCount, ...] | None = None,
    shard: ShardOf | None = None,
) -> FileEntry:
    """Write a new file, sync it, and read it back; what a manifest says of it."""
    path, total, num_bytes = directory / name, xxh64(), 0
    with failing(CheckpointError, "write", path), disk.create(path) as file:
        for data in parts:
            total.update(data)
            num_bytes += memoryview(data).nbytes
            file.write(data)
        file.sync()
    entry = FileEntry(name=name, bytes=num_bytes, checksum=total.hexdigest(), rows=rows, shard=shard)
    check_file(disk, directory, entry)
    return entry


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


def read_shard(
    disk: Disk, directory: Path, manifest: Manifest, shard: tuple[int, int] = ALL, only: int | None = None
) -> Iterator[tuple[int, Int64s, Floats]]:
    """The rows of one checkpoint as (table, ids, values): those of a shard (server, servers), and of `only` a table."""
    tables = [(table.name, table.width) for table in manifest.tables]
    for entry in manifest.files:
        if not _may_hold(entry, shard, only):
            continue
        for table, ids, values in read_rows(disk, directory, entry, tables):
            if only is not None and table != only:
                continue
            _check_range(directory / entry.name, manifest.tables[table], ids)
            mine = of_shard(table, ids, values, shard)
            if len(mine[0]):
                yield (table, *mine)


def _may_hold(entry: FileEntry, shard: tuple[int, int], only: int | None) -> bool:
    """Whether a file can have rows of a shard, and of one table: each server has a range of the hash of keys."""
    if entry.rows is None or (only is not None and all(part.table != only for part in entry.rows)):
        return False
    if entry.shard is None:
        return True
    server, servers, (wanted, of) = entry.shard.server, entry.shard.servers, shard
    return bool(server * of < (wanted + 1) * servers and wanted * servers < (server + 1) * of)


def _check_range(path: Path, table: TableEntry, ids: Int64s) -> None:
    if table.rows is not None and len(ids) and not 0 <= ids.min() <= ids.max() < table.rows:
        raise CheckpointError(
            f"{path} has ids {ids.min()} to {ids.max()} of table {table.name!r} of {table.rows} rows: use another one"
        )


def of_shard(table: int, ids: Int64s, values: Floats, shard: tuple[int, int]) -> tuple[Int64s, Floats]:
    """Those of these rows that a server (server, servers) has."""
    server, servers = shard
    if servers == 1:
        return ids, values
    order, starts = divide(table, ids, servers)
    mine = order[starts[server] : starts[server + 1]]
    return (ids, values) if len(mine) == len(ids) else (ids[mine], values[mine])


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
