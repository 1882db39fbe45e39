"""Old values that memory has no room for, in files without a name: a checkpoint under way needs them until it is done.

They are mapped, so that they are read as those in memory are. What is full is written out and let go, so that memory
stays bounded (I5). The files are gone with the process, and space is taken before it is used: a full disk is noticed.
"""

from __future__ import annotations

import ctypes
import mmap
import os
import tempfile
import weakref
from contextlib import suppress
from pathlib import Path

from bagpipe.store.blocks import Block, Blocks

_BLOCKS_PER_SEGMENT = 64
_WRITE_AND_WAIT = 1 | 2 | 4  # from <fcntl.h>
_sync_file_range = getattr(ctypes.CDLL(None), "sync_file_range", None)
if _sync_file_range is not None:
    _sync_file_range.argtypes = [ctypes.c_int, ctypes.c_int64, ctypes.c_int64, ctypes.c_uint]


class Segment:
    """A file for some blocks."""

    def __init__(self, directory: Path | None, num_bytes: int) -> None:
        """OSError if there is no room for it."""
        with tempfile.TemporaryFile(dir=directory) as file:
            os.posix_fallocate(file.fileno(), 0, num_bytes)
            self.memory = mmap.mmap(file.fileno(), num_bytes)
            self.fd = os.dup(file.fileno())
        weakref.finalize(self, os.close, self.fd)


class SpilledBlock(Block):
    """Part of a file."""

    def __init__(self, segment: Segment, start: int, num_bytes: int) -> None:
        self.memory = memoryview(segment.memory)[start : start + num_bytes]
        self.used = self.num_writers = 0
        self.is_unwanted = False
        self._segment, self._start = segment, start

    def let_go(self) -> None:
        """Return once it is on the disk, and takes no memory that can't be had back at once."""
        fd, num_bytes = self._segment.fd, len(self.memory)
        if _sync_file_range is not None:
            _sync_file_range(fd, self._start, num_bytes, _WRITE_AND_WAIT)
        with suppress(OSError):  # then the kernel has it in memory for longer
            self._segment.memory.madvise(mmap.MADV_DONTNEED, self._start, num_bytes)
            os.posix_fadvise(fd, self._start, num_bytes, os.POSIX_FADV_DONTNEED)


class SpillingBlocks(Blocks):
    """Blocks in memory, and where these do not suffice others on a disk. Whoever shares it locks it."""

    def __init__(self, width_max: int, bytes_max: int | None = None) -> None:
        super().__init__(width_max, bytes_max)
        self.num_bytes_spilled = 0
        """That the files take."""
        self._num_spilled = 0
        """Blocks on a disk that are in use."""
        self._unused: list[SpilledBlock] = []
        self._segments: list[Segment] = []

    def take_on_disk(self, directory: Path | None) -> SpilledBlock:
        """An empty block in a directory, or else in that of temporary files; OSError if there is no room."""
        if not self._unused:
            num_bytes = -(-self.block_bytes // mmap.PAGESIZE) * mmap.PAGESIZE
            segment = Segment(directory, _BLOCKS_PER_SEGMENT * num_bytes)
            self._unused = [SpilledBlock(segment, n * num_bytes, num_bytes) for n in range(_BLOCKS_PER_SEGMENT)]
            self.num_bytes_spilled += len(segment.memory)
            self._segments.append(segment)
        self._num_spilled += 1
        return self._unused.pop()

    def give_back(self, block: Block) -> None:
        """The block is free, now or when its writers are done; with the last on a disk the files are gone."""
        if not isinstance(block, SpilledBlock):
            super().give_back(block)
            return
        block.is_unwanted = True
        if not block.num_writers:
            block.used, block.is_unwanted = 0, False
            self._unused.append(block)
            self._num_spilled -= 1
            if not self._num_spilled:
                self._unused, self._segments, self.num_bytes_spilled = [], [], 0

    def unmap(self) -> None:
        """What was read of files is not this process's memory any more, but the kernel's to give to others."""
        for segment in self._segments:
            segment.memory.madvise(mmap.MADV_DONTNEED)
