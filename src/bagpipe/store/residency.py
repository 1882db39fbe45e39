"""A bound on the page cache that row files take, kept by letting go of what was touched (promise I5).

The kernel would keep every page that was ever read or written until memory runs short, and a page that is still to be
written can't be dropped at all: in a container with a memory limit that ends in stalls, or in a kill. So pages are
counted as they are touched, by extents of a file, and when the bound is near, extents are written out and let go in
turn, like the hand of a clock.
"""

from __future__ import annotations

import mmap
import os
from pathlib import Path
from threading import Lock

import numpy as np
from numpy.typing import NDArray

from bagpipe.arrays import Int64s
from bagpipe.errors import ConfigError, StoreError
from bagpipe.kernels import inlined, kernel
from bagpipe.store.failures import medium_failure
from bagpipe.store.libc import DONTNEED, START_WRITE, WRITE_AND_WAIT, errno_now, posix_fadvise, sync_file_range

PAGE_BYTES = mmap.PAGESIZE
EXTENT_BYTES = 4 << 20  # holds whole pages also where the kernel uses larger ones, up to 2 MiB
_PAGES_PER_EXTENT = EXTENT_BYTES // PAGE_BYTES
RESIDENT_BYTES_MIN = 4 << 20

# Three threads at most, each between counting and copying, may bring in this share of the bound uncounted.
_SLICE_SHARE = 8
_TRIGGER_SHARE = 5 / 8
_KEPT_SHARE = 3 / 8


@inlined
def _pages_of(position: int, row_bytes: int) -> tuple[int, int]:
    first = position * row_bytes // PAGE_BYTES
    last = ((position + 1) * row_bytes - 1) // PAGE_BYTES
    return first, last


@kernel
def _count(touched: NDArray[np.int32], positions: Int64s, row_bytes: int) -> int:
    """Add the pages under these rows, in ascending order, to their extents; the number added."""
    num_added = 0
    page_done = -1
    for i in range(positions.shape[0]):
        first, last = _pages_of(positions[i], row_bytes)
        for page in range(max(first, page_done + 1), last + 1):
            extent = page // _PAGES_PER_EXTENT
            if touched[extent] < _PAGES_PER_EXTENT:
                touched[extent] += 1
                num_added += 1
        page_done = last
    return num_added


@kernel
def _let_go(fd: int, extents: Int64s) -> int:
    """Write these extents out and drop them from the page cache; 0, or the number of the error."""
    for k in range(extents.shape[0]):  # all writes are under way before the first is waited for
        if sync_file_range(fd, extents[k] * EXTENT_BYTES, EXTENT_BYTES, START_WRITE) != 0:
            return errno_now()
    for k in range(extents.shape[0]):
        if sync_file_range(fd, extents[k] * EXTENT_BYTES, EXTENT_BYTES, WRITE_AND_WAIT) != 0:
            return errno_now()
        posix_fadvise(fd, extents[k] * EXTENT_BYTES, EXTENT_BYTES, DONTNEED)
    return 0


class ResidentFile:
    """A file whose touched pages are counted."""

    def __init__(self, fd: int, path: Path) -> None:
        self.fd = fd
        self.path = path
        self.touched = np.zeros(1, np.int32)

    def grow(self, num_bytes: int) -> None:
        """Make room to count a file of that many bytes."""
        num_extents = -(-num_bytes // EXTENT_BYTES)
        if num_extents > len(self.touched):
            self.touched = np.append(self.touched, np.zeros(num_extents - len(self.touched), np.int32))


class Residency:
    """The page cache of all files of a store, at most `bytes_max`."""

    def __init__(self, bytes_max: int) -> None:
        if bytes_max < RESIDENT_BYTES_MIN:
            raise ConfigError(
                f"resident_bytes_max is {bytes_max:,}: give at least {RESIDENT_BYTES_MIN:,}, better a few percent of "
                "memory, as it is what keeps rows that are read soon after they were written off the disk"
            )
        self.bytes_max = bytes_max
        self._files: list[ResidentFile] = []
        self._lock = Lock()
        self._num_pages = 0
        self._hand = 0
        self.failure: StoreError | None = None
        """Rows were lost on their way to the disk; the kernel says so once only, so it is kept here."""

    def add(self, fd: int, path: Path) -> ResidentFile:
        """Count the pages of one more file."""
        file = ResidentFile(fd, path)
        self._files.append(file)
        return file

    @property
    def bytes_now(self) -> int:
        """At most this much of the files is in the page cache."""
        return self._num_pages * PAGE_BYTES

    def rows_per_slice(self, row_bytes: int) -> int:
        """As many rows as may be copied between two calls of `touch`."""
        pages_per_row = (row_bytes + PAGE_BYTES - 2) // PAGE_BYTES + 1
        return max(self.bytes_max // _SLICE_SHARE // (pages_per_row * PAGE_BYTES), 1)

    def touch(self, file: ResidentFile, positions: Int64s, row_bytes: int) -> None:
        """Count the pages of rows about to be copied, in ascending order; let others go first when there are many."""
        with self._lock:
            file.grow((int(positions[-1]) + 1) * row_bytes)
            self._num_pages += _count(file.touched, positions, row_bytes)
            if self.bytes_now > self.bytes_max * _TRIGGER_SHARE:
                self._let_go()

    def write_out(self) -> None:
        """Return once all that was written to the files is on their disk."""
        with self._lock:
            for file in self._files:
                try:
                    os.fdatasync(file.fd)
                except OSError as error:
                    raise self._lost(file, error.errno or 0) from error

    def _lost(self, file: ResidentFile, error: int) -> StoreError:
        self.failure = medium_failure(file.path, "writing out", error)
        return self.failure

    def _let_go(self) -> None:
        """Move the hand on until enough is gone."""
        starts = np.cumsum([0, *(len(file.touched) for file in self._files)])
        touched = np.concatenate([file.touched for file in self._files])
        self._hand %= len(touched)
        in_turn = np.roll(touched, -self._hand)
        excess = self._num_pages - int(self.bytes_max * _KEPT_SHARE) // PAGE_BYTES
        num_passed = int(np.searchsorted(np.cumsum(in_turn), excess)) + 1
        passed = np.flatnonzero(in_turn[:num_passed]) + self._hand
        passed[passed >= len(touched)] -= len(touched)
        passed.sort()
        for file, start, stop in zip(self._files, starts, starts[1:], strict=False):
            extents = passed[(passed >= start) & (passed < stop)] - start
            if error := _let_go(file.fd, extents):
                raise self._lost(file, error)
            self._num_pages -= int(file.touched[extents].sum())
            file.touched[extents] = 0
        self._hand += num_passed
