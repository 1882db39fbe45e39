"""The same script on two trainers, as people launch it: one exported model, equal to the reference to the last bit."""

from __future__ import annotations

import importlib.util
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from bagpipe import Batch, Ids, optim
from harness.process import bagpipe
from harness.seams import given_reference

pytestmark = [
    pytest.mark.timeout(240),
    pytest.mark.skipif(importlib.util.find_spec("ray") is None, reason="Ray is an extra"),
]

EXAMPLE = Path(__file__).parents[2] / "examples" / "prepared.py"
RESUMED = EXAMPLE.with_name("resumed.py")


def launch(tmp_path, script, *words):
    """Two trainers and two servers, each trainer on one core."""
    options = ("--trainers", "2", "--servers", "2", "--trainer-cores", "1", "--run-dir", str(tmp_path / "run"))
    return bagpipe("launch", *options, *words[:-1], str(script), *words[-1:])


def reference():
    """What two trainers end with, by the definition."""
    parts = {}
    exec(EXAMPLE.read_text().split("torch.manual_seed(0)")[0], parts)  # the model and its data, not the training

    class Net(parts["Net"]):
        def forward(self, dense, sparse):
            return super().forward({"dense": dense} | {name: ids.values for name, ids in sparse.items()})

    torch.manual_seed(0)
    model = Net()
    weights = {name: getattr(model, name).weight.detach().numpy().copy() for name in ("user", "item")}
    trained = given_reference(
        model, ["user", "item"], weights, optim.SGD(lr=0.5), lambda given: torch.optim.SGD(given, lr=0.5), trainers=2
    )
    for number, batch in enumerate(parts["make_loader"]()):
        sparse = {name: Ids(batch[name]) for name in ("user", "item")}
        trained.step(Batch(batch["dense"], sparse, batch["label"], number=number))
    found = {name: value.detach() for name, value in model.named_parameters()}
    for table in trained.tables:
        name = table.layout.table.name
        vectors = torch.from_numpy(weights[name])
        for row, values in table.written.items():
            vectors[row] = torch.from_numpy(values[: table.layout.dim])
        found[f"{name}.weight"] = vectors
    return found


def test_the_example_on_two_trainers_ends_with_the_bits_of_the_reference(tmp_path):
    path = tmp_path / "model.safetensors"
    done = launch(tmp_path, EXAMPLE, str(path))
    assert done.returncode == 0, done.stderr
    assert done.stdout.count("loss ") == 1, "only what the first trainer prints is shown"
    expected, found = reference(), load_file(path)
    assert expected.keys() == found.keys()
    for name, value in expected.items():
        assert torch.equal(found[name], value), name
    alone = tmp_path / "alone.safetensors"
    subprocess.run([sys.executable, str(EXAMPLE), str(alone)], check=True, capture_output=True)
    for name, value in load_file(alone).items():
        torch.testing.assert_close(found[name], value, rtol=1e-3, atol=1e-4, msg=name)


SCRIPT = """
import sys, torch, bagpipe
from bagpipe.data import Loader, generated
from bagpipe.models import build_model
data = generated("tiny", 2000)
model = build_model("wide_deep", data.tables, data.num_dense, 4, torch.device("meta"), seed=0)
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
model, optimizer, loader = bagpipe.prepare(model, optimizer, Loader(data, 100), features=data.tables)
with loader:
    for number, batch in enumerate(loader):
        if number == 5 and loader.rank == 1 and sys.argv[1] == "raise":
            raise ValueError("enough")
        model(batch.dense, batch.sparse).square().mean().backward()
        optimizer.step(), optimizer.zero_grad()
        if number == 5 and (loader.rank == 1 or sys.argv[1] == "break"):
            break
print("trainer", loader.rank, "of", loader.trainers, flush=True)
"""


@pytest.mark.long
@pytest.mark.parametrize(
    ("how", "code", "said"),
    [
        ("break", 0, "trainer 0 of 2"),
        ("leave", 1, "left the training loop after iteration 5"),
        ("raise", 1, "ValueError: enough"),
    ],
)
def test_trainers_that_leave_together_end_well_and_one_that_leaves_alone_ends_all_with_a_reason(
    tmp_path, how, code, said
):
    script = tmp_path / "script.py"
    script.write_text(SCRIPT)
    done = launch(tmp_path, script, how)
    assert done.returncode == code, done.stderr
    logs = "".join(path.read_text() for path in (tmp_path / "run").rglob("*.log"))
    assert said in done.stdout + done.stderr + logs


@pytest.mark.long
@pytest.mark.timeout(600)
def test_a_script_goes_on_from_its_checkpoints_in_a_second_launch_with_other_servers(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)

    def resumed(run, servers, *words):
        words = ("--run-dir", run, "--servers", servers, *words)
        return bagpipe("launch", "--trainers", "2", "--trainer-cores", "1", *words)

    def printed(done):
        return [line for line in done.stdout.splitlines() if " INFO " not in line]

    refused = resumed("refused", "2", str(RESUMED), "kept", "parts.out")
    assert refused.returncode == 1
    assert "with --checkpoints DIR" in refused.stderr
    whole = resumed("whole", "2", "--checkpoints", "all", str(RESUMED), "all/of/one", "whole.out")
    assert whole.returncode == 0, whole.stderr
    begins, *losses = printed(whole)
    assert (begins, len(losses)) == ("begins", 3)
    first = resumed("first", "2", str(RESUMED), "first/checkpoints", "parts.out", "27")
    assert first.returncode == 3, first.stderr
    second = resumed("second", "3", "--checkpoints", "first", str(RESUMED), "first/checkpoints", "parts.out")
    assert second.returncode == 0, second.stderr
    assert printed(second) == ["goes on after 20 iterations", *losses[1:]]
    assert Path("parts.out").read_bytes() == Path("whole.out").read_bytes()
