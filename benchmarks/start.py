"""How long a new process takes to its first finished iteration: DLRM on the 20,000 samples of `tiny`.

`empty` begins with no compiled kernels, as the first run on a machine does; `warm` finds those on disk. Seconds count
from the start of the Python process, imports, generator and evaluation of the untrained model included.
"""

from __future__ import annotations

import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

from numba.core import event

from bagpipe.config import parse_config
from bagpipe.data import find_preset
from bagpipe.errors import PipelineError
from bagpipe.job import prepare
from bagpipe.training import train_configured
from benchmarks import Benchmark, Results

WARM_RUNS = 3
SLOWEST = 8
TIMEOUT_S = 600


def run(quick: bool) -> Results:
    """One start with an empty cache of kernels, then some with what it left there."""
    with tempfile.TemporaryDirectory(prefix="bagpipe-kernels-") as directory:
        empty = _start(directory)
        warm = [_start(directory) for _ in range(1 if quick else WARM_RUNS)]
    compiled: dict[str, float] = empty.pop("compiled")
    slowest = sorted(compiled, key=lambda name: -compiled[name])[:SLOWEST]
    return [
        {"kernels": "warm", "kernels_compiled": max(len(said["compiled"]) for said in warm)}
        | {key: statistics.median(said[key] for said in warm) for key in ("seconds", "import_seconds")},
        {"kernels": "empty", "kernels_compiled": len(compiled)}
        | empty
        | {
            "compile_seconds": sum(compiled.values()),
            "slowest_compile_seconds": {name.removeprefix("bagpipe."): round(compiled[name], 2) for name in slowest},
        },
    ]


def _start(kernels: str) -> dict[str, Any]:
    """Train one iteration in a new process that keeps its kernels in this directory; what it says about it."""
    command = [sys.executable, "-m", "benchmarks.start", str(time.time())]
    environment = os.environ | {"NUMBA_CACHE_DIR": kernels}
    child = subprocess.run(  # noqa: S603 - this module, with this interpreter
        command, env=environment, stdout=subprocess.PIPE, text=True, timeout=TIMEOUT_S, check=False
    )
    if child.returncode:
        raise PipelineError(f"a process that should train one iteration ended with {child.returncode}: see above")
    said: dict[str, Any] = json.loads(child.stdout)
    return said


class Recorder(event.Listener):  # type: ignore[misc, unused-ignore]
    """Seconds that each function took to compile, less those of the functions that it needed compiled."""

    def __init__(self) -> None:
        self.seconds: dict[str, float] = {}
        self._open: list[float] = []
        self._inner = [0.0]

    def on_start(self, event: Any) -> None:  # noqa: ARG002
        """A function begins to compile."""
        self._open.append(time.perf_counter())
        self._inner.append(0.0)

    def on_end(self, event: Any) -> None:
        """It is compiled."""
        seconds = time.perf_counter() - self._open.pop()
        function = event.data["dispatcher"].py_func
        name = f"{function.__module__}.{function.__name__}"
        self.seconds[name] = self.seconds.get(name, 0.0) + seconds - self._inner.pop()
        self._inner[-1] += seconds


class _Enough(Exception):
    """The first iteration is over."""


def _train_one_iteration(began: float) -> None:
    """What the new process does; `began` is when it was started."""
    imported = time.time()
    recorder = Recorder()
    event.register("numba:compile", recorder)  # type: ignore[no-untyped-call, unused-ignore]

    def stop(done: int, note: str) -> None:  # noqa: ARG001
        said = {"seconds": time.time() - began, "import_seconds": imported - began, "compiled": recorder.seconds}
        sys.stdout.write(json.dumps(said) + "\n")
        raise _Enough

    with tempfile.TemporaryDirectory(prefix="bagpipe-start-") as directory:
        data = {"preset": "tiny", "samples": find_preset("tiny").samples}
        job = prepare(parse_config({"data": data, "iterations": 8}), Path(directory) / "run")
        try:
            train_configured(job, stop)
        except _Enough:
            return


BENCHMARK = Benchmark("start", "seconds from a new process to its first iteration, kernels on disk or not", run)

if __name__ == "__main__":
    _train_one_iteration(float(sys.argv[1]))
