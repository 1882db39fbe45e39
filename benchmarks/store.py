"""Rows a second that stores read and write: random rows of a large table, 48 and 96 floats each.

`read` and `written` are measured alone, `exchanged` is a batch read and another one written, as in an iteration. The
mapped store runs twice: with all of its rows in the page cache, and with an eighth. Beside stands the plainest way in
memory, NumPy's indexing of an array, which looks up no id, and on disk other ways to keep rows in files and what the
disk gives at all (`store_peers`).

`marks` is the memory store with layers above it against the same without, on the rows of skewed batches: what a read
and a write cost then, and the processor time of a mark, of reading the rows changed since the one before, of merging
them once they are saved, and of going back.
"""

from __future__ import annotations

import statistics
import tempfile
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np

from bagpipe.arrays import Floats, Int64s
from bagpipe.store import MappedStore, MemoryStore, Store
from bagpipe.store.versioned import VersionedStore
from benchmarks import Benchmark, Results
from benchmarks.store_peers import BATCH_ROWS, PEERS, measure, measure_disk

WIDTHS = (48, 96)
SKEWED_ROWS = 14_300
ITERATIONS, PERIODS = 60, 5
"""From one mark to the next, and how many of them."""
_STRIDE = 7919  # ids are not positions

Work = Callable[[Int64s, Int64s], object]
"""Takes the positions of a batch to read and of another to write."""


class _Zeros:
    def __init__(self, width: int) -> None:
        self.width = width

    def initialise(self, ids: Int64s, out: Floats) -> None:
        out[: len(ids)] = 0


def run(quick: bool) -> Results:
    """All stores and widths; some minutes."""
    num_rows, repeats = (40_000, 2) if quick else (2_000_000, 11)
    results: Results = []
    for width in WIDTHS:
        results.append(_memory(width, num_rows, repeats))
        results += [_mapped(width, num_rows, repeats, cached_share) for cached_share in (2, 1 / 8)]
    results.append(_marks(WIDTHS[0], num_rows // 2, 4 if quick else ITERATIONS, 2 if quick else PERIODS))
    with tempfile.TemporaryDirectory() as parent:
        for peer in PEERS:
            results.append(measure(peer, Path(parent) / peer.name, num_rows, WIDTHS[0], repeats))
        results.append(measure_disk(Path(parent), num_rows * WIDTHS[0] * 4, 1 if quick else 5))
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
    with MappedStore([_Zeros(width)], resident_bytes_max=resident_bytes_max) as store:
        _fill(store, width, num_rows)
        for name, work in _works(store, rows).items():
            seconds |= _in_turn(num_rows, repeats, {name: work})
    return _figures("mapped", width, num_rows, seconds) | {"resident_bytes_max": resident_bytes_max}


def _marks(width: int, num_rows: int, iterations: int, periods: int) -> dict[str, Any]:
    """The memory store with and without layers, in turn, batch by batch."""
    rng = np.random.default_rng(0)
    rows = np.empty((SKEWED_ROWS, width), np.float32)
    spent: dict[str, list[float]] = {}

    def timed(name: str, work: Callable[[], object]) -> None:
        began = time.thread_time()
        work()
        spent.setdefault(name, []).append(time.thread_time() - began)

    with MemoryStore([_Zeros(width)]) as plain, VersionedStore(MemoryStore([_Zeros(width)])) as versioned:
        stores = {"plain": plain, "marks": versioned}
        for store in stores.values():
            _fill(store, width, num_rows)
        versioned.mark(0)
        for period in range(1, periods + 1):
            for _ in range(iterations):
                ids = np.unique((num_rows * rng.random(SKEWED_ROWS * 7 // 5) ** 3).astype(np.int64))[:SKEWED_ROWS]
                ids, part = ids * _STRIDE, rows[: len(ids)]
                for name, store in stores.items():
                    timed(f"{name} read", partial(store.read, 0, ids, part))
                    timed(f"{name} written", partial(store.write, 0, ids, part))
            timed("mark", partial(versioned.mark, period))
            timed("changes", partial(_read_changes, versioned, period))
            timed("merge", partial(versioned.saved, period))
        for _ in range(iterations):
            ids = np.unique((num_rows * rng.random(SKEWED_ROWS * 7 // 5) ** 3).astype(np.int64))[:SKEWED_ROWS] * _STRIDE
            versioned.write(0, ids, rows[: len(ids)])
        timed("rollback", partial(versioned.rollback, periods))
    median = {name: statistics.median(times) for name, times in spent.items()}
    return {
        "store": "marks", "floats_per_row": width, "num_rows": num_rows, "batch_rows": SKEWED_ROWS,
        "iterations_per_mark": iterations,
        "read_time_ratio_to_plain": round(median["marks read"] / median["plain read"], 2),
        "written_time_ratio_to_plain": round(median["marks written"] / median["plain written"], 2),
        **{f"{name}_ms": round(1e3 * median[name], 2) for name in ("mark", "changes", "merge", "rollback")},
    }  # fmt: skip


def _read_changes(store: VersionedStore, done: int) -> None:
    with store.changes(done) as changes:
        for _ in changes.iterate(0):
            pass


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
