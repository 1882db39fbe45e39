"""Room for arrays that may outgrow memory: in memory while they fit, then in mapped files (I5).

The pages of mapped files that the process holds are counted, and let go when they are too many; their contents stay
with the operating system, which keeps them cached as long as nobody else needs the memory.
"""

from __future__ import annotations

import mmap
import os
import tempfile
from pathlib import Path
from threading import Lock
from typing import Any

import numpy as np
from numpy.typing import NDArray

from bagpipe.errors import ShardError

PIECE = 1024
"""So many random accesses to mapped arrays may pass between two calls of `relieve`: the kernel maps up to 16 pages at
each, so this is at most 64 MiB that nobody counted."""
_SMALL_SHARE = 256
_MEMORY_SHARE = 3 / 4
_ANONYMOUS_BYTES_MIN = 1 << 18


class Held:
    """An array, and how to give it back."""

    def __init__(self, array: NDArray[Any], mapped: mmap.mmap | None) -> None:
        self.array, self.mapped = array, mapped


class Space:
    """At most `bytes_max` of memory for arrays, the rest in files of a directory; may be used by several threads."""

    def __init__(self, directory: Path, bytes_max: int) -> None:
        self.directory, self.bytes_max = directory, bytes_max
        self._lock = Lock()
        self._bytes_now = 0
        self._mapped: list[mmap.mmap] = []
        self._resident_elsewhere = resident_file_bytes()

    def zeros(self, shape: tuple[int, ...], dtype: type[np.generic]) -> Held:
        """An array of zeros."""
        num_bytes = int(np.prod(shape)) * np.dtype(dtype).itemsize
        with self._lock:
            # A small array is one that every block uses all over: it would be in memory in any case.
            small = num_bytes <= self.bytes_max // _SMALL_SHARE
            if small or self._bytes_now + num_bytes <= self.bytes_max * _MEMORY_SHARE:
                self._bytes_now += num_bytes
                return Held(_anonymous(num_bytes, dtype).reshape(shape), None)
            mapped = self._map(num_bytes)
            self._mapped.append(mapped)
        return Held(np.frombuffer(mapped, dtype).reshape(shape), mapped)

    def release(self, held: Held) -> None:
        """Take an array back; nobody may hold a view of it."""
        with self._lock:
            if held.mapped is None:
                self._bytes_now -= held.array.nbytes
            else:
                self._mapped.remove(held.mapped)
        held.array = np.empty(0)
        held.mapped = None  # unmapped with its last view

    def relieve(self) -> None:
        """Let go of the pages of mapped files when there are many."""
        if resident_file_bytes() - self._resident_elsewhere <= self.bytes_max * (1 - _MEMORY_SHARE):
            return
        with self._lock:
            for mapped in self._mapped:
                mapped.madvise(mmap.MADV_DONTNEED)
            self._resident_elsewhere = resident_file_bytes()

    def _map(self, num_bytes: int) -> mmap.mmap:
        try:
            # It has no name, so it is gone when the process is, whatever ends it.
            with tempfile.TemporaryFile(dir=self.directory, buffering=0) as file:
                # Blocks are reserved now: a write to a mapped page that finds the disk full would end the process.
                os.posix_fallocate(file.fileno(), 0, max(num_bytes, 1))
                mapped = mmap.mmap(file.fileno(), max(num_bytes, 1))
        except OSError as error:
            raise ShardError(
                f"{self.directory} has no room for {num_bytes:,} bytes of vocabularies ({error.strerror}): free space, "
                "or raise --memory"
            ) from error
        mapped.madvise(mmap.MADV_RANDOM)
        return mapped


def _anonymous(num_bytes: int, dtype: type[np.generic]) -> NDArray[Any]:
    """Zeros in memory that goes back to the operating system at once when it is given back: arrays that grow by
    being copied would else leave holes in the heap."""
    if num_bytes < _ANONYMOUS_BYTES_MIN:
        return np.zeros(num_bytes // np.dtype(dtype).itemsize, dtype)
    return np.frombuffer(mmap.mmap(-1, num_bytes, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS), dtype)


def resident_bytes() -> int:
    """Memory of this process."""
    return _statm(1)


def resident_file_bytes() -> int:
    """The part of it that shows files."""
    return _statm(2)


def _statm(field: int) -> int:
    return int(Path("/proc/self/statm").read_bytes().split()[field]) * mmap.PAGESIZE
