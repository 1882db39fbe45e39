"""`bagpipe bench recovery`: seconds from kill -9 of a role to the next iteration that is finished, for each role.

`bagpipe launch` on this machine with two trainers, two servers, a data processor and the oracle trains Wide&Deep on the
20,000 samples of `tiny`, with checkpoints for recovery as often as a launch makes them by default. Roles are killed one
after the other, in turns; between two kills the run continues for a while, as after faults that are rare. What is
trained again since the last checkpoint is included.
"""

from __future__ import annotations

import os
import re
import signal
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

from bagpipe.cluster.extra import require_ray
from bagpipe.errors import DeadlineError, PipelineError
from benchmarks import Benchmark, Results

ROLES = {"trainer": "trainer 1", "server": "server 1", "oracle": "oracle", "processor": "processor 0"}
KILLS = 5
"""Of each role."""
SETTLE_S = 15.0
"""From when a run went on to the next kill."""
TIMEOUT_S = 180.0
SETTINGS = (
    "data.preset=tiny", "data.samples=20000", "model.name=wide_deep", "batch_size=256", "iterations=1000000000",
    "recovery.restarts_max=1000",
)  # fmt: skip
COMMAND = (sys.executable, "-c", "from bagpipe.cli import main; main()", "launch", "--trainers", "2", "--servers", "2")


def run(quick: bool) -> Results:
    """Launch once, kill often."""
    require_ray()
    took: dict[str, list[float]] = {kind: [] for kind in ROLES}
    with tempfile.TemporaryDirectory(prefix="bagpipe-recovery-") as directory:
        launched = _Launched(Path(directory))
        try:
            launched.wait_for("trainer 0: iteration", 1)
            for _ in range(1 if quick else KILLS):
                for kind, role in ROLES.items():
                    time.sleep(1.0 if quick else SETTLE_S)
                    took[kind].append(launched.kill(role))
        finally:
            launched.end()
    return [_result(kind, seconds) for kind, seconds in took.items()]


def _result(kind: str, seconds: list[float]) -> dict[str, Any]:
    return {
        "role": kind,
        "kills": len(seconds),
        "median_s": statistics.median(seconds),
        "least_s": min(seconds),
        "most_s": max(seconds),
    }


class _Launched:
    """A launch under way, and what it says."""

    def __init__(self, directory: Path) -> None:
        self._logs, self._said = directory / "run" / "logs", directory / "said"
        words = [word for setting in SETTINGS for word in ("--set", setting)]
        with self._said.open("w") as said:
            self._process = subprocess.Popen(  # noqa: S603 - this package, with this interpreter
                [*COMMAND, "--run-dir", str(directory / "run"), *words],
                stdout=subprocess.DEVNULL,
                stderr=said,
                start_new_session=True,
            )

    def kill(self, role: str) -> float:
        """Kill the process of a role; seconds until an iteration was finished again."""
        log = self._logs / f"{role.replace(' ', '-')}.log"
        pid = int(re.findall(r"is process (\d+) on", log.read_text(encoding="utf-8"))[-1])
        before = self._said.read_text(encoding="utf-8").count("went on from")
        began = time.perf_counter()
        os.kill(pid, signal.SIGKILL)
        self.wait_for("went on from", before + 1)
        return time.perf_counter() - began

    def wait_for(self, words: str, times: int) -> None:
        """Return when this was said so often."""
        until = time.monotonic() + TIMEOUT_S
        while self._said.read_text(encoding="utf-8").count(words) < times:
            if self._process.poll() is not None:
                last = self._said.read_text(encoding="utf-8").strip().rpartition("\n")[2]
                raise PipelineError(f"the launch ended with {self._process.returncode}: {last}")
            if time.monotonic() > until:
                raise DeadlineError(f"the launch did not say {words!r} within {TIMEOUT_S:g} s")
            time.sleep(0.01)

    def end(self) -> None:
        """End it as Ctrl-C does."""
        if self._process.poll() is None:
            self._process.send_signal(signal.SIGINT)
        self._process.wait(TIMEOUT_S)


BENCHMARK = Benchmark("recovery", "seconds from kill -9 of a role to the next finished iteration", run)
