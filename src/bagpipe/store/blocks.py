"""Memory for old values, in blocks that are used again: fresh pages cost more than the values that are copied to them.

All blocks together take `bytes_max` at most (I5). Whoever shares it locks it.
"""

from __future__ import annotations

import mmap
from contextlib import suppress
from typing import NamedTuple

import numpy as np

from bagpipe.arrays import Floats, Int32s, Int64s

BLOCK_BYTES = 4 << 20
_POSITION_BYTES, _EPOCH_BYTES, _FLOAT_BYTES, _ALIGNED = 8, 4, 4, 16


class Piece(NamedTuple):
    """Old values of rows of one table."""

    positions: Int64s
    before: Int32s
    """The epoch in which each was written."""
    values: Floats


class Block:
    """Some memory, of which the first `used` bytes are taken."""

    def __init__(self, num_bytes: int) -> None:
        memory = mmap.mmap(-1, num_bytes, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
        with suppress(OSError, ValueError):  # a kernel without huge pages
            memory.madvise(mmap.MADV_HUGEPAGE)
        self.memory: mmap.mmap | memoryview = memory
        self.used = 0
        self.num_writers = 0
        """Who copies values to it just now."""
        self.is_unwanted = False
        """It is free as soon as they are done."""

    def cut(self, width: int, count: int) -> Piece | None:
        """Room for so many rows, or as many as there is room for."""
        count = min(count, (len(self.memory) - self.used - _ALIGNED) // row_bytes(width))
        if count < 1:
            return None
        start = self.used
        piece = Piece(
            np.ndarray((count,), np.int64, self.memory, start),
            np.ndarray((count,), np.int32, self.memory, start + count * _POSITION_BYTES),
            np.ndarray((count, width), np.float32, self.memory, start + count * (_POSITION_BYTES + _EPOCH_BYTES)),
        )
        self.used += -(-count * row_bytes(width) // _ALIGNED) * _ALIGNED
        return piece


class Blocks:
    """All blocks of a history, in use or free."""

    def __init__(self, width_max: int, bytes_max: int | None = None) -> None:
        """Blocks for rows of at most so many floats."""
        some = BLOCK_BYTES if bytes_max is None else min(BLOCK_BYTES, bytes_max // 16)
        self.block_bytes = max(some, row_bytes(width_max) + _ALIGNED)
        self.num_bytes = 0
        """Memory that all blocks take."""
        self._bytes_max = bytes_max
        self._free: list[Block] = []

    def take(self) -> Block | None:
        """An empty block; None if there would be too many."""
        if self._free:
            return self._free.pop()
        if self._bytes_max is not None and self.num_bytes + self.block_bytes > self._bytes_max:
            return None
        try:
            block = Block(self.block_bytes)
        except OSError as error:
            raise MemoryError(f"can't map {self.block_bytes:,} B") from error
        self.num_bytes += self.block_bytes
        return block

    def give_back(self, block: Block) -> None:
        """The block is free, now or when its writers are done."""
        block.is_unwanted = True
        if not block.num_writers:
            block.used, block.is_unwanted = 0, False
            self._free.append(block)

    def release(self) -> None:
        """Give the memory of free blocks back."""
        self.num_bytes -= len(self._free) * self.block_bytes
        self._free.clear()


def row_bytes(width: int) -> int:
    """Memory that one old value takes."""
    return _POSITION_BYTES + _EPOCH_BYTES + width * _FLOAT_BYTES
