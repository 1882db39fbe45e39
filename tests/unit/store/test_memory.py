"""Chunks that never move: the copying kernels against their twins, growth, and what it takes."""

from __future__ import annotations

import mmap
from pathlib import Path

import numpy as np
import pytest

from bagpipe.errors import StoreError
from bagpipe.store import MemoryStore
from bagpipe.store.chunks import ChunkedRows
from definitions.memory import define_gather, define_scatter


class Zeros:
    def __init__(self, width: int) -> None:
        self.width = width

    def initialise(self, ids: np.ndarray, out: np.ndarray) -> None:
        out[:] = 0


@pytest.mark.parametrize(("width", "chunk_bytes"), [(1, 4), (1, 64), (3, 100), (48, 192), (48, 4096), (96, 1 << 20)])
def test_kernels_copy_what_their_twins_copy(width: int, chunk_bytes: int) -> None:
    rng = np.random.default_rng(width)
    rows, twin = ChunkedRows(width, chunk_bytes), ChunkedRows(width, chunk_bytes)
    for each in (rows, twin):
        each.reserve(300)
    for num_rows in (0, 1, 2, 150, 300):
        positions = rng.permutation(300)[:num_rows]
        values = rng.integers(0, 2**32, (num_rows, width), np.uint32).view(np.float32)
        rows.scatter(positions, values)
        define_scatter(twin.chunks, positions, values)
        wanted = rng.integers(-1, 300, 500)
        for columns in {1, -(-width // 3), width}:
            out, expected = np.full((2, 500, columns), 7, np.float32)
            rows.gather(wanted, out)
            define_gather(twin.chunks, wanted, expected)
            assert np.array_equal(out.view(np.uint32), expected.view(np.uint32))


def test_growth_moves_no_row() -> None:
    rows = ChunkedRows(4, 64)
    rows.reserve(10)
    before = [chunk.ctypes.data for chunk in rows.chunks]
    rows.reserve(1000)
    rows.reserve(5)
    assert [chunk.ctypes.data for chunk in rows.chunks][: len(before)] == before
    assert len(rows.chunks) == 250


def test_a_row_larger_than_a_chunk_has_a_chunk_of_its_own() -> None:
    rows = ChunkedRows(1000, 64)
    rows.reserve(3)
    assert [chunk.shape for chunk in rows.chunks] == [(1, 1000)] * 3


def test_when_memory_is_short_the_write_is_refused_and_changes_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    store = MemoryStore([Zeros(4)], chunk_bytes=64)
    store.write(0, np.arange(4), np.ones((4, 4), np.float32))
    real, calls = mmap.mmap, []

    def short(*args: object, **options: object) -> mmap.mmap:
        calls.append(args)
        if len(calls) == 3:
            raise OSError(12, "Cannot allocate memory")
        return real(*args, **options)  # type: ignore[arg-type]

    monkeypatch.setattr(mmap, "mmap", short)
    with pytest.raises(StoreError, match=r"table 0: no memory for 104 rows of 16 B.*store = mapped"):
        store.write(0, np.arange(100, 200), np.ones((100, 4), np.float32))
    assert store.num_rows(0) == 4
    store.write(0, np.arange(100, 200), np.ones((100, 4), np.float32))
    assert store.num_rows(0) == 104


def test_a_thousand_tables_of_a_few_rows_take_little_memory() -> None:
    def resident_bytes() -> int:
        return int(Path("/proc/self/statm").read_text().split()[1]) * mmap.PAGESIZE

    before = resident_bytes()
    with MemoryStore([Zeros(48)] * 1000) as store:
        for table in range(1000):
            store.write(table, np.arange(3), np.ones((3, 48), np.float32))
        assert store.stats().num_rows == 3000
        assert resident_bytes() - before < 64 << 20
