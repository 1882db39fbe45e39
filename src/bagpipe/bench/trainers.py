"""Two trainers and a server, each at a link of 100 Mbit/s: our designs, and TorchRec with two ranks, on four models.

Compute and network stand in the ratio of the paper's testbed. Three network namespaces hang on one bridge, each by a
link that is limited both ways. Processes: one embedding server, one oracle with the data (both behind the server's
link, so that plans and batches cross it and are counted), two trainers with one thread each; TorchRec's ranks, if
`BAGPIPE_TORCHREC_PYTHON` names an interpreter that has it, where the trainers are. Batches of 16,384, 26 tables of
Criteo Kaggle's sizes, 48 columns, SGD. The server holds every row that occurs and the caches (3 % of the rows) are warm
before the link is limited. A turn lasts until its traffic has ended: `iteration_ms` is all of it by its iterations,
`loop_ms` the median of what the training loop saw. TorchRec trains iterations between our turns; ratios are to the mean
of those before and after. Its floor is what its bytes take on the link and its dense part on the processor.
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
from pathlib import Path
from typing import Any, NamedTuple

from bagpipe.bench import Benchmark, Results
from bagpipe.bench.children import Process, call, child
from bagpipe.bench.namespaces import DEVICE, SERVERS, NamespaceError, Namespaces, joined_namespaces
from bagpipe.bench.train import LR
from bagpipe.bench.trainer_roles import FULL, QUICK, TRAINERS, Size, data_of
from bagpipe.errors import PipelineError

BITS_PER_SECOND = 100_000_000
TORCHREC_PYTHON = "BAGPIPE_TORCHREC_PYTHON"
SIDES = [*(f"trainer{rank}" for rank in range(TRAINERS)), SERVERS]
PORT = 29_400
DENSE_ITERATIONS = 4
QUIET = {"TORCH_CPP_LOG_LEVEL": "ERROR"}
"""Hosts of a namespace have no names, which torch would warn of."""
NOT_GIVEN = f"set {TORCHREC_PYTHON} to the python of a virtual environment with TorchRec (docs/benchmarks.md)"


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
MODELS = dict.fromkeys(("wide_deep", "deep_cross", "deepfm", "dlrm"), SYSTEMS)
QUICK_MODELS = MODELS | dict.fromkeys(("deep_cross", "deepfm", "dlrm"), SYSTEMS[:1])
FIGURES = (
    *("iteration_ms", "loop_ms", "samples_per_second", "bytes_sent", "bytes_received", "server_bytes_sent"),
    *("plan_bytes", "fetched_rows", "written_rows", "stall_fraction", "lookahead", "cache_rows", "loss_difference_max"),
)
COMPARED = (
    *("torchrec_iteration_ms", "torchrec_dense_ms", "torchrec_bytes_sent", "torchrec_floor_ms"),
    *("time_ratio_to_torchrec", "time_ratio_to_torchrec_floor", "speedup_over_torchrec"),
    *("speedup_over_torchrec_floor",),
)


def run(quick: bool) -> Results:
    """All models one after the other, each in processes of its own; about twelve minutes, and 13 GB."""
    models = QUICK_MODELS if quick else MODELS
    with ExitStack() as stack:
        try:
            namespaces = stack.enter_context(joined_namespaces(SIDES))
        except NamespaceError as error:
            nothing = dict.fromkeys((*FIGURES, *COMPARED)) | {"link_reason": str(error), "torchrec_reason": str(error)}
            return [_described(model, each, quick) | nothing for model, systems in models.items() for each in systems]
        python = os.environ.get(TORCHREC_PYTHON)
        return [row for model, systems in models.items() for row in measure(namespaces, model, systems, quick, python)]


def _described(model: str, system: System, quick: bool) -> dict[str, Any]:
    size = QUICK if quick else FULL
    return {
        "model": model,
        "design": system.design,
        "delayed": system.delayed,
        "trainers": TRAINERS,
        "servers": 1,
        "oracle_and_data": "with the server",
        "megabits_per_second": BITS_PER_SECOND / 1e6,
        "batch_size": size.batch_size,
        "dim": size.dim,
        "row_optimizer": "sgd",
        "link_reason": None,
    }


def measure(namespaces: Namespaces, model: str, systems: Sequence[System], quick: bool, python: str | None) -> Results:
    """One model: TorchRec, ours, TorchRec, the next of ours, and so on."""
    size = QUICK if quick else FULL
    with tempfile.TemporaryDirectory(prefix="bagpipe-bench-") as directory, ExitStack() as stack:
        ours = stack.enter_context(_ours(namespaces, model, size, directory))
        torchrec = stack.enter_context(_torchrec(namespaces, model, size, directory, python))
        turns: list[Turn] = []
        with _limited(namespaces):
            torchrec.take_turn()
        for number, system in enumerate(systems):
            ours.open(system, number)
            with _limited(namespaces):
                turn = ours.take_turn(system)
                torchrec.take_turn()
            turn.losses = ours.close()
            turns.append(turn)
    return [
        _described(model, turn.system, quick)
        | turn.figures(size.batch_size)
        | {"loss_difference_max": turn.loss_difference(turns[0])}
        | torchrec.compared(number, turn.iteration_s)
        for number, turn in enumerate(turns)
    ]


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
    server_bytes_sent: int
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
        """Of an iteration: bytes of each trainer, rows of all of them."""

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
            "server_bytes_sent": self.server_bytes_sent // self._iterations,
            "plan_bytes": of_each("plan_bytes"),
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

    def __init__(self, model: str, size: Size, directory: str, meeting_host: str, **processes: list[Process]) -> None:
        self._model, self._size, self._directory, self._meeting_host = model, size, directory, meeting_host
        self._servers, self._planners, self._trainers = (processes[key] for key in ("server", "planner", "trainer"))

    def prepare(self) -> None:
        """Make data; start everything that takes time."""
        quick = self._size is QUICK
        call(self._planners, "prepare", quick=quick, model=self._model, directory=self._directory)
        call(self._trainers, "prepare")

    def open(self, system: System, number: int) -> None:
        """Start a system, fill its server and warm its caches up."""
        run = os.urandom(16).hex()
        given: dict[str, Any] = {"model": self._model, "quick": self._size is QUICK, **system._asdict()}
        (server,) = call(self._servers, "open", run=run)
        (oracle,) = call(self._planners, "open", run=run, **given)
        meeting = f"{self._meeting_host}:{PORT + 1 + number}"
        given |= {"server": server, "oracle": oracle, "meeting": meeting, "directory": self._directory}
        call(self._trainers, "open", run=run, **given)
        call(self._trainers, "warm_up", iterations=self._size.warm_up)
        self._rest()

    def take_turn(self, system: System) -> Turn:
        """Train some iterations."""
        before = self._rest()
        trainers = call(self._trainers, "turn", iterations=self._size.turn[self._model])
        return Turn(system, trainers, self._rest() - before)

    def close(self) -> list[list[float]]:
        """End the system; the losses of each trainer."""
        losses = call(self._trainers, "close")
        call(self._planners, "close")
        call(self._servers, "close")
        return losses

    def _rest(self) -> int:
        """Wait until nothing is done any more; bytes that the server's side has sent."""
        call(self._trainers, "rest")
        return int(call(self._planners, "rest")[0][0])


@contextmanager
def _ours(namespaces: Namespaces, model: str, size: Size, directory: str) -> Iterator[Ours]:
    this = [sys.executable, "-m", "bagpipe.bench.trainer_roles"]
    host = namespaces.host(SERVERS)
    places = [(SERVERS, "server", host), (SERVERS, "planner", host)]
    places += [(f"trainer{rank}", "trainer", str(rank)) for rank in range(TRAINERS)]
    with ExitStack() as stack:
        processes: dict[str, list[Process]] = {}
        for side, role, where in places:
            command = namespaces.command(side, [*this, role, where])
            processes.setdefault(role, []).append(stack.enter_context(child(command, QUIET)))
        ours = Ours(model, size, directory, namespaces.host(SIDES[0]), **processes)
        ours.prepare()
        yield ours


class TorchRec:
    """TorchRec's ranks, or why there are none."""

    def __init__(self, ranks: Sequence[Process], reason: str | None) -> None:
        self._ranks, self.reason = list(ranks), reason
        self._seconds: list[float] = []
        self._bytes: list[list[int]] = []
        self._dense_s = 0.0

    def prepare(self, namespaces: Namespaces, model: str, size: Size, directory: str) -> None:
        """Make the tables, train once, and measure the dense part alone."""
        given = {
            "trainers": TRAINERS,
            "meeting": f"{namespaces.host(SIDES[0])}:{PORT}",
            "device": DEVICE,
            "bits_per_second": BITS_PER_SECOND,
            "directory": directory,
            "model": model,
            "tables": [
                {"name": table.name, "rows": table.rows, "features": table.features} for table in data_of(size).tables
            ],
            "dim": size.dim,
            "lr": LR,
        }
        if self._ask("prepare", own=[{"rank": rank} for rank in range(TRAINERS)], **given) and self._ask(
            "turn", iterations=1
        ):
            told = self._ask("dense", iterations=DENSE_ITERATIONS)
            self._dense_s = max((statistics.median(each["seconds"][1:]) for each in told), default=0.0)

    def take_turn(self) -> None:
        """One iteration."""
        if told := self._ask("turn", iterations=1):
            self._seconds.append(max(each["seconds"][0] for each in told))
            self._bytes.append([each["bytes_sent"][0] for each in told])

    def compared(self, number: int, our_s: float) -> dict[str, Any]:
        """The figures beside those of our turn of this number, which stands between two of TorchRec's."""
        if self.reason is not None or len(self._seconds) < number + 2:
            return dict.fromkeys(COMPARED) | {"torchrec_reason": self.reason}
        their_s = statistics.mean(self._seconds[number : number + 2])
        sent = [int(statistics.median(of_rank)) for of_rank in zip(*self._bytes, strict=True)]
        floor_s = max(sent) * 8 / BITS_PER_SECOND + self._dense_s
        return {
            "torchrec_iteration_ms": 1e3 * their_s,
            "torchrec_dense_ms": 1e3 * self._dense_s,
            "torchrec_bytes_sent": sent,
            "torchrec_floor_ms": 1e3 * floor_s,
            "time_ratio_to_torchrec": our_s / their_s,
            "time_ratio_to_torchrec_floor": our_s / floor_s,
            "speedup_over_torchrec": their_s / our_s,
            "speedup_over_torchrec_floor": floor_s / our_s,
            "torchrec_reason": None,
        }

    def _ask(self, do: str, **given: Any) -> list[Any]:
        """What each rank says; nothing if one has failed, now or before."""
        if self.reason is not None:
            return []
        try:
            return call(self._ranks, do, **given)
        except PipelineError as error:
            self.reason = f"TorchRec failed: {error}"
            return []


@contextmanager
def _torchrec(namespaces: Namespaces, model: str, size: Size, directory: str, python: str | None) -> Iterator[TorchRec]:
    reason = NOT_GIVEN if not python else _refusal(python, size)
    with ExitStack() as stack:
        ranks = []
        for rank in range(TRAINERS) if reason is None else ():
            script = str(Path(__file__).with_name("torchrec_peer.py"))
            # Isolated: the modules of this directory would hide others of the same name.
            command = namespaces.command(f"trainer{rank}", [str(python), "-I", script])
            ranks.append(stack.enter_context(child(command, QUIET)))
        torchrec = TorchRec(ranks, reason)
        torchrec.prepare(namespaces, model, size, directory)
        yield torchrec


def _refusal(python: str, size: Size) -> str | None:
    """Why TorchRec can't be run here, if so."""
    if not os.access(python, os.X_OK):
        return f"{TORCHREC_PYTHON} is {python}, which can't be run: {NOT_GIVEN}"
    needed = 1.3 * 4 * size.dim * sum(table.rows or 0 for table in data_of(size).tables)
    for line in Path("/proc/meminfo").read_text(encoding="ascii").splitlines():
        if line.startswith("MemAvailable:") and int(line.split()[1]) * 1024 < needed:
            available = int(line.split()[1]) * 1024
            return f"TorchRec's tables take {needed / 1e9:.1f} GB, {available / 1e9:.1f} GB are available"
    return None


BENCHMARK = Benchmark("trainers", "two trainers over links of 100 Mbit/s, in four designs, and TorchRec", run)
