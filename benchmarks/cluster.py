"""`bagpipe bench cluster`: how long a launch takes to its first iteration, and what Ray takes of an iteration.

One trainer, two servers, a data processor and the oracle, as actors of a Ray of their own: DLRM on the 20,000 samples
of `tiny`. Seconds count from the start of a new Python process, as `bagpipe launch` would be; kernels are on disk.
Ray's share is the processor time of its threads in the trainer's process while it trains, by the time of training.
"""

from __future__ import annotations

import json
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

from bagpipe.cluster.extra import require_ray
from bagpipe.config import parse_config
from bagpipe.data import find_preset
from bagpipe.errors import PipelineError
from benchmarks import Benchmark, Results

SERVERS = 2
RUNS = 3
ITERATIONS = 100
TIMEOUT_S = 600


def run(quick: bool) -> Results:
    """Launch a few times, each time anew."""
    require_ray()
    iterations = 10 if quick else ITERATIONS
    said = [_launch(iterations) for _ in range(1 if quick else RUNS)]
    middle = {key: statistics.median(each[key] for each in said) for key in said[0]}
    return [{"trainers": 1, "servers": SERVERS, "processors": 1, "iterations": iterations, "runs": len(said)} | middle]


def _launch(iterations: int) -> dict[str, float]:
    """Launch in a new process; what it says about it."""
    command = [sys.executable, "-m", "benchmarks.cluster", str(time.time()), str(iterations)]
    child = subprocess.run(  # noqa: S603 - this module, with this interpreter
        command, stdout=subprocess.PIPE, text=True, timeout=TIMEOUT_S, check=False
    )
    if child.returncode:
        raise PipelineError(f"a process that should launch a run ended with {child.returncode}: see above")
    said: dict[str, float] = json.loads(child.stdout)
    return said


def _said(began: float, iterations: int) -> dict[str, Any]:
    """What the new process does; `began` is when it was started."""
    from bagpipe.cluster.launch import launch
    from bagpipe.cluster.request import Request

    imported = time.time()
    data = {"preset": "tiny", "samples": find_preset("tiny").samples}
    with tempfile.TemporaryDirectory(prefix="bagpipe-launch-") as directory:
        config = parse_config({"data": data, "iterations": iterations})
        launched = launch(Request(config, SERVERS, run_dir=Path(directory) / "run"), lambda *_: None)
    trained = launched.trained
    assert trained is not None
    return {
        "seconds_to_first_iteration": trained.first_iteration_at - began,
        "seconds_to_import": imported - began,
        "seconds_to_ray": launched.reached_at["ray"] - began,
        "seconds_to_roles": launched.reached_at["roles"] - began,
        "seconds_to_start": launched.reached_at["started"] - began,
        "seconds_to_end": time.time() - began,
        "iteration_ms": trained.training_s / iterations * 1000,
        "ray_share": trained.ray_s / trained.training_s,
    }


BENCHMARK = Benchmark("cluster", "seconds from a launch to its first iteration, and Ray's share of an iteration", run)

if __name__ == "__main__":
    sys.stdout.write(json.dumps(_said(float(sys.argv[1]), int(sys.argv[2]))) + "\n")
