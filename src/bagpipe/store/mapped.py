"""Rows in files, for tables larger than memory: the memory store's chunks, mapped from files without names.

Disk and memory follow the rows touched. The kernel would keep every page that was ever touched until memory runs short,
and a page that is still to be written can't be dropped at all: in a container with a memory limit that ends in stalls,
or in a kill. So pages are counted before they are touched, and when the bound is reached, extents of files are written
out and dropped in turn, like the hand of a clock (I5). A page that is not known to be in memory is asked for before it
is needed, so that a batch waits for the disk once and not once a row.

What of a disk's failures is an error (I8), and what is not:
- A full disk: space is allocated before a row changes, so that the write is refused and changes nothing (a file system
  that copies on write may break its word).
- A page that can't be read: pages are mapped by a system call that reports it. One that the operating system has
  dropped meanwhile is read again by an access to memory: if that fails, the process ends with SIGBUS.
- A page that can't be written out: noticed at the latest right after the next rows are copied, before anyone sees them,
  and from then on the store refuses all work.
"""

from __future__ import annotations

import errno
import os
import re
import resource
import sys
import tempfile
from collections.abc import Iterator, Sequence
from contextlib import suppress
from pathlib import Path
from threading import Condition
from typing import Any

import numpy as np

from bagpipe.arrays import Floats, Int64s, UInt8s
from bagpipe.errors import ConfigError, StoreError
from bagpipe.kernels import inlined, kernel
from bagpipe.os_errors import failing, no_room, os_error
from bagpipe.store.base import RowSource, StoreStats, check_widths
from bagpipe.store.chunks import PAGE_BYTES, ChunkedRows, ScratchFile
from bagpipe.store.libc import (
    DONTNEED,
    FORGET_MAPPED,
    POPULATE_READ,
    POPULATE_WRITE,
    START_WRITE,
    WAIT_BEFORE,
    WILLNEED,
    WRITE_AND_WAIT,
    errno_now,
    madvise,
    posix_fadvise,
    sync_file_range,
)
from bagpipe.store.local import LocalStore

EXTENT_BYTES = 4 << 20  # holds whole pages also where the kernel uses larger ones, up to 2 MiB
CHUNK_BYTES = 64 << 20  # a process may have 65,530 mappings: 4 TB
RESIDENT_BYTES_MAX = 1 << 30
RESIDENT_BYTES_MIN = 4 << 20

_PAGES_PER_EXTENT = EXTENT_BYTES // PAGE_BYTES
_KEPT_SHARE = 5 / 8  # of the bound, when pages have been dropped
_PART_SHARE = 1 / 8  # of the bound, at most, that is brought in at once
_GAP_PAGES = 1  # between two that are needed are read along: a larger read costs less than two
_ALLOCATION_BYTES_MIN, _ALLOCATION_BYTES_MAX = 1 << 20, 64 << 20
_DOUBT_COPIES = 64
_EINTR, _EAGAIN, _EINVAL, _EFAULT, _EIO = errno.EINTR, errno.EAGAIN, errno.EINVAL, errno.EFAULT, errno.EIO
_NO_PAGES = np.empty(0, np.int64)
_EARLIER_FILES = re.compile(r"table-\d{5}\.(rows|ids)")


@inlined
def _pages_of(position: int, shift: int, row_bytes: int, chunk_bytes: int) -> tuple[int, int]:
    begin = (position >> shift) * chunk_bytes + (position & ((1 << shift) - 1)) * row_bytes
    return begin // PAGE_BYTES, (begin + row_bytes - 1) // PAGE_BYTES + 1


@kernel
def _note(
    noted: UInt8s, shift: int, row_bytes: int, chunk_bytes: int, positions: Int64s, num_max: int, all_: int, out: Int64s
) -> tuple[int, int, int]:
    """Note the pages of rows from the first on, until more than `num_max` would be new.

    Returns how many rows that are, how many pages are new, and how many are listed in `out`: the new ones, or with
    `all_` all of them, maybe more than once.
    """
    num_new = 0
    num_listed = 0
    for i in range(positions.shape[0]):
        if positions[i] < 0:
            continue
        first, stop = _pages_of(positions[i], shift, row_bytes, chunk_bytes)
        missing = 0
        for page in range(first, stop):
            missing += 1 - noted[page]
        if missing == 0 and all_ == 0:
            continue
        if num_new + missing > num_max or num_listed + stop - first > out.shape[0]:
            return i, num_new, num_listed
        num_new += missing
        for page in range(first, stop):
            if noted[page] == 0 or all_ != 0:
                noted[page] = 1
                out[num_listed] = page
                num_listed += 1
    return positions.shape[0], num_new, num_listed


@kernel
def _join(noted: UInt8s, pages_per_chunk: int, pages: Int64s, runs: Int64s) -> tuple[int, int]:
    """Make runs (first, stop) of pages in ascending order, over small gaps, which are noted too.

    Returns how many runs there are, and how many pages are noted in addition.
    """
    num_runs = 0
    num_more = 0
    for i in range(pages.shape[0]):
        first, stop = pages[i], pages[i] + 1
        before = runs[num_runs - 1, 1] if num_runs else -1 - _GAP_PAGES
        if first - before > _GAP_PAGES or first // pages_per_chunk != runs[num_runs - 1, 0] // pages_per_chunk:
            runs[num_runs] = first, stop
            num_runs += 1
            continue
        for page in range(before, first):
            num_more += 1 - noted[page]
            noted[page] = 1
        runs[num_runs - 1, 1] = max(before, stop)  # a page may be listed twice
    return num_runs, num_more


@kernel
def _bring(fd: int, chunks: Int64s, pages_per_chunk: int, runs: Int64s, num_on_disk: int, advice: int) -> int:
    """Ask the disk for all pages first, then wait for them and map them; 0, or the number of the error."""
    for k in range(runs.shape[0]):
        first, stop = runs[k, 0], min(runs[k, 1], num_on_disk)
        if first < stop:
            posix_fadvise(fd, first * PAGE_BYTES, (stop - first) * PAGE_BYTES, WILLNEED)
    for k in range(runs.shape[0]):
        address = chunks[runs[k, 0] // pages_per_chunk] + runs[k, 0] % pages_per_chunk * PAGE_BYTES
        while madvise(address, (runs[k, 1] - runs[k, 0]) * PAGE_BYTES, advice) != 0:
            error = errno_now()
            if error == _EINVAL:
                return 0  # Linux before 5.14: pages are mapped as they are touched
            if error != _EINTR and error != _EAGAIN:
                return _EIO if error == _EFAULT else error  # what would be a SIGBUS
    return 0


@kernel
def _write_out(fd: int, extents: Int64s) -> int:
    """Begin to write extents out, and wait for none; 0, or the number of the error."""
    for k in range(extents.shape[0]):
        if sync_file_range(fd, extents[k] * EXTENT_BYTES, EXTENT_BYTES, START_WRITE) != 0:
            return errno_now()
    return 0


@kernel
def _drop(fd: int, chunks: Int64s, chunk_bytes: int, num_bytes: int, extents: Int64s) -> int:
    """Wait until extents are on the disk, and drop them from memory; 0, or the number of the error."""
    for k in range(extents.shape[0]):
        begin = extents[k] * EXTENT_BYTES
        end = min(begin + EXTENT_BYTES, num_bytes)
        if sync_file_range(fd, begin, EXTENT_BYTES, WRITE_AND_WAIT) != 0:
            return errno_now()
        stop = min((end - 1) // chunk_bytes + 1, chunks.shape[0])  # the file may be allocated beyond what is mapped
        for chunk in range(begin // chunk_bytes, stop):  # what is mapped would stay
            first = max(begin - chunk * chunk_bytes, 0)
            madvise(chunks[chunk] + first, min(end - chunk * chunk_bytes, chunk_bytes) - first, FORGET_MAPPED)
        posix_fadvise(fd, begin, end - begin, DONTNEED)
    return 0


@kernel
def _lost(fd: int, num_bytes: int) -> int:
    """The number of the error if something of the file could not be written out since this was last asked, else 0."""
    if sync_file_range(fd, num_bytes, 1, WAIT_BEFORE) != 0:  # errors are those of the file, whatever the range
        return errno_now()
    return 0


class Residency:
    """The page cache of the files of a store, at most `bytes_max`, whatever is read and written at once.

    (A row of more than a sixteenth of that, and a file system that is memory itself, are not bounded.)
    """

    def __init__(self, bytes_max: int = RESIDENT_BYTES_MAX) -> None:
        if bytes_max < RESIDENT_BYTES_MIN:
            raise ConfigError(
                f"resident_bytes_max is {bytes_max:,}: give at least {RESIDENT_BYTES_MIN:,}, better a few percent of "
                "memory, as it is what keeps rows that are read soon after they were written off the disk"
            )
        self.bytes_max = bytes_max
        self.changed = Condition()
        """Guards everything here, and what files note."""
        self._failure: tuple[int | str, ...] | None = None
        """Rows were lost on their way to the disk; the kernel says so once only, so it is kept here."""
        self._files: list[FileRows] = []
        self._num_pages = 0
        self._num_copying = 0
        self._is_dropping = False
        self._hand = 0

    @property
    def bytes_now(self) -> int:
        """At most this much of the files is in the page cache."""
        return self._num_pages * PAGE_BYTES

    def add(self, file: FileRows) -> None:
        """Count the pages of one more file."""
        self._files.append(file)

    def begin(self, file: FileRows, positions: Int64s) -> tuple[int, Int64s]:
        """How many of these rows may be copied now, at least one, and the runs of pages to bring in before.

        Their pages stay until `end`; others are written out and dropped first where there is no room.
        """
        part_max = int(self.bytes_max * _PART_SHARE) // PAGE_BYTES
        with self.changed:
            self.changed.wait_for(lambda: not self._is_dropping)
            self.check()
            if self._num_pages + part_max > self.bytes_max // PAGE_BYTES and not file.is_noted(positions):
                self._drop_some()
            # Pages between those that rows are on may come in addition.
            num_rows, num_new, runs = file.note(positions, part_max // (1 + _GAP_PAGES))
            if not num_rows:  # a row larger than that
                num_rows, num_new, runs = file.note(positions[:1], self.bytes_max)
            self._num_pages += num_new
            self._num_copying += 1
        return num_rows, runs

    def end(self, file: FileRows) -> None:
        """The rows have been copied. StoreError if some may have been read again from a disk that has lost them."""
        with self.changed:
            self._num_copying -= 1
            self.changed.notify_all()
            if error := file.lost():
                self._fail(file, error)
            self.check()

    def check(self) -> None:
        """StoreError if rows were lost, or the store is closed."""
        if self._failure is not None:
            raise StoreError(*self._failure)  # a new one: it leads to whoever called

    def close(self) -> None:
        """Count no more."""
        with self.changed:
            self._failure = ("the store is closed: open another",)
            self._files.clear()

    def _drop_some(self) -> None:
        """Move the hand on over the extents of all files until enough is gone.

        Nobody copies meanwhile: a page touched between being counted out and being dropped would stay, uncounted.
        """
        self._is_dropping = True
        try:
            self.changed.wait_for(lambda: not self._num_copying)
            self.check()
            counts = [file.pages_by_extent() for file in self._files]
            in_turn = np.roll(np.concatenate(counts), -self._hand)
            excess = self._num_pages - int(self.bytes_max * _KEPT_SHARE) // PAGE_BYTES
            num_passed = int(np.searchsorted(np.cumsum(in_turn), excess)) + 1
            for file, extents in self._under_hand(counts, num_passed):
                if error := file.drop(extents):
                    self._fail(file, error)
                    self.check()
            self._num_pages -= int(in_turn[:num_passed].sum())
            self._hand = (self._hand + num_passed) % len(in_turn)
            for file, extents in self._under_hand(counts, num_passed):  # will be next: less to wait for then
                file.write_out(extents)
        finally:
            self._is_dropping = False
            self.changed.notify_all()

    def _under_hand(self, counts: list[Int64s], count: int) -> Iterator[tuple[FileRows, Int64s]]:
        """The next extents that have pages in memory, by file."""
        sizes = [len(each) for each in counts]
        chosen = np.zeros(sum(sizes), np.bool_)
        chosen[(self._hand + np.arange(min(count, len(chosen)))) % len(chosen)] = True
        for file, pages, under in zip(self._files, counts, np.split(chosen, np.cumsum(sizes)[:-1]), strict=True):
            yield file, np.flatnonzero(under & (pages > 0))

    def _fail(self, file: FileRows, error: int) -> None:
        lost = f"rows in {file.path} were lost on their way to the disk ({os.strerror(error)})"
        self._failure = self._failure or (error, f"{lost}: check the disk, then start again from a checkpoint")


class FileRows(ChunkedRows):
    """Rows of one table in a file without a name, so that nothing is left of it after any end of the process."""

    def __init__(
        self, table: int, width: int, directory: Path, residency: Residency, chunk_bytes: int = CHUNK_BYTES
    ) -> None:
        super().__init__(width, chunk_bytes)
        self.path = directory
        self._table, self._residency = table, residency
        with failing(StoreError, "make a file in", directory):
            self._file = ScratchFile(directory)
        self._num_pages_written = 0
        """Pages beyond are new, and no use to ask the disk for; only a hint."""
        self._noted: UInt8s = np.zeros(0, np.uint8)
        """Of each page, whether it may be in memory."""
        self._doubts = 0
        """For so many copies to come, pages are asked for though they should be in memory."""
        residency.add(self)

    def reserve(self, num_rows: int) -> None:
        """Allocate disk for that many rows in all, or raise and change nothing."""
        self._allocate(self._end_of(num_rows))
        super().reserve(num_rows)
        num_new = len(self.chunks) * self._chunk_bytes // PAGE_BYTES - len(self._noted)
        if num_new:
            with self._residency.changed:
                self._noted = np.append(self._noted, np.zeros(num_new, np.uint8))

    def gather(self, positions: Int64s, out: Floats) -> None:
        """Copy the row at each position, or its first columns, into `out`; where it is -1, leave `out` as it is."""
        for part in self._in_parts(positions, POPULATE_READ):
            if isinstance(part, slice):
                super().gather(positions[part], out[part])
            else:
                rows = np.empty((len(part), out.shape[1]), np.float32)
                super().gather(positions[part], rows)
                out[part] = rows

    def scatter(self, positions: Int64s, values: Floats) -> None:
        """Copy `values` to the rows at these positions."""
        for part in self._in_parts(positions, POPULATE_WRITE):
            super().scatter(positions[part], values[part])
        if len(positions):
            end = self._end_of(int(positions.max()) + 1)
            self._num_pages_written = max(self._num_pages_written, -(-end // PAGE_BYTES))

    @property
    def bytes_in_memory(self) -> int:
        """Nothing of its own: `Residency` counts the page cache of all files together."""
        return 0

    @property
    def bytes_on_disk(self) -> int:
        """What the file takes, what is allocated ahead included."""
        return self._file.num_bytes

    # What the bound on the page cache asks for, under its lock

    def is_noted(self, positions: Int64s) -> bool:
        """Whether all pages of these rows are noted."""
        count, _, _ = _note(self._noted, self._shift, self._row_bytes, self._chunk_bytes, positions, 0, 0, _NO_PAGES)
        return count == len(positions)

    def note(self, positions: Int64s, num_new_max: int) -> tuple[int, int, Int64s]:
        """Note the pages of rows until so many are new: the number of rows, of new pages, and the runs to bring in."""
        pages_per_row = (self._row_bytes + PAGE_BYTES - 2) // PAGE_BYTES + 1
        listed_max = len(positions) * pages_per_row
        if not self._doubts:
            listed_max = min(listed_max, num_new_max)
        pages = np.empty(listed_max, np.int64)
        num_rows, num_new, num_listed = _note(
            self._noted, self._shift, self._row_bytes, self._chunk_bytes, positions, num_new_max, self._doubts, pages
        )
        if not num_listed:
            return num_rows, 0, np.empty((0, 2), np.int64)
        runs = np.empty((num_listed, 2), np.int64)
        num_runs, num_more = _join(self._noted, self._chunk_bytes // PAGE_BYTES, np.sort(pages[:num_listed]), runs)
        return num_rows, num_new + num_more, runs[:num_runs]

    def pages_by_extent(self) -> Int64s:
        """How many pages of each extent are noted."""
        padded = np.zeros(-(-len(self._noted) // _PAGES_PER_EXTENT) * _PAGES_PER_EXTENT, np.uint8)
        padded[: len(self._noted)] = self._noted
        counts: Int64s = padded.reshape(-1, _PAGES_PER_EXTENT).sum(1, dtype=np.int64)
        return counts

    def write_out(self, extents: Int64s) -> int:
        """Begin to write extents out; 0, or the number of the error."""
        return _write_out(self._file.fd, extents)

    def drop(self, extents: Int64s) -> int:
        """Write extents out and drop them from memory; 0, or the number of the error."""
        error = self.write_out(extents) or _drop(
            self._file.fd, self._addresses, self._chunk_bytes, self._file.num_bytes, extents
        )
        if not error:
            for extent in extents.tolist():
                self._noted[extent * _PAGES_PER_EXTENT : (extent + 1) * _PAGES_PER_EXTENT] = 0
        return error

    def lost(self) -> int:
        """The number of the error if something could not be written out, else 0."""
        return _lost(self._file.fd, self._file.num_bytes)

    # Inside

    def _in_parts(self, positions: Int64s, advice: int) -> Iterator[slice | Int64s]:
        """Rows to copy at once, whose pages stay meanwhile: all, unless there is no room for those that must be read.

        Then the rest comes by place, so that a page is brought in once, and with its neighbours.
        """
        start, order = 0, None
        while start < len(positions):
            count, runs = self._residency.begin(self, positions[start:])
            try:
                if len(runs):
                    self._bring(runs, advice)
                before = _num_waits()
                yield slice(start, start + count) if order is None else order[start : start + count]
                if _num_waits() - before > count // 64:  # memory is short, and pages were taken from us
                    self._doubts = max(self._doubts, _DOUBT_COPIES)
                elif self._doubts:
                    self._doubts -= 1
            finally:
                self._residency.end(self)
            start += count
            if order is None and start < len(positions):
                order = start + np.argsort(positions[start:])
                order = order[positions[order] >= 0]
                positions, start = positions[order], 0

    def _bring(self, runs: Int64s, advice: int) -> None:
        error = _bring(
            self._file.fd,
            self._addresses,
            self._chunk_bytes // PAGE_BYTES,
            runs,
            self._num_pages_written,
            advice,
        )
        if error:
            self._doubts = sys.maxsize  # whoever touches a page that can't be read ends the process
            do = "read" if advice == POPULATE_READ else "write"
            raise os_error(StoreError, f"{do} rows of table {self._table} in", self.path, OSError(error, ""))

    def _end_of(self, num_rows: int) -> int:
        """Where in the file the first so many rows end."""
        num_whole, rest = divmod(num_rows, 1 << self._shift)
        return num_whole * self._chunk_bytes + rest * self._row_bytes

    def _allocate(self, needed: int) -> None:
        num_bytes = self._file.num_bytes
        if needed <= num_bytes:
            return
        step = min(max(num_bytes, _ALLOCATION_BYTES_MIN), _ALLOCATION_BYTES_MAX)
        try:
            self._file.allocate(max(num_bytes + step, needed))
        except OSError:
            try:
                self._file.allocate(needed)
            except OSError as error:
                raise no_room(f"the file of table {self._table}", self.path, needed, error) from error

    def _map(self, number: int) -> Any:
        try:
            return self._file.map(number * self._chunk_bytes, self._chunk_bytes)
        except OSError as error:
            raise MemoryError(f"can't map {self._chunk_bytes:,} B of a file ({error.strerror})") from error


class MappedStore(LocalStore):
    """Rows in files without names, in a directory for scratch files; 19-25 B of memory a touched row for its id."""

    def __init__(
        self,
        tables: Sequence[RowSource],
        directory: str | Path | None = None,
        *,
        resident_bytes_max: int = RESIDENT_BYTES_MAX,
        chunk_bytes: int = CHUNK_BYTES,
    ) -> None:
        """Without a directory it is that of temporary files. It is made if it is missing, and may hold other files."""
        check_widths(tables)
        residency = Residency(resident_bytes_max)
        self.path = Path(tempfile.gettempdir() if directory is None else directory).resolve()
        """The directory."""
        is_new = not self.path.exists()
        make_directory(self.path)
        try:
            super().__init__(tables, lambda table, width: FileRows(table, width, self.path, residency, chunk_bytes))
        except BaseException:
            residency.close()
            with suppress(OSError):
                if is_new:
                    self.path.rmdir()
            raise
        self._residency, self._pid = residency, os.getpid()

    def close(self) -> None:
        """Give back memory and disk, once calls that are under way are over; a second call does nothing."""
        super().close()
        if os.getpid() == self._pid:  # in a fork, a thread that is not there may have the lock
            self._residency.close()

    def stats(self) -> StoreStats:
        """What is held, and what it takes; memory includes page cache that may have been reclaimed meanwhile."""
        stats = super().stats()
        return StoreStats(stats.num_rows, stats.bytes_in_memory + self._residency.bytes_now, stats.bytes_on_disk)

    def _check_usable(self) -> None:
        super()._check_usable()
        if os.getpid() != self._pid:
            raise StoreError(
                f"the files in {self.path} belong to the process that opened the store, and this one was forked from "
                "it: use the store there"
            )
        self._residency.check()


def make_directory(path: Path) -> None:
    """Make the directory for scratch files if it is missing; StoreError if an earlier version has left its rows there.

    What else is in it does not matter.
    """
    with failing(StoreError, "make", path):
        if path.exists() and not path.is_dir():
            raise StoreError(errno.ENOTDIR, f"{path} is a file: give a directory for the files of rows")
        path.mkdir(parents=True, exist_ok=True)
        earlier = sorted(file.name for file in path.iterdir() if _EARLIER_FILES.fullmatch(file.name))
    if earlier:
        raise StoreError(
            f"{path} holds the rows of a store of an earlier version ({earlier[0]}), which can't be continued from: "
            "rows outlive a process in checkpoints only; remove table-*.rows, table-*.ids and index.json there, or "
            "give another directory"
        )


def _num_waits() -> int:
    """How often this thread has waited for a page that it touched."""
    return resource.getrusage(resource.RUSAGE_THREAD).ru_majflt
