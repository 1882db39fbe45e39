"""The embedding layer alone, forward + backward + row update: ours on cached rows, PyTorch's sparse one, FBGEMM's.

Batches of 16,384 samples of `criteo-kaggle-like`, 26 tables of 48 columns, the same gradients for all; every contestant
starts from the same vectors, takes its turn batch by batch, and must end at the same vectors to float tolerance. Ids
are taken modulo a million, so that the peers' whole tables fit small machines; the rows of a batch stay as many. Ours
need a plan, which the oracle makes in the background: its time, on as many threads, is given apart and added. Run it on
a machine that is otherwise idle: beside other work the peers' OpenMP threads lose far more than ours, and the ratios
flatter us.
"""

from __future__ import annotations

import importlib.util
import statistics
import time
import warnings
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import numpy as np
import numpy.typing as npt
import torch

from bagpipe.data.generator import Generated
from bagpipe.data.presets import find_preset
from bagpipe.initial import Uniform
from bagpipe.kernels.bag import Bags, accumulate, pool
from bagpipe.kernels.parallel import Workers
from bagpipe.kernels.update import apply, first_not_finite
from bagpipe.optim import SGD, Adagrad, RowOptimizer
from bagpipe.oracle.lookahead import Oracle
from bagpipe.oracle.tables import OracleTable
from benchmarks import Benchmark, Results

Floats = npt.NDArray[np.float32]
Ids = npt.NDArray[np.int64]

DIM = 48
LOOKAHEAD = 100
LR = 0.01
RELATIVE_TOLERANCE, ABSOLUTE_TOLERANCE = 1e-3, 1e-4
BASE = 1 << 48


@dataclass(frozen=True)
class Size:
    """How much work the contestants do."""

    batch_size: int
    batches: int
    rounds: int
    table_rows_max: int
    cache_rows: int


FULL = Size(batch_size=16_384, batches=4, rounds=24, table_rows_max=1_000_000, cache_rows=3_760_000)
QUICK = Size(batch_size=256, batches=2, rounds=4, table_rows_max=1_000, cache_rows=20_000)


@dataclass(frozen=True)
class Work:
    """The ids and gradients that all contestants are given."""

    size: Size
    tables: list[int]
    """Rows of each."""
    ids: list[list[Ids]]
    """By batch and table, one id a sample."""
    grads: list[torch.Tensor]
    """By table, (samples, columns)."""

    def initial(self, table: int, ids: Ids) -> Floats:
        """The vectors that all contestants start from."""
        vectors = np.empty((len(ids), DIM), np.float32)
        Uniform(0, str(table), 0.1).fill(ids, vectors)
        return vectors


class Contestant(Protocol):
    """One way to do the work."""

    def forward(self, batch: int) -> None:
        """Look the vectors of a batch up."""

    def backward(self, batch: int) -> None:
        """Bring the gradients into the rows."""

    def vectors(self, table: int, ids: Ids) -> Floats:
        """The vectors of some rows, as trained."""


def run(quick: bool) -> Results:
    """Both optimizers; 20 s on two idle cores, 6.5 GB of memory with both peers."""
    invariants: Any = torch.sparse.check_sparse_tensor_invariants
    invariants.disable()  # as they are by default, but said aloud: torch warns otherwise
    work = _work(QUICK if quick else FULL)
    return [_compare(work, SGD(LR)), _compare(work, Adagrad(LR))]


def _work(size: Size) -> Work:
    preset = find_preset("criteo-kaggle-like")
    data = Generated(preset, size.batch_size * size.batches, seed=0)
    tables = [min(table.rows or size.table_rows_max, size.table_rows_max) for table in preset.tables]
    ids = []
    for batch in range(size.batches):
        samples = data.gather(np.arange(batch * size.batch_size, (batch + 1) * size.batch_size))
        columns = [samples.columns[table.features[0]].values.reshape(-1) for table in preset.tables]
        ids.append([column % rows for column, rows in zip(columns, tables, strict=True)])
    generator = torch.Generator().manual_seed(0)
    grads = [torch.randn(size.batch_size, DIM, generator=generator) for _ in tables]
    return Work(size, tables, ids, grads)


def _compare(work: Work, optimizer: RowOptimizer) -> dict[str, Any]:
    ours = Ours(work, optimizer)
    contestants: dict[str, Contestant] = {"bagpipe": ours, "pytorch": PyTorch(work, optimizer)}
    missing = None
    if importlib.util.find_spec("fbgemm_gpu") is None:
        missing = "fbgemm-gpu-cpu is not installed: pip install 'bagpipe[bench]'"
    else:
        contestants["fbgemm"] = Fbgemm(work, optimizer)
    seconds: dict[str, list[tuple[float, float]]] = {name: [] for name in contestants}
    planning: list[float] = []
    for turn in range(work.size.rounds):
        start = time.perf_counter()
        ours.plan(turn % work.size.batches)
        planning.append(time.perf_counter() - start)
        for name, contestant in contestants.items():
            start = time.perf_counter()
            contestant.forward(turn % work.size.batches)
            middle = time.perf_counter()
            contestant.backward(turn % work.size.batches)
            seconds[name].append((middle - start, time.perf_counter() - middle))
    _check_agreement(work, contestants)
    ours.close()
    warm = work.size.rounds // 4
    result: dict[str, Any] = {
        "optimizer": optimizer.name,
        "batch_size": work.size.batch_size,
        "tables": len(work.tables),
        "dim": DIM,
        "rows_per_batch": sum(len(np.unique(ids)) for ids in work.ids[0]),
    }
    for name, times in seconds.items():
        for part, index in (("forward", 0), ("backward_update", 1)):
            result[f"{name}_{part}_ms"] = 1e3 * statistics.median(time[index] for time in times[warm:])
        result[f"{name}_ms"] = 1e3 * statistics.median(sum(time) for time in times[warm:])
    result["oracle_ms"] = 1e3 * statistics.median(planning[warm:])
    for peer in ("pytorch", "fbgemm"):
        there = peer in contestants
        result[f"time_ratio_to_{peer}"] = result["bagpipe_ms"] / result[f"{peer}_ms"] if there else None
        with_oracle = result["bagpipe_ms"] + result["oracle_ms"]
        result[f"time_ratio_to_{peer}_with_oracle"] = with_oracle / result[f"{peer}_ms"] if there else None
    if missing:
        result["fbgemm_reason"] = missing
    return result


def _check_agreement(work: Work, contestants: dict[str, Contestant]) -> None:
    """A contestant that computes something else would not be comparable."""
    for table, ids in enumerate(work.ids[0]):
        some = np.unique(ids)[:200]
        ours = contestants["bagpipe"].vectors(table, some)
        if np.array_equal(ours, work.initial(table, some)):
            raise AssertionError(f"table {table} was not trained")
        for name, contestant in contestants.items():
            vectors = contestant.vectors(table, some)
            np.testing.assert_allclose(vectors, ours, RELATIVE_TOLERANCE, ABSOLUTE_TOLERANCE, err_msg=name)


class Ours:
    """Kernels on a cache of rows, tables dealt to two threads, as the trainer uses them."""

    def __init__(self, work: Work, optimizer: RowOptimizer) -> None:
        self._work, self._optimizer, self._updates = work, optimizer, 0
        self._workers = Workers(torch.get_num_threads())
        width = DIM + optimizer.state_width((DIM,))
        self._cache = np.zeros((work.size.cache_rows, width), np.float32)
        free = iter(np.random.default_rng(0).permutation(work.size.cache_rows))
        self._slot_of: list[dict[int, int]] = []
        for table in range(len(work.tables)):
            ids = np.unique(np.concatenate([batch[table] for batch in work.ids]))
            slots = np.fromiter(free, np.int64, len(ids))
            self._cache[slots, :DIM] = work.initial(table, ids)
            self._slot_of.append(dict(zip(ids.tolist(), slots.tolist(), strict=True)))
        self._plans = [[self._plan(table, ids) for table, ids in enumerate(batch)] for batch in work.ids]
        rows = [max(len(batch[table][1]) for batch in self._plans) for table in range(len(work.tables))]
        self._buffers = [np.empty((count, DIM), np.float32) for count in rows]
        tables = [OracleTable(str(table), count) for table, count in enumerate(work.tables)]
        self._oracle = Oracle(tables, [work.size.cache_rows], LOOKAHEAD, threads=self._workers.num_threads)
        for batch in range(LOOKAHEAD - 1):
            self._oracle.read(work.ids[batch % work.size.batches])

    def plan(self, batch: int) -> None:
        """What the oracle does for each batch: read one more, plan the oldest."""
        self._oracle.read(self._work.ids[batch])
        self._oracle.emit()

    def close(self) -> None:
        """End the threads."""
        self._workers.close()
        self._oracle.close()

    def _plan(self, table: int, ids: Ids) -> tuple[Bags, npt.NDArray[np.int32]]:
        unique, first, inverse = np.unique(ids, return_index=True, return_inverse=True)
        order = np.argsort(first)  # plans number rows as they first occur
        place = np.empty_like(order)
        place[order] = np.arange(len(order))
        slots = np.array([self._slot_of[table][one] for one in unique[order].tolist()], np.int32)
        return Bags((BASE + place[inverse])[:, None], BASE), slots

    def forward(self, batch: int) -> None:
        """Look the vectors of a batch up."""
        self._outputs = []
        for bags, slots in self._plans[batch]:
            output = torch.empty(len(bags), DIM)
            self._outputs.append(output)
            self._pool(bags, slots, output.numpy())

    def _pool(self, bags: Bags, slots: npt.NDArray[np.int32], out: Floats) -> None:
        parts = self._workers.num_threads
        edges = [len(bags) * part // parts for part in range(parts + 1)]
        bad = [-1] * parts

        def pool_part(part: int) -> None:
            bad[part] = pool(self._cache, slots, bags, 0, out, edges[part], edges[part + 1])

        self._workers.run([lambda part=part: pool_part(part) for part in range(parts)])  # type: ignore[misc]
        assert max(bad) < 0, bad

    def backward(self, batch: int) -> None:
        """Bring the gradients into the rows: add up and check all tables, then update them."""
        self._outputs = []
        self._updates += 1
        scalars, plans = self._optimizer.scalars(self._updates), self._plans[batch]
        order = sorted(range(len(plans)), key=lambda table: -len(plans[table][1]))
        bad = [-1] * len(plans)

        def add(table: int) -> None:
            bags, slots = plans[table]
            buffer = self._buffers[table][: len(slots)]
            buffer.fill(0)
            accumulate(self._work.grads[table].numpy(), bags, buffer)
            bad[table] = first_not_finite(buffer)

        def update(table: int) -> None:
            slots = plans[table][1]
            apply(self._optimizer, self._cache, slots, self._buffers[table][: len(slots)], (DIM,), scalars)

        self._workers.run([lambda table=table: add(table) for table in order])  # type: ignore[misc]
        assert max(bad) < 0, bad
        self._workers.run([lambda table=table: update(table) for table in order])  # type: ignore[misc]

    def vectors(self, table: int, ids: Ids) -> Floats:
        """The vectors of some rows, as trained."""
        slots = [self._slot_of[table][one] for one in ids.tolist()]
        vectors: Floats = self._cache[slots, :DIM]
        return vectors


class PyTorch:
    """`nn.EmbeddingBag(sparse=True)` and torch's optimizer, on whole tables."""

    def __init__(self, work: Work, optimizer: RowOptimizer) -> None:
        self._work = work
        self._layers = [
            torch.nn.EmbeddingBag.from_pretrained(
                torch.from_numpy(work.initial(table, np.arange(rows))), freeze=False, sparse=True, mode="sum"
            )
            for table, rows in enumerate(work.tables)
        ]
        kinds: dict[str, Any] = {"sgd": torch.optim.SGD, "adagrad": torch.optim.Adagrad}
        self._optimizer = kinds[optimizer.name]([layer.weight for layer in self._layers], lr=LR)
        self._ids = [[torch.from_numpy(ids)[:, None] for ids in batch] for batch in work.ids]
        self._outputs: Sequence[torch.Tensor] = ()

    def forward(self, batch: int) -> None:
        """Look the vectors of a batch up."""
        self._outputs = [layer(ids) for layer, ids in zip(self._layers, self._ids[batch], strict=True)]

    def backward(self, batch: int) -> None:  # noqa: ARG002
        """Bring the gradients into the rows."""
        torch.autograd.backward(self._outputs, self._work.grads)
        self._outputs = ()
        self._optimizer.step()
        self._optimizer.zero_grad()

    def vectors(self, table: int, ids: Ids) -> Floats:
        """The vectors of some rows, as trained."""
        vectors: Floats = self._layers[table].weight.detach()[torch.from_numpy(ids)].numpy()
        return vectors


class Fbgemm:
    """FBGEMM's table-batched CPU kernels, what TorchRec trains with, on whole tables."""

    def __init__(self, work: Work, optimizer: RowOptimizer) -> None:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # at import, about parts that it lacks on CPU
            from fbgemm_gpu.split_embedding_configs import EmbOptimType
            from fbgemm_gpu.split_table_batched_embeddings_ops_common import EmbeddingLocation, PoolingMode
            from fbgemm_gpu.split_table_batched_embeddings_ops_training import (
                ComputeDevice,
                SplitTableBatchedEmbeddingBagsCodegen,
            )
        kinds = {"sgd": EmbOptimType.EXACT_SGD, "adagrad": EmbOptimType.EXACT_ADAGRAD}
        self._tables: Any = SplitTableBatchedEmbeddingBagsCodegen(
            [(rows, DIM, EmbeddingLocation.HOST, ComputeDevice.CPU) for rows in work.tables],
            optimizer=kinds[optimizer.name],
            learning_rate=LR,
            eps=1e-10,
            pooling_mode=PoolingMode.SUM,
        )
        for table, weight in enumerate(self._tables.split_embedding_weights()):
            weight.copy_(torch.from_numpy(work.initial(table, np.arange(work.tables[table]))))
        self._ids = [torch.from_numpy(np.concatenate(batch)) for batch in work.ids]
        self._offsets = torch.arange(len(work.tables) * work.size.batch_size + 1)
        self._grad = torch.cat(work.grads, dim=1)
        self._output: Any = None

    def forward(self, batch: int) -> None:
        """Look the vectors of a batch up."""
        self._output = self._tables(self._ids[batch], self._offsets)

    def backward(self, batch: int) -> None:  # noqa: ARG002
        """Bring the gradients into the rows."""
        self._output.backward(self._grad)
        self._output = None

    def vectors(self, table: int, ids: Ids) -> Floats:
        """The vectors of some rows, as trained."""
        vectors: Floats = self._tables.split_embedding_weights()[table][torch.from_numpy(ids)].numpy()
        return vectors


BENCHMARK = Benchmark("embedding", "the embedding layer alone against PyTorch's and FBGEMM's", run)
