"""`bagpipe launch` as people run it: the result of one process, and nothing is left behind however it ends (I1)."""

from __future__ import annotations

import importlib.util
import json
import os
import signal
import subprocess
import sys
import time

import pytest

from harness.process import Driver, bagpipe, expected, settings, title
from harness.ray_nodes import TOKEN, ray_nodes
from harness.seams import children_of

pytestmark = [
    pytest.mark.timeout(240),
    pytest.mark.usefixtures("scratch"),
    pytest.mark.skipif(importlib.util.find_spec("ray") is None, reason="Ray is an extra"),
]


@pytest.fixture(scope="module")
def three_nodes():
    with ray_nodes(3, cores=2) as nodes:
        yield nodes


def test_two_servers_give_the_parameters_of_one_process(tmp_path, scratch):
    done = bagpipe("launch", "--servers", "2", "--json", "--run-dir", str(tmp_path / "run"), *settings("iterations=20"))
    assert done.returncode == 0, done.stderr
    summary = json.loads(done.stdout)
    alone = expected(tmp_path, 20)
    assert summary["parameters_sha256"] == alone["parameters_sha256"]
    assert alone.keys() <= summary.keys()
    assert summary["run_dir"] == str(tmp_path / "run")
    assert json.loads((tmp_path / "run" / "summary.json").read_text())["config"]["servers"] == 2
    assert {path.name for path in (tmp_path / "run" / "logs").iterdir()} == {
        "server-0.log", "server-1.log", "oracle.log", "processor-0.log", "trainer-0.log"
    }  # fmt: skip
    assert "server 1: starts on" in done.stderr
    assert list(scratch.iterdir()) == []


@pytest.mark.long
def test_three_nodes_give_the_same_and_are_left_as_they_were(three_nodes, tmp_path):
    words = (
        "launch",
        "--servers",
        "2",
        "--address",
        three_nodes.address,
        "--server-memory",
        "500MB",
        "--trainer-cores",
        "1",
    )
    done = bagpipe(*words, "--json", "--run-dir", str(tmp_path / "run"), *settings("iterations=20"), **TOKEN)
    assert done.returncode == 0, done.stderr
    assert json.loads(done.stdout)["parameters_sha256"] == expected(tmp_path, 20)["parameters_sha256"]

    hungry = (*words, "--server-memory", "2GB", "--json", "--run-dir", str(tmp_path / "hungry"))
    done = bagpipe(*hungry, *settings("iterations=20"), **TOKEN)
    assert done.returncode == 1
    said = json.loads(done.stdout)
    assert said["error"] == "ClusterError"
    assert "memory: 4 GB needed, 3 GB free" in said["message"]
    assert not (tmp_path / "hungry").exists()
    assert "is placed" not in done.stderr, "nothing is begun that waits for what never comes"

    until = time.monotonic() + 30
    while roles := [each for each in children_of(three_nodes.pid) if "Post" in title(each)]:
        assert time.monotonic() < until, roles
        time.sleep(0.1)
    assert sum("raylet" in title(each) for each in children_of(three_nodes.pid)) == 3


def test_a_killed_driver_leaves_no_process_and_no_file_of_ray(tmp_path, scratch):
    driver = Driver(tmp_path / "run", *settings("iterations=100000"))
    driver.wait_for("trainer 0: iteration")
    assert list(scratch.glob("bagpipe-ray-*/r/session_*"))
    driver.end(signal.SIGKILL)
    driver.assert_nothing_is_left()
    assert list(scratch.iterdir()) == []


def test_ctrl_c_ends_everything_with_its_exit_code_and_leaves_no_directory(tmp_path, scratch):
    driver = Driver(tmp_path / "run", *settings("iterations=100000"))
    driver.wait_for("server 0: is placed")
    said = driver.end(signal.SIGINT)
    assert driver.process.returncode == 130
    assert json.loads(said) == {"error": "Interrupted", "message": "stopped by Ctrl-C"}
    driver.assert_nothing_is_left()
    assert list(scratch.iterdir()) == []
    assert not (tmp_path / "run").exists()


@pytest.mark.long
def test_sigterm_ends_everything_with_its_exit_code(tmp_path):
    driver = Driver(tmp_path / "run", *settings("iterations=100000"))
    driver.wait_for("trainer 0: iteration")
    driver.end(signal.SIGTERM)
    assert driver.process.returncode == 143
    driver.assert_nothing_is_left()


@pytest.mark.long
@pytest.mark.parametrize("role", ["ServerPost", "OraclePost", "TrainerPost", "ProcessorPost"])
def test_a_role_that_dies_and_may_not_be_started_again_ends_the_run_and_is_named(tmp_path, role):
    driver = Driver(tmp_path / "run", *settings("iterations=100000", "recovery.restarts_max=0"))
    driver.wait_for("trainer 0: iteration")
    os.kill(next(pid for pid in driver.started if role in title(pid)), signal.SIGKILL)
    said = json.loads(driver.process.communicate(timeout=60)[0])
    assert driver.process.returncode == 1
    assert said["error"] == "ClusterError"
    assert said["message"].startswith(role.removesuffix("Post").lower())
    assert "was lost: " in said["message"]
    driver.assert_nothing_is_left()
    assert [path.name for path in (tmp_path / "run").iterdir()] == ["logs"]


@pytest.mark.long
def test_a_script_runs_in_the_trainer_with_the_servers_and_its_output_is_shown(tmp_path):
    script = tmp_path / "script.py"
    script.write_text(SCRIPT)
    words = ("launch", "--servers", "2", "--run-dir", str(tmp_path / "run"), str(script), "--lr", "0.5")
    done = bagpipe(*words)
    assert done.returncode == 5, done.stderr
    assert "['--lr', '0.5'] RemoteStore True" in done.stdout
    alone = subprocess.run([sys.executable, str(script), "--lr", "0.5"], capture_output=True, text=True, check=False)
    assert done.stdout.splitlines()[-1] == alone.stdout.splitlines()[-1]


@pytest.mark.long
def test_the_benchmark_says_how_long_a_launch_takes_and_what_ray_takes():
    done = bagpipe("bench", "cluster", "--quick", "--json")
    assert done.returncode == 0, done.stderr
    result = json.loads(done.stdout)["results"][0]
    assert (result["trainers"], result["servers"]) == (1, 2)
    assert 0 < result["seconds_to_ray"] < result["seconds_to_first_iteration"] < result["seconds_to_end"]
    assert 0 <= result["ray_share"] < 1


SCRIPT = """
import hashlib, signal, sys, torch, bagpipe
from bagpipe.data import Loader, generated
from bagpipe.models import build_model
torch.set_num_threads(1)
signal.signal(signal.SIGUSR1, lambda *_: None)  # only the main thread may
data = generated("tiny", 2000)
model = build_model("wide_deep", data.tables, data.num_dense, 4, torch.device("meta"), seed=0)
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
model, optimizer, loader = bagpipe.prepare(model, optimizer, Loader(data, 100), features=data.tables)
for batch in loader:
    model(batch.dense, batch.sparse).square().mean().backward()
    optimizer.step()
    optimizer.zero_grad()
store = loader.loop.store
print(sys.argv[1:], type(store).__name__, store.num_rows(0) > 0)
values = [values for table in range(3) for values in sorted(
    (ids.tobytes(), rows.tobytes()) for ids, rows in store.iterate(table, 1))]
print(hashlib.sha256(repr(values).encode()).hexdigest(), flush=True)
sys.exit(5)
"""
