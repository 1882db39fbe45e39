"""Nothing is decided by what errors say: with every message reworded a run recovers all the same, or ends by name."""

from __future__ import annotations

import importlib.util
import json
import os
import runpy
from pathlib import Path

import pytest

from bagpipe import errors, failpoints
from bagpipe.failpoints import Fault
from harness.faults import LARGE, SERVER_LOST, USUAL, error_of, survives
from harness.process import Driver, expected, settings

REWORDED = Path(__file__).parents[1] / "harness" / "reworded"
PROCESSES = {"PYTHONPATH": os.pathsep.join(filter(None, [str(REWORDED), os.environ.get("PYTHONPATH")]))}
SHARED = ("batch_size=101", "data.shuffle=true", "trainers=2")
OFTEN = ("recovery.every=5", "recovery.restarts_max=5", "lookahead=4")


def launch(test):
    """Marks a test of a real launch."""
    for mark in (
        pytest.mark.timeout(280),
        pytest.mark.usefixtures("scratch"),
        pytest.mark.skipif(importlib.util.find_spec("ray") is None, reason="Ray is an extra"),
    ):
        test = mark(test)
    return test


@pytest.fixture
def reworded(monkeypatch):
    """All errors of this process say the same."""
    for kind in vars(errors).values():
        if isinstance(kind, type) and (kind is errors.BagpipeError or "__str__" in vars(kind)):
            monkeypatch.setattr(kind, "__str__", kind.__str__)  # what is put back
    said = runpy.run_path(str(REWORDED / "sitecustomize.py"))["SAID"]
    assert str(errors.StoreError("x")) == str(errors.PeerLostError("x", 1)) == str(errors.ConfigError()) == said


@pytest.mark.usefixtures("reworded")
@pytest.mark.parametrize(
    ("world", "faults", "options"),
    [
        *((USUAL, (Fault("wire.received", at=20, role="server-0"),), {"victims": {"wire.received": [role]}})
          for role in ("trainer-0", "trainer-1", "server-0", "server-1", "oracle", "processor-0")),
        (USUAL, (Fault("remote.write.begun", "pause", 8, "trainer-0"),), {}),
        (USUAL, (Fault("mark.written", "pause", 2, "trainer-1"),), {}),
        (USUAL, (Fault("checkpoint.confirmed", "pause", 1, "trainer-0"),), {}),
        (USUAL, (SERVER_LOST, Fault("server.loaded", role="server-1")), {}),
        (LARGE, (Fault("trainer.sync.delayed", at=5, role="trainer-2"),),
         {"delay": (0.0, 0.003), "breaks": 0.03}),
    ],
)  # fmt: skip
def test_a_run_goes_on_with_the_same_bits(world, faults, options):
    survives(world, *faults, **options)


@pytest.mark.parametrize("name", ["trainer.fetch.read", "server.save.begun", "oracle.plan.made", "data.group.read"])
def test_an_error_that_ends_a_run_is_of_the_same_type(request, name):
    role = {"trainer": "trainer-0", "server": "server-0", "oracle": "oracle", "data": "processor-0"}
    fault = Fault(name, "fail", 2, role[name.partition(".")[0]])
    usual = error_of(USUAL, fault)
    assert usual is not None
    request.getfixturevalue("reworded")
    assert type(error_of(USUAL, fault)) is type(usual)


def launched(tmp_path, faults):
    """A launch with faults, whose processes have other words for every error."""
    once = tmp_path / "once"
    once.mkdir()
    armed = {failpoints.VARIABLE: ", ".join(faults), failpoints.ONCE_VARIABLE: str(once)}
    words = ("--servers", "2", *settings("iterations=60", *SHARED, *OFTEN))
    driver = Driver(tmp_path / "run", *words, **PROCESSES, **armed)
    driver.wait_for("server 1: is placed")
    answer = json.loads(driver.process.communicate(timeout=250)[0])
    assert len(list(once.iterdir())) == len(faults)
    driver.assert_nothing_is_left()
    return answer, driver.process.returncode, driver.said.read_text()


@launch
def test_a_launch_goes_on_with_the_same_bits_after_deaths(tmp_path):
    kills = (
        "trainer-1/trainer.step.updated=kill@14",
        "server-1/server.write.applied=kill@50",
        "oracle/oracle.plan.made=kill@60",
    )
    summary, code, said = launched(tmp_path, kills)
    assert code == 0, said
    assert sorted(each["role"] for each in summary["recoveries"]) == ["oracle", "server 1", "trainer 1"]
    assert summary["parameters_sha256"] == expected(tmp_path, 60, *SHARED)["parameters_sha256"]
    told = "".join(path.read_text() for path in (tmp_path / "run" / "logs").glob("*.log"))
    assert "Error: generation 0 is over; generation 1 is over; trainer 0" in told, "errors had other words"


@launch
def test_a_launch_in_which_a_trainer_fails_ends_with_the_error_of_that_trainer(tmp_path):
    said, code, _ = launched(tmp_path, ("trainer-1/trainer.step.updated=fail@14",))
    assert code == 1
    assert said["error"] == "ClusterError"
