"""What the processes of `bagpipe bench trainers` do: the embedding server, the oracle with the data, and each trainer.

They are what `bagpipe launch` has, with its checkpoints for recovery, so that a lost process could come back. The
process that started them asks them one thing at a time (`children.py`). One system is open at a time; it is closed,
with its server's rows, before the next one begins from the same values.
"""

from __future__ import annotations

import sys
import threading
import time
from collections.abc import Iterator, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from functools import cached_property
from itertools import islice
from pathlib import Path
from queue import Queue
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import nn

from bagpipe.allocator import keep_freed_memory
from bagpipe.build import build_loop
from bagpipe.cluster.context import RoleWorld
from bagpipe.config import RecoveryConfig, memory_bytes, parse_config
from bagpipe.data import Generated, find_preset
from bagpipe.job import Job, dense_optimizer
from bagpipe.layout import RowLayout
from bagpipe.oracle.service import OracleService
from bagpipe.prepared import PreparedLoader, row_parameters
from bagpipe.server.client import RemoteStore
from bagpipe.server.process import Ready, ServerOptions, serve
from bagpipe.store import Store
from bagpipe.store.base import ROWS_PER_CHUNK
from bagpipe.trainer.collective import Groups
from bagpipe.trainer.process_group import open_groups
from bagpipe.trainer.remote_plans import RemotePlans
from bagpipe.training import spec_of
from bagpipe.types import Batch
from bagpipe.wire.listener import on_socket
from bagpipe.wire.stream import SocketNetwork
from benchmarks.children import answer
from benchmarks.idle import wait_until_idle
from benchmarks.namespaces import DEVICE, counted_bytes
from benchmarks.train import CACHE_SHARE, LR

TRAINERS = 2
IDS, DENSE, LABELS, TOUCHED = "ids.npy", "dense.npy", "labels.npy", "touched.npz"
"""Files of the batches that are measured, as other systems read them, and of the ids of rows that are fetched then."""


@dataclass(frozen=True)
class Size:
    """How much work there is."""

    rows_share: float
    dim: int
    batch_size: int
    batches: int
    """Different ones, as many as are read."""
    lookahead: int
    """Also how many batches pass before anything is measured: then the cache holds what it will always hold."""
    turn: dict[str, int]
    """Iterations of a turn."""
    cache_rows: int


_ROWS = sum(table.rows or 0 for table in find_preset("criteo-kaggle-like").tables)
FULL = Size(
    1.0, 48, 16_384, 136, 50, {"wide_deep": 6, "deepfm": 6, "deep_cross": 5, "dlrm": 5}, round(CACHE_SHARE * _ROWS)
)
QUICK = Size(0.001, 8, 256, 40, 8, dict.fromkeys(FULL.turn, 2), 4_096)
AHEAD = 24
"""More batches than can be on their way from the oracle to a trainer's cache."""


def data_of(size: Size) -> Generated:
    """What all systems train on."""
    preset = find_preset("criteo-kaggle-like")
    whole = preset if size.rows_share == 1 else preset.scaled(size.rows_share)
    return Generated(whole, size.batch_size * size.batches, 0)


def job_of(model: str, design: str, delayed: bool, quick: bool) -> Job:
    """One way to train one model."""
    size = QUICK if quick else FULL
    config = parse_config({
        "model": {"name": model, "dim": size.dim},
        "row_optimizer": {"name": "sgd", "lr": LR},
        "dense_optimizer": {"name": "sgd", "lr": LR},
        "batch_size": size.batch_size,
        "cache": size.cache_rows,
        "lookahead": size.lookahead,
        "trainers": TRAINERS,
        "sync": {"design": design, "delayed": delayed},
        "checkpoint": {"final": False},
    })  # fmt: skip
    data = data_of(size)
    return Job(config, data.preset.name, data, data, size.batches, Path())


class ServerRole:
    """The embedding server."""

    def __init__(self, host: str) -> None:
        self._host = host
        self._stop = threading.Event()
        self._thread: threading.Thread | None = None

    def open(self, run: str, directory: str) -> str:
        """A server without rows, which can go back to the last checkpoint as that of a launch can; its address."""
        ready: Queue[Ready | None] = Queue()
        self._stop = stop = threading.Event()
        options = ServerOptions(
            address=f"{self._host}:0",
            run=bytes.fromhex(run),
            rollback=True,
            history_max=memory_bytes("recovery.history", RecoveryConfig().history),
            checkpoints=(str(_checkpoints(directory, run)),),
        )

        def work() -> None:
            try:
                serve(options, "none", ready.put, stop)
            finally:
                ready.put(None)

        self._thread = threading.Thread(target=work, name="server")
        self._thread.start()
        found = ready.get()
        assert found is not None, "the server did not start"
        return found.address

    def close(self) -> None:
        """Let its rows go."""
        assert self._thread is not None
        self._stop.set()
        self._thread.join()


class PlannerRole:
    """The oracle, and the data: batches lie in memory, so reading them costs nothing."""

    def __init__(self, host: str) -> None:
        self._host = host
        self._batches: list[Batch] = []
        self._service: OracleService | None = None

    def prepare(self, quick: bool, model: str, directory: str) -> None:
        """Make the data, and files of it for others: what is measured, and the ids of rows that are fetched then."""
        size = QUICK if quick else FULL
        data = data_of(size)
        self._batches = list(data.batches(size.batch_size))
        path, first, count = Path(directory), size.lookahead + 1, size.turn[model]
        _save(path, data, self._batches[first : first + count])
        fetched = self._batches[size.lookahead : first + count + AHEAD]
        touched = {
            table.name: np.unique(np.concatenate([_ids(batch, name) for batch in fetched for name in table.features]))
            for table in data.tables
        }
        np.savez(path / TOUCHED, **touched)  # type: ignore[arg-type]
        keep_freed_memory()

    def open(self, run: str, **system: Any) -> str:
        """An oracle that has all batches before it; its address."""
        listen = on_socket(f"{self._host}:0", security="none")
        settings = job_of(**system).plan_settings()
        self._service = OracleService(listen, iter(self._batches), settings, run=bytes.fromhex(run))
        return self._service.start()

    def rest(self) -> dict[str, int]:
        """Return when nothing is left to plan or to send; what was sent so far, on the link also by the server."""
        assert self._service is not None
        wait_until_idle(counted_bytes)
        status = self._service.status()
        return {"bytes_sent": counted_bytes()[0], "plans": status.plans_sent, "plan_bytes": status.bytes_sent}

    def close(self) -> None:
        """Plan no more."""
        assert self._service is not None
        self._service.close()


class TrainerRole:
    """One trainer, with one thread for PyTorch."""

    def __init__(self, rank: int) -> None:
        self._rank = rank
        self._opened = ExitStack()
        self._system: TrainedSystem | None = None

    def prepare(self) -> None:
        """What does not depend on the system."""
        keep_freed_memory()
        torch.set_num_threads(1)

    def open(self, run: str, server: str, oracle: str, meeting: str, directory: str, **system: Any) -> None:
        """Connect; fill the server with the rows that will be measured: one that was never written would not travel."""
        job = job_of(**system)
        with ExitStack() as stack:
            network = SocketNetwork("none", local=False)  # on the same host, but nothing may pass by the link
            layouts = job.model()[2]
            key = bytes.fromhex(run)
            store = RemoteStore(layouts, [server], network, run=key, trainer=self._rank, trainers=TRAINERS)
            stack.callback(store.close)
            if self._rank == 0:
                fill(store, layouts, Path(directory) / TOUCHED)
            groups = open_groups(self._rank, TRAINERS, meeting, interface=DEVICE)
            stack.callback(groups.close)
            plans = RemotePlans(network, oracle, run=key, trainer=self._rank)
            stack.callback(plans.close)
            self._system = TrainedSystem(job, plans, store, groups, _checkpoints(directory, run))
            stack.callback(self._system.close)
            self._opened = stack.pop_all()

    def warm_up(self, iterations: int) -> None:
        """Fill the cache, and train once."""
        assert self._system is not None
        self._system.skip(iterations)
        self._system.train(1)

    def rest(self) -> None:
        """Return when nothing is on its way."""
        wait_until_idle(counted_bytes)

    def turn(self, iterations: int) -> dict[str, Any]:
        """Train some iterations, until their traffic has ended, and tell what they took."""
        assert self._system is not None
        return self._system.turn(iterations)

    def close(self) -> list[float]:
        """Write back, and let go of everything; the losses of all iterations that were trained."""
        assert self._system is not None
        self._opened.close()
        losses, self._system = self._system.losses, None
        return losses


class TrainedSystem:
    """A model, and the loop over its batches."""

    def __init__(self, job: Job, plans: RemotePlans, store: Store, groups: Groups, checkpoints: Path) -> None:
        self.losses: list[float] = []
        # All trainers write into one directory, by the same name.
        token = checkpoints.name[-8:]
        world = RoleWorld(job.config, plans, store, groups, checkpoints=checkpoints, recovers=True, token=token)
        loop = build_loop(spec_of(job, world), world, job.checkpointing(checkpoints))
        self._model = loop.model
        self._optimizer = dense_optimizer(job.config.dense_optimizer)(list(self._model.parameters()))
        parameters = row_parameters(loop.binding, loop.lookups.device)
        self._loader = PreparedLoader(loop, parameters, [self._optimizer], {})
        self._loader.register_for_checkpointing()

    @cached_property
    def _iterator(self) -> Iterator[Any]:
        return iter(self._loader)

    def skip(self, count: int) -> None:
        """Pass over so many batches; their rows pass through the cache."""
        for _ in islice(self._iterator, count):
            pass

    def train(self, count: int) -> list[float]:
        """Train so many iterations; the seconds of each."""
        seconds, before = [], time.perf_counter()
        for batch in islice(self._iterator, count):
            loss = nn.functional.binary_cross_entropy_with_logits(self._model(batch.dense, batch.sparse), batch.labels)
            self._optimizer.zero_grad()
            loss.backward()  # type: ignore[no-untyped-call]
            self._optimizer.step()
            self.losses.append(loss.item())
            del batch, loss
            seconds.append(time.perf_counter() - before)
            before = time.perf_counter()
        return seconds

    def turn(self, count: int) -> dict[str, Any]:
        """Train some iterations, and count what they take; times are of the clock that all processes share."""
        before, moved, start = self._loader.stats(), counted_bytes(), time.perf_counter()
        seconds = self.train(count)
        end = wait_until_idle(counted_bytes)
        sent, received = (now - then for now, then in zip(counted_bytes(), moved, strict=True))
        after = self._loader.stats()
        return {
            "start": start,
            "end": end,
            "seconds": seconds,
            "bytes_sent": sent,
            "bytes_received": received,
            "lookahead": after["lookahead"],
            "cache_rows": after["cache_rows"],
        } | {key: after[key] - before[key] for key in ("fetched_rows", "written_rows", "stall_seconds")}

    def close(self) -> None:
        """Write back what is cached."""
        self._loader.close()


def _checkpoints(directory: str, run: str) -> Path:
    """Of one system."""
    return Path(directory) / f"checkpoints-{run}"


def _save(path: Path, data: Generated, batches: Sequence[Batch]) -> None:
    features = [feature for table in data.tables for feature in table.features]
    np.save(path / IDS, np.array([[_ids(batch, name) for name in features] for batch in batches]))
    np.save(path / DENSE, np.stack([batch.dense.numpy() for batch in batches]))
    np.save(path / LABELS, np.stack([batch.labels.numpy() for batch in batches]))


def _ids(batch: Batch, feature: str) -> NDArray[np.int64]:
    """The ids of a feature, of which each sample has one."""
    ids: NDArray[np.int64] = batch.sparse[feature].values.numpy().reshape(-1)
    return ids


def fill(store: Store, layouts: list[RowLayout], touched: Path) -> None:
    """Write these rows as they begin."""
    with np.load(touched) as ids_of:
        for number, layout in enumerate(layouts):
            ids = ids_of[layout.table.name]
            for start in range(0, len(ids), ROWS_PER_CHUNK):
                chunk = ids[start : start + ROWS_PER_CHUNK]
                rows = np.empty((len(chunk), layout.width), np.float32)
                layout.initialise(chunk, rows)
                store.write(number, chunk, rows)


def role_of(name: str, where: str) -> ServerRole | PlannerRole | TrainerRole:
    """The one that this process is there for; `where` is its host, or which of the trainers it is."""
    if name == "trainer":
        return TrainerRole(int(where))
    return ServerRole(where) if name == "server" else PlannerRole(where)


if __name__ == "__main__":
    answer(role_of(*sys.argv[1:]))
