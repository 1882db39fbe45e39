"""The records of a journal's files, and how they are told from anything else.

A record is a head of 40 B and a body; numbers are little-endian.

    4 B "BPJ1"   u32 kind   u64 its number in the file   u64 size of the body   u64 XXH64 of the body
    u64 XXH64 of the 32 B before and of the file's base (i64): a record is good in its own file and place only

    kind 0, begins every file   i64 base, u64 number of tables, u64 floats of a row of each
    kind 1, a write             for each table: u64 table, u64 rows, i64 ids, f32 values, zeros to a multiple of 8 B
    kind 2, a mark, ends a file i64 done
    kind 3, alone in its file   bytes that are kept with a mark; the base is the mark
"""

from __future__ import annotations

import struct
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from threading import local

import numpy as np
from xxhash import xxh64, xxh64_intdigest

from bagpipe.checkpoint.disk import Readable
from bagpipe.errors import StoreError
from bagpipe.store.base import TablePart

BEGIN, WRITE, MARK, BLOB = range(4)
START = -1
"""The base of a file whose writes begin with a store without rows."""

_MAGIC = b"BPJ1"
_HEAD = struct.Struct("<4sIQQQ")
_SUM = struct.Struct("<Q")
_PART = struct.Struct("<QQ")
_NUMBER = struct.Struct("<q")
HEAD_BYTES = _HEAD.size + _SUM.size
_MARK_BYTES = HEAD_BYTES + _NUMBER.size
_PACKED_BYTES_MAX = (8 << 20) - HEAD_BYTES
_PIECE_BYTES = 1 << 17
"""On average; larger ones are not worth a copy."""

Piece = bytes | memoryview


class Body:
    """The body of a record, summed up before anyone holds a lock."""

    def __init__(self, kind: int, pieces: Sequence[Piece]) -> None:
        self.kind = kind
        self.num_bytes = sum(map(len, pieces))
        self._pieces = list(pieces)
        self._packed: memoryview | None = None
        if kind == WRITE:  # a thread has one of these at a time; others are made in the middle of one
            self._packed = _scratch.pack(pieces, self.num_bytes)
        if self._packed is not None:
            self._pieces = [self._packed[HEAD_BYTES:]]
        total = xxh64()
        for piece in self._pieces:
            total.update(piece)
        self._checksum = total.intdigest()

    def record(self, base: int, number: int) -> list[Piece]:
        """All bytes of the record, at its place."""
        first = head(self.kind, number, self.num_bytes, self._checksum, base)
        if self._packed is None:
            return [first, *self._pieces]
        self._packed[:HEAD_BYTES] = first
        return [self._packed]


class _Scratch(local):
    """Memory of each thread for a record in one piece: many small ones cost more than the copy."""

    def __init__(self) -> None:
        self._room = memoryview(bytearray(1 << 16))

    def pack(self, pieces: Sequence[Piece], num_bytes: int) -> memoryview | None:
        """Room for a head, and behind it all bytes; None where that is too much to copy."""
        if num_bytes > min(_PACKED_BYTES_MAX, len(pieces) * _PIECE_BYTES):
            return None
        if len(self._room) < HEAD_BYTES + num_bytes:
            self._room = memoryview(bytearray(1 << (HEAD_BYTES + num_bytes - 1).bit_length()))
        start = HEAD_BYTES
        for piece in pieces:
            self._room[start : start + len(piece)] = piece
            start += len(piece)
        return self._room[:start]


_scratch = _Scratch()


def begin_body(base: int, widths: Sequence[int]) -> Body:
    """The first record of a file."""
    return Body(BEGIN, [_NUMBER.pack(base), np.array([len(widths), *widths], "<u8").tobytes()])


def write_body(parts: Sequence[TablePart]) -> Body:
    """A write."""
    pieces: list[Piece] = []
    for table, ids, values in parts:
        pieces += [_PART.pack(table, len(ids)), _octets(ids, "<i8"), _octets(values, "<f4"), b"\0" * _padding(values)]
    return Body(WRITE, pieces)


def mark_body(done: int) -> Body:
    """The last record of a file."""
    return Body(MARK, [_NUMBER.pack(done)])


def head(kind: int, number: int, num_bytes: int, checksum: int, base: int) -> bytes:
    """The head of a record."""
    start = _HEAD.pack(_MAGIC, kind, number, num_bytes, checksum)
    return start + _SUM.pack(xxh64_intdigest(start + _NUMBER.pack(base)))


def closing_mark(file: Readable, base: int) -> int | None:
    """The mark that ends this file of writes; None where there is none, because the file ends in the middle."""
    data = bytearray(_MARK_BYTES)
    start = file.num_bytes - _MARK_BYTES
    if start < 0 or file.read_into(data, start) < _MARK_BYTES:
        return None
    found = _parse_head(bytes(data[:HEAD_BYTES]), base)
    if found is None:
        return None
    kind, _, num_bytes, checksum = found
    body = bytes(data[HEAD_BYTES:])
    if (kind, num_bytes) != (MARK, len(body)) or xxh64_intdigest(body) != checksum:
        return None
    return int(_NUMBER.unpack(body)[0])


def records(file: Readable, path: Path, base: int) -> Iterator[tuple[int, memoryview]]:
    """The kind and body of every record; StoreError at the first that is not whole. Memory: one record."""
    start = number = 0
    while start < file.num_bytes:
        data = bytearray(HEAD_BYTES)
        found = _parse_head(bytes(data), base) if file.read_into(data, start) == HEAD_BYTES else None
        start += HEAD_BYTES
        if found is None or found[1] != number or found[2] > file.num_bytes - start:
            raise damaged(path, start - HEAD_BYTES)
        kind, _, num_bytes, checksum = found
        body = memoryview(bytearray(num_bytes))
        if file.read_into(body, start) < num_bytes or xxh64_intdigest(body) != checksum:
            raise damaged(path, start - HEAD_BYTES)
        if (kind == BEGIN) != (number == 0) or kind not in (BEGIN, WRITE, MARK, BLOB):
            raise damaged(path, start - HEAD_BYTES)
        yield kind, body
        start, number = start + num_bytes, number + 1


def begin_of(path: Path, body: memoryview) -> tuple[int, list[int]]:
    """The base and the widths that a file begins with."""
    with _parsing(path):
        base, count = struct.unpack("<qQ", body[:16])
        widths = np.frombuffer(body[16:], "<u8").tolist()
        if len(widths) != count:
            raise ValueError
        return base, widths


def parts_of(path: Path, body: memoryview, widths: Sequence[int]) -> list[TablePart]:
    """The rows of a write, to be read only."""
    parts: list[TablePart] = []
    with _parsing(path):
        while body:
            table, count = _PART.unpack(body[: _PART.size])
            body = body[_PART.size :]
            ids = np.frombuffer(body[: count * 8], "<i8").astype(np.int64, copy=False)
            body = body[count * 8 :]
            num_bytes = count * widths[table] * 4
            values = (
                np.frombuffer(body[:num_bytes], "<f4").astype(np.float32, copy=False).reshape(len(ids), widths[table])
            )
            if len(ids) != count:
                raise ValueError
            body = body[num_bytes + _padding(values) :]
            parts.append((table, ids, values))
    return parts


def mark_of(path: Path, body: memoryview) -> int:
    """The mark that a file ends with."""
    with _parsing(path):
        return int(_NUMBER.unpack(body)[0])


@contextmanager
def _parsing(path: Path) -> Iterator[None]:
    """The checksum was right, so whoever wrote it meant something else."""
    try:
        yield
    except (ValueError, IndexError, struct.error) as error:
        raise StoreError(f"{path} was not written by this Bagpipe: use the one that wrote it") from error


def damaged(path: Path, start: int) -> StoreError:
    """A record that should be whole is not."""
    return StoreError(f"{path} is damaged at byte {start:,}: return to an earlier mark, or load a checkpoint")


def _parse_head(data: bytes, base: int) -> tuple[int, int, int, int] | None:
    magic, kind, number, num_bytes, checksum = _HEAD.unpack(data[: _HEAD.size])
    if magic != _MAGIC or data != head(kind, number, num_bytes, checksum, base):
        return None
    return kind, number, num_bytes, checksum


def _padding(values: np.ndarray[tuple[int, ...], np.dtype[np.float32]]) -> int:
    return -values.nbytes % 8


def _octets(array: np.ndarray[tuple[int, ...], np.dtype[np.generic]], kind: str) -> Piece:
    return np.ascontiguousarray(array.astype(kind, copy=False)).reshape(-1).view(np.uint8).data
