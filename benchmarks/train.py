"""Whole iterations: a cache of 3 % of the rows against everything resident, and against plain PyTorch in memory.

`criteo-kaggle-like`, batches of 16,384, 26 tables of 48 columns, SGD for rows and dense part, default settings. All
systems train the same batches from the same values and take turns in one process; a turn lasts until the background
threads have made up for it, so that no work is left to the next one's time. Ratios are medians over rounds. `prepared`
data lies in memory, so reading costs nothing; `live` data is generated on a thread of its own while training goes on;
`shards` are read by two processes, as `data.processes = 2` does.
Freed memory is kept (`allocator.py`), for all systems alike: otherwise paging is a quarter of what is measured.
"""

from __future__ import annotations

import gc
import math
import statistics
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass
from functools import cached_property
from itertools import cycle, islice
from multiprocessing import get_context
from pathlib import Path
from typing import Any, Protocol

import numpy as np
import torch
from torch import nn

from bagpipe.allocator import keep_freed_memory
from bagpipe.checkpointing import Checkpointing
from bagpipe.data import Generated, Loader, Shards, find_preset, write
from bagpipe.initial import Uniform
from bagpipe.models import build_model
from bagpipe.optim import SGD
from bagpipe.policy_options import DEFAULTS, PolicyOptions
from bagpipe.prepared import Cache, Options, prepare
from bagpipe.store.base import ROWS_PER_CHUNK
from bagpipe.types import Batch, Table
from bagpipe.world import OpenStore
from benchmarks import Benchmark, Results
from benchmarks.idle import IDLE_SHARE, POLL_S

LR = 0.01
CACHE_SHARE = 0.03
PREPARED, LIVE, SHARDS = "prepared", "live", "shards"
PROCESSES = 2
EVALUATED = 6
"""Batches that are evaluated, beside as many forward passes of training."""
OURS, IDEAL, PYTORCH = "bagpipe", "ideal", "pytorch"


@dataclass(frozen=True)
class Size:
    """How much work the systems do."""

    rows_share: float
    dim: int
    batch_size: int
    batches: int
    """Different ones, more than any window holds. They come again and again: after one round the ideal has all rows."""
    rounds: dict[str, int]
    turn: dict[str, int]
    """Iterations of a turn; DLRM's take seconds."""


FULL = Size(1.0, 48, 16_384, 288, {"wide_deep": 12, "dlrm": 4}, {"wide_deep": 8, "dlrm": 3})
QUICK = Size(0.0002, 8, 256, 4, {"wide_deep": 2, "dlrm": 2}, {"wide_deep": 2, "dlrm": 2})


class System(Protocol):
    """One way to train."""

    losses: list[float]

    def skip(self, count: int) -> None:
        """Pass over so many batches without training."""

    def train(self, count: int) -> None:
        """Train so many iterations."""

    def close(self) -> None:
        """Let everything go."""


@dataclass(frozen=True)
class Work:
    """What all systems are given."""

    model: str
    size: Size
    data: Generated
    loader: Callable[[], Iterator[Batch]]
    """Batches without end."""
    touched: dict[str, Any]
    """The ids of each table that occur."""
    directory: tempfile.TemporaryDirectory[str] | None = None
    """Of shards."""

    @property
    def tables(self) -> Sequence[Table]:
        """The tables of the data."""
        return self.data.tables

    def initial(self, table: Table) -> Uniform:
        """First values of rows, the same for all."""
        return Uniform(0, table.name, self.size.dim**-0.5)

    def build(self, device: str | None) -> nn.Module:
        """The model, with the same dense part for all."""
        return build_model(self.model, self.tables, self.data.num_dense, self.size.dim, device, seed=0)


class Ours:
    """`bagpipe.prepare` with a policy and a store, which is `filled` with every row first, as after an epoch."""

    def __init__(
        self,
        work: Work,
        policy: str,
        *,
        cache_rows: int,
        store: str | OpenStore = "memory",
        filled: bool = True,
        checkpoint: Checkpointing | None = None,
        options: PolicyOptions | None = None,
    ) -> None:
        self.losses: list[float] = []
        self._model = work.build("meta")
        self._optimizer = torch.optim.SGD(self._model.parameters(), lr=LR)
        _, _, self._loader = prepare(
            self._model, self._optimizer, work.loader(), features=work.tables, store=store, checkpoint=checkpoint,
            cache=Cache(cache_rows, policy=policy, options=options or DEFAULTS), options=Options(initial=work.initial),
        )  # fmt: skip
        self.loop = self._loader.loop
        if filled:
            self._fill(work)
        if checkpoint is not None:
            self._loader.register_for_checkpointing()

    @cached_property
    def _iterator(self) -> Iterator[Any]:
        """It begins to read when it is made."""
        return iter(self._loader)

    def _fill(self, work: Work) -> None:
        for number, layout in enumerate(self.loop.layouts):
            touched = work.touched[layout.table.name]
            for start in range(0, len(touched), ROWS_PER_CHUNK):
                ids = touched[start : start + ROWS_PER_CHUNK]
                rows = np.empty((len(ids), layout.width), np.float32)
                layout.initialise(ids, rows)
                self.loop.write_rows(number, ids, rows)

    def skip(self, count: int) -> None:
        """Pass over so many batches; their rows pass through the cache."""
        for _ in islice(self._iterator, count):
            pass

    def train(self, count: int) -> None:
        """Train so many iterations."""
        for batch in islice(self._iterator, count):
            loss = _loss(self._model, batch)
            self._optimizer.zero_grad()
            loss.backward()  # type: ignore[no-untyped-call]
            self._optimizer.step()
            self.losses.append(loss.item())
            del batch, loss

    def evaluation(self, batches: Sequence[Batch]) -> dict[str, float]:
        """How long a batch takes in milliseconds: the forward pass of training, evaluation over a loader that reads
        its rows ahead, and evaluation as plain PyTorch would do it, which looks rows up when the model asks."""
        forward = []
        for batch in islice(self._iterator, len(batches)):
            start = time.perf_counter()
            self._model(batch.dense, batch.sparse)
            forward.append(time.perf_counter() - start)
        found = {"training_forward_ms": 1e3 * statistics.median(forward)}
        for name, loader in (
            ("evaluation_ms", self._loader.for_evaluation(batches)), ("evaluation_unprepared_ms", batches)
        ):  # fmt: skip
            start = time.perf_counter()
            with torch.no_grad():
                for batch in loader:
                    self._model(batch.dense, batch.sparse)
            found[name] = 1e3 * (time.perf_counter() - start) / len(batches)
        return found

    def close(self) -> None:
        """Stop the threads."""
        self._loader.close()
        self.loop.store.close()


class PyTorch:
    """`nn.EmbeddingBag(sparse=True)` over whole tables in memory, `torch.optim.SGD` for everything."""

    def __init__(self, work: Work) -> None:
        self.losses: list[float] = []
        self._model = work.build(None)
        for name, module in self._model.embeddings.items():  # type: ignore[operator, union-attr]
            module.sparse = True
            table = next(table for table in work.tables if table.name == name)
            ids = work.touched[name]
            vectors = np.empty((len(ids), work.size.dim), np.float32)
            work.initial(table).fill(ids, vectors)
            module.weight.data[torch.from_numpy(ids)] = torch.from_numpy(vectors)
        self._optimizer = torch.optim.SGD(self._model.parameters(), lr=LR)
        self._batches = work.loader()

    def skip(self, count: int) -> None:
        """Pass over so many batches."""
        for _ in islice(self._batches, count):
            pass

    def train(self, count: int) -> None:
        """Train so many iterations."""
        for batch in islice(self._batches, count):
            loss = _loss(self._model, batch)
            self._optimizer.zero_grad(set_to_none=True)
            loss.backward()  # type: ignore[no-untyped-call]
            self._optimizer.step()
            self.losses.append(loss.item())

    def close(self) -> None:
        """Give the memory back."""
        del self._model, self._optimizer, self._batches


CASES = (
    ("wide_deep", PREPARED, IDEAL),
    ("wide_deep", PREPARED, PYTORCH),
    ("wide_deep", LIVE, IDEAL),
    ("wide_deep", LIVE, PYTORCH),
    ("wide_deep", SHARDS, IDEAL),
    ("dlrm", PREPARED, IDEAL),
)
"""Model, data and peer; one peer at a time, since each holds whole tables."""


def run(quick: bool) -> Results:
    """Wide&Deep with prepared, live and stored data, DLRM with prepared; about ten minutes, and 14 GB."""
    if quick:
        return [_case(*case, QUICK) for case in CASES]
    return [_apart(*case) for case in CASES]


def _apart(model: str, kind: str, peer: str) -> dict[str, Any]:
    """In a process of its own: what one has freed, it keeps."""
    with ProcessPoolExecutor(1, get_context("spawn")) as pool:
        return pool.submit(_case, model, kind, peer, FULL).result()


def _case(model: str, kind: str, peer: str, size: Size) -> dict[str, Any]:
    torch.sparse.check_sparse_tensor_invariants.disable()  # type: ignore[no-untyped-call]
    keep_freed_memory()
    work = _work(size, model, kind)
    try:
        return _compare(work, kind, peer)
    finally:
        if work.directory is not None:
            work.directory.cleanup()
        gc.collect()


def _work(size: Size, model: str, kind: str) -> Work:
    preset = find_preset("criteo-kaggle-like")
    data = Generated(
        preset if size.rows_share == 1 else preset.scaled(size.rows_share), size.batch_size * size.batches, 0
    )
    prepared = list(data.batches(size.batch_size))
    touched = {
        table.name: np.unique(np.concatenate([batch.sparse[name].values.numpy().reshape(-1)
                                              for batch in prepared for name in table.features]))
        for table in data.tables
    }  # fmt: skip
    if kind == PREPARED:
        return Work(model, size, data, lambda: cycle(prepared), touched)
    if kind == SHARDS:
        directory = tempfile.TemporaryDirectory(prefix="bagpipe-bench-")
        shards = Path(directory.name) / "shards"
        write(data, shards, workers=2)
        loader = Loader(Shards(shards), size.batch_size, epochs=1_000_000, processes=PROCESSES)
        return Work(model, size, data, lambda: iter(loader), touched, directory)
    return Work(model, size, data, lambda: data.batches(size.batch_size, epochs=1_000_000), touched)


def _compare(work: Work, kind: str, peer: str) -> dict[str, Any]:
    described = {
        "model": work.model,
        "data": kind,
        "batch_size": work.size.batch_size,
        "dim": work.size.dim,
        "row_optimizer": SGD.name,
    }
    if (reason := _refusal(work)) is not None:
        return described | {f"time_ratio_to_{peer}": None, f"{peer}_reason": reason}
    cache_rows = max(1, round(CACHE_SHARE * sum(table.rows or 0 for table in work.tables)))
    if work.size is QUICK:
        cache_rows = 26 * work.size.batch_size
    ours = Ours(work, "lookahead", cache_rows=cache_rows)
    systems: dict[str, System] = {OURS: ours}
    systems[peer] = Ours(work, "ideal", cache_rows=cache_rows) if peer == IDEAL else PyTorch(work)
    try:
        seconds, before, after = _take_turns(work, systems)
        evaluation = ours.evaluation(list(islice(work.loader(), EVALUATED)))
    finally:
        for system in systems.values():
            system.close()
    mine, theirs = systems[OURS].losses, systems[peer].losses
    moved = _traffic(before, after, work.size.turn[work.model] * sum(seconds[OURS]))
    return described | moved | evaluation | {
        "samples_per_second": work.size.batch_size / statistics.median(seconds[OURS]),
        "iteration_ms": 1e3 * statistics.median(seconds[OURS]),
        f"{peer}_iteration_ms": 1e3 * statistics.median(seconds[peer]),
        f"time_ratio_to_{peer}": statistics.median(m / t for m, t in zip(seconds[OURS], seconds[peer], strict=True)),
        "loss_difference_max": max(math.fabs(m - t) for m, t in zip(mine, theirs, strict=True)),
    }  # fmt: skip


def _take_turns(
    work: Work, systems: dict[str, System]
) -> tuple[dict[str, list[float]], dict[str, Any], dict[str, Any]]:
    """Seconds of an iteration in each turn, and what our system had moved before and after them."""
    turn, rounds = work.size.turn[work.model], work.size.rounds[work.model]
    for system in systems.values():
        system.skip(work.size.batches)
        system.train(1)
        wait_until_idle()
    ours = systems[OURS]
    assert isinstance(ours, Ours)
    before = ours.loop.stats()
    seconds: dict[str, list[float]] = {name: [] for name in systems}
    names = list(systems)
    for number in range(rounds):
        for name in names[number % len(names) :] + names[: number % len(names)]:
            start = time.perf_counter()
            systems[name].train(turn)
            seconds[name].append((wait_until_idle() - start) / turn)
    return seconds, before, ours.loop.stats()


def _traffic(before: dict[str, Any], after: dict[str, Any], seconds: float) -> dict[str, Any]:
    """What an iteration moved, and the share of the time in which training waited for it."""
    iterations = after["iterations"] - before["iterations"]
    return {
        "cache_rows": after["cache_rows"],
        "fetched_rows": (after["fetched_rows"] - before["fetched_rows"]) / iterations,
        "written_rows": (after["written_rows"] - before["written_rows"]) / iterations,
        "stall_fraction": (after["stall_seconds"] - before["stall_seconds"]) / seconds,
        "data_wait_fraction": (after["data_wait_seconds"] - before["data_wait_seconds"]) / seconds,
    }


def wait_until_idle() -> float:
    """Wait until the background threads of all systems rest: their queues are full. The time when they came to rest."""
    busy_until, used = time.perf_counter(), time.process_time()
    while True:
        time.sleep(POLL_S)
        now, used_now = time.perf_counter(), time.process_time()
        if used_now - used < IDLE_SHARE * POLL_S:
            return busy_until
        busy_until, used = now, used_now


def _loss(model: nn.Module, batch: Batch) -> torch.Tensor:
    return nn.functional.binary_cross_entropy_with_logits(model(batch.dense, batch.sparse), batch.labels)


def _refusal(work: Work) -> str | None:
    """Why a peer that holds whole tables can't be run here, if so."""
    tables_bytes = sum(table.rows or 0 for table in work.tables) * work.size.dim * 4
    needed = 1.2 * tables_bytes + 4 * sum(len(ids) for ids in work.touched.values()) * work.size.dim * 4
    for line in Path("/proc/meminfo").read_text(encoding="ascii").splitlines():
        if line.startswith("MemAvailable:"):
            available = int(line.split()[1]) * 1024
            if available < needed:
                return f"whole tables beside ours take {needed / 1e9:.1f} GB, {available / 1e9:.1f} GB are available"
    return None


BENCHMARK = Benchmark("train", "whole iterations against everything resident, and against plain PyTorch", run)
