"""`bagpipe launch`."""

from __future__ import annotations

import sys
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, TextIO

import typer

from bagpipe.cli.output import AsJson, Settings, errors, print_json, print_pairs
from bagpipe.cli.train import InitFrom, RunDirectory, tell_way_on, with_init_from
from bagpipe.visible import visible

if TYPE_CHECKING:
    from bagpipe.resuming import Resumed

Servers = Annotated[int | None, typer.Option(help="Embedding servers, which hold the rows; 1 if not configured.")]
Trainers = Annotated[int | None, typer.Option(help="Trainers, which share each batch; 1 if not configured.")]
Processors = Annotated[int, typer.Option(help="Data processors, which read batches.")]
ConfigFile = Annotated[Path | None, typer.Option("--config", help="Configuration in TOML, as of bagpipe train.")]
RayAddress = Annotated[
    str | None, typer.Option(metavar="HOST:PORT", help="A Ray cluster that this machine is a node of; else a Ray here.")
]
Interface = Annotated[
    str | None, typer.Option(help="Where roles on several machines listen: eth0, 10.0.0.7 or 10.0.0.0/24.")
]
ServerMemory = Annotated[str | None, typer.Option(help="What each server reserves and may take, such as 8GB.")]
ServerCores = Annotated[float, typer.Option(min=0.0, help="What each server reserves.")]
TrainerCores = Annotated[
    int | None, typer.Option(min=1, help="What each trainer reserves and uses; all of this machine's, shared.")
]
TrainerGpus = Annotated[float, typer.Option(min=0.0, help="0: trainers use no GPU yet, more is refused.")]
ResumedRun = Annotated[
    Path | None, typer.Option("--resume", metavar="RUN", help="Go on with a run from its last checkpoint.")
]
ScriptCheckpoints = Annotated[
    Path | None,
    typer.Option("--checkpoints", metavar="DIR", help="Where a script keeps its checkpoints; RUN/checkpoints."),
]
Script = Annotated[
    list[str] | None,
    typer.Argument(
        metavar="[SCRIPT] [ARGS]...", help="Run by every trainer instead; its bagpipe.prepare finds the servers."
    ),
]


def launch(
    script: Script = None,
    servers: Servers = None,
    trainers: Trainers = None,
    processors: Processors = 1,
    config: ConfigFile = None,
    settings: Settings = None,
    address: RayAddress = None,
    interface: Interface = None,
    run_dir: RunDirectory = None,
    resume: ResumedRun = None,
    init_from: InitFrom = None,
    checkpoints: ScriptCheckpoints = None,
    server_memory: ServerMemory = None,
    server_cores: ServerCores = 1.0,
    trainer_cores: TrainerCores = None,
    trainer_gpus: TrainerGpus = 0.0,
    as_json: AsJson = False,
) -> None:
    """Train with servers, data processors, oracle and trainers as processes of their own, here or on a Ray cluster."""
    from bagpipe.cluster.display import StatusLines
    from bagpipe.cluster.extra import require_ray
    from bagpipe.config import load_config, memory_bytes

    require_ray()
    _refuse_gpus(trainer_gpus)
    given = [*with_init_from(settings, init_from), *([] if trainers is None else [f"trainers={trainers}"])]
    resumed = None if resume is None else _resumed(resume, config, run_dir, given)
    # Before PyTorch is loaded: a wrong one is refused at once.
    chosen = load_config(config, given) if resumed is None else resumed.config
    memory = None if server_memory is None else memory_bytes("--server-memory", server_memory)
    from bagpipe.cluster.launch import launch
    from bagpipe.cluster.request import Request

    request = Request(
        chosen,
        servers=(chosen.servers or 1) if servers is None else servers,
        processors=processors,
        address=address,
        interface=interface,
        run_dir=run_dir,
        resumed=resumed,
        script=Path(script[0]) if script else None,
        arguments=tuple(script[1:]) if script else (),
        checkpoints=checkpoints,
        server_memory=memory,
        server_cores=server_cores,
        trainer_cores=trainer_cores,
    )
    with StatusLines(errors, live=not script) as show:
        launched = launch(request, show, partial(_echo, sys.stderr if as_json else sys.stdout), show.tell)
    if as_json:
        print_json(launched.summary)
    elif launched.trained is not None:
        shared_by = f"{request.trainers} trainers, " if request.trainers > 1 else ""
        print_pairs(f"{chosen.model.name}, {shared_by}{request.servers} servers", launched.summary)
        tell_way_on(launched.summary)
    raise typer.Exit(launched.exit_code)


def _echo(out: TextIO, text: str) -> None:
    """What a script prints, as it is; a terminal gets the lines of it alone, and nothing that it would act on."""
    out.write(visible("\n".join(text.replace("\r\n", "\n").split("\r"))) if out.isatty() else text)


def _refuse_gpus(wanted: float) -> None:
    from bagpipe.errors import ConfigError

    if wanted:
        raise ConfigError(
            f"--trainer-gpus {wanted:g}: trainers use no GPU yet, and these would stay idle: leave it out"
        )


def _resumed(run: Path, config: Path | None, run_dir: Path | None, given: list[str]) -> Resumed:
    """A run that goes on, with its own configuration."""
    from bagpipe.errors import ConfigError
    from bagpipe.resuming import find_run, open_run

    for name, value in (("--config", config), ("--run-dir", run_dir)):
        if value is not None:
            raise ConfigError(f"{name} {value}: a run that is resumed has its own: leave it out")
    resumed = open_run(find_run(run), given)
    for note in resumed.notes:
        errors.print(f"note: {note}")
    return resumed
