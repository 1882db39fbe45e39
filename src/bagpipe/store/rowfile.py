"""The rows of one table in one file, at the positions of their first write.

Rows are read and written by pread and pwrite: a disk that fails or a file that was cut off gives an error, where a
mapping would kill the process. Space is allocated before it is needed, so a full disk is noticed before a row changes.

A batch of random rows is sorted by position, and rows that share a page take one call. What the page cache has is
copied at once; for the rest the disk is told all pages first, and waited for after: a queue of thousands of reads
instead of one at a time. A write to a page that is not in the cache would wait for it too, so it is announced likewise.
"""

from __future__ import annotations

import errno
import os
from collections.abc import Iterator
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from bagpipe.arrays import Floats, Int64s
from bagpipe.kernels import inlined, kernel
from bagpipe.store.failures import medium_failure, no_room, too_short
from bagpipe.store.libc import NOWAIT, WILLNEED, errno_now, memcpy, posix_fadvise, pread, preadv2, pwrite
from bagpipe.store.local import Backing
from bagpipe.store.residency import PAGE_BYTES, Residency

Bytes = NDArray[np.uint8]

ALLOCATION_STEP_BYTES = 64 << 20
_ALLOCATION_STEP_BYTES_MIN = 1 << 20
_BUFFER_BYTES = 256 << 10
_END_OF_FILE = -1
_EINTR = errno.EINTR


@inlined
def _end_of_run(positions: Int64s, start: int, row_bytes: int, gap_bytes: int, run_bytes_max: int) -> int:
    """The first index from `start` whose row lies more than a gap behind the one before, or too far from the first."""
    stop = start + 1
    first = positions[start] * row_bytes
    while stop < positions.shape[0]:
        begin = positions[stop] * row_bytes
        if begin - (positions[stop - 1] + 1) * row_bytes > gap_bytes or begin + row_bytes - first > run_bytes_max:
            break
        stop += 1
    return stop


@inlined
def _deliver(
    positions: Int64s, order: Int64s, start: int, stop: int, row_bytes: int, buffer: Bytes, out: Floats
) -> None:
    source, target, size = buffer.ctypes.data, out.ctypes.data, out.shape[1] * 4
    for k in range(start, stop):
        memcpy(target + order[k] * size, source + (positions[k] - positions[start]) * row_bytes, size)


@kernel
def _read_cached(
    fd: int, positions: Int64s, order: Int64s, row_bytes: int, buffer: Bytes, out: Floats, cold: Int64s
) -> int:
    """Copy the rows that the page cache has, ask the disk for the others; list where their runs start; how many."""
    vector = np.empty(2, np.int64)  # struct iovec
    vector[0] = buffer.ctypes.data
    num_cold = 0
    start = 0
    while start < positions.shape[0]:
        stop = _end_of_run(positions, start, row_bytes, PAGE_BYTES, buffer.shape[0])
        offset = positions[start] * row_bytes
        vector[1] = (positions[stop - 1] + 1) * row_bytes - offset
        if preadv2(fd, vector.ctypes.data, 1, offset, NOWAIT) == vector[1]:
            _deliver(positions, order, start, stop, row_bytes, buffer, out)
        else:
            posix_fadvise(fd, offset, vector[1], WILLNEED)
            cold[num_cold] = start
            num_cold += 1
        start = stop
    return num_cold


@kernel
def _read_cold(
    fd: int, positions: Int64s, order: Int64s, row_bytes: int, buffer: Bytes, out: Floats, cold: Int64s
) -> int:
    """Copy the rows of the listed runs, waiting for the disk; 0, or the number of the error."""
    for k in range(cold.shape[0]):
        start = cold[k]
        stop = _end_of_run(positions, start, row_bytes, PAGE_BYTES, buffer.shape[0])
        offset = positions[start] * row_bytes
        size = (positions[stop - 1] + 1) * row_bytes - offset
        done = 0
        while done < size:
            result = pread(fd, buffer.ctypes.data + done, size - done, offset + done)
            if result == 0:
                return _END_OF_FILE
            if result > 0:
                done += result
            else:
                error = errno_now()
                if error != _EINTR:
                    return error
        _deliver(positions, order, start, stop, row_bytes, buffer, out)
    return 0


@kernel
def _announce(fd: int, positions: Int64s, row_bytes: int, buffer: Bytes) -> None:
    """Ask the disk for the pages of these rows, and wait for none."""
    start = 0
    while start < positions.shape[0]:
        stop = _end_of_run(positions, start, row_bytes, PAGE_BYTES, buffer.shape[0])
        offset = positions[start] * row_bytes
        posix_fadvise(fd, offset, (positions[stop - 1] + 1) * row_bytes - offset, WILLNEED)
        start = stop


@kernel
def _write(fd: int, positions: Int64s, order: Int64s, row_bytes: int, buffer: Bytes, values: Floats) -> int:
    """Copy rows into the file; 0, or the number of the error."""
    start = 0
    while start < positions.shape[0]:
        stop = _end_of_run(positions, start, row_bytes, 0, buffer.shape[0])
        for k in range(start, stop):
            memcpy(buffer.ctypes.data + (k - start) * row_bytes, values.ctypes.data + order[k] * row_bytes, row_bytes)
        size = (stop - start) * row_bytes
        done = 0
        while done < size:
            result = pwrite(fd, buffer.ctypes.data + done, size - done, positions[start] * row_bytes + done)
            if result >= 0:
                done += result
            else:
                error = errno_now()
                if error != _EINTR:
                    return error
        start = stop
    return 0


class RowFile(Backing):
    """Rows of one table in an open file; the file is the caller's to close."""

    def __init__(self, fd: int, path: Path, width: int, residency: Residency) -> None:
        self.path = path
        self._fd = fd
        self._row_bytes = width * 4
        self._residency = residency
        self._resident = residency.add(fd, path)
        self._num_bytes = os.fstat(fd).st_size
        # Pages beyond are new, no use to ask the disk for them; only a hint, so two writers need no lock for it.
        self._num_rows_written = self._num_bytes // self._row_bytes
        self._buffer_bytes = max(_BUFFER_BYTES, self._row_bytes)
        os.posix_fadvise(fd, 0, 0, os.POSIX_FADV_RANDOM)  # else each row read brings its neighbourhood

    def reserve(self, num_rows: int) -> None:
        """Allocate disk for that many rows in all, or raise and change nothing."""
        needed = num_rows * self._row_bytes
        if needed <= self._num_bytes:
            return
        step = min(max(self._num_bytes, _ALLOCATION_STEP_BYTES_MIN), ALLOCATION_STEP_BYTES)
        try:
            self._allocate(max(self._num_bytes + step, needed))
        except OSError:
            try:
                self._allocate(needed)
            except OSError as error:
                raise no_room(self.path, needed, error) from error

    def gather(self, positions: Int64s, out: Floats) -> None:
        """Copy the row at each position into `out`; where the position is -1, leave `out` as it is.

        Pages are what a disk reads, so rows are read whole, and cut where `out` has fewer columns.
        """
        buffer = np.empty(self._buffer_bytes, np.uint8)
        for ascending, order in self._slices(positions):
            cold = np.empty(len(ascending), np.int64)
            num_cold = _read_cached(self._fd, ascending, order, self._row_bytes, buffer, out, cold)
            error = _read_cold(self._fd, ascending, order, self._row_bytes, buffer, out, cold[:num_cold])
            if error == _END_OF_FILE:
                needed = (int(ascending[-1]) + 1) * self._row_bytes
                raise too_short(self.path, os.fstat(self._fd).st_size, needed)
            if error:
                raise medium_failure(self.path, "reading", error)

    def scatter(self, positions: Int64s, values: Floats) -> None:
        """Copy `values` to the rows at these positions."""
        buffer = np.empty(self._buffer_bytes, np.uint8)
        num_known = self._num_rows_written
        for ascending, order in self._slices(positions):
            _announce(self._fd, ascending[: np.searchsorted(ascending, num_known)], self._row_bytes, buffer)
            if error := _write(self._fd, ascending, order, self._row_bytes, buffer, values):
                raise medium_failure(self.path, "writing", error)
            self._num_rows_written = max(self._num_rows_written, int(ascending[-1]) + 1)

    @property
    def bytes_in_memory(self) -> int:
        """Nothing of its own: the page cache is counted for all files together."""
        return 0

    @property
    def bytes_on_disk(self) -> int:
        """Disk that the file takes, what is allocated ahead included."""
        try:
            return os.fstat(self._fd).st_blocks * 512
        except OSError as error:  # the store was closed meanwhile
            raise medium_failure(self.path, "measuring", error.errno or 0) from error

    def trim(self, num_rows: int) -> None:
        """Give back the disk that is allocated beyond that many rows."""
        try:
            os.ftruncate(self._fd, num_rows * self._row_bytes)
        except OSError as error:
            raise medium_failure(self.path, "shortening", error.errno or 0) from error
        self._num_bytes = num_rows * self._row_bytes

    def _allocate(self, num_bytes: int) -> None:
        try:
            os.posix_fallocate(self._fd, self._num_bytes, num_bytes - self._num_bytes)
        except OSError:
            os.ftruncate(self._fd, self._num_bytes)  # an allocation that fails may leave a part of it behind
            raise
        self._num_bytes = num_bytes

    def _slices(self, positions: Int64s) -> Iterator[tuple[Int64s, Int64s]]:
        """The positions from 0 up in ascending order, with their index, in slices whose pages are counted."""
        order = np.argsort(positions)
        order = order[np.searchsorted(positions, 0, sorter=order) :]
        rows_per_slice = self._residency.rows_per_slice(self._row_bytes)
        for start in range(0, len(order), rows_per_slice):
            part = order[start : start + rows_per_slice]
            ascending = positions[part]
            self._residency.touch(self._resident, ascending, self._row_bytes)
            yield ascending, part
