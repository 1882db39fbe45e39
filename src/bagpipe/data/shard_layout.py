"""The bytes of a shard: a header and columns, laid out so that the file can be mapped into memory (docs/formats.md).

The header has a checksum for each 256 KB of each column, and the manifest has that of the header; so opening a file
checks a few KB, and reading checks only what it touches.
"""

from __future__ import annotations

import mmap
import os
import stat
import struct
import zlib
from collections.abc import Mapping
from pathlib import Path
from typing import Annotated, Any, Literal, cast

import numpy as np
from numpy.typing import NDArray
from pydantic import Field, ValidationError

from bagpipe.data.manifest import VERSION, Checksum, Count, Manifest, Record, ShardEntry
from bagpipe.errors import ShardError

Bytes = NDArray[np.uint8]
Kind = Literal["<u1", "<u2", "<u4", "<i8", "<f4"]

MAGIC = b"BAGSHARD"
PRELUDE = struct.Struct("<8sIII")
"""Magic, version, bytes of the header, its CRC-32."""
ALIGNMENT = 64
CHUNK_BYTES = 1 << 18
HEADER_BYTES_MAX = 1 << 24
"""A shard of 300 GB has as much."""


class ColumnEntry(Record):
    """Where a column lies, counted from the end of the header, and the CRC-32 of each of its chunks."""

    name: str
    type: Kind
    start: Count
    bytes: Count
    checksums: tuple[Checksum, ...]


class ShardHeader(Record):
    """The header of a shard."""

    samples: Annotated[int, Field(ge=1)]
    columns: tuple[ColumnEntry, ...]


def id_type(rows: int | None) -> Kind:
    """How ids of a table are stored: in the smallest unsigned integer of up to 32 bits that fits, else in 64 bits."""
    if rows is None or rows > 1 << 32:
        return "<i8"
    return "<u1" if rows <= 1 << 8 else "<u2" if rows <= 1 << 16 else "<u4"


def column_types(manifest: Manifest) -> dict[str, Kind]:
    """The columns of a shard, in order."""
    rows = manifest.table_rows()
    types: dict[str, Kind] = {"labels": "<u1", "dense": "<f4"}
    for feature in manifest.features:
        if feature.ids is None:
            types[f"offsets:{feature.name}"] = "<i8"
        types[f"ids:{feature.name}"] = id_type(rows[feature.name])
        if feature.weighted:
            types[f"weights:{feature.name}"] = "<f4"
    return types


def may_be(found: Kind, expected: Kind) -> bool:
    """Whether a column may be stored so; ids whose table grew while it was written began in a smaller type."""
    return found == expected or (found[1] == expected[1] == "u" and found[2] <= expected[2])


def encode(samples: int, columns: Mapping[str, NDArray[Any]]) -> tuple[list[bytes | memoryview], int]:
    """The bytes of a shard, in pieces to be written one after the other, and the checksum of its header."""
    entries: list[ColumnEntry] = []
    pieces: list[bytes | memoryview] = []
    start = 0
    for name, column in columns.items():
        data = np.ascontiguousarray(column).reshape(-1).view(np.uint8).data
        sums = tuple(zlib.crc32(data[at : at + CHUNK_BYTES]) for at in range(0, len(data), CHUNK_BYTES))
        kind = cast(Kind, column.dtype.str.replace("|", "<"))
        entries.append(ColumnEntry(name=name, type=kind, start=start, bytes=len(data), checksums=sums))
        padding = bytes(-len(data) % ALIGNMENT)
        pieces += [data, padding]
        start += len(data) + len(padding)
    header = ShardHeader(samples=samples, columns=tuple(entries)).model_dump_json().encode()
    header += b" " * (-(PRELUDE.size + len(header)) % ALIGNMENT)
    checksum = zlib.crc32(header)
    return [PRELUDE.pack(MAGIC, VERSION, len(header), checksum), header, *pieces], checksum


def map_shard(path: Path, entry: ShardEntry) -> tuple[ShardHeader, Bytes]:
    """The header of a shard, checked, and the mapped bytes behind it, still unchecked."""
    data = _map(path, entry.bytes)
    magic, version, size, checksum = PRELUDE.unpack(data[: PRELUDE.size].tobytes())
    if magic != MAGIC:
        raise ShardError(f"{path} starts with {magic!r}, not with {MAGIC!r}: it is not a shard; write the data again")
    if version != VERSION:
        raise ShardError(
            f"{path} has version {version}, this is version {VERSION}: write the data again, or use the version of "
            "Bagpipe that wrote it"
        )
    if size > HEADER_BYTES_MAX:
        raise ShardError(
            f"{path} announces a header of {size:,} B, at most {HEADER_BYTES_MAX:,} are read: write the data again, in "
            "smaller shards"
        )
    text = data[PRELUDE.size : PRELUDE.size + size].tobytes()
    found = zlib.crc32(text)
    if not found == checksum == entry.checksum:
        raise ShardError(
            f"{path} is corrupt: its header has checksum {found}, the file says {checksum} and the manifest "
            f"{entry.checksum}; copy the file again, or write the data again"
        )
    try:
        header = ShardHeader.model_validate_json(text)
    except ValidationError as error:
        raise ShardError(f"{path} has a header that is not a shard's: write the data again") from error
    return header, data[PRELUDE.size + size :]


def _map(path: Path, size: int) -> Bytes:
    try:
        # Non-blocking, so that a pipe in the place of a file can't hang the reader.
        descriptor = os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK)
    except OSError as error:
        raise ShardError(f"{path} can't be opened ({error.strerror}): restore it, or write the data again") from error
    try:
        status = os.fstat(descriptor)
        if not stat.S_ISREG(status.st_mode):
            raise ShardError(f"{path} is not a regular file: restore it, or write the data again")
        if status.st_size != size:
            state = f"has {status.st_size} bytes" if status.st_size else "is empty"
            raise ShardError(
                f"{path} {state}, the manifest says {size} bytes: it was truncated or replaced; copy the file again, "
                "or write the data again"
            )
        if size < PRELUDE.size:
            raise ShardError(f"{path} has {size} bytes, too few for a shard: write the data again")
        return np.frombuffer(mmap.mmap(descriptor, size, access=mmap.ACCESS_READ), dtype=np.uint8)
    finally:
        os.close(descriptor)
