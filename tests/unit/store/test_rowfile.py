"""Rows in a file: the kernels against their twins, with pages in the cache and without, and the bound on the cache."""

from __future__ import annotations

import ctypes
import errno
import mmap
import os
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest

from bagpipe.errors import StoreError
from bagpipe.store.residency import EXTENT_BYTES, PAGE_BYTES, Residency, _count
from bagpipe.store.rowfile import RowFile
from definitions.residency import define_count
from definitions.rowfile import define_read, define_write

libc = ctypes.CDLL(None, use_errno=True)


def pages_in_cache(path: Path) -> int:
    """How many pages of the file the kernel holds, by mincore."""
    with path.open("r+b") as file:
        num_bytes = os.fstat(file.fileno()).st_size
        with mmap.mmap(file.fileno(), num_bytes) as mapping:
            flags = (ctypes.c_ubyte * -(-num_bytes // PAGE_BYTES))()
            address = ctypes.c_void_p(ctypes.addressof(view := ctypes.c_char.from_buffer(mapping)))
            assert libc.mincore(address, ctypes.c_size_t(num_bytes), flags) == 0
            del view
    return int((np.frombuffer(flags, np.uint8) & 1).sum())


def forget(path: Path) -> None:
    """Take the file out of the page cache, or skip where that is not possible."""
    with path.open("rb") as file:
        os.fsync(file.fileno())
        os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)
    if pages_in_cache(path):
        pytest.skip("this file system is memory itself: its pages can't be let go")


@pytest.fixture
def fd(tmp_path: Path) -> Iterator[int]:
    fd = os.open(tmp_path / "rows", os.O_RDWR | os.O_CREAT)
    yield fd
    os.close(fd)


@pytest.mark.parametrize("width", [1, 3, 16, 48, 96, 1024, 1500, 100_000])
@pytest.mark.parametrize("cold", [False, True])
def test_kernels_copy_what_their_twins_copy(tmp_path: Path, fd: int, width: int, cold: bool) -> None:
    rng = np.random.default_rng(width)
    path, twin = tmp_path / "rows", tmp_path / "twin"
    file = RowFile(fd, path, width, Residency(4 << 20))
    num_rows = min(5000, 4_000_000 // width)
    file.reserve(num_rows)
    twin.touch()
    written = rng.permutation(num_rows)
    parts = [written, written[: num_rows // 2], np.arange(num_rows // 3), written[:1], written[:0]]
    for part in parts:
        rows = rng.integers(0, 2**32, (len(part), width), np.uint32).view(np.float32)
        if cold:
            forget(path)
        file.scatter(part, rows)
        define_write(twin, part, rows)
    for wanted in (rng.integers(-1, num_rows, 300), np.arange(num_rows), np.full(3, -1), np.array([num_rows - 1] * 2)):
        for columns in {-(-width // 3), width}:
            out, expected = np.full((2, len(wanted), columns), 7, np.float32)
            if cold:
                forget(path)
            file.gather(wanted, out)
            define_read(twin, wanted, width, expected)
            assert np.array_equal(out.view(np.uint32), expected.view(np.uint32))


def test_errors_of_the_system_calls_come_back_by_number(tmp_path: Path, fd: int) -> None:
    RowFile(fd, tmp_path / "rows", 48, Residency(4 << 20)).reserve(10)
    read_only = os.open(tmp_path / "rows", os.O_RDONLY)
    file = RowFile(read_only, tmp_path / "rows", 48, Residency(4 << 20))
    rows = np.ones((10, 48), np.float32)
    with pytest.raises(StoreError, match=r"writing .*rows failed \(Bad file descriptor\)") as caught:
        file.scatter(np.arange(10), rows)
    assert caught.value.errno == errno.EBADF
    os.close(read_only)
    with pytest.raises(StoreError, match=r"reading .*rows failed \(Bad file descriptor\)") as caught:
        file.gather(np.arange(10), rows)
    assert caught.value.errno == errno.EBADF


def test_space_is_allocated_ahead_in_steps_that_grow(tmp_path: Path, fd: int) -> None:
    file = RowFile(fd, tmp_path / "rows", 256, Residency(4 << 20))
    sizes = []
    for num_rows in (1, 1024, 1025, 2049, 5000, 100_000):
        file.reserve(num_rows)
        sizes.append(os.fstat(fd).st_size >> 10)
        assert file.bytes_on_disk >= num_rows * 1024
    assert sizes == [1024, 1024, 2048, 4096, 8192, 100_000]


@pytest.mark.parametrize("row_bytes", [4, 64, 192, 4096, 5000, 9000])
def test_pages_are_counted_as_the_twin_counts_them(row_bytes: int) -> None:
    rng = np.random.default_rng(row_bytes)
    positions_max = 3 * EXTENT_BYTES // row_bytes - 1
    for num_rows in (0, 1, 10, 3000):
        touched = rng.integers(0, EXTENT_BYTES // PAGE_BYTES + 1, 3).astype(np.int32)
        twin = touched.copy()
        positions = np.sort(rng.integers(0, positions_max, num_rows))
        assert _count(touched, positions, row_bytes) == define_count(twin, positions, row_bytes)
        assert np.array_equal(touched, twin)


def test_the_page_cache_stays_under_the_bound_whatever_is_read_and_written(tmp_path: Path, fd: int) -> None:
    path, bytes_max, num_rows = tmp_path / "rows", 8 << 20, 200_000
    residency = Residency(bytes_max)
    file = RowFile(fd, path, 48, residency)
    file.reserve(num_rows)
    forget(path)
    rng = np.random.default_rng(0)
    rows = np.ones((5000, 48), np.float32)
    most = 0
    for start in range(0, num_rows, 5000):
        file.scatter(np.arange(start, start + 5000), rows)
        most = max(most, pages_in_cache(path))
    for turn in range(40):
        some = rng.choice(num_rows, 1500, replace=False)
        if turn % 2:
            file.scatter(some, rows[:1500])
        else:
            file.gather(some, rows[:1500])
        in_cache = pages_in_cache(path)
        most = max(most, in_cache)
    assert bytes_max // 4 < most * PAGE_BYTES <= bytes_max
    assert residency.bytes_now <= bytes_max
    assert np.fromfile(path, np.float32).reshape(-1, 48)[:num_rows].min() == 1


def test_the_bound_holds_over_all_files_together(tmp_path: Path) -> None:
    bytes_max, num_rows = 8 << 20, 40_000
    residency = Residency(bytes_max)
    paths = [tmp_path / f"rows-{k}" for k in range(5)]
    fds = [os.open(path, os.O_RDWR | os.O_CREAT) for path in paths]
    files = [RowFile(fd, path, 48, residency) for fd, path in zip(fds, paths, strict=True)]
    rows = np.ones((4000, 48), np.float32)
    for start in range(0, num_rows, 4000):
        for file, path in zip(files, paths, strict=True):
            file.reserve(start + 4000)
            if not start:
                forget(path)
            file.scatter(np.arange(start, start + 4000), rows)
            assert sum(pages_in_cache(path) for path in paths if path.stat().st_size) * PAGE_BYTES <= bytes_max
    for fd in fds:
        os.close(fd)
