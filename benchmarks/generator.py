"""`bagpipe bench generator`: how fast criteo-kaggle-like data is made, and its counts beside the published ones.

About a minute. Counts are of data as a trainer would read it, `expected` is computed from the laws of popularity.
"""

from __future__ import annotations

import time

import numpy as np

from bagpipe.data.generator import Generated, best_auc, generated
from bagpipe.data.presets import Preset, find_preset
from benchmarks import Benchmark, Results
from benchmarks.calibration import expected_rows, expected_shared, expected_top_share

PRESET = "criteo-kaggle-like"
BATCH_SIZE = 16_384
PUBLISHED_ROWS = {1: 65e3, 5: 206e3, 10: 347e3, 50: 1.225e6, 100: 2.138e6, 200: 3.753e6, 300: 5.226e6}
"""Unique rows of so many batches: of one as the paper states them, of more from its table 3, at 192 bytes a row."""
PUBLISHED_TOP_SHARE = 0.90
PUBLISHED_SHARED_ROWS = 22.7e3
PUBLISHED_DRIFT = {1: 0.91, 9: 0.82}


def run(quick: bool) -> Results:
    """Rate for 1 and 2 threads, then unique rows, top share and rows shared by neighbouring batches."""
    preset = find_preset(PRESET).scaled(0.01) if quick else find_preset(PRESET)
    batches = [1, 5] if quick else list(PUBLISHED_ROWS)
    rates = [_rate(preset, workers, samples=(2 if quick else 120) * BATCH_SIZE) for workers in (1, 2)]
    auc = {"measure": "best_auc", "value": best_auc(preset, (2 if quick else 16) * BATCH_SIZE)}
    return [*rates, *_counts(preset, batches, published=not quick), auc, *_drift(100_000 if quick else 300_000)]


def _rate(preset: Preset, workers: int, samples: int) -> dict[str, object]:
    source = generated(preset, samples)
    for _ in source.part(0, min(samples, BATCH_SIZE)).batches(BATCH_SIZE):
        pass  # kernels are compiled
    start = time.perf_counter()
    for _ in source.batches(BATCH_SIZE, workers=workers):
        pass
    elapsed = time.perf_counter() - start
    return {"measure": "rate", "workers": workers, "samples": samples, "samples_per_second": samples / elapsed}


def _counts(preset: Preset, batches: list[int], published: bool) -> Results:
    source = generated(preset, max(batches) * BATCH_SIZE)
    unique, shared, accesses = _replay(source, batches)
    total_rows = sum(len(counts) for counts in accesses)
    top = np.sort(np.concatenate(accesses))[::-1][: total_rows // 1000].sum() / sum(int(c.sum()) for c in accesses)
    results: Results = [
        _beside("unique_rows", rows, expected_rows(preset, number * BATCH_SIZE), PUBLISHED_ROWS[number], published)
        | {"batches": number}
        for number, rows in unique.items()
    ]
    shares = ("top_0.1_percent_share", float(top), expected_top_share(preset, 0.001), PUBLISHED_TOP_SHARE, published)
    needed = (
        "rows_needed_by_next_batch",
        shared,
        expected_shared(preset, BATCH_SIZE),
        PUBLISHED_SHARED_ROWS,
        published,
    )
    return [*results, _beside(*shares), _beside(*needed)]


def _drift(samples: int) -> Results:
    """Share of accesses, on days 1 and 9, to the 0.05 % of Avazu's rows that are the most popular on day 1."""
    source = generated("avazu-like")
    bases = np.cumsum([0, *(source.preset.ranks(table) for table in source.tables)])

    def day(number: int) -> np.ndarray:
        first = (number - 1) * source.preset.day_samples
        columns = source.gather(np.arange(first, first + samples)).columns.values()
        return np.concatenate([column.values[:, 0] + base for column, base in zip(columns, bases, strict=False)])

    counts = np.bincount(day(1), minlength=bases[-1])
    popular = np.argpartition(counts, -(bases[-1] // 2000))[-(bases[-1] // 2000) :]
    is_popular = np.zeros(bases[-1], dtype=bool)
    is_popular[popular] = True
    return [
        {"measure": "avazu_top_0.05_percent_share", "day": number, "value": float(is_popular[day(number)].mean())}
        | {"published": paper}
        for number, paper in PUBLISHED_DRIFT.items()
    ]


def _beside(measure: str, value: float, expected: float, paper: float, published: bool) -> dict[str, object]:
    found: dict[str, object] = {"measure": measure, "value": value, "expected": expected}
    if published:
        found |= {"published": paper, "ratio_to_published": value / paper}
    return found


def _replay(source: Generated, batches: list[int]) -> tuple[dict[int, int], float, list[np.ndarray]]:
    """Unique rows after each number of batches, mean rows that the next batch needs, accesses of each row."""
    names = [name for table in source.tables for name in table.features]
    accesses = [np.zeros(source.preset.ranks(table), dtype=np.uint32) for table in source.tables]
    before: list[np.ndarray] = [np.empty(0, dtype=np.int64) for _ in names]
    unique: dict[int, int] = {}
    seen = shared = 0
    for batch in source.batches(BATCH_SIZE, workers=2):
        for place, name in enumerate(names):
            rows, counts = np.unique(batch.sparse[name].values.numpy(), return_counts=True)
            seen += int((accesses[place][rows] == 0).sum())
            accesses[place][rows] += counts.astype(np.uint32)
            shared += len(np.intersect1d(rows, before[place], assume_unique=True))
            before[place] = rows
        if batch.number + 1 in batches:
            unique[batch.number + 1] = seen
    return unique, shared / max(1, max(batches) - 1), accesses


BENCHMARK = Benchmark("generator", "rate and statistics of generated Criteo-like data", run)
