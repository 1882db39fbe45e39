"""`bagpipe bench processors`: samples a second that arrive from shards, read by threads and by data processors."""

from __future__ import annotations

import tempfile
import time
from itertools import islice
from pathlib import Path
from typing import Any

from bagpipe.data.generator import generated
from bagpipe.data.loader import Loader
from bagpipe.data.shards import Shards
from bagpipe.data.writer import write
from benchmarks import Benchmark, Results

PRESET = "criteo-kaggle-like"
BATCH_SIZE = 16_384
ROUNDS = 3


def run(quick: bool) -> Results:
    """Rates once every reader has started; the ways to read take turns, because machines are noisy."""
    samples = (4 if quick else 100) * BATCH_SIZE
    results: Results = []
    with tempfile.TemporaryDirectory(prefix="bagpipe-bench-") as directory:
        path = Path(directory) / "shards"
        write(generated(PRESET, samples), path, workers=2)
        for seed in (0,) if quick else (None, 0):
            found: dict[int, list[dict[str, float]]] = {processes: [] for processes in ((0, 2) if quick else (0, 1, 2))}
            for _ in range(1 if quick else ROUNDS):
                for processes, rounds in found.items():
                    rounds.append(_read(path, seed, processes, 4 if quick else 400))
            for processes, rounds in found.items():
                described: dict[str, Any] = {"shuffled": seed is not None, "processes": processes}
                described |= {key: sorted(one[key] for one in rounds)[len(rounds) // 2] for key in rounds[0]}
                results.append(described)
    return results


def _read(path: Path, seed: int | None, processes: int, batches: int) -> dict[str, float]:
    """Read the data over and over; the first batches, until all processes are at work, are not counted in the rate."""
    shards = Shards(path)
    epochs = 2 + batches * BATCH_SIZE // shards.num_samples
    reading = iter(Loader(shards, BATCH_SIZE, epochs=epochs, seed=seed, workers=2, processes=processes))
    begin = time.perf_counter()
    next(reading)
    first = time.perf_counter() - begin
    for _ in islice(reading, min(40, batches)):
        pass
    start = time.perf_counter()
    samples = sum(len(batch) for batch in islice(reading, batches))
    rate = samples / (time.perf_counter() - start)
    reading.close()
    return {"samples_per_second": rate, "first_batch_seconds": first}


BENCHMARK = Benchmark("processors", "samples a second from shards, by threads and by processes of their own", run)
