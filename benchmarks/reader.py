"""`bagpipe bench reader`: samples a second from shards, in stored order and shuffled, for 1 and 2 threads."""

from __future__ import annotations

import tempfile
import time
from pathlib import Path

from bagpipe.data.generator import generated
from bagpipe.data.shards import Shards
from bagpipe.data.writer import write
from benchmarks import Benchmark, Results

PRESET = "criteo-kaggle-like"
BATCH_SIZE = 16_384


def run(quick: bool) -> Results:
    """The first pass over new shards, which checks every byte, and a second one."""
    samples = (2 if quick else 100) * BATCH_SIZE
    results: Results = []
    with tempfile.TemporaryDirectory(prefix="bagpipe-bench-") as directory:
        path = Path(directory) / "shards"
        start = time.perf_counter()
        manifest = write(generated(PRESET, samples), path, workers=2)
        rate = samples / (time.perf_counter() - start)
        stored = sum(shard.bytes for shard in manifest.shards) / samples
        results.append({"measure": "write", "workers": 2, "samples_per_second": rate, "bytes_per_sample": stored})
        _read(Shards(path), None, 1)
        _read(Shards(path), 0, 1)  # kernels are compiled, files are in memory
        for seed in (None, 0):
            for workers in (1, 2):
                shards = Shards(path)
                found: dict[str, object] = {"measure": "read", "shuffled": seed is not None, "workers": workers}
                found["samples_per_second_first_pass"] = samples / _read(shards, seed, workers)
                found["samples_per_second"] = samples / _read(shards, seed, workers)
                results.append(found)
    return results


def _read(shards: Shards, seed: int | None, workers: int) -> float:
    start = time.perf_counter()
    for _ in shards.batches(BATCH_SIZE, seed=seed, workers=workers):
        pass
    return time.perf_counter() - start


BENCHMARK = Benchmark("reader", "samples a second from shards", run)
