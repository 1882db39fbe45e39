"""Rows in this process's memory: the default.

A table grows by chunks that never move, so growth copies nothing and readers need no lock. Memory follows the rows
that were written: a chunk is an address range at first, and takes pages as rows arrive.
"""

from __future__ import annotations

import mmap
from collections.abc import Sequence
from contextlib import suppress

import numpy as np

from bagpipe.arrays import Floats, Int64s
from bagpipe.kernels import inlined, kernel
from bagpipe.store.base import RowSource
from bagpipe.store.libc import memcpy, prefetch_bytes
from bagpipe.store.local import Backing, LocalStore

CHUNK_BYTES = 16 << 20
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


class ChunkedRows(Backing):
    """Rows of one table in chunks of a power of two of rows."""

    def __init__(self, width: int, chunk_bytes: int = CHUNK_BYTES) -> None:
        self._width = width
        self._shift = max(chunk_bytes // (width * 4), 1).bit_length() - 1
        self.chunks: list[Floats] = []
        # Replaced, not changed, when a chunk is added: a reader keeps the one it started with.
        self._addresses = np.empty(0, np.int64)
        self._num_rows = 0

    def reserve(self, num_rows: int) -> None:
        """Make room for that many rows in all, or raise MemoryError and change nothing."""
        rows_per_chunk = 1 << self._shift
        num_more = -(-num_rows // rows_per_chunk) - len(self.chunks)
        more = [self._new_chunk(first=not self.chunks and not k) for k in range(num_more)]
        self.chunks += more
        self._addresses = np.array([chunk.ctypes.data for chunk in self.chunks], np.int64)
        self._num_rows = max(self._num_rows, num_rows)

    def gather(self, positions: Int64s, out: Floats) -> None:
        """Copy the row at each position, or its first columns, into `out`; where it is -1, leave `out` as it is."""
        _gather(self._addresses, self._shift, self._width * 4, positions, out)

    def scatter(self, positions: Int64s, values: Floats) -> None:
        """Copy `values` to the rows at these positions."""
        _scatter(self._addresses, self._shift, self._width * 4, positions, values)

    @property
    def bytes_in_memory(self) -> int:
        """Memory that rows take."""
        return self._num_rows * self._width * 4

    @property
    def bytes_on_disk(self) -> int:
        """Nothing."""
        return 0

    def _new_chunk(self, first: bool) -> Floats:
        num_bytes = (self._width * 4) << self._shift
        try:
            memory = mmap.mmap(-1, num_bytes, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
        except OSError as error:
            raise MemoryError(f"can't map {num_bytes:,} B") from error
        # Random rows miss the TLB less on huge pages. The beginning of a table does without, so that a table of a few
        # rows takes a few kilobytes.
        start = _HUGE_PAGE_BYTES if first else 0
        with suppress(OSError, ValueError):  # a kernel without huge pages; a chunk that ends before
            memory.madvise(mmap.MADV_HUGEPAGE, start)
        return np.frombuffer(memory, np.float32).reshape(-1, self._width)


class MemoryStore(LocalStore):
    """Rows in this process's memory, 19-25 B a touched row more for its id."""

    def __init__(
        self, tables: Sequence[RowSource], *, chunk_bytes: int = CHUNK_BYTES, bytes_max: int | None = None
    ) -> None:
        super().__init__(tables, lambda _, width: ChunkedRows(width, chunk_bytes))
        self.bytes_in_memory_max = bytes_max
