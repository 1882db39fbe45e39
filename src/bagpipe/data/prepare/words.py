"""The values of a table while they are being numbered: files that only grow, in order of first appearance.

What was committed (a number of values) stays as it is; what came after it is cut off when a stopped run goes on (I2).
"""

from __future__ import annotations

import os
from contextlib import suppress
from pathlib import Path
from typing import IO, Any

import numpy as np
import pyarrow as pa
from numpy.typing import NDArray

from bagpipe.data.prepare.space import PIECE
from bagpipe.errors import ShardError
from bagpipe.kernels import kernel

RECORD = np.dtype([("key", "<u8"), ("end", "<u8"), ("check", "<u4")])
"""What is kept of a value beside its text: key, where its text ends in the file of texts, check."""


@kernel
def gather_texts(
    data: NDArray[np.uint8], begins: NDArray[np.int64], ends: NDArray[np.int64], out: NDArray[np.uint8]
) -> None:
    """Copy stretches of bytes one after the other; about 10 ns a short text."""
    at = 0
    for i in range(len(begins)):
        for place in range(begins[i], ends[i]):
            out[at] = data[place]
            at += 1


class Words:
    """The values of one table, in two files: records of 20 bytes, and texts without anything between them."""

    def __init__(self, directory: Path, number: int) -> None:
        self._paths = directory / f"keys-{number:05d}.bin", directory / f"texts-{number:05d}.bin"
        self._files: tuple[IO[bytes], ...] = tuple(_open(path) for path in self._paths)
        self._size, self._end = 0, 0
        self._committed = 0

    def __len__(self) -> int:
        return self._size

    def append(self, keys: NDArray[np.uint64], checks: NDArray[np.uint32], values: pa.Array) -> None:
        """Add values: strings, or integers, which their keys hold already."""
        records = np.zeros(len(keys), RECORD)
        records["key"], records["check"] = keys, checks
        if not pa.types.is_integer(values.type):
            ends, texts = _texts(values)
            records["end"] = self._end + ends
            self._end += len(texts)
            self._write(1, texts)
        self._write(0, records.tobytes())
        self._size += len(keys)

    def commit(self) -> int:
        """Bring all to disk; how many values there are."""
        if self._size > self._committed:
            for path, file in zip(self._paths, self._files, strict=True):
                try:
                    file.flush()
                    os.fsync(file.fileno())
                except OSError as error:
                    raise _full(path, error) from error
            self._committed = self._size
        return self._size

    def cut(self, size: int) -> None:
        """Keep the first values, as they were committed."""
        records = self._mapped(0, RECORD)
        if len(records) < size:
            raise ShardError(f"{self._paths[0]} has {len(records)} values instead of {size}: remove the directory")
        self._end = int(records[size - 1]["end"]) if size else 0
        if self._paths[1].stat().st_size < self._end:
            raise ShardError(f"{self._paths[1]} is shorter than {self._end} bytes: remove the directory")
        for file, length in zip(self._files, (size * RECORD.itemsize, self._end), strict=True):
            file.truncate(length)
            file.seek(length)
        self._size = self._committed = size

    def records(self, start: int, stop: int) -> NDArray[Any]:
        """The records of values start to stop."""
        return np.array(self._mapped(0, RECORD)[start:stop])

    def values(self, positions: NDArray[np.uint32], integers: bool) -> pa.Array:
        """The values at these positions, in this order."""
        places = positions.astype(np.int64)
        neighbours = len(places) > 0 and (np.diff(places) == 1).all()
        step = len(places) if neighbours else PIECE
        pieces = [self._values(places[at : at + step], integers) for at in range(0, len(places), step)]
        return pa.concat_arrays(pieces) if pieces else pa.array([], pa.int64() if integers else pa.large_string())

    def _values(self, places: NDArray[np.int64], integers: bool) -> pa.Array:
        records = self._mapped(0, RECORD)
        if integers:
            return pa.array(records["key"][places].view(np.int64))
        ends = records["end"][places].astype(np.int64)
        begins = np.where(places > 0, records["end"][np.maximum(places - 1, 0)], 0).astype(np.int64)
        offsets = np.concatenate([np.zeros(1, np.int64), np.cumsum(ends - begins)])
        texts = np.empty(offsets[-1], np.uint8)
        gather_texts(self._mapped(1, np.dtype(np.uint8)), begins, ends, texts)
        return pa.LargeStringArray.from_buffers(len(places), pa.py_buffer(offsets), pa.py_buffer(texts))

    def close(self) -> None:
        """Close the files."""
        for file in self._files:
            with suppress(OSError):  # what was not committed is not needed
                file.close()

    def _mapped(self, which: int, dtype: np.dtype[Any]) -> NDArray[Any]:
        """A file as an array; a mapping of its own, so that its pages are gone when the caller is done."""
        self._files[which].flush()
        size = self._paths[which].stat().st_size // dtype.itemsize
        return np.memmap(self._paths[which], dtype, "r", shape=(size,)) if size else np.zeros(0, dtype)

    def _write(self, which: int, data: bytes) -> None:
        try:
            self._files[which].write(data)
        except OSError as error:
            raise _full(self._paths[which], error) from error


def _texts(values: pa.Array) -> tuple[NDArray[np.int64], bytes]:
    """Where each text ends, and all of them."""
    values = values.cast(pa.large_string())
    _, offsets, data = values.buffers()
    ends = np.frombuffer(offsets, np.int64)[values.offset : values.offset + len(values) + 1]
    texts = memoryview(data)[ends[0] : ends[-1]].tobytes() if data is not None and len(ends) else b""
    return ends[1:] - ends[0], texts


def _open(path: Path) -> IO[bytes]:
    try:
        return path.open("r+b" if path.exists() else "w+b", buffering=1 << 16)
    except OSError as error:
        raise _full(path, error) from error


def _full(path: Path, error: OSError) -> ShardError:
    return ShardError(f"{path} can't be written ({error.strerror}): free space or choose another directory")
