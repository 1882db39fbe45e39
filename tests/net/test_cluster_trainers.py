"""Trainers in processes of their own: the bits of threads of one process, and the end of one is the end of all (I1)."""

from __future__ import annotations

import importlib.util
import json
import os
import re
import signal

import pytest

from harness.process import Driver, bagpipe, expected, settings

pytestmark = [
    pytest.mark.timeout(240),
    pytest.mark.usefixtures("scratch"),
    pytest.mark.skipif(importlib.util.find_spec("ray") is None, reason="Ray is an extra"),
]

RAISING = """
import sys
from importlib.machinery import PathFinder

class Finder:
    def find_spec(name, path=None, target=None):
        spec = PathFinder.find_spec(name, path, target) if name == "bagpipe.cluster.trainer_role" else None
        if spec is not None:
            load = spec.loader.exec_module
            spec.loader.exec_module = lambda module: (load(module), wrap(module))
        return spec

def wrap(module):
    train = module.train_in

    def train_in(world, job, report, *more):
        def raising(done, note):
            report(done, note)
            if world.trainer == 1 and done == 9:
                raise ValueError("sample 1153 is odd")
        return train(world, job, raising, *more)

    module.train_in = train_in

sys.meta_path.insert(0, Finder)
"""
"""Imported by every Python that starts, it lets the second trainer fail in the middle."""


def test_two_trainers_and_two_servers_give_the_parameters_of_threads_of_one_process(tmp_path, scratch):
    uneven = ("batch_size=101", "data.shuffle=true")
    words = ("launch", "--trainers", "2", "--servers", "2", "--json", "--run-dir", str(tmp_path / "run"))
    done = bagpipe(*words, *settings("iterations=20", *uneven))
    assert done.returncode == 0, done.stderr
    summary = json.loads(done.stdout)
    together = expected(tmp_path, 20, "trainers=2", *uneven)
    assert summary.pop("recoveries") == []
    of_timing = {"seconds", "samples_per_second", "stall_fraction", "run_dir", "plan_bytes", "peak_rows"}
    of_timing |= {
        "weights",
        "checkpoints",
        "checkpoint_fraction",
        "written_rows",
    }  # at a checkpoint all rows are written back
    assert {key: value for key, value in summary.items() if key not in of_timing} == {
        key: value for key, value in together.items() if key not in of_timing
    }
    assert summary["plan_bytes"] > 0
    assert 0 < summary["peak_rows"] <= summary["cache_rows"]
    logs = {path.name for path in (tmp_path / "run" / "logs").iterdir()}
    assert {"trainer-0.log", "trainer-1.log", "server-0.log", "server-1.log"} <= logs
    assert "trainer 1: starts on" in done.stderr
    assert list(scratch.iterdir()) == []


def test_a_trainer_that_fails_in_the_middle_ends_all_with_its_error(tmp_path, scratch):
    (tmp_path / "sitecustomize.py").write_text(RAISING)
    path = os.pathsep.join([str(tmp_path), *filter(None, [os.environ.get("PYTHONPATH")])])
    words = ("launch", "--trainers", "2", "--json", "--run-dir", str(tmp_path / "run"))
    done = bagpipe(*words, *settings("iterations=100000"), PYTHONPATH=path)
    assert done.returncode == 1, done.stderr
    said = json.loads(done.stdout)
    assert said["error"] == "ClusterError"
    assert said["message"].startswith("trainer 1 failed with ValueError: sample 1153 is odd; see ")
    logs = tmp_path / "run" / "logs"
    assert "ValueError: sample 1153 is odd" in (logs / "trainer-1.log").read_text()
    assert "trainer 1 has stopped: ValueError: sample 1153 is odd" in (logs / "trainer-0.log").read_text()
    assert list(scratch.iterdir()) == []


@pytest.mark.long
def test_a_trainer_that_is_killed_and_may_not_be_started_again_ends_the_launch_and_is_named(tmp_path, scratch):
    driver = Driver(tmp_path / "run", "--trainers", "2", *settings("iterations=100000", "recovery.restarts_max=0"))
    driver.wait_for("trainer 1: iteration")
    logs = tmp_path / "run" / "logs"
    os.kill(int(re.search(r"is process (\d+) on", (logs / "trainer-1.log").read_text())[1]), signal.SIGKILL)
    said = json.loads(driver.process.communicate(timeout=60)[0])
    assert driver.process.returncode == 1
    assert said["error"] == "ClusterError"
    assert said["message"].startswith("trainer 1 was lost: its process ended without a word")
    driver.assert_nothing_is_left()
    assert [path.name for path in (tmp_path / "run").iterdir()] == ["logs"]
    assert list(scratch.iterdir()) == []
