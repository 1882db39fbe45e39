"""Rows a second that stores read and write: random rows of a large table, 48 and 96 floats each.

`read` and `written` are measured alone, `exchanged` is a batch read and another one written, as in an iteration. The
mapped store runs twice: with all of its rows in the page cache, and with an eighth. Beside stands the plainest way:
NumPy's indexing of an array in memory, which looks up no id, or of a `numpy.memmap` of the same file.
"""

from __future__ import annotations

import os
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np

from bagpipe.arrays import Floats, Int64s
from bagpipe.store import MappedStore, MemoryStore, Store
from benchmarks import Benchmark, Results

BATCH_ROWS = 16_384
WIDTHS = (48, 96)
_STRIDE = 7919  # ids are not positions

Work = Callable[[Int64s, Int64s], object]
"""Takes the positions of a batch to read and of another to write."""


class _Zeros:
    def __init__(self, width: int) -> None:
        self.width = width

    def initialise(self, ids: Int64s, out: Floats) -> None:
        out[: len(ids)] = 0


def run(quick: bool) -> Results:
    """All stores and widths; about a minute."""
    num_rows, repeats = (40_000, 2) if quick else (2_000_000, 11)
    results: Results = []
    for width in WIDTHS:
        results.append(_memory(width, num_rows, repeats))
        results += [_mapped(width, num_rows, repeats, cached_share) for cached_share in (2, 1 / 8)]
    return results


def _memory(width: int, num_rows: int, repeats: int) -> dict[str, Any]:
    array = np.ones((num_rows, width), np.float32)
    rows = np.empty((BATCH_ROWS, width), np.float32)
    plain: dict[str, Work] = {
        "read_numpy": lambda read, _: np.take(array, read, axis=0, out=rows, mode="clip"),
        "written_numpy": lambda _, written: array.__setitem__(written, rows),
    }
    with MemoryStore([_Zeros(width)]) as store:
        _fill(store, width, num_rows)
        seconds = _in_turn(num_rows, repeats, _works(store, rows) | plain)
    figures = _figures("memory", width, num_rows, seconds)
    for work in ("read", "written"):
        figures[f"{work}_time_ratio_to_numpy"] = round(seconds[work] / seconds[f"{work}_numpy"], 2)
    return figures


def _mapped(width: int, num_rows: int, repeats: int, cached_share: float) -> dict[str, Any]:
    resident_bytes_max = max(int(num_rows * width * 4 * cached_share), 16 << 20)
    rows = np.empty((BATCH_ROWS, width), np.float32)
    seconds: dict[str, float] = {}
    with tempfile.TemporaryDirectory() as parent:
        with MappedStore([_Zeros(width)], parent, resident_bytes_max=resident_bytes_max) as store:
            _fill(store, width, num_rows)
            for name, work in _works(store, rows).items():
                seconds |= _in_turn(num_rows, repeats, {name: work})
        figures = _figures("mapped", width, num_rows, seconds) | {"resident_bytes_max": resident_bytes_max}
        if cached_share < 1:
            figures["read_rows_per_second_memmap"] = _memmap_rows_per_second(Path(parent) / "rows", num_rows, width)
    return figures


def _memmap_rows_per_second(path: Path, num_rows: int, width: int) -> int:
    """What a plain memmap reads from a file that is not in the page cache."""
    with path.open("wb") as file:
        for start in range(0, num_rows, BATCH_ROWS):
            np.ones((min(BATCH_ROWS, num_rows - start), width), np.float32).tofile(file)
        os.fsync(file.fileno())
        os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)
    array = np.memmap(path, np.float32, mode="r").reshape(-1, width)
    positions = np.random.default_rng(0).integers(0, len(array), 500)
    begin = time.perf_counter()
    _ = array[positions]
    return round(len(positions) / (time.perf_counter() - begin))


def _fill(store: Store, width: int, num_rows: int) -> None:
    values = np.ones((BATCH_ROWS, width), np.float32)
    for start in range(0, num_rows, BATCH_ROWS):
        ids = np.arange(start, min(start + BATCH_ROWS, num_rows)) * _STRIDE
        store.write(0, ids, values[: len(ids)])


def _works(store: Store, rows: Floats) -> dict[str, Work]:
    def read(positions: Int64s, _: Int64s) -> None:
        store.read(0, positions * _STRIDE, rows)

    def write(_: Int64s, positions: Int64s) -> None:
        store.write(0, positions * _STRIDE, rows)

    def exchange(read_positions: Int64s, written_positions: Int64s) -> None:
        read(read_positions, written_positions)
        write(read_positions, written_positions)

    return {"read": read, "written": write, "exchanged": exchange}


def _in_turn(num_rows: int, repeats: int, works: dict[str, Work]) -> dict[str, float]:
    """Median seconds of each work, on rows drawn anew each time; one round goes before the clock starts."""
    rng = np.random.default_rng(0)
    seconds: dict[str, list[float]] = {name: [] for name in works}
    for _ in range(repeats + 1):
        for name, work in works.items():
            read, written = rng.choice(num_rows, (2, BATCH_ROWS), replace=False)
            start = time.perf_counter()
            work(read, written)
            seconds[name].append(time.perf_counter() - start)
    return {name: float(np.median(times[1:])) for name, times in seconds.items()}


def _figures(store: str, width: int, num_rows: int, seconds: dict[str, float]) -> dict[str, Any]:
    figures: dict[str, Any] = {
        "store": store,
        "floats_per_row": width,
        "num_rows": num_rows,
        "batch_rows": BATCH_ROWS,
    }
    for work in ("read", "written", "exchanged"):
        figures[f"{work}_rows_per_second"] = round(BATCH_ROWS / seconds[work])
    return figures


BENCHMARK = Benchmark("store", "rows a second read from and written to memory and disk, at random", run)
