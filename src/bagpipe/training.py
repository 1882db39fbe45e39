"""A training run from its configuration to its summary: `bagpipe train` and `bagpipe verify` are thin layers over it.

`prepare` opens and checks everything and writes nothing but the run directory; the same job can then be trained by the
reference or by the configured system, and both must end with the same `parameters_sha256` (I1).
"""

from __future__ import annotations

import json
import math
import shutil
import time
from collections.abc import Callable, Generator, Sequence
from contextlib import closing, suppress
from dataclasses import dataclass, replace
from functools import partial
from itertools import islice
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from bagpipe.api import OpenStore, accelerate, open_rows
from bagpipe.config import DEFAULT_PRESET, DEFAULT_SAMPLES, Config, DenseOptimizerConfig
from bagpipe.data import Dataset, Loader, Shards, describe, find_preset, generated
from bagpipe.data.service import DataOrder
from bagpipe.errors import ConfigError, DataError
from bagpipe.initial import Uniform
from bagpipe.layers import Binding, bind
from bagpipe.layout import RowLayout
from bagpipe.metrics import Metrics
from bagpipe.models import build_model
from bagpipe.oracle.assign import Assigner
from bagpipe.oracle.service import PlanSettings
from bagpipe.reference import Reference
from bagpipe.server.local import open_store, open_stores
from bagpipe.state import State, of_reference, of_store
from bagpipe.store import Store
from bagpipe.store.views import shared_views
from bagpipe.together import Trainers
from bagpipe.trainer.batches import Batches
from bagpipe.trainer.remote_plans import RemotePlans, remote_batches
from bagpipe.trainer.stages import Driver
from bagpipe.trainer.sync import Groups, Peers
from bagpipe.types import Batch

Report = Callable[[int, str], None]
Summary = dict[str, Any]


@dataclass(frozen=True)
class Job:
    """Everything that a run needs, opened and checked."""

    config: Config
    source: str
    train: Dataset
    held_out: Dataset
    iterations: int
    run_dir: Path

    def model(self) -> tuple[nn.Module, Binding, list[RowLayout]]:
        """A fresh model, its embedding tables on the meta device, and the layout of their rows."""
        config = self.config
        tables = self.train.tables
        model = build_model(
            config.model.name, tables, self.train.num_dense, config.model.dim, torch.device("meta"), seed=config.seed
        )
        features = [feature for table in tables for feature in table.features]
        binding = bind(model, features, tables=tables)
        optimizer = config.row_optimizer.build()
        scale = 1 / config.model.dim**0.5
        layouts = [
            RowLayout(table, binding.dims(number), optimizer, Uniform(config.seed, table.name, scale))
            for number, table in enumerate(binding.tables)
        ]
        return model, binding, layouts

    def data_order(self) -> DataOrder:
        """What data processors need to know of the run."""
        seed = self.config.seed if self.config.data.shuffle else None
        return DataOrder(describe(self.train), self.config.batch_size, self.iterations, seed)

    def plan_settings(self) -> PlanSettings:
        """What an oracle needs to know of the run, besides its batches."""
        config = self.config
        _, binding, layouts = self.model()
        widths = tuple(layout.width for layout in layouts)
        data = self.data_order().fingerprint()
        return PlanSettings(
            binding.tables,
            widths,
            config.cache,
            config.lookahead,
            config.policy,
            data=data,
            trainers=config.trainers,
            assign=config.assign,
            seed=config.seed,
            design=config.sync.design,
            delayed=config.sync.delayed,
        )

    def batches(self) -> Generator[Batch, None, None]:
        """The batches of the run, in order."""
        config = self.config
        epochs = -(-self.iterations // -(-self.train.num_samples // config.batch_size))
        seed = config.seed if config.data.shuffle else None
        workers, processes = config.data.workers, config.data.processes
        loader = Loader(self.train, config.batch_size, epochs=epochs, seed=seed, workers=workers, processes=processes)
        with closing(iter(loader)) as reading:
            yield from islice(reading, self.iterations)


def prepare(config: Config, run_dir: Path | None = None) -> Job:
    """Open the data and claim the run directory."""
    job = open_job(config, Path())
    return replace(job, run_dir=claim(run_dir, config))


def open_job(config: Config, run_dir: Path) -> Job:
    """Open the data; the run directory is another's, and is not looked at."""
    source, data = _open(config)
    train, held_out = _divide(source, data, config.data.held_out)
    an_epoch = -(-train.num_samples // config.batch_size)
    iterations = config.iterations or (config.epochs or 1) * an_epoch
    if config.threads is not None:
        torch.set_num_threads(config.threads)
    return Job(config, source, train, held_out, iterations, run_dir)


def train_reference(job: Job, report: Report) -> tuple[State, Summary]:
    """Train with the reference, on the trainers that the job asks for."""
    model, binding, layouts = job.model()
    config = job.config
    dense = dense_optimizer(config.dense_optimizer)
    assign = Assigner(config.assign, config.trainers, config.seed, [table.features for table in binding.tables])
    reference = Reference(model, binding, layouts, dense, config.trainers, assign)
    untrained = evaluate(job, reference.predict)
    clock = Clock()
    for batch in job.batches():
        clock.loss = reference.step(batch)
        clock.tick(batch, report)
    clock.stop()
    trained = evaluate(job, reference.predict)
    return of_reference(reference), clock.summary() | metrics_summary(trained, untrained)


def train_accelerated(job: Job, report: Report) -> tuple[State, Summary]:
    """Train with the configured system."""
    if job.config.trainers > 1:
        return train_together(job, report)
    with closing(job.batches()) as reading:  # also when training never begins: its threads must not stay
        return _train_accelerated(job, reading, report)


def _train_accelerated(job: Job, reading: Generator[Batch, None, None], report: Report) -> tuple[State, Summary]:
    config = job.config
    model, _, layouts = job.model()
    optimizer = layouts[0].optimizer
    initials = {layout.table.name: layout.initial for layout in layouts}
    batches = accelerate(
        model,
        reading,
        optimizer,
        cache=config.cache,
        lookahead=config.lookahead,
        policy=config.policy,
        store=_store(job),
        store_memory=config.store_memory if not config.servers else None,
        tables=job.train.tables,
        initial=lambda table: initials[table.name],
        check=config.check,
    )
    with closing(batches.store):
        state, summary = train_over(job, model, layouts, batches, report)
    assert state is not None
    del summary["last_samples"]
    return state, summary


def train_together(job: Job, report: Report) -> tuple[State, Summary]:
    """The same with several trainers, which are threads of this process."""
    config = job.config
    made = [job.model() for _ in range(config.trainers)]
    with closing(job.batches()) as reading:
        trainers = Trainers(config, made, reading, partial(open_views, job))
        reports = [report, *[_unheard] * (config.trainers - 1)]
        ended = trainers.run(lambda rank, batches: train_over(job, *made[rank][::2], batches, reports[rank], rank))
    state = ended[0][0]
    assert state is not None
    return state, joined_summary([summary for _, summary in ended])


def _unheard(_done: int, _note: str) -> None:
    """What trainers beside the first one say in one process."""


def open_views(job: Job, layouts: Sequence[RowLayout], notify: Sequence[Callable[[], None]]) -> list[Store]:
    """The rows of a job, as each of its trainers sees them."""
    config = job.config
    if config.servers:
        return [*open_stores(config, layouts, job.run_dir, config.trainers)]
    return [*shared_views(open_rows(_store(job), layouts, config.store_memory), config.trainers, notify)]


def joined_summary(summaries: Sequence[Summary]) -> Summary:
    """What trainers have shown, as one: they share batches, so counts are summed and the rest is the first one's."""
    joined = dict(summaries[0])
    for key in ("samples", "fetched_rows", "written_rows", "plan_bytes"):
        if key in joined:
            joined[key] = sum(summary[key] for summary in summaries)
    joined["samples_per_second"] = joined["samples"] / joined["seconds"]
    last = [summary.pop("last_samples") for summary in summaries]
    losses = [summary["loss"] for summary in summaries]
    joined["loss"] = sum(loss * n for loss, n in zip(losses, last, strict=True) if n) / sum(last)
    del joined["last_samples"]
    return joined


def _store(job: Job) -> str | Path | OpenStore:
    """Where the rows of a job live."""
    if job.config.servers:
        return lambda layouts: open_store(job.config, layouts, job.run_dir)
    return "memory" if job.config.store == "memory" else job.run_dir / "rows"


def train_over(
    job: Job, model: nn.Module, layouts: list[RowLayout], batches: Batches, report: Report, rank: int = 0
) -> tuple[State | None, Summary]:
    """Train a model whose embedding layers are swapped, over the batches of the job.

    Of several trainers all call it, and the first one evaluates and has a state in the end.
    """
    optimizer = layouts[0].optimizer
    dense = dense_optimizer(job.config.dense_optimizer)(list(model.parameters()))
    loss_fn = nn.BCEWithLogitsLoss()
    untrained = trained = Metrics()
    with batches:
        if rank == 0:
            untrained = evaluate_accelerated(job, batches)
        clock = Clock()
        for batch in batches:
            loss = loss_fn(model(batch.dense, batch.sparse), batch.labels)
            dense.zero_grad(set_to_none=True)
            loss.backward()
            dense.step()
            optimizer.step()
            clock.loss = loss.item()
            clock.tick(batch, report)
        clock.stop()
        batches.barrier()
        if rank == 0:
            trained = evaluate_accelerated(job, batches)
    stats = batches.stats()
    summary = clock.summary() | (metrics_summary(trained, untrained) if rank == 0 else {})
    summary |= {key: stats[key] for key in ("hit_rate", "fetched_rows", "written_rows", "lookahead", "cache_rows")}
    summary["stall_fraction"] = stats["stall_seconds"] / clock.seconds
    if rank:
        return None, summary
    return of_store(model, [layout.table.name for layout in layouts], batches.store), summary


def train_remote(
    job: Job,
    plans: RemotePlans,
    store: Store,
    report: Report,
    groups: Groups | None = None,
    driver: Driver | None = None,
) -> tuple[State | None, Summary]:
    """Train on plans that an oracle elsewhere makes, with rows in this store; both are closed in the end.

    With `groups` this is one of several trainers: the first one has a state in the end, and `joined_summary` makes one
    of what all of them have shown.
    """
    config = job.config
    sync = config.sync
    peers = None if groups is None else Peers(groups, sync.design, sync.delayed, sync.deterministic)
    with closing(plans), closing(store):
        model, binding, layouts = job.model()
        batches = remote_batches(
            model, binding, layouts, layouts[0].optimizer, plans, store, check=config.check and peers is None,
            driver=driver, peers=peers, assign=config.assign,
        )  # fmt: skip
        state, summary = train_over(job, model, layouts, batches, report, 0 if peers is None else peers.rank)
        if peers is None:
            del summary["last_samples"]
        return state, summary | {"plan_bytes": plans.stats()["bytes_received"]}


def train(job: Job, report: Report) -> Summary:
    """Train as configured, write summary.json, return it; a run that fails leaves no directory behind."""
    try:
        state, summary = train_accelerated(job, report)
        summary["parameters_sha256"] = state.sha256()
        return write_summary(job, summary)
    except BaseException:
        shutil.rmtree(job.run_dir, ignore_errors=True)
        with suppress(OSError):
            Path("runs").rmdir()  # if no other run is in it
        raise


def verify(job: Job, report: Report) -> Summary:
    """Train with the reference and with the configured system, and compare every bit."""
    # The configured system first: what is wrong with its settings shows before the slower reference has run.
    found, _ = train_accelerated(job, report)
    expected, _ = train_reference(job, lambda done, note: report(job.iterations + done, note))
    differing = expected.differing(found)
    return {
        "identical": not differing,
        "tensors": len(expected.dense),
        "rows": sum(len(ids) for ids, _ in expected.rows.values()),
        "differing": len(differing),
        "first_difference": differing[0] if differing else None,
        "parameters_sha256": expected.sha256(),
    }


class Clock:
    """Counts what a run has done and how long it took."""

    def __init__(self) -> None:
        self.iterations, self.samples, self.loss, self.seconds = 0, 0, math.nan, math.nan
        self.last_samples = 0
        self._start = time.perf_counter()

    def tick(self, batch: Batch, report: Report) -> None:
        """One more iteration."""
        self.iterations += 1
        self.last_samples = len(batch)
        self.samples += self.last_samples
        report(self.iterations, f"loss {self.loss:.4f}")

    def stop(self) -> None:
        """Training is over."""
        self.seconds = time.perf_counter() - self._start

    def summary(self) -> Summary:
        """For people and for summary.json."""
        return {
            "iterations": self.iterations,
            "samples": self.samples,
            "seconds": self.seconds,
            "samples_per_second": self.samples / self.seconds,
            "loss": self.loss,
            "last_samples": self.last_samples,
        }


def evaluate(job: Job, predict: Callable[[Batch], Tensor]) -> Metrics:
    """Metrics on the held-out samples."""
    metrics = Metrics()
    for batch in job.held_out.batches(job.config.batch_size):
        metrics.add(batch.labels, predict(batch))
    return metrics


def evaluate_accelerated(job: Job, batches: Batches) -> Metrics:
    """The same for a model whose rows are cached."""
    metrics = Metrics()
    with torch.no_grad():
        for batch in batches.evaluate(job.held_out.batches(job.config.batch_size)):
            metrics.add(batch.labels, batches.model(batch.dense, batch.sparse))
    return metrics


def metrics_summary(trained: Metrics, untrained: Metrics) -> Summary:
    """How good the model is, and how good it was before."""
    return {"log_loss": trained.log_loss(), "auc": trained.auc(), "auc_untrained": untrained.auc()}


def write_summary(job: Job, summary: Summary) -> Summary:
    """Keep what a run has shown, beside the configuration that led to it."""
    summary["run_dir"] = str(job.run_dir)
    path = job.run_dir / "summary.json"
    text = json.dumps(summary | {"config": job.config.model_dump(mode="json")}, indent=2)
    with path.open("x", encoding="utf-8") as file:
        file.write(text + "\n")
    return summary


def dense_optimizer(config: DenseOptimizerConfig) -> Callable[[Any], torch.optim.Optimizer]:
    """Makes the torch optimizer of the dense parameters."""
    kinds: dict[str, Callable[..., torch.optim.Optimizer]] = {
        "sgd": torch.optim.SGD,
        "momentum": lambda parameters, lr: torch.optim.SGD(parameters, lr=lr, momentum=0.9),
        "adagrad": torch.optim.Adagrad,
        "adam": torch.optim.Adam,
        "adamw": torch.optim.AdamW,
    }
    return lambda parameters: kinds[config.name](parameters, lr=config.lr)


def _open(config: Config) -> tuple[str, Dataset]:
    if config.data.path is not None:
        return str(config.data.path), Shards(config.data.path)
    preset = config.data.preset or DEFAULT_PRESET
    samples = config.data.samples or min(DEFAULT_SAMPLES, find_preset(preset).samples)
    return preset, generated(preset, samples, config.seed)


def _divide(source: str, data: Dataset, share: float) -> tuple[Dataset, Dataset]:
    """What is trained on and what is held out: parts that the data names, or the last samples; never `test`."""
    parts = {name: data.part_named(name) for name in data.part_names} if isinstance(data, Shards) else {}
    data = parts.get("train", data)
    if "train" in parts and "validation" in parts and parts["validation"].num_samples:
        return parts["train"], parts["validation"]
    held_out = int(data.num_samples * share)
    if held_out == 0 or held_out == data.num_samples:
        raise DataError(f"{source} has {data.num_samples} samples, too few to hold out {share:.0%} of them")
    split = data.num_samples - held_out
    return data.part(0, split), data.part(split, data.num_samples)


def claim(run_dir: Path | None, config: Config) -> Path:
    """Make the run directory; one that holds something already is never written into."""
    if run_dir is not None:
        try:
            run_dir.mkdir(parents=True, exist_ok=True)
            occupied = any(run_dir.iterdir())
        except OSError as error:
            raise ConfigError(f"can't make the run directory {run_dir}: {error.strerror}: choose another") from error
        if occupied:
            raise ConfigError(f"the run directory {run_dir} is not empty: choose another, or remove it first")
        return run_dir
    stem = f"{time.strftime('%Y%m%d-%H%M%S')}-{config.model.name}"
    for number in range(1000):
        path = Path("runs") / (stem if number == 0 else f"{stem}-{number}")
        try:
            path.mkdir(parents=True)
        except FileExistsError:
            continue
        return path
    raise ConfigError(f"runs/{stem} is taken a thousand times over: give --run-dir")
