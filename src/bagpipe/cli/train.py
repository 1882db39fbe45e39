"""`bagpipe train`."""

from __future__ import annotations

import json
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from bagpipe.cli.output import AsJson, Settings, errors, print_json, print_pairs, progress

if TYPE_CHECKING:
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
    from bagpipe.allocator import keep_freed_memory
    from bagpipe.config import load_config

    overrides = with_init_from(settings, init_from)
    if checkpoint_every is not None:
        overrides.append(f"checkpoint.every={checkpoint_every}")
    # Before PyTorch is loaded: a wrong one is refused at once.
    chosen = None if resume else load_config(config, overrides)
    from bagpipe.errors import ConfigError
    from bagpipe.job import discard, prepare
    from bagpipe.resuming import has_checkpoint
    from bagpipe.training import train

    keep_freed_memory()
    job, checkpoint = (prepare(chosen, run_dir), None) if chosen else _resumed(config, run_dir, overrides)
    try:
        with progress(job.iterations, f"training {job.config.model.name}") as report:
            summary = train(job, report, checkpoint)
    except BaseException as error:
        if has_checkpoint(job.run_dir):
            if not (resume and isinstance(error, ConfigError)):  # it has not begun: another process may be at it
                errors.print(f"go on from the last checkpoint with: bagpipe train --resume {job.run_dir}", markup=False)
        elif not resume:  # which may be another process's
            discard(job.run_dir)  # training may not have begun
        raise
    if as_json:
        print_json(summary)
    else:
        print_pairs(f"{job.config.model.name} on {job.source}", summary)


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
        errors.print(f"note: {note}", markup=False)
    return open_job(resumed.config, directory), resumed.point.checkpoint
