"""`bagpipe train` killed in the middle and resumed ends with the bits of a run that nobody disturbed (I2)."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys

import pytest

from bagpipe import failpoints
from bagpipe.errors import ConfigError
from harness.seams import find_run, prepared, resumed, trained

SETTINGS = {
    "model": {"name": "wide_deep", "dim": 4},
    "data": {"preset": "tiny", "samples": 800, "shuffle": True},
    "batch_size": 16,
    "epochs": 2,
    "cache": 20_000,
    "threads": 1,
}
COMMAND = [sys.executable, "-c", "from bagpipe.cli import main; main()", "train", "--json"]


def overrides(settings, prefix=""):
    for key, value in settings.items():
        if isinstance(value, dict):
            yield from overrides(value, f"{prefix}{key}.")
        else:
            yield from ("--set", f"{prefix}{key}={json.dumps(value)}")


@pytest.mark.parametrize(
    "more",
    [
        pytest.param({}, id="one trainer", marks=pytest.mark.long),
        pytest.param({"trainers": 2, "store": "mapped"}, id="two trainers"),
    ],
)
def test_a_run_killed_in_the_middle_and_resumed_has_the_same_parameters(tmp_path, more):
    settings = SETTINGS | more
    expected = trained(prepared(settings, tmp_path / "undisturbed"))
    begun = [*COMMAND, "--checkpoint-every", "20", *overrides(settings | {"checkpoint": {"keep": 99}})]
    killed = subprocess.run(
        begun, cwd=tmp_path, capture_output=True, timeout=250, check=False,
        env=os.environ | {failpoints.VARIABLE: "checkpoint.complete=kill@3"},
    )  # fmt: skip
    assert killed.returncode == -signal.SIGKILL, killed.stderr.decode()
    (run,) = (tmp_path / "runs").iterdir()
    assert not (run / "summary.json").exists()
    went_on = subprocess.run(
        [*COMMAND, "--resume", "--set", "lookahead=3", "--set", "cache=2000"],
        cwd=tmp_path, capture_output=True, timeout=300, check=False,
    )  # fmt: skip
    assert went_on.returncode == 0, went_on.stderr.decode()
    summary = json.loads(went_on.stdout)
    assert summary["parameters_sha256"] == expected["parameters_sha256"]
    assert (summary["run_dir"], summary["iterations"], summary["samples"]) == (f"runs/{run.name}", 90, 1440)
    assert summary["resumed_from"] == 60
    assert json.loads((run / "summary.json").read_text())["config"]["lookahead"] == 3
    with pytest.raises(ConfigError, match="has ended"):
        find_run(run)


def test_a_run_that_fails_stays_if_it_has_a_checkpoint(tmp_path):
    settings = SETTINGS | {"checkpoint": {"every": 10}, "iterations": 40, "epochs": None}
    expected = trained(prepared(settings, tmp_path / "whole"))

    def failing_at(iteration):
        def report(done, _note):
            if done == iteration:
                raise ValueError("the end")

        return report

    for iteration, stays in ((5, False), (25, True)):
        job = prepared(settings, tmp_path / str(iteration))
        with pytest.raises(ValueError, match="the end"):
            trained(job, failing_at(iteration))
        assert job.run_dir.exists() == stays
    again, checkpoint = resumed(job.run_dir, ["policy=lru", "store=mapped"])
    assert checkpoint.name == "00000020"

    found = trained(again, checkpoint=checkpoint)
    same = ("iterations", "samples", "loss", "log_loss", "auc", "auc_untrained", "parameters_sha256")
    assert {key: found[key] for key in same} == {key: expected[key] for key in same}
    assert found["resumed_from"] == 20
    assert found["seconds"] > 0


def test_servers_may_change_their_number_when_a_run_goes_on(tmp_path):
    settings = SETTINGS | {"checkpoint": {"every": 4, "keep": 9}, "iterations": 8, "epochs": None, "servers": 2}
    job = prepared(settings, tmp_path / "run")
    expected = trained(job)["parameters_sha256"]
    (job.run_dir / "summary.json").unlink()

    for servers in (3, 0):
        again, _ = resumed(job.run_dir, [f"servers={servers}"])
        found = trained(again, checkpoint=job.run_dir / "checkpoints" / "00000004")
        assert found["parameters_sha256"] == expected
        assert found["resumed_from"] == 4
        (job.run_dir / "summary.json").unlink()
