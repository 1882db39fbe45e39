"""`bagpipe train` killed again and again at random moments, and resumed each time, ends with the same bits (I2)."""

from __future__ import annotations

import json
import os
import random
import signal
import subprocess
import sys
import time

import pytest

from bagpipe.checkpoint.directory import Checkpoints
from harness.seams import prepared, trained

SETTINGS = {
    "model": {"name": "wide_deep", "dim": 8},
    "data": {"preset": "tiny", "samples": 20_000, "shuffle": True},
    "batch_size": 16,
    "cache": 4_000,
    "threads": 1,
}
KILLS = 10
TRAIN = [sys.executable, "-c", "from bagpipe.cli import main; main()", "train", "--json"]


def overrides(settings, prefix=""):
    for key, value in settings.items():
        if isinstance(value, dict):
            yield from overrides(value, f"{prefix}{key}.")
        else:
            yield from ("--set", f"{prefix}{key}={json.dumps(value)}")


@pytest.mark.long
@pytest.mark.timeout(900)
@pytest.mark.parametrize("store", ["memory", "mapped"])
def test_ten_kills_at_random_moments_leave_the_bits_of_an_undisturbed_run(tmp_path, store):
    expected = trained(prepared(SETTINGS, tmp_path / "undisturbed"))
    rng = random.Random(store)
    command = [*TRAIN, "--checkpoint-every", "20", *overrides(SETTINGS | {"store": store})]
    done = -1
    for _ in range(KILLS):
        run = subprocess.Popen(command, cwd=tmp_path, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE)
        # Once the session has a checkpoint of its own, at any moment: in an iteration, or while files are written.
        until = time.monotonic() + 120
        while newest(tmp_path) <= done and run.poll() is None and time.monotonic() < until:
            time.sleep(0.01)
        done = newest(tmp_path)
        time.sleep(rng.uniform(0, 0.4))
        assert run.poll() is None, run.stderr.read().decode()
        os.kill(run.pid, signal.SIGKILL)
        run.communicate(timeout=60)
        command = [*TRAIN, "--resume"]
    ended = subprocess.run(command, cwd=tmp_path, capture_output=True, timeout=600, check=False)
    assert ended.returncode == 0, ended.stderr.decode()
    summary = json.loads(ended.stdout)
    assert summary["parameters_sha256"] == expected["parameters_sha256"]
    assert summary["iterations"] == expected["iterations"]
    assert summary["resumed_from"] >= done > 0


def newest(directory):
    found = [max(Checkpoints(run / "checkpoints").numbers(), default=0) for run in directory.glob("runs/*")]
    return max(found, default=-1)
