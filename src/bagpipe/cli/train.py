"""`bagpipe train`."""

from __future__ import annotations

import json
import shlex
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from bagpipe.cli.output import AsJson, Reporter, Settings, console, errors, print_json, print_pairs, progress

if TYPE_CHECKING:
    from bagpipe.config import Config
    from bagpipe.job import Job

ConfigPath = Annotated[Path | None, typer.Argument(help="Configuration in TOML; without it the defaults are used.")]
ConfigOrRun = Annotated[
    Path | None,
    typer.Argument(
        metavar="[CONFIG|RUN]",
        help="Configuration in TOML; without it the defaults are used. With --resume the directory of a run.",
    ),
]
RunDirectory = Annotated[
    Path | None, typer.Option(help="Where summary.json goes; must be new or empty. Default: runs/DATE-MODEL.")
]
CheckpointEvery = Annotated[
    int | None,
    typer.Option(metavar="N", help="Write a checkpoint every N iterations; for --set checkpoint.every=N."),
]
InitFrom = Annotated[
    Path | None,
    typer.Option(
        "--init-from",
        metavar="CHECKPOINT",
        help="Begin with rows, dense part and optimizer states of another run's checkpoint; for --set init_from=PATH.",
    ),
]
Resume = Annotated[
    bool,
    typer.Option("--resume", help="Go on with a run from its last checkpoint: with RUN, or the newest in runs/."),
]


def train(
    config: ConfigOrRun = None,
    settings: Settings = None,
    run_dir: RunDirectory = None,
    checkpoint_every: CheckpointEvery = None,
    init_from: InitFrom = None,
    resume: Resume = False,
    as_json: AsJson = False,
) -> None:
    """Train a model. With no configuration: DLRM on generated Criteo-like data, about a minute."""
    from bagpipe.config import load_config

    overrides = with_init_from(settings, init_from)
    if checkpoint_every is not None:
        overrides.append(f"checkpoint.every={checkpoint_every}")
    # Before PyTorch is loaded: a wrong one is refused at once.
    chosen = None if resume else load_config(config, overrides)
    with progress(None, "training") as report:
        report.prepares("loading PyTorch")
        summary, title = _train(chosen, config, run_dir, overrides, report)
    if as_json:
        print_json(summary)
    else:
        print_pairs(title, summary)
        tell_way_on(summary)


def _train(
    chosen: Config | None, run: Path | None, run_dir: Path | None, overrides: list[str], report: Reporter
) -> tuple[dict[str, Any], str]:
    """Train a new run, or one that goes on; its summary, and what it was."""
    from bagpipe.allocator import keep_freed_memory
    from bagpipe.errors import ConfigError
    from bagpipe.job import discard, prepare
    from bagpipe.resuming import has_checkpoint
    from bagpipe.training import train

    keep_freed_memory()
    report.prepares("opening the data")
    job, checkpoint = _resumed(run, run_dir, overrides) if chosen is None else (prepare(chosen, run_dir), None)
    try:
        report.prepares(f"{job.config.model.name} on {job.source}: building the model")
        report.begins(job.iterations)
        return train(job, report, checkpoint), f"{job.config.model.name} on {job.source}"
    except BaseException as error:
        if has_checkpoint(job.run_dir):
            if not (
                chosen is None and isinstance(error, ConfigError)
            ):  # it has not begun: another process may be at it
                errors.print(f"go on from the last checkpoint with: bagpipe train --resume {job.run_dir}")
        elif chosen is not None:  # else it may be another process's
            discard(job.run_dir)  # training may not have begun
        raise


def tell_way_on(summary: Mapping[str, Any]) -> None:
    """What can be done with a run that is over."""
    run = shlex.quote(summary["run_dir"])
    if "weights" in summary:
        console.print(
            f"weights for PyTorch:    bagpipe checkpoint export {run} model.safetensors\n"
            f"train on with new data: bagpipe train --init-from {run} --set data.path=...",
            soft_wrap=True,
        )  # fmt: skip
    else:
        console.print("no weights were kept: leave out checkpoint.final=false")


def with_init_from(settings: list[str] | None, init_from: Path | None) -> list[str]:
    """Settings as `a.b=c`, with what the run begins with."""
    begun = [] if init_from is None else [f"init_from={json.dumps(str(init_from.absolute()))}"]
    return [*(settings or ()), *begun]


def _resumed(run: Path | None, run_dir: Path | None, overrides: list[str]) -> tuple[Job, Path | None]:
    """A run that goes on, and the checkpoint that it goes on from."""
    from bagpipe.errors import ConfigError
    from bagpipe.job import open_job
    from bagpipe.resuming import find_run, open_run

    if run_dir is not None:
        raise ConfigError(f"--run-dir {run_dir}: a run that is resumed stays in its directory: leave it out")
    directory = find_run(run)
    resumed = open_run(directory, overrides)
    for note in resumed.notes:
        errors.print(f"note: {note}")
    return open_job(resumed.config, directory), resumed.point.checkpoint
