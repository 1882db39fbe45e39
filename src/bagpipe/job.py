"""What a run is made of, from its configuration: data, model, rows, optimizers, run directory; opened and checked.

`prepare` writes nothing but the run directory; the same job can be trained by the reference or by any system, and all
must end with the same bits (I1).
"""

from __future__ import annotations

import shutil
import time
from collections.abc import Callable, Generator, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from torch import nn

from bagpipe.checkpoint.disk import Disk, check_private, make_directories
from bagpipe.checkpointing import Checkpointing
from bagpipe.config import DEFAULT_PRESET, DEFAULT_SAMPLES, Config, DenseOptimizerConfig
from bagpipe.data import Dataset, Loader, Shards, describe, find_preset, generated
from bagpipe.data.described import vocabularies
from bagpipe.data.service import DataOrder
from bagpipe.errors import ConfigError, DataError
from bagpipe.initial import Uniform
from bagpipe.layers import Binding, bind
from bagpipe.layout import RowLayout
from bagpipe.models import build_model
from bagpipe.oracle.service import PlanSettings
from bagpipe.resuming import CHECKPOINTS, find_initial_point
from bagpipe.types import Batch


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

    @property
    def directory(self) -> Path | None:
        """Of the run, if this process knows it."""
        return None if self.run_dir == Path() else self.run_dir

    def data_order(self) -> DataOrder:
        """What data processors need to know of the run."""
        seed = self.config.seed if self.config.data.shuffle else None
        return DataOrder(describe(self.train), self.config.batch_size, self.iterations, seed)

    def data_fingerprint(self) -> str:
        """What tells the data of the run and their order from others."""
        return self.data_order().fingerprint()

    def checkpointing(self, directory: Path | None = None, resume: Path | None = None) -> Checkpointing | None:
        """Where checkpoints go, if any do; not given: into the run directory."""
        config, init_from = self.config.checkpoint, self.config.init_from
        is_saved = config.retained and (directory is not None or self.run_dir != Path())
        if not is_saved and init_from is None and resume is None:
            return None
        return Checkpointing(
            (directory or self.run_dir / CHECKPOINTS) if is_saved else None,
            every=config.every,
            keep=config.keep,
            init_from=init_from,
            resume=resume,
            about={"config": self.config.model_dump(mode="json")},
            data=self.data_fingerprint(),
            vocabulary=vocabularies(self.train),
        )

    def plan_settings(self) -> PlanSettings:
        """What an oracle needs to know of the run, besides its batches."""
        config = self.config
        _, binding, layouts = self.model()
        widths = tuple(layout.width for layout in layouts)
        data = self.data_fingerprint()
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
            options=config.policy_options.build(),
            move_costs=tuple(layout.move_cost for layout in layouts if config.sync.moving),
        )

    def loader(self) -> Loader:
        """Reads the batches of the run, from any position on."""
        config = self.config
        epochs = -(-self.iterations // -(-self.train.num_samples // config.batch_size))
        return Loader(
            self.train,
            config.batch_size,
            epochs=epochs,
            seed=config.seed if config.data.shuffle else None,
            stop=self.iterations,
            workers=config.data.workers,
            processes=config.data.processes,
        )

    def batches(self) -> Generator[Batch, None, None]:
        """The batches of the run, in order."""
        return iter(self.loader())

    def samples_of(self, iterations: int) -> int:
        """How many samples so many iterations of the run have, from its beginning."""
        epochs, batches = divmod(iterations, -(-self.train.num_samples // self.config.batch_size))
        return epochs * self.train.num_samples + min(batches * self.config.batch_size, self.train.num_samples)


def prepare(config: Config, run_dir: Path | None = None) -> Job:
    """Open the data and claim the run directory."""
    job = open_job(with_checkpoint(config), Path())
    return replace(job, run_dir=claim(run_dir, config))


def with_checkpoint(config: Config) -> Config:
    """The same with the very checkpoint that the run begins with: there may be others by the time it is read."""
    if config.init_from is None:
        return config
    return config.model_copy(update={"init_from": find_initial_point(config.init_from).checkpoint})


def without_weights(config: Config) -> Config:
    """The same for a run that is only looked at: it writes no checkpoint at its end."""
    return config.model_copy(update={"checkpoint": config.checkpoint.model_copy(update={"final": False})})


def open_job(config: Config, run_dir: Path) -> Job:
    """Open the data; the run directory is another's, and is not looked at."""
    source, data = _open(config)
    train, held_out = _divide(source, data, config.data.held_out)
    an_epoch = -(-train.num_samples // config.batch_size)
    iterations = config.iterations or (config.epochs or 1) * an_epoch
    if config.threads is not None:
        torch.set_num_threads(config.threads)
    return Job(config, source, train, held_out, iterations, run_dir)


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
    """Make the run directory, whose name outlives a crash; one that holds something already is never written into."""
    disk = Disk()
    if run_dir is not None:
        with _making(run_dir):
            make_directories(disk, run_dir.resolve())
            check_private(run_dir, "the run directory")
            occupied = any(run_dir.iterdir())
        if occupied:
            raise ConfigError(f"the run directory {run_dir} is not empty: choose another, or remove it first")
        return run_dir
    runs, stem = Path("runs"), f"{time.strftime('%Y%m%d-%H%M%S')}-{config.model.name}"
    for number in range(1000):
        path, made = runs / (stem if number == 0 else f"{stem}-{number}"), False
        try:
            with _making(path):
                make_directories(disk, runs.resolve())
                try:
                    disk.make_directory(path)
                    made = True
                except (FileExistsError, FileNotFoundError):  # or a run that failed has just removed `runs`
                    continue
                disk.sync_directory(runs.resolve())
            return path
        except BaseException:  # syncing takes time, and Ctrl-C then leaves nothing either
            discard(path if made else None)
            raise
    raise ConfigError(f"runs/{stem} is taken a thousand times over: give --run-dir")


@contextmanager
def _making(path: Path) -> Iterator[None]:
    try:
        yield
    except OSError as error:
        raise ConfigError(f"can't make the run directory {path}: {error.strerror}: choose another") from error


def discard(run_dir: Path | None) -> None:
    """Remove the directory of a run that has nothing to go on from."""
    if run_dir is not None:
        shutil.rmtree(run_dir, ignore_errors=True)
    with suppress(OSError):
        Path("runs").rmdir()  # if no other run is in it
