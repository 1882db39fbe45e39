"""`bagpipe launch --init-from`: servers load the rows of another run, also after a loss before its own checkpoint."""

from __future__ import annotations

import importlib.util
import json
import subprocess
import sys

import pytest

from bagpipe import failpoints
from bagpipe.checkpoint.directory import Checkpoints
from bagpipe.training import train
from harness.daily import SETTINGS, day_job, state_of, trained_reference, write_days
from harness.process import Driver, bagpipe

pytestmark = [
    pytest.mark.timeout(280),
    pytest.mark.skipif(importlib.util.find_spec("ray") is None, reason="Ray is an extra"),
]


def words(settings, prefix=""):
    """Settings as the command line has them."""
    for name, value in settings.items():
        if isinstance(value, dict):
            yield from words(value, f"{prefix}{name}.")
        else:
            yield from ("--set", f"{prefix}{name}={json.dumps(value)}")


def test_a_launch_begins_with_another_runs_rows_and_again_after_a_loss(tmp_path):
    write_days(tmp_path, samples=260)
    train(day_job(tmp_path, tmp_path / "first", 1, checkpoint={"every": 5}), lambda *_: None)
    before = trained_reference(day_job(tmp_path, tmp_path / "plain", 1))
    second = day_job(tmp_path, tmp_path / "second", 2, trainers=2)
    expected = state_of(trained_reference(second, before)).sha256()
    once = tmp_path / "once"
    once.mkdir()
    own = SETTINGS | {"data": {"path": str(tmp_path / "2")}, "seed": 2, "recovery": {"every": 1000}}
    driver = Driver(
        tmp_path / "run", "--servers", "2", "--trainers", "2", "--init-from", str(tmp_path / "first"), *words(own),
        **{failpoints.VARIABLE: "server-1/server.write.applied=kill@4", failpoints.ONCE_VARIABLE: str(once)},
    )  # fmt: skip
    said = driver.process.communicate(timeout=250)[0]
    assert driver.process.returncode == 0, said + driver.said.read_text()
    summary = json.loads(said)
    assert summary["parameters_sha256"] == expected
    assert [incident["done_after"] for incident in summary["recoveries"]] == [0]
    assert summary["initialised_from"] == str(Checkpoints(tmp_path / "first" / "checkpoints").latest().directory)


SCRIPT = """
import sys, torch, bagpipe
from torch import nn

torch.manual_seed(0)
keys = torch.arange(64) % int(sys.argv[1])
data = [({"user": keys[i : i + 8]}, (keys[i : i + 8] % 2).float()) for i in range(0, 64, 8)]


class Model(nn.Module):
    def __init__(self):
        super().__init__()
        self.user = nn.Embedding(int(sys.argv[1]), 2, device="meta")
        self.top = nn.Linear(2, 1)

    def forward(self, sparse):
        return self.top(self.user(sparse["user"])).squeeze(1)


model, rows = Model(), bagpipe.optim.Adagrad(0.1)
optimizer = torch.optim.Adam(model.parameters(), lr=0.1)
kept = bagpipe.Checkpointing(sys.argv[2], every=4) if len(sys.argv) > 2 else None
model, optimizer, loader = bagpipe.prepare(model, optimizer, data, rows=rows, cache=64, checkpoint=kept)
loader.register_for_checkpointing()
for sparse, labels in loader:
    loss = nn.functional.binary_cross_entropy_with_logits(model(sparse), labels)
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
print("steps", rows.updates, "weight", model.top.weight.sum().item(), flush=True)
"""


def test_a_script_begins_with_what_its_launch_names(tmp_path):
    script = tmp_path / "script.py"
    script.write_text(SCRIPT)
    first = subprocess.run(
        [sys.executable, str(script), "20", str(tmp_path / "day")],
        capture_output=True,
        text=True,
        timeout=200,
        check=False,
    )
    assert first.returncode == 0, first.stderr
    assert "steps 8" in first.stdout
    second = bagpipe(
        "launch", "--run-dir", str(tmp_path / "run"), "--init-from", str(tmp_path / "day"), str(script), "30"
    )
    assert second.returncode == 0, second.stderr
    assert "steps 16" in second.stdout, "row optimizers count on"
