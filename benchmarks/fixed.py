"""What an iteration costs however little is trained: Wide&Deep on `tiny`, batches of 256, next to no arithmetic.

Trainers are threads of one process, as `trainers = N` makes them, or processes of a `bagpipe launch` with an oracle and
two servers, one PyTorch thread each. Every run is a process of its own; with `--against DIR` each is followed by the
same one with the package of that checkout, and ratios are medians over rounds. A run is timed first and then counted:
what counts is put in place when the timing is over. Of a process of several trainers, each has its share of the
processor time; the oracle, the rows and the data of the run are in it where they are not roles of their own.

`wake_ups` are those of all trainers together, by an iteration: how often a thread that slept until something was so
went on, or looked and slept again. `collectives` and `messages` are what each trainer takes part in, and sends.
"""

from __future__ import annotations

import json
import os
import re
import resource
import statistics
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable
from contextlib import suppress
from importlib import import_module
from pathlib import Path
from typing import Any, NamedTuple

import torch

import bagpipe
from bagpipe.cluster.extra import require_ray
from bagpipe.cluster.post import TrainerPost
from bagpipe.config import parse_config
from bagpipe.data import find_preset
from bagpipe.errors import BagpipeError, PipelineError
from bagpipe.job import prepare
from bagpipe.results import Clock
from benchmarks import Benchmark, Results, source_of

THREADS, PROCESSES = "threads", "processes"
SERVERS = 2
ROUNDS, TIMEOUT_S = 5, 300
DIRECTORY = "BAGPIPE_BENCH_DIRECTORY"
"""Where trainers that are processes leave what they measured; the directory of the run is below it."""


class Case(NamedTuple):
    """Trainers, and what they are."""

    trainers: int
    kind: str


CASES = (Case(1, THREADS), Case(2, THREADS), Case(4, THREADS), Case(2, PROCESSES))


class Phases(NamedTuple):
    """Iterations before anything is measured, while it is timed, and while it is counted."""

    warm: int
    timed: int
    counted: int


FULL, QUICK = Phases(100, 300, 100), Phases(4, 8, 8)


def run(quick: bool, against: Path | None = None) -> Results:
    """Some rounds, in each every case in turn; about five minutes, ten with another checkout."""
    sources = [Path(__file__).parents[1] / "src"]
    if against is not None:
        sources.append(source_of(against))
    said: dict[Case, list[list[dict[str, float]]]] = {case: [] for case in CASES}
    reasons: dict[Case, str] = {}
    try:
        require_ray()
    except BagpipeError as error:
        reasons = {case: str(error) for case in CASES if case.kind == PROCESSES}
    for number in range(1 if quick else ROUNDS):
        for case in (case for case in CASES if case not in reasons):
            order = [0, 1][: len(sources)][:: -1 if number % 2 else 1]
            measured = {side: _apart(case, quick, sources[side]) for side in order}
            said[case].append([measured[side] for side in sorted(measured)])
    return [
        {"trainers": case.trainers, "as": case.kind}
        | ({"wall_ms": None, "reason": reasons[case]} if case in reasons else _result(said[case]))
        for case in CASES
    ]


def _result(rounds: list[list[dict[str, float]]]) -> dict[str, Any]:
    ours = _medians([each[0] for each in rounds])
    if len(rounds[0]) == 1:
        return ours
    theirs = _medians([each[1] for each in rounds])
    return ours | {f"{key}_against": value for key, value in theirs.items()} | {
        f"{key}_ratio_to_against": statistics.median(mine[key] / other[key] for mine, other in rounds)
        for key in ("wall_ms", "processor_ms_a_trainer")
    }  # fmt: skip


def _medians(rounds: list[dict[str, float]]) -> dict[str, float]:
    return {key: statistics.median(each[key] for each in rounds) for key in rounds[0]}


def _apart(case: Case, quick: bool, source: Path) -> dict[str, float]:
    """Measure one case in a new process, with the package from here; what it says."""
    root = str(Path(__file__).parents[1])
    command = [sys.executable, "-m", "benchmarks.fixed", str(case.trainers), case.kind, "quick" if quick else "full"]
    environment = os.environ | {"PYTHONPATH": os.pathsep.join((str(source), root)), "OMP_WAIT_POLICY": "PASSIVE"}
    with tempfile.TemporaryDirectory(prefix="bagpipe-fixed-") as directory:
        child = subprocess.run(  # noqa: S603 - this module, with this interpreter
            [*command, directory], env=environment | {DIRECTORY: directory}, stdout=subprocess.PIPE, text=True,
            timeout=TIMEOUT_S, check=False, cwd=directory,
        )  # fmt: skip
    if child.returncode:
        raise PipelineError(f"a process that should measure an iteration ended with {child.returncode}: see above")
    said: dict[str, Any] = json.loads(child.stdout)
    if not Path(said.pop("package")).is_relative_to(source):
        raise PipelineError(f"a process that should use the package in {source} has used another one")
    return said


# What such a process does


class Meter:
    """Measures iterations of this process by the clock of a training loop, which ticks once in each."""

    def __init__(self, phases: Phases, trainers: int, found: Callable[[dict[str, float]], None], logs: Path) -> None:
        """`trainers` are those of this process; `found` is given what was measured, once; `logs` are those of roles."""
        self._trainers, self._found, self._logs = trainers, found, logs
        self._timed = range(phases.warm, phases.warm + phases.timed + 1)
        self._counted = range(phases.warm + phases.timed, sum(phases) + 1)
        self._clock: Clock | None = None
        self._counts: dict[str, list[None]] = {"wake_ups": [], "collectives": [], "messages": []}
        """An entry for each time: any thread may append one."""
        self._before = self._usage()

    def install(self) -> None:
        """Have the first loop whose clock ticks measured."""
        tick = Clock.tick

        def ticking(clock: Clock, *arguments: Any) -> None:
            tick(clock, *arguments)
            self._clock = self._clock or clock
            if clock is self._clock:
                self._tick(clock.iterations)

        setattr(Clock, "tick", ticking)  # noqa: B010 - to mypy a method can't be assigned

    def _tick(self, done: int) -> None:
        if done == self._timed[0]:
            self._before = self._usage()
        elif done == self._timed[-1]:
            iterations = len(self._timed) - 1
            self._measured = {key: (self._usage()[key] - then) / iterations for key, then in self._before.items()}
            self._measured["processor_ms_a_trainer"] /= self._trainers
            self._count()
        elif done == self._counted[-1]:
            iterations = len(self._counted) - 1
            counts = {key: len(times) / iterations for key, times in self._counts.items()}
            for key in ("collectives", "messages"):
                counts[key] /= self._trainers
            self._found(self._measured | counts)

    def _usage(self) -> dict[str, float]:
        used = resource.getrusage(resource.RUSAGE_SELF)
        usage = {
            "wall_ms": 1e3 * time.perf_counter(),
            "processor_ms_a_trainer": 1e3 * time.process_time(),
            "switches": used.ru_nvcsw + used.ru_nivcsw,
        }
        roles = _processor_s_of_roles(self._logs)
        return usage | {f"{role}_processor_ms": 1e3 * seconds for role, seconds in roles.items()}

    def _count(self) -> None:
        """From now on what happens is counted; nothing of this is there before."""
        wake_ups, collectives, messages = self._counts.values()

        def counted(kind: Any, name: str, count: Callable[..., None]) -> None:
            inner = getattr(kind, name)

            def calling(*arguments: Any, **more: Any) -> Any:
                count(*arguments)
                return inner(*arguments, **more)

            setattr(kind, name, calling)

        def wakes(*_: Any) -> None:
            name = threading.current_thread().name
            if name == "MainThread" or (name.startswith("bagpipe-") and name != "bagpipe-report"):
                wake_ups.append(None)

        def exchanges(group: Any, *_: Any) -> None:
            collectives.append(None)
            if not hasattr(group, "backend"):  # in memory
                messages.extend([None] * (group.size - 1))

        counted(threading.Condition, "wait", wakes)
        with suppress(ImportError):  # in checkouts from before there was one
            from bagpipe.waits import Waits

            counted(Waits, "_sleep", wakes)
        for module, name in (
            ("collective", "MemoryGroup"),
            ("process_group", "ProcessGroup"),
            ("gloo_group", "GlooGroup"),  # in checkouts from before there was one class
        ):
            with suppress(ImportError, AttributeError):
                counted(getattr(import_module(f"bagpipe.trainer.{module}"), name), "exchange", exchanges)
        counted(torch.distributed.ProcessGroupGloo, "send", lambda *_: messages.append(None))


def _processor_s_of_roles(logs: Path) -> dict[str, float]:
    """What oracle and servers of a launch have used so far, by their processes."""
    used: dict[str, float] = {}
    for log in logs.glob("*.log"):
        kind = log.stem.partition("-")[0]
        pids = re.findall(r"is process (\d+) on", log.read_text(encoding="utf-8"))
        if kind in ("oracle", "server") and pids:
            fields = Path(f"/proc/{pids[-1]}/stat").read_text(encoding="ascii").rpartition(")")[2].split()
            used[kind] = used.get(kind, 0.0) + (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")
    return used


class MeasuredPost(TrainerPost):
    """A process of a launch that is a trainer and measures itself."""

    def take_on(self, name: str) -> None:
        """Be that role."""
        directory = Path(os.environ[DIRECTORY])
        phases = QUICK if (directory / "quick").exists() else FULL

        def found(measured: dict[str, float]) -> None:
            (directory / f"{name}.json").write_text(json.dumps(measured), encoding="utf-8")

        Meter(phases, 1, found, directory / "run" / "logs").install()
        super().take_on(name)


def _config(phases: Phases, trainers: int) -> Any:
    return parse_config({
        "data": {"preset": "tiny", "samples": find_preset("tiny").samples},
        "model": {"name": "wide_deep"},
        "batch_size": 256,
        "iterations": sum(phases) + 8,
        "trainers": trainers,
        "threads": 1,
    })  # fmt: skip


def _as_threads(phases: Phases, trainers: int, directory: Path) -> dict[str, float]:
    torch.set_num_threads(1)
    job = prepare(_config(phases, trainers), directory / "run")
    measured: list[dict[str, float]] = []
    Meter(phases, trainers, measured.append, directory / "none").install()
    training = import_module("bagpipe.training")
    name = "train_configured" if hasattr(training, "train_configured") else "train_accelerated"  # in older checkouts
    getattr(training, name)(job, lambda *_: None)
    return measured[0]


def _as_processes(phases: Phases, trainers: int, directory: Path) -> dict[str, float]:
    from bagpipe.cluster import post
    from bagpipe.cluster.launch import launch
    from bagpipe.cluster.request import Request
    from benchmarks.fixed import MeasuredPost as Importable  # the one that other processes can import

    post.POSTS["trainer"] = Importable
    request = Request(_config(phases, trainers), SERVERS, run_dir=directory / "run", trainer_cores=1)
    launch(request, lambda *_: None)
    said = [json.loads(path.read_text(encoding="utf-8")) for path in sorted(directory.glob("trainer *.json"))]
    mean = {key: statistics.mean(each[key] for each in said) for key in said[0]}
    return mean | {key: sum(each[key] for each in said) for key in ("wake_ups", "switches")}


def _measure(trainers: int, kind: str, quick: bool, directory: Path) -> dict[str, Any]:
    if quick:
        (directory / "quick").touch()
    measure = _as_processes if kind == PROCESSES else _as_threads
    return {"package": bagpipe.__file__} | measure(QUICK if quick else FULL, trainers, directory)


BENCHMARK = Benchmark("fixed", "what an iteration costs however little is trained: time, wake-ups, messages", run, run)

if __name__ == "__main__":
    measured = _measure(int(sys.argv[1]), sys.argv[2], sys.argv[3] == "quick", Path(sys.argv[4]))
    sys.stdout.write(json.dumps(measured) + "\n")
