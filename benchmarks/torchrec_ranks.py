"""TorchRec with several ranks, each in a namespace of its own, as the process of a benchmark sees it.

It lives in a virtual environment of its own, whose interpreter the environment variable names; where it can't be run,
its figures are null and the reason stands beside them.
"""

from __future__ import annotations

import os
import statistics
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

from bagpipe.errors import PipelineError
from bagpipe.types import Table
from benchmarks.children import Process, call, child
from benchmarks.namespaces import DEVICE, Namespaces
from benchmarks.train import LR

VARIABLE = "BAGPIPE_TORCHREC_PYTHON"
NOT_GIVEN = f"set {VARIABLE} to the python of a virtual environment that has TorchRec, see docs/benchmarks.md"
DEFAULT, TOLD = "default", "told of the link"
"""What TorchRec's planner, which decides how to shard tables, knows: nothing, or batch size, hosts and their link."""
DENSE_ITERATIONS = 4
MEMORY_FACTOR = 1.3
FIGURES = (
    *("torchrec_iteration_ms", "torchrec_dense_ms", "torchrec_bytes_sent", "torchrec_floor_ms", "torchrec_sharding"),
    *("time_ratio_to_torchrec", "time_ratio_to_torchrec_floor", "speedup_over_torchrec", "speedup_over_torchrec_floor"),
)


class TorchRec:
    """Its ranks, or why there are none."""

    def __init__(self, ranks: Sequence[Process], meeting: str, bits_per_second: int, reason: str | None) -> None:
        self._ranks, self._meeting, self._rate, self.reason = ranks, meeting, bits_per_second, reason
        self._seconds: list[float] = []
        self._bytes: list[list[int]] = []
        self._dense_s = 0.0
        self._sharding: dict[str, str] = {}

    def prepare(self, planner: str, model: str, dim: int, tables: Sequence[Table], directory: str) -> None:
        """Make a model with its tables, train once, and measure the dense part alone; what was measured is forgotten.

        `directory` has the samples. Where memory is too small for the tables, there is a reason not to.
        """
        self._seconds, self._bytes, self._dense_s = [], [], 0.0
        self.reason = self.reason or _too_large(tables, dim)
        told = self._ask(
            "prepare",
            own=[{"rank": rank} for rank in range(len(self._ranks))],
            trainers=len(self._ranks),
            meeting=self._meeting,
            device=DEVICE,
            bits_per_second=self._rate if planner == TOLD else None,
            directory=directory,
            model=model,
            tables=[{"name": table.name, "rows": table.rows, "features": table.features} for table in tables],
            dim=dim,
            lr=LR,
        )
        self._sharding = told[0]["sharding"] if told else {}
        self._ask("turn", iterations=1)
        told = self._ask("dense", iterations=DENSE_ITERATIONS)
        self._dense_s = max((statistics.median(each["seconds"][1:]) for each in told), default=0.0)

    def take_turn(self) -> None:
        """One iteration."""
        if told := self._ask("turn", iterations=1):
            self._seconds.append(max(each["seconds"][0] for each in told))
            self._bytes.append([each["bytes_sent"][0] for each in told])

    def compared(self, number: int, our_s: float) -> dict[str, Any]:
        """The figures beside those of our turn of this number, which stands between two of TorchRec's."""
        if self.reason is not None:
            return dict.fromkeys(FIGURES) | {"torchrec_reason": self.reason}
        their_s = statistics.mean(self._seconds[number : number + 2])
        sent = [int(statistics.median(of_rank)) for of_rank in zip(*self._bytes, strict=True)]
        floor_s = max(sent) * 8 / self._rate + self._dense_s
        kinds = sorted(set(self._sharding.values()))
        return {
            "torchrec_iteration_ms": 1e3 * their_s,
            "torchrec_dense_ms": 1e3 * self._dense_s,
            "torchrec_bytes_sent": sent,
            "torchrec_floor_ms": 1e3 * floor_s,
            "torchrec_sharding": {kind: list(self._sharding.values()).count(kind) for kind in kinds},
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
def torchrec_ranks(
    namespaces: Namespaces, sides: Sequence[str], port: int, bits_per_second: int, environment: dict[str, str]
) -> Iterator[TorchRec]:
    """A rank on each side, which has done nothing yet."""
    python = os.environ.get(VARIABLE)
    reason = NOT_GIVEN if not python else None
    if python and not os.access(python, os.X_OK):
        reason = f"{VARIABLE} is {python}, which can't be run: {NOT_GIVEN}"
    with ExitStack() as stack:
        ranks = []
        for side in sides if reason is None else ():
            script = str(Path(__file__).with_name("torchrec_peer.py"))
            # Isolated: the modules of this directory would hide others of the same name.
            command = namespaces.command(side, [str(python), "-I", script])
            ranks.append(stack.enter_context(child(command, environment)))
        yield TorchRec(ranks, f"{namespaces.host(sides[0])}:{port}", bits_per_second, reason)


def _too_large(tables: Sequence[Table], dim: int) -> str | None:
    """Why the tables can't be held here, if so."""
    needed = MEMORY_FACTOR * 4 * dim * sum(table.rows or 0 for table in tables)
    for line in Path("/proc/meminfo").read_text(encoding="ascii").splitlines():
        if line.startswith("MemAvailable:"):
            available = int(line.split()[1]) * 1024
            if available < needed:
                return f"TorchRec's tables take {needed / 1e9:.1f} GB, {available / 1e9:.1f} GB are available"
    return None
