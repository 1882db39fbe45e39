"""One rank of TorchRec, as a peer of `bagpipe bench trainers`: the same models, tables, samples and optimizers.

Runs in TorchRec's own virtual environment, which needs nothing of ours: `python -I torchrec_peer.py`. Asked in lines of
JSON on standard input, it answers in lines on standard output. The dense part is that of `bagpipe.models`, loaded by
path; its pooled vectors come from TorchRec's tables, sharded as TorchRec's planner decides. Dense parameters are
averaged by torch's DistributedDataParallel, as TorchRec does by default.
"""

from __future__ import annotations

import gc
import importlib
import json
import logging
import os
import sys
import time
import warnings
from collections.abc import Mapping, Sequence
from functools import partial
from pathlib import Path
from types import ModuleType
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor, nn

MULTIPLE = 4
"""FBGEMM's vectors have a length that this divides."""
LINEAR = 1
"""Columns of DeepFM's linear term, which stands behind the vector of the same id: so its ids are sent once."""


def load_models() -> Any:
    """Our models without the rest of the package, which needs more than PyTorch."""
    bare = ModuleType("bagpipe")
    bare.__path__ = [str(Path(__file__).parents[1] / "src" / "bagpipe")]
    sys.modules["bagpipe"] = bare
    return importlib.import_module("bagpipe.models"), importlib.import_module("bagpipe.types")


def make_dense_part(name: str, tables: Sequence[Mapping[str, Any]], num_dense: int, dim: int) -> Any:
    """The model with its embedding layers taken away: it is given the pooled vector of each feature instead."""
    models, types = load_models()
    given = [types.Table(table["name"], table["rows"], tuple(table["features"])) for table in tables]
    model = models.build_model(name, given, num_dense, dim, "meta", seed=0)
    model.embeddings = nn.ModuleDict()
    if hasattr(model, "linear"):
        model.linear = nn.ModuleDict()
    model.pool = partial(_pooled, model)
    return model


def vector_width(model: Any) -> int:
    """Columns of a row that serves all layers of the model."""
    used = int(model.dim) + (LINEAR if hasattr(model, "linear") else 0)
    return -(-used // MULTIPLE) * MULTIPLE


def _pooled(model: Any, layers: nn.ModuleDict, vectors: Mapping[str, Tensor]) -> list[Tensor]:
    linear = layers is getattr(model, "linear", None)
    columns = slice(model.dim, model.dim + LINEAR) if linear else slice(0, model.dim)
    return [vectors[feature][:, columns] for _, feature in model.fields]


class Net(nn.Module):
    """Tables, then the dense part."""

    def __init__(self, tables: nn.Module, model: nn.Module) -> None:
        super().__init__()
        self.tables, self.model = tables, model

    def forward(self, dense: Tensor, sparse: Any) -> Any:
        """Logits, shape (samples,)."""
        return self.model(dense, self.tables(sparse).to_dict())


class Peer:
    """What can be asked for."""

    def __init__(self) -> None:
        self._batches: list[tuple[Tensor, Any, Tensor]] = []
        self._model: Any = None
        self._optimizer: Any = None
        self._iteration = 0
        self._sent = Path()

    def prepare(
        self,
        rank: int,
        trainers: int,
        meeting: str,
        device: str,
        bits_per_second: int | None,
        directory: str,
        model: str,
        tables: list[dict[str, Any]],
        dim: int,
        lr: float,
    ) -> dict[str, Any]:
        """Meet the other ranks, make the tables, read this rank's samples.

        With `bits_per_second` the planner is told that each rank is a host, what they are joined by, and how many
        samples they have; without, it gets what everybody has to give.
        """
        if not dist.is_initialized():
            torch.set_num_threads(1)
            os.environ["GLOO_SOCKET_IFNAME"] = device
            dist.init_process_group("gloo", init_method=f"tcp://{meeting}", rank=rank, world_size=trainers)
        self._sent = Path("/sys/class/net") / device / "statistics" / "tx_bytes"
        self._model = self._optimizer = None
        self._batches, self._iteration = [], 0
        gc.collect()
        path = Path(directory)
        ids, numbers, labels = (np.load(path / f"{name}.npy", mmap_mode="r") for name in ("ids", "dense", "labels"))
        share = slice(rank * ids.shape[2] // trainers, (rank + 1) * ids.shape[2] // trainers)
        dense_part = partial(make_dense_part, model, tables, numbers.shape[2], dim)
        features = [feature for table in tables for feature in table["features"]]
        plan = self._make(dense_part(), tables, trainers, share.stop - share.start, bits_per_second, lr)
        torchrec = importlib.import_module("torchrec")
        for number in range(len(ids)):
            dense = torch.from_numpy(numbers[number, share].copy())
            values = torch.from_numpy(ids[number, :, share].reshape(-1).copy())
            lengths = torch.ones(values.numel(), dtype=torch.int32)
            sparse = torchrec.KeyedJaggedTensor(keys=features, values=values, lengths=lengths)
            self._batches.append((dense, sparse, torch.from_numpy(labels[number, share].copy())))
        self._alone_model = dense_part()
        self._alone_optimizer = torch.optim.SGD(self._alone_model.parameters(), lr=lr)
        self._features, self._width = features, vector_width(self._alone_model)
        numel = sum(parameter.numel() for parameter in self._alone_model.parameters())
        return {"torchrec": torchrec.__version__, "sharding": plan, "dense_parameters": numel}

    def _make(
        self,
        dense_part: Any,
        tables: list[dict[str, Any]],
        trainers: int,
        samples: int,
        bits_per_second: int | None,
        lr: float,
    ) -> dict[str, str]:
        """The model, sharded as TorchRec's planner wants it; how each table is."""
        torchrec = importlib.import_module("torchrec")
        bags = importlib.import_module("torchrec.distributed.embeddingbag")
        planner = importlib.import_module("torchrec.distributed.planner")
        parallel = importlib.import_module("torchrec.distributed.model_parallel")
        fused = importlib.import_module("torchrec.optim.apply_optimizer_in_backward")
        width = vector_width(dense_part)
        configs = [
            torchrec.EmbeddingBagConfig(
                name=table["name"], embedding_dim=width, num_embeddings=table["rows"], feature_names=table["features"]
            )
            for table in tables
        ]
        net = Net(torchrec.EmbeddingBagCollection(device=torch.device("meta"), tables=configs), dense_part)
        fused.apply_optimizer_in_backward(torch.optim.SGD, net.tables.parameters(), {"lr": lr})
        sharder = bags.EmbeddingBagCollectionSharder()
        known: dict[str, Any] = {}
        if bits_per_second is not None:
            known = {"local_world_size": 1, "inter_host_bw": bits_per_second / 8e3}  # bytes a millisecond
        topology = planner.Topology(world_size=trainers, compute_device="cpu", **known)
        batch_size = samples if known else None
        plan = planner.EmbeddingShardingPlanner(topology=topology, batch_size=batch_size).collective_plan(
            net, [sharder], dist.group.WORLD
        )
        self._model = parallel.DistributedModelParallel(net, device=torch.device("cpu"), plan=plan, sharders=[sharder])
        dense = [value for name, value in self._model.named_parameters() if ".tables." not in f".{name}"]
        self._optimizer = torch.optim.SGD(dense, lr=lr)
        return {name: each.sharding_type for name, each in plan.plan["tables"].items()}

    def turn(self, iterations: int) -> dict[str, Any]:
        """Train; seconds and bytes sent of each iteration."""
        seconds, sent = [], []
        for _ in range(iterations):
            dense, sparse, labels = self._batches[self._iteration % len(self._batches)]
            self._iteration += 1
            dist.barrier()
            before, start = self._bytes(), time.perf_counter()
            self._optimizer.zero_grad()
            loss = nn.functional.binary_cross_entropy_with_logits(self._model(dense, sparse), labels)
            loss.backward()  # type: ignore[no-untyped-call]
            self._optimizer.step()
            seconds.append(time.perf_counter() - start)
            sent.append(self._bytes() - before)
        return {"seconds": seconds, "bytes_sent": sent, "loss": loss.item()}

    def dense(self, iterations: int) -> dict[str, Any]:
        """The dense part alone, all ranks at the same time: seconds of each iteration."""
        seconds = []
        for number in range(iterations):
            dense, _, labels = self._batches[number % len(self._batches)]
            vectors = {name: torch.rand(len(dense), self._width, requires_grad=True) for name in self._features}
            dist.barrier()
            start = time.perf_counter()
            self._alone_optimizer.zero_grad()
            loss = nn.functional.binary_cross_entropy_with_logits(self._alone_model(dense, vectors), labels)
            loss.backward()  # type: ignore[no-untyped-call]
            self._alone_optimizer.step()
            seconds.append(time.perf_counter() - start)
        return {"seconds": seconds}

    def _bytes(self) -> int:
        return int(self._sent.read_text(encoding="ascii"))


def main() -> None:
    """Answer until there are no more questions; whatever else prints does so on standard error."""
    warnings.filterwarnings("ignore")
    logging.disable(logging.WARNING)
    answers = os.fdopen(os.dup(1), "w", encoding="utf-8")
    os.dup2(2, 1)
    peer = Peer()
    for line in sys.stdin:
        asked = json.loads(line)
        answers.write(json.dumps(getattr(peer, asked["do"])(**asked["given"])) + "\n")
        answers.flush()


if __name__ == "__main__":
    main()
