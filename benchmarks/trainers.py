"""Two trainers and a server, each at a link of 100 Mbit/s: our designs, and TorchRec with two ranks, on four models.

Compute and network stand in the ratio of the paper's testbed. Three network namespaces hang on one bridge, each by a
link that is limited both ways. Processes: one embedding server, one oracle with the data (both behind the server's
link, so that plans and batches cross it and are counted), two trainers with one thread each; TorchRec's ranks, if
`BAGPIPE_TORCHREC_PYTHON` names an interpreter that has it, where the trainers are. Batches of 16,384, 26 tables of
Criteo Kaggle's sizes, 48 columns, SGD, lookahead 50. The server holds every row that will be fetched, and the caches
are warm, before the link is limited. A turn lasts until its traffic has ended: `iteration_ms` is all of it by its
iterations, `loop_ms` the median of what the training loop saw. TorchRec trains an iteration before and after each of
our turns; ratios are to their mean. Its floor is what its bytes take on the link, and its dense part on the processor.
Its planner is told of the link; for two models it is also tried as it comes (`torchrec_planner`).
"""

from __future__ import annotations

import os
import statistics
import sys
import tempfile
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from itertools import chain
from typing import Any, NamedTuple

from benchmarks import Benchmark, Results
from benchmarks.children import Process, call, child
from benchmarks.namespaces import SERVERS, NamespaceError, Namespaces, joined_namespaces
from benchmarks.torchrec_ranks import DEFAULT, TOLD, TorchRec, torchrec_ranks
from benchmarks.torchrec_ranks import FIGURES as TORCHREC_FIGURES
from benchmarks.trainer_roles import FULL, QUICK, TRAINERS, Size, data_of

BITS_PER_SECOND = 100_000_000
SIDES = [f"trainer{rank}" for rank in range(TRAINERS)]
"""Of the trainers."""
PORT = 29_400
QUIET = {"TORCH_CPP_LOG_LEVEL": "ERROR"}
"""Hosts of a namespace have no names, which torch would warn of."""


class System(NamedTuple):
    """One of our ways to train."""

    design: str
    delayed: bool


SYSTEMS = (
    System("owned", True),
    System("owned", False),
    System("lrpp", True),
    System("lrpp", False),
    System("replicated", True),
    System("partitioned", True),
)


class Case(NamedTuple):
    """A model, which of our systems train it, and with how much knowledge TorchRec's planner shards it."""

    model: str
    systems: Sequence[System]
    planner: str


CASES = (
    Case("wide_deep", SYSTEMS, TOLD),
    Case("deep_cross", SYSTEMS, TOLD),
    Case("deepfm", SYSTEMS, TOLD),
    Case("deepfm", SYSTEMS[:1], DEFAULT),
    Case("dlrm", SYSTEMS, TOLD),
    Case("dlrm", SYSTEMS[:1], DEFAULT),
)
QUICK_CASES = (
    Case("wide_deep", SYSTEMS, TOLD),
    Case("deep_cross", SYSTEMS[:1], TOLD),
    Case("deepfm", SYSTEMS[:1], DEFAULT),
    Case("dlrm", SYSTEMS[:1], TOLD),
)
FIGURES = (
    *("iteration_ms", "loop_ms", "samples_per_second", "bytes_sent", "bytes_received", "server_bytes_sent"),
    *("plan_bytes", "fetched_rows", "written_rows", "stall_fraction", "lookahead", "cache_rows", "loss_difference_max"),
)


def run(quick: bool) -> Results:
    """All cases one after the other: about a quarter of an hour, and up to 14 GB."""
    with ExitStack() as stack:
        try:
            namespaces = stack.enter_context(joined_namespaces([*SIDES, SERVERS]))
        except NamespaceError as error:
            nothing = dict.fromkeys((*FIGURES, *TORCHREC_FIGURES)) | {"torchrec_reason": str(error)}
            cases = QUICK_CASES if quick else CASES
            rows = (_described(case, each, quick) for case in cases for each in case.systems)
            return [row | nothing | {"link_reason": str(error)} for row in rows]
        if quick:
            return measure(namespaces, QUICK_CASES, quick)
        # What a process has freed, it keeps: those of one case are gone when the next begins.
        return [row for case in CASES for row in measure(namespaces, [case], quick)]


def _described(case: Case, system: System, quick: bool) -> dict[str, Any]:
    size = QUICK if quick else FULL
    return {
        "model": case.model,
        "design": system.design,
        "delayed": system.delayed,
        "trainers": TRAINERS,
        "servers": 1,
        "oracle_and_data": "with the server",
        "megabits_per_second": BITS_PER_SECOND / 1e6,
        "batch_size": size.batch_size,
        "dim": size.dim,
        "row_optimizer": "sgd",
        "torchrec_planner": case.planner,
        "link_reason": None,
    }


def measure(namespaces: Namespaces, cases: Sequence[Case], quick: bool) -> Results:
    """Some cases, with one set of processes."""
    size = QUICK if quick else FULL
    with ExitStack() as stack:
        directory = stack.enter_context(tempfile.TemporaryDirectory(prefix="bagpipe-bench-"))
        ours = stack.enter_context(_ours(namespaces, size, directory))
        torchrec = stack.enter_context(torchrec_ranks(namespaces, SIDES, PORT, BITS_PER_SECOND, QUIET))
        rows: Results = []
        for case in cases:
            ours.prepare(case.model)
            torchrec.prepare(case.planner, case.model, size.dim, data_of(size).tables, directory)
            turns = _take_turns(namespaces, case.systems, ours, torchrec)
            rows += [
                _described(case, turn.system, quick)
                | turn.figures(size.batch_size)
                | {"loss_difference_max": turn.loss_difference(turns[0])}
                | torchrec.compared(number, turn.iteration_s)
                for number, turn in enumerate(turns)
            ]
        return rows


def _take_turns(namespaces: Namespaces, systems: Sequence[System], ours: Ours, torchrec: TorchRec) -> list[Turn]:
    """TorchRec, ours, TorchRec, the next of ours, and so on."""
    turns: list[Turn] = []
    with _limited(namespaces):
        torchrec.take_turn()
    for system in systems:
        ours.open(system)
        with _limited(namespaces):
            turn = ours.take_turn(system)
            torchrec.take_turn()
        turn.losses = ours.close()
        turns.append(turn)
    return turns


@contextmanager
def _limited(namespaces: Namespaces) -> Iterator[None]:
    namespaces.limit(BITS_PER_SECOND)
    try:
        yield
    finally:
        namespaces.limit(None)


@dataclass
class Turn:
    """What some iterations of one of our systems took."""

    system: System
    trainers: list[dict[str, Any]]
    """What each has told."""
    served: dict[str, int]
    """What the oracle and the server have sent, and how many plans that were."""
    losses: list[list[float]] = field(default_factory=list)
    """Of each trainer, all that it has trained."""

    @property
    def _iterations(self) -> int:
        return len(self.trainers[0]["seconds"])

    @property
    def _seconds(self) -> float:
        return float(max(each["end"] for each in self.trainers) - min(each["start"] for each in self.trainers))

    @property
    def iteration_s(self) -> float:
        """Of one iteration, with all that it leaves to the background."""
        return self._seconds / self._iterations

    def figures(self, batch_size: int) -> dict[str, Any]:
        """Of an iteration: bytes of each trainer, rows of all of them; and the bytes of a plan for one trainer."""

        def of_each(key: str) -> list[int]:
            return [each[key] // self._iterations for each in self.trainers]

        loops = [statistics.median(each["seconds"]) for each in self.trainers]
        stalled = sum(each["stall_seconds"] for each in self.trainers)
        return {
            "iteration_ms": 1e3 * self.iteration_s,
            "loop_ms": 1e3 * max(loops),
            "samples_per_second": batch_size / self.iteration_s,
            "bytes_sent": of_each("bytes_sent"),
            "bytes_received": of_each("bytes_received"),
            "server_bytes_sent": self.served["bytes_sent"] // self._iterations,
            "plan_bytes": self.served["plan_bytes"] // max(1, self.served["plans"]),
            "fetched_rows": sum(of_each("fetched_rows")),
            "written_rows": sum(of_each("written_rows")),
            "stall_fraction": stalled / (len(self.trainers) * self._seconds),
            "lookahead": self.trainers[0]["lookahead"],
            "cache_rows": self.trainers[0]["cache_rows"],
        }

    def loss_difference(self, other: Turn) -> float:
        """The largest in any iteration of any trainer: all designs give the same bits."""
        pairs = zip(chain(*self.losses), chain(*other.losses), strict=True)
        return max(abs(one - another) for one, another in pairs)


class Ours:
    """Our processes; they have one system open at a time."""

    def __init__(self, processes: dict[str, list[Process]], size: Size, directory: str, meeting_host: str) -> None:
        self._servers, self._planners, self._trainers = (processes[key] for key in ("server", "planner", "trainer"))
        self._size, self._directory, self._meeting_host = size, directory, meeting_host
        self._model = ""
        self._num_opened = 0

    def prepare(self, model: str) -> None:
        """Make the data, and start everything that takes time."""
        self._model = model
        call(self._planners, "prepare", quick=self._size is QUICK, model=model, directory=self._directory)
        call(self._trainers, "prepare")

    def open(self, system: System) -> None:
        """Start a system, fill its server and warm its caches up."""
        self._num_opened += 1
        run = os.urandom(16).hex()
        given: dict[str, Any] = {"model": self._model, "quick": self._size is QUICK, **system._asdict()}
        (server,) = call(self._servers, "open", run=run, directory=self._directory)
        (oracle,) = call(self._planners, "open", run=run, **given)
        meeting = f"{self._meeting_host}:{PORT + self._num_opened}"
        given |= {"server": server, "oracle": oracle, "meeting": meeting, "directory": self._directory}
        call(self._trainers, "open", run=run, **given)
        call(self._trainers, "warm_up", iterations=self._size.lookahead)
        self._rest()

    def take_turn(self, system: System) -> Turn:
        """Train some iterations."""
        before = self._rest()
        trainers = call(self._trainers, "turn", iterations=self._size.turn[self._model])
        return Turn(system, trainers, {key: value - before[key] for key, value in self._rest().items()})

    def close(self) -> list[list[float]]:
        """End the system; the losses of each trainer."""
        losses = call(self._trainers, "close")
        call(self._planners, "close")
        call(self._servers, "close")
        return losses

    def _rest(self) -> dict[str, int]:
        """Wait until nothing is done any more; what the oracle and the server have sent."""
        call(self._trainers, "rest")
        (sent,) = call(self._planners, "rest")
        return dict(sent)


@contextmanager
def _ours(namespaces: Namespaces, size: Size, directory: str) -> Iterator[Ours]:
    host = namespaces.host(SERVERS)
    places = [(SERVERS, "server", host), (SERVERS, "planner", host)]
    places += [(side, "trainer", str(rank)) for rank, side in enumerate(SIDES)]
    with ExitStack() as stack:
        processes: dict[str, list[Process]] = {}
        for side, role, where in places:
            this = [sys.executable, "-m", "benchmarks.trainer_roles", role, where]
            process = stack.enter_context(child(namespaces.command(side, this), QUIET))
            processes.setdefault(role, []).append(process)
        yield Ours(processes, size, directory, namespaces.host(SIDES[0]))


BENCHMARK = Benchmark("trainers", "two trainers over links of 100 Mbit/s, in four designs, and TorchRec", run)
