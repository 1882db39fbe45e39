"""`bagpipe launch`: starts the roles of a run, watches and replaces them. The result is that of `bagpipe train` (I1).

However it ends, nothing that was started here stays: actors and placement groups are removed from a cluster that was
joined, and a Ray of our own is ended with every process of it.
"""

from __future__ import annotations

import os
import shutil
import time
from collections.abc import Callable
from contextlib import ExitStack, closing, redirect_stdout
from dataclasses import asdict, dataclass, replace
from pathlib import Path

from bagpipe.checkpoint.directory import Checkpoints
from bagpipe.cluster.crew import RayCrew, ResultT, ScriptCrew, TrainingCrew
from bagpipe.cluster.log import LogPlace
from bagpipe.cluster.request import Request
from bagpipe.cluster.session import OwnRay, disconnect, exit_codes_kept, join
from bagpipe.cluster.trainer_role import Trained
from bagpipe.cluster.watch import Watch
from bagpipe.config import Config, warn_of_idle_rows
from bagpipe.job import Job, claim, discard, open_job, prepare, with_checkpoint
from bagpipe.recovery import Incident, Supervisor
from bagpipe.results import Summary, joined_summary, write_summary
from bagpipe.resuming import CHECKPOINTS, CONFIG_NAME, has_checkpoint, holding, note_config

Tell = Callable[[str], object]
"""Is given a line for people."""


@dataclass(frozen=True)
class Launched:
    """How a launch went."""

    summary: Summary
    trained: Trained | None
    """What the first trainer has said; None for a script."""
    reached_at: dict[str, float]
    """When it had come so far, by the clock of this machine: "ray" is connected, "roles" have begun, have "started"."""
    exit_code: int = 0


def launch(
    request: Request,
    show: Callable[[str, str], None],
    echo: Callable[[str], object] | None = None,
    tell: Tell = lambda _: None,
) -> Launched:
    """Run the roles to the end. Logs and checkpoints of a run that failed stay; of one that was stopped, checkpoints.

    `show` is told the name of a role and how it is; `echo` is given what a script prints; `tell` what was lost, and how
    the run went on.
    """
    config = _resolved(request.config, request.servers)
    if request.resumed is None:
        config = with_checkpoint(config)
    request = replace(request, config=config)
    if request.script is None:  # which has a lookahead of its own, and warns itself
        warn_of_idle_rows(config.sync.design, config.trainers, config.policy)
    with exit_codes_kept(), ExitStack() as stack:
        own = stack.enter_context(closing(OwnRay(cores=_own_cores(request)))) if request.address is None else None
        job = _job(request) if request.script is None else None
        run_dir = job.run_dir if job is not None else claim(request.run_dir, config)
        stack.enter_context(holding(run_dir))
        try:
            for left in (run_dir / CHECKPOINTS).glob(".seen-*"):  # of a launch that was killed
                shutil.rmtree(left, ignore_errors=True)
            if job is not None and (config.checkpoint.retained or config.recovery.restarts_max):
                note_config(run_dir, config)
            logs = LogPlace.make(run_dir / "logs")
            # Ray prints what it has to say about its processes; standard output is for the result.
            stack.enter_context(redirect_stdout(stack.enter_context(logs.ray())))
            stack.callback(disconnect)
            ray = join(str(request.address)) if own is None else own.connect()
            watch = Watch(ray, logs, show, echo=echo if job is None else None, stuck_s=config.wire.deadline_s / 2)
            told = _Told(logs, tell)
            if job is None:
                launched = _run_script(ScriptCrew(request, ray, watch, run_dir), told)
            else:
                launched = _train(TrainingCrew(request, ray, watch, run_dir, job), told)
        except BaseException as error:
            _keep_logs(run_dir, not isinstance(error, Exception))
            if has_checkpoint(run_dir, retained=job is None):
                tell(f"go on from the last checkpoint with: bagpipe launch {_way_on(request, run_dir)}")
            raise
        logs.finish()
        return launched


class _Told:
    """What happened to a run, for people: at once, and in a log of its own."""

    def __init__(self, logs: LogPlace, tell: Tell) -> None:
        self._path, self._tell = logs.path("recovery"), tell

    def __call__(self, line: str) -> None:
        self._tell(line)
        with self._path.open("a", encoding="utf-8") as file:
            file.write(f"{time.strftime('%Y-%m-%d %H:%M:%S')} {line}\n")


def _job(request: Request) -> Job:
    """A new run, or the one that is gone on with."""
    if request.resumed is None:
        return prepare(request.config, request.run_dir)
    return open_job(request.config, request.resumed.directory)


def _train(crew: TrainingCrew, told: _Told) -> Launched:
    trained, incidents = _supervise(crew, told)
    summary = trained[0].summary if len(trained) == 1 else joined_summary([each.summary for each in trained])
    summary["recoveries"] = [asdict(incident) for incident in incidents]
    return Launched(write_summary(crew.job, summary), trained[0], crew.reached_at)


def _run_script(crew: ScriptCrew, told: _Told) -> Launched:
    codes, incidents = _supervise(crew, told)
    code = next((code for code in codes if code), 0)
    summary = {"script": str(crew.request.script), "exit_code": code, "run_dir": str(crew.run_dir)}
    summary |= {"recoveries": [asdict(incident) for incident in incidents]}
    return Launched(summary, None, crew.reached_at, code)


def _supervise(crew: RayCrew[ResultT], told: _Told) -> tuple[ResultT, list[Incident]]:
    """Run to the end, however often roles are lost, and leave nothing behind."""
    supervisor = Supervisor(crew, crew.request.config.recovery.restarts_max, told)
    try:
        result = supervisor.run(crew.request.start)
        crew.stop()
        Checkpoints(crew.checkpoints).end(keep_last=crew.request.config.checkpoint.retained)
        return result, supervisor.incidents
    finally:
        crew.close()


def _resolved(config: Config, servers: int) -> Config:
    """With paths that mean the same in any directory."""
    path, known = config.data.path, {"servers": servers}
    if path is None:
        return config.model_copy(update=known)  # data that nobody has set stays so
    return config.model_copy(update=known | {"data": config.data.model_copy(update={"path": path.resolve()})})


def _own_cores(request: Request) -> float:
    """All roles share this machine, as threads of one process do; only each trainer by itself is held to its cores."""
    trainers = request.trainers * min(request.threads, len(os.sched_getaffinity(0)))
    return trainers + request.servers * request.server_cores + 1 + request.processors


def _way_on(request: Request, run_dir: Path) -> str:
    """With which words a run that failed goes on from its directory; a script has to be told where it kept them."""
    return (
        f"--resume {run_dir}" if request.script is None else f"--checkpoints {run_dir / CHECKPOINTS} {request.script}"
    )


def _keep_logs(run_dir: Path, nothing: bool) -> None:
    """Of a run that failed only what its roles said stays, and all that it can go on from."""
    kept = has_checkpoint(run_dir)
    for part in run_dir.iterdir() if run_dir.exists() else ():
        if part.name != "logs" and not (kept and part.name in (CHECKPOINTS, CONFIG_NAME)):
            shutil.rmtree(part, ignore_errors=True) if part.is_dir() else part.unlink(missing_ok=True)
    logs = run_dir / "logs"
    if logs.exists():
        LogPlace(logs, "").finish()
    if not kept and (nothing or not logs.exists() or not any(logs.iterdir())):
        discard(run_dir)
