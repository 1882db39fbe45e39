"""kill -9 of every role of a launch: it goes on by itself, and ends with the bits of an undisturbed run (I2)."""

from __future__ import annotations

import importlib.util
import json

import pytest

from bagpipe import failpoints
from harness.process import Driver, expected, settings

pytestmark = [
    pytest.mark.timeout(280),
    pytest.mark.usefixtures("scratch"),
    pytest.mark.skipif(importlib.util.find_spec("ray") is None, reason="Ray is an extra"),
]
KILLS = (
    "trainer-1/trainer.step.updated=kill@14",
    "server-1/server.write.applied=kill@50",
    "oracle/oracle.plan.made=kill@60",
    "processor-0/data.batch.sent=kill@80",
    "server-0/server.mark.made=kill@6",
    "trainer-0/mark.asked=kill@4",
    "server-1/server.return.begun=kill@2",
)
"""In processes that live until then: counted in each process by itself. The last one happens during a recovery."""


@pytest.fixture
def armed(tmp_path):
    """What arms processes with faults, each of which happens once; the faults that have happened are files there."""
    once = tmp_path / "once"
    once.mkdir()
    return lambda *faults: {failpoints.VARIABLE: ", ".join(faults), failpoints.ONCE_VARIABLE: str(once)}


def end_of(driver):
    """The summary of a launch that ends by itself, and leaves nothing behind."""
    said = driver.process.communicate(timeout=250)[0]
    assert driver.process.returncode == 0, said + driver.said.read_text()
    return json.loads(said)


def test_a_launch_survives_the_death_of_every_role_in_turn(tmp_path, scratch, armed):
    shared = ("iterations=60", "batch_size=101", "data.shuffle=true", "trainers=2")
    driver = Driver(
        tmp_path / "run",
        "--servers",
        "2",
        *settings(*shared, "recovery.every=5", "recovery.restarts_max=5", "lookahead=4"),
        **armed(*KILLS),
    )
    driver.wait_for("server 1: is placed")
    summary = end_of(driver)
    happened = {path.name.replace(":", "/", 1) for path in (tmp_path / "once").iterdir()}
    assert happened == set(KILLS)
    roles = [incident["role"] for incident in summary["recoveries"]]
    assert sorted(roles) == sorted(fault.partition("/")[0].replace("-", " ") for fault in KILLS)
    assert any(incident["done_after"] > 0 for incident in summary["recoveries"]), "marks are gone back to"
    together = expected(tmp_path, 60, *shared[1:])
    assert summary["parameters_sha256"] == together["parameters_sha256"]
    assert summary["iterations"] == 60
    assert summary["samples"] == together["samples"]
    said = driver.said.read_text()
    assert "server 1 was lost: its process ended without a word" in said
    assert "went on from the checkpoint after" in said
    assert "going back to" in (tmp_path / "run" / "logs" / "recovery.log").read_text()
    driver.assert_nothing_is_left()
    assert list(scratch.iterdir()) == []
    assert {path.name for path in (tmp_path / "run").iterdir()} == {
        *("config.json", "logs", "summary.json"),
        *("metrics.jsonl", "checkpoints"),
    }
