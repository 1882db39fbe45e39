"""Rows of one table by position: in chunks of memory, or of a file without a name.

A table grows by chunks that never move, so growth copies nothing and readers need no lock. Memory follows the rows
that were written: a chunk is an address range at first, and takes pages as rows arrive.
"""

from __future__ import annotations

import ctypes
import mmap
import os
import tempfile
import weakref
from contextlib import suppress
from pathlib import Path
from typing import Any

import numpy as np

from bagpipe.arrays import Floats, Int64s
from bagpipe.kernels import inlined, kernel
from bagpipe.store.libc import memcpy, prefetch_bytes

CHUNK_BYTES = 16 << 20
PAGE_BYTES = mmap.PAGESIZE
_HUGE_PAGE_BYTES = 2 << 20
_AHEAD = 8


@inlined
def _address(chunks: Int64s, shift: int, row_bytes: int, position: int) -> int:
    return chunks[position >> shift] + (position & ((1 << shift) - 1)) * row_bytes  # type: ignore[no-any-return]


@kernel
def _gather(chunks: Int64s, shift: int, row_bytes: int, positions: Int64s, out: Floats) -> None:
    """The copy of as many columns as `out` has, at about half of memory's speed: the misses of eight rows overlap."""
    size = out.shape[1] * 4
    for i in range(positions.shape[0]):
        if i + _AHEAD < positions.shape[0] and positions[i + _AHEAD] >= 0:
            prefetch_bytes(_address(chunks, shift, row_bytes, positions[i + _AHEAD]), size)
        if positions[i] >= 0:
            memcpy(out.ctypes.data + i * size, _address(chunks, shift, row_bytes, positions[i]), size)


@kernel
def _scatter(chunks: Int64s, shift: int, row_bytes: int, positions: Int64s, values: Floats) -> None:
    """As `_gather`, the other way."""
    for i in range(positions.shape[0]):
        if i + _AHEAD < positions.shape[0]:
            prefetch_bytes(_address(chunks, shift, row_bytes, positions[i + _AHEAD]), row_bytes)
        memcpy(_address(chunks, shift, row_bytes, positions[i]), values.ctypes.data + i * row_bytes, row_bytes)


class ChunkedRows:
    """Rows of one table in chunks of a power of two of rows; position 0, 1, 2, ... is the order of first write."""

    def __init__(self, width: int, chunk_bytes: int = CHUNK_BYTES) -> None:
        self._width, self._row_bytes = width, width * 4
        self._shift = max(chunk_bytes // self._row_bytes, 1).bit_length() - 1
        # A chunk may be mapped from its place in a file, so it has whole pages.
        self._chunk_bytes = -(-(self._row_bytes << self._shift) // PAGE_BYTES) * PAGE_BYTES
        self.chunks: list[Floats] = []
        # Replaced, not changed, when a chunk is added: a reader keeps the one it started with.
        self._addresses = np.empty(0, np.int64)
        self._num_rows = 0

    def reserve(self, num_rows: int) -> None:
        """Make room for that many rows in all, or raise and change nothing. Rows that are there stay where they are."""
        numbers, size = range(len(self.chunks), -(-num_rows // (1 << self._shift))), self._width << self._shift
        self.chunks += [np.frombuffer(self._map(k), np.float32, size).reshape(-1, self._width) for k in numbers]
        self._addresses = np.array([chunk.ctypes.data for chunk in self.chunks], np.int64)
        self._num_rows = max(self._num_rows, num_rows)

    def gather(self, positions: Int64s, out: Floats) -> None:
        """Copy the row at each position, or its first columns, into `out`; where it is -1, leave `out` as it is."""
        _gather(self._addresses, self._shift, self._row_bytes, positions, out)

    def scatter(self, positions: Int64s, values: Floats) -> None:
        """Copy `values` to the rows at these positions."""
        _scatter(self._addresses, self._shift, self._row_bytes, positions, values)

    @property
    def bytes_in_memory(self) -> int:
        """Memory that rows take."""
        return self._num_rows * self._row_bytes

    @property
    def bytes_on_disk(self) -> int:
        """Disk that rows take."""
        return 0

    def _map(self, number: int) -> Any:
        """A buffer for a chunk, with zeros; MemoryError if there is no room."""
        try:
            memory = mmap.mmap(-1, self._chunk_bytes, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
        except OSError as error:
            raise MemoryError(f"can't map {self._chunk_bytes:,} B") from error
        # Random rows miss the TLB less on huge pages. The beginning of a table does without, so that a table of a few
        # rows takes a few kilobytes.
        with suppress(OSError, ValueError):  # a kernel without huge pages; a chunk that ends before
            memory.madvise(mmap.MADV_HUGEPAGE, 0 if number else _HUGE_PAGE_BYTES)
        return memory


class ScratchFile:
    """A file without a name, so that nothing is left of it after any end of the process."""

    def __init__(self, directory: Path | None) -> None:
        """None: in the directory of temporary files. Raises OSError, as its methods do."""
        with tempfile.TemporaryFile(dir=directory) as file:
            self.fd = os.dup(file.fileno())
        weakref.finalize(self, os.close, self.fd).atexit = False  # open as long as somebody copies rows
        self.num_bytes = 0
        """That are allocated."""

    def allocate(self, num_bytes: int) -> None:
        """Take disk for so many bytes in all, or change nothing."""
        try:
            os.posix_fallocate(self.fd, self.num_bytes, num_bytes - self.num_bytes)
        except OSError:
            os.ftruncate(self.fd, self.num_bytes)  # an allocation that fails may leave a part of it behind
            raise
        self.num_bytes = num_bytes

    def map(self, offset: int, num_bytes: int) -> Any:
        """A buffer over bytes of it for random access, mapped as long as somebody has it.

        Other than with Python's own, the file may end before, and grow later: whoever touches what is beyond gets a
        SIGBUS.
        """
        protection = mmap.PROT_READ | mmap.PROT_WRITE
        address = _libc.mmap(None, num_bytes, protection, mmap.MAP_SHARED, self.fd, offset)
        if address == ctypes.c_void_p(-1).value:
            error = ctypes.get_errno()
            raise OSError(error, os.strerror(error))
        _libc.madvise(address, num_bytes, mmap.MADV_RANDOM)  # what lies around a row is not needed with it
        memory = (ctypes.c_char * num_bytes).from_address(address)
        weakref.finalize(memory, _libc.munmap, address, num_bytes).atexit = False  # threads may still use it then
        return memory


_libc = ctypes.CDLL(None, use_errno=True)
_libc.mmap.restype = ctypes.c_void_p
_libc.mmap.argtypes = (ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int, ctypes.c_int, ctypes.c_int, ctypes.c_int64)
_libc.munmap.argtypes = (ctypes.c_void_p, ctypes.c_size_t)
_libc.madvise.argtypes = (ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int)
