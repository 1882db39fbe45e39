"""Rows in files, for tables larger than memory: the memory store's chunks, mapped from files without names.

Disk and memory follow the rows touched. The kernel would keep every page that was ever touched until memory runs short,
and a page that is still to be written can't be dropped at all: in a container with a memory limit that ends in stalls,
or in a kill. So pages are counted as they are touched, and when the bound is near, extents of files are written out and
let go in turn, like the hand of a clock (I5). A page that is not known to be in memory is asked for before it is
needed, so that a batch waits for the disk once and not for each row.

Space is taken before it is used, so that a full disk is an error and changes no row (as far as a copy-on-write file
system keeps what it allocated). A disk that fails to read or write a page ends the process with SIGBUS: rows outlive a
process in checkpoints only.
"""

from __future__ import annotations

import mmap
import os
import tempfile
from pathlib import Path
from threading import Lock

import numpy as np

from bagpipe.arrays import Floats, Int64s, UInt8s
from bagpipe.errors import ConfigError, StoreError
from bagpipe.kernels import kernel
from bagpipe.store.failures import medium_failure, no_room
from bagpipe.store.libc import (
    DONTNEED,
    START_WRITE,
    WILLNEED,
    WRITE_AND_WAIT,
    errno_now,
    posix_fadvise,
    sync_file_range,
)
from bagpipe.store.memory import CHUNK_BYTES, ChunkedRows

PAGE_BYTES = mmap.PAGESIZE
EXTENT_BYTES = 4 << 20
_PAGES_PER_EXTENT = EXTENT_BYTES // PAGE_BYTES
RESIDENT_BYTES_MAX = 1 << 30
RESIDENT_BYTES_MIN = 4 << 20
# Three threads at most, each between counting and copying, may bring in this share of the bound uncounted.
_SLICE_SHARE = 8
_TRIGGER_SHARE = 5 / 8
_KEPT_SHARE = 3 / 8


@kernel
def _touch(fd: int, touched: UInt8s, shift: int, row_bytes: int, chunk_bytes: int, positions: Int64s) -> int:
    """Note the pages under these rows, and ask for those that were not noted before; how many these are."""
    num_new = 0
    for i in range(positions.shape[0]):
        if positions[i] < 0:
            continue
        begin = (positions[i] >> shift) * chunk_bytes + (positions[i] & ((1 << shift) - 1)) * row_bytes
        for page in range(begin // PAGE_BYTES, (begin + row_bytes - 1) // PAGE_BYTES + 1):
            if touched[page] == 0:
                touched[page] = 1
                num_new += 1
                posix_fadvise(fd, page * PAGE_BYTES, PAGE_BYTES, WILLNEED)
    return num_new


@kernel
def _write_out(fd: int, extents: Int64s) -> int:
    """Return once these extents are on the disk; 0, or the number of the error."""
    for k in range(extents.shape[0]):  # all writes are under way before the first is waited for
        if sync_file_range(fd, extents[k] * EXTENT_BYTES, EXTENT_BYTES, START_WRITE) != 0:
            return errno_now()
    for k in range(extents.shape[0]):
        if sync_file_range(fd, extents[k] * EXTENT_BYTES, EXTENT_BYTES, WRITE_AND_WAIT) != 0:
            return errno_now()
    return 0


class Residency:
    """The page cache of the files of a store, at most `bytes_max`."""

    def __init__(self, bytes_max: int = RESIDENT_BYTES_MAX) -> None:
        if bytes_max < RESIDENT_BYTES_MIN:
            raise ConfigError(
                f"resident_bytes_max is {bytes_max:,}: give at least {RESIDENT_BYTES_MIN:,}, better a few percent of "
                "memory, as it is what keeps rows that are read soon after they were written off the disk"
            )
        self.bytes_max = bytes_max
        self.files: list[FileRows] = []
        self.failure: StoreError | None = None
        """Rows were lost on their way to the disk; the kernel says so once only, so it is kept here."""
        self._lock = Lock()
        self._num_pages = 0
        self._hand = 0

    @property
    def bytes_now(self) -> int:
        """At most this much of the files is in the page cache."""
        return self._num_pages * PAGE_BYTES

    def touch(self, file: FileRows, positions: Int64s) -> None:
        """Rows are about to be copied; let others go first when there are many."""
        with self._lock:
            if self.failure is not None:
                raise self.failure
            self._num_pages += file.note(positions)
            if self.bytes_now > self.bytes_max * _TRIGGER_SHARE:
                self._let_go()

    def _let_go(self) -> None:
        """Move the hand on over the extents of all files until enough is gone."""
        counts = [file.pages_by_extent() for file in self.files]
        every, starts = np.concatenate(counts), np.cumsum([0, *map(len, counts)])
        self._hand %= len(every)
        in_turn = np.roll(every, -self._hand)
        excess = self._num_pages - int(self.bytes_max * _KEPT_SHARE) // PAGE_BYTES
        num_passed = int(np.searchsorted(np.cumsum(in_turn), excess)) + 1
        passed = np.sort((np.flatnonzero(in_turn[:num_passed]) + self._hand) % len(every))
        for file, start, stop in zip(self.files, starts, starts[1:], strict=False):
            extents = passed[(passed >= start) & (passed < stop)] - start
            try:
                file.let_go(extents)
            except OSError as error:
                self.failure = medium_failure(file.path, "writing out", error.errno or 0)
                raise self.failure from error
            self._num_pages -= int(every[start:stop][extents].sum())
        self._hand += num_passed


class FileRows(ChunkedRows):
    """Rows of one table in a file without a name."""

    def __init__(self, width: int, directory: Path, residency: Residency, chunk_bytes: int = CHUNK_BYTES) -> None:
        super().__init__(width, chunk_bytes)
        self.path, self._residency = directory, residency
        self._file = tempfile.TemporaryFile(dir=directory)  # noqa: SIM115 - open as long as the rows are
        self._maps: list[mmap.mmap] = []
        # Whole pages: a chunk is mapped at its place in the file.
        self._chunk_bytes = -(-((width * 4) << self._shift) // mmap.ALLOCATIONGRANULARITY) * mmap.ALLOCATIONGRANULARITY
        self._touched: UInt8s = np.zeros(0, np.uint8)
        """Whether each page of the file was touched since it was let go."""
        residency.files.append(self)

    def gather(self, positions: Int64s, out: Floats) -> None:
        """Copy the row at each position, or its first columns, into `out`; where it is -1, leave `out` as it is."""
        for part in self._slices(len(positions)):
            self._residency.touch(self, positions[part])
            super().gather(positions[part], out[part])

    def scatter(self, positions: Int64s, values: Floats) -> None:
        """Copy `values` to the rows at these positions."""
        for part in self._slices(len(positions)):
            self._residency.touch(self, positions[part])
            super().scatter(positions[part], values[part])

    @property
    def bytes_in_memory(self) -> int:
        """What the page cache has of them is counted by `Residency`."""
        return 0

    @property
    def bytes_on_disk(self) -> int:
        """What the file takes."""
        return len(self._maps) * self._chunk_bytes

    def note(self, positions: Int64s) -> int:
        """Note the pages of these rows; how many were not known to be in memory."""
        return _touch(self._file.fileno(), self._touched, self._shift, self._width * 4, self._chunk_bytes, positions)

    def pages_by_extent(self) -> Int64s:
        """How many pages of each extent are in memory."""
        padded = np.zeros(-(-len(self._touched) // _PAGES_PER_EXTENT) * _PAGES_PER_EXTENT, np.uint8)
        padded[: len(self._touched)] = self._touched
        counts: Int64s = padded.reshape(-1, _PAGES_PER_EXTENT).sum(1, dtype=np.int64)
        return counts

    def let_go(self, extents: Int64s) -> None:
        """Write extents out and drop them from memory; OSError if the disk has failed."""
        fd = self._file.fileno()
        if error := _write_out(fd, extents):
            raise OSError(error, os.strerror(error))
        for extent in extents.tolist():
            begin, end = extent * EXTENT_BYTES, min((extent + 1) * EXTENT_BYTES, self.bytes_on_disk)
            for number in range(begin // self._chunk_bytes, -(-end // self._chunk_bytes)):
                first = max(begin - number * self._chunk_bytes, 0)
                last = min(end - number * self._chunk_bytes, self._chunk_bytes)
                self._maps[number].madvise(mmap.MADV_DONTNEED, first, last - first)
            os.posix_fadvise(fd, begin, end - begin, DONTNEED)
            self._touched[begin // PAGE_BYTES : end // PAGE_BYTES] = 0

    def _slices(self, count: int) -> list[slice]:
        """As many rows at once as may be copied between two looks at the bound."""
        pages_per_row = (self._width * 4 + PAGE_BYTES - 2) // PAGE_BYTES + 1
        size = max(self._residency.bytes_max // _SLICE_SHARE // (pages_per_row * PAGE_BYTES), 1)
        return [slice(start, start + size) for start in range(0, count, size)]

    def _new_chunk(self, first: bool) -> Floats:  # noqa: ARG002
        end = (len(self._maps) + 1) * self._chunk_bytes
        try:
            os.posix_fallocate(self._file.fileno(), 0, end)
            memory = mmap.mmap(self._file.fileno(), self._chunk_bytes, offset=end - self._chunk_bytes)
        except OSError as error:
            raise no_room(self.path, end, error) from error
        memory.madvise(mmap.MADV_RANDOM)  # rows are scattered: what lies around one is not needed
        self._maps.append(memory)
        self._touched = np.append(self._touched, np.zeros(self._chunk_bytes // PAGE_BYTES, np.uint8))
        return np.frombuffer(memory, np.float32, ((self._width) << self._shift)).reshape(-1, self._width)
