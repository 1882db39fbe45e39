"""What checkpoints cost: whole iterations with one every 100 against the same without, at a million rows.

Both train the same batches from the same values and take turns of 100 iterations in one process. Each turn of the one
that is saved holds one checkpoint, from its mark to the last file: the first with all rows, the others with those that
have changed, until these take more than the full one and the next is full again. `slowdown` is the median over turns of
how much longer it took, `processor_slowdown` the same of processor time, which noise disturbs less, and `pause_ms` how
long the loop stood still for a mark.
"""

from __future__ import annotations

import math
import statistics
import tempfile
import time
from collections.abc import Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass, field
from itertools import cycle
from multiprocessing import get_context
from pathlib import Path
from typing import Any

import numpy as np

from bagpipe.allocator import keep_freed_memory
from bagpipe.checkpoint.directory import Checkpoints
from bagpipe.checkpointing import Checkpointing
from bagpipe.data import Generated, find_preset
from benchmarks import Benchmark, Results
from benchmarks.train import Ours, Size, Work, wait_until_idle

CACHE_SHARE = 0.3
SAVED, PLAIN = "saved", "plain"


@dataclass(frozen=True)
class Case:
    """How large the work is."""

    model: str
    rows_share: float
    dim: int
    batch_size: int
    batches: int
    """Different ones, which come again and again."""
    every: int
    """Iterations from one checkpoint to the next, and of a turn."""
    turns: int


FULL = (
    Case("wide_deep", 0.02962, 48, 16_384, 150, 100, 5),
    Case("dlrm", 0.02962, 48, 2_048, 150, 100, 5),
)
QUICK = (Case("wide_deep", 0.0002, 8, 256, 8, 4, 3),)


@dataclass
class Turns:
    """What one of the two took, turn by turn."""

    seconds: list[float] = field(default_factory=list)
    processor_seconds: list[float] = field(default_factory=list)


def run(quick: bool) -> Results:
    """Wide&Deep and DLRM, about ten minutes."""
    if quick:
        return [_measure(case) for case in QUICK]
    with ProcessPoolExecutor(1, get_context("spawn"), max_tasks_per_child=1) as pool:
        return list(pool.map(_apart, FULL))


def _apart(case: Case) -> dict[str, Any]:
    """In a process of its own: what one has freed, it keeps."""
    keep_freed_memory()
    return _measure(case)


def _measure(case: Case) -> dict[str, Any]:
    work = _work(case)
    num_rows = sum(len(ids) for ids in work.touched.values())
    cache_rows = max(round(CACHE_SHARE * num_rows), 26 * case.batch_size if num_rows < 100_000 else 0)
    with tempfile.TemporaryDirectory(prefix="bagpipe-bench-") as path:
        checkpointing = Checkpointing(path, every=case.every, keep=case.turns + 2)
        systems = {
            SAVED: Ours(work, "lookahead", cache_rows=cache_rows, checkpoint=checkpointing),
            PLAIN: Ours(work, "lookahead", cache_rows=cache_rows),
        }
        try:
            turns, pauses = _take_turns(case, systems)
        finally:
            for system in systems.values():
                system.close()
        full, incremental = _sizes(Path(path))
    losses = zip(systems[SAVED].losses, systems[PLAIN].losses, strict=True)
    row_bytes = 4 * case.dim
    return {
        "model": case.model,
        "batch_size": case.batch_size,
        "dim": case.dim,
        "rows": num_rows,
        "cache_rows": cache_rows,
        "every": case.every,
        "iteration_ms": 1e3 * statistics.median(turns[SAVED].seconds) / case.every,
        "plain_iteration_ms": 1e3 * statistics.median(turns[PLAIN].seconds) / case.every,
        "time_ratio_to_plain": _ratio(turns[SAVED].seconds, turns[PLAIN].seconds),
        "slowdown": _ratio(turns[SAVED].seconds, turns[PLAIN].seconds) - 1,
        "slowdown_with_all_rows": turns[SAVED].seconds[0] / turns[PLAIN].seconds[0] - 1,
        "processor_slowdown": _ratio(turns[SAVED].processor_seconds, turns[PLAIN].processor_seconds) - 1,
        "pause_ms": 1e3 * statistics.median(pauses),
        "full_bytes": full[0][1],
        "full_rows": full[0][0],
        "incremental_bytes": statistics.median(num_bytes for _, num_bytes in incremental),
        "incremental_rows": statistics.median(rows for rows, _ in incremental),
        "bytes_per_changed_row": statistics.median(num_bytes / rows for rows, num_bytes in incremental),
        "full_checkpoints": len(full),
        "incremental_checkpoints": len(incremental),
        "row_bytes": row_bytes,
        "loss_difference_max": max(math.fabs(saved - plain) for saved, plain in losses),
    }


def _work(case: Case) -> Work:
    data = Generated(find_preset("criteo-kaggle-like").scaled(case.rows_share), case.batch_size * case.batches, 0)
    prepared = list(data.batches(case.batch_size))
    size = Size(case.rows_share, case.dim, case.batch_size, case.batches, {}, {})
    every_row = {table.name: np.arange(table.rows or 0) for table in data.tables}
    return Work(case.model, size, data, lambda: cycle(prepared), every_row)


def _take_turns(case: Case, systems: dict[str, Ours]) -> tuple[dict[str, Turns], Sequence[float]]:
    """A mark is made when the batch after it is asked for: the first of a turn."""
    for system in systems.values():
        system.train(case.every)
        wait_until_idle()
    turns = {name: Turns() for name in systems}
    pauses = []
    for number in range(case.turns):
        for name in (SAVED, PLAIN) if number % 2 else (PLAIN, SAVED):
            start, used = time.perf_counter(), time.process_time()
            systems[name].train(1)
            if name == SAVED:
                pauses.append(time.perf_counter() - start)
            systems[name].train(case.every - 1)
            turns[name].seconds.append(wait_until_idle() - start)
            turns[name].processor_seconds.append(time.process_time() - used)
    usual = statistics.median(turns[PLAIN].seconds) / case.every
    return turns, [max(0.0, pause - usual) for pause in pauses]


def _sizes(directory: Path) -> tuple[list[tuple[int, int]], list[tuple[int, int]]]:
    """Rows and bytes of the row files of each checkpoint, oldest first: of full ones, and of incremental ones."""
    full: list[tuple[int, int]] = []
    incremental: list[tuple[int, int]] = []
    for checkpoint in Checkpoints(directory).list():
        entries = [entry for entry in checkpoint.manifest.files if entry.rows is not None]
        rows = sum(part.rows for entry in entries for part in entry.rows or ())
        kind = full if checkpoint.manifest.base is None else incremental
        kind.append((rows, sum(entry.bytes for entry in entries)))
    return full, incremental


def _ratio(ours: Sequence[float], theirs: Sequence[float]) -> float:
    return statistics.median(one / other for one, other in zip(ours, theirs, strict=True))


BENCHMARK = Benchmark("checkpoint", "what a checkpoint every 100 iterations costs, and how large it is", run)
