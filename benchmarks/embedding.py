"""The embedding layer alone, forward + backward + row update: ours on cached rows, PyTorch's sparse one, FBGEMM's.

Batches of 16,384 samples of `criteo-kaggle-like`, 26 tables of 48 columns, the same gradients for all; every contestant
starts from the same vectors, takes its turn batch by batch, and must end at the same vectors to float tolerance. Ids
are taken modulo a million, so that the peers' whole tables fit small machines; the rows of a batch stay as many. All go
through autograd; ours are the layers that `bagpipe.prepare` leaves in a model, updated by `optimizer.step()`. They
need a plan, which the oracle makes in the background, on one thread: its time is given apart and added. Run it on a
machine that is otherwise idle: beside other work the peers' OpenMP threads lose far more than ours, and the ratios
flatter us.
"""

from __future__ import annotations

import importlib.util
import statistics
import time
import warnings
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import numpy as np
import numpy.typing as npt
import torch
from torch import nn

import bagpipe
from bagpipe.data.generator import Generated
from bagpipe.data.presets import find_preset
from bagpipe.initial import Uniform
from bagpipe.optim import SGD, Adagrad, RowOptimizer
from bagpipe.oracle.oracle import Oracle
from bagpipe.oracle.tables import OracleTable
from benchmarks import Benchmark, Results
from benchmarks.idle import wait_until_idle

Floats = npt.NDArray[np.float32]
Ids = npt.NDArray[np.int64]

DIM = 48
LOOKAHEAD = 100
LR = 0.01
RELATIVE_TOLERANCE, ABSOLUTE_TOLERANCE = 1e-3, 1e-4


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
    ours, oracle = Ours(work, optimizer), Planning(work)
    contestants: dict[str, Contestant] = {"bagpipe": ours, "pytorch": PyTorch(work, optimizer)}
    missing = None
    if importlib.util.find_spec("fbgemm_gpu") is None:
        missing = "fbgemm-gpu-cpu is not installed: pip install 'bagpipe[bench]'"
    else:
        contestants["fbgemm"] = Fbgemm(work, optimizer)
    seconds: dict[str, list[tuple[float, float]]] = {name: [] for name in contestants}
    planning: list[float] = []
    for turn in range(work.size.rounds):
        ours.take()
        start = time.perf_counter()
        oracle.plan(turn % work.size.batches)
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


class Layers(nn.Module):
    """One layer a table."""

    def __init__(self, tables: Sequence[int]) -> None:
        super().__init__()
        self.bags = nn.ModuleList(nn.EmbeddingBag(rows, DIM, mode="sum", device="meta") for rows in tables)


class Ours:
    """The layers of a model after `bagpipe.prepare`, in the loop that people write; all rows of the batches fit."""

    def __init__(self, work: Work, optimizer: RowOptimizer) -> None:
        self._work = work
        self._names = [f"table_{table}" for table in range(len(work.tables))]
        self._model = Layers(work.tables)
        _, self._optimizer, self._loader = bagpipe.prepare(
            self._model,
            torch_optimizer(optimizer.name, self._model.parameters()),
            (self._batch(turn % work.size.batches) for turn in range(work.size.rounds)),
            cache=work.size.cache_rows,
            features={name: f"bags.{table}" for table, name in enumerate(self._names)},
            options=bagpipe.Options(initial=lambda table: Uniform(0, table.name.rpartition(".")[2], 0.1)),
        )
        self._iterator = iter(self._loader)
        self._given: Mapping[str, torch.Tensor] = {}
        self._outputs: Sequence[torch.Tensor] = ()

    def _batch(self, number: int) -> dict[str, torch.Tensor]:
        """Tensors of its own each time, as loaders give them."""
        return {
            name: torch.from_numpy(ids.copy())[:, None]
            for name, ids in zip(self._names, self._work.ids[number], strict=True)
        }

    def take(self) -> None:
        """The next batch, whose rows are in the cache, and nothing runs in the background."""
        self._given = next(self._iterator)
        wait_until_idle(lambda: (0, 0))

    def close(self) -> None:
        """Write back, and end the threads."""
        self._loader.close()
        self._loader.loop.store.close()

    def forward(self, batch: int) -> None:  # noqa: ARG002
        """Look the vectors of a batch up."""
        self._outputs = [bag(self._given[name]) for bag, name in zip(self._model.bags, self._names, strict=True)]

    def backward(self, batch: int) -> None:  # noqa: ARG002
        """Bring the gradients into the rows."""
        torch.autograd.backward(self._outputs, self._work.grads)
        self._outputs = ()
        self._optimizer.step()
        self._optimizer.zero_grad()

    def vectors(self, table: int, ids: Ids) -> Floats:
        """The vectors of some rows, as trained."""
        with torch.no_grad():
            vectors: Floats = self._model.bags[table](torch.from_numpy(ids)[:, None]).numpy()
        return vectors


class Planning:
    """The oracle for the same batches, as it runs in the background: on one thread."""

    def __init__(self, work: Work) -> None:
        self._work = work
        tables = [OracleTable(str(table), count) for table, count in enumerate(work.tables)]
        self._oracle = Oracle(tables, [work.size.cache_rows], LOOKAHEAD)
        for batch in range(LOOKAHEAD - 1):
            self._oracle.read(work.ids[batch % work.size.batches])

    def plan(self, batch: int) -> None:
        """What the oracle does for each batch: read one more, plan the oldest."""
        self._oracle.read(self._work.ids[batch])
        self._oracle.emit()


def torch_optimizer(name: str, parameters: Iterable[torch.Tensor]) -> torch.optim.Optimizer:
    """Torch's own of that name."""
    kinds: dict[str, Any] = {"sgd": torch.optim.SGD, "adagrad": torch.optim.Adagrad}
    optimizer: torch.optim.Optimizer = kinds[name](parameters, lr=LR)
    return optimizer


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
        self._optimizer = torch_optimizer(optimizer.name, [layer.weight for layer in self._layers])
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
