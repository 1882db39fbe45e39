"""Faults that take long: random kills, stopped processes, a machine that is gone, scripts, and the death of all."""

from __future__ import annotations

import importlib.util
import json
import os
import random
import re
import signal
import subprocess
import sys
import time

import pytest

from bagpipe import failpoints
from bagpipe.cluster import keeper
from harness.process import BAGPIPE, Driver, bagpipe, expected, is_there, settings, title
from harness.ray_nodes import TOKEN, ray_nodes

pytestmark = [
    pytest.mark.long,
    pytest.mark.timeout(1500),
    pytest.mark.usefixtures("scratch"),
    pytest.mark.skipif(importlib.util.find_spec("ray") is None, reason="Ray is an extra"),
]
SHARED = ("batch_size=101", "data.shuffle=true", "trainers=2")
OFTEN = ("recovery.every=20", "recovery.restarts_max=1000")
ROLES = ("trainer-0", "trainer-1", "server-0", "server-1", "oracle", "processor-0", "processor-1")


class Faulty(Driver):
    """A launch whose processes are hurt."""

    def __init__(self, run_dir, *words, **environment):
        super().__init__(run_dir, *words, **environment)
        self.logs, self.started = run_dir / "logs", []
        self.wait_until(lambda: "trainer 0: iteration" in self.said.read_text())
        self.started = keeper.children_of(self.process.pid)

    def pid(self, role):
        return int(re.findall(r"is process (\d+) on", (self.logs / f"{role}.log").read_text())[-1])

    def signal(self, role, number):
        os.kill(self.pid(role), number)

    def times(self, words):
        return self.said.read_text().count(words)

    def wait_until(self, condition, seconds=300):
        until = time.monotonic() + seconds
        while not condition() and self.process.poll() is None:
            assert time.monotonic() < until, self.said.read_text()[-3000:]
            time.sleep(0.02)

    def summary(self):
        said = self.process.communicate(timeout=900)[0]
        assert self.process.returncode == 0, said + self.said.read_text()[-3000:]
        self.assert_nothing_is_left()
        return json.loads(said)


def random_kills(tmp_path, seed, kills, iterations):
    """A launch in which roles die at random moments, sometimes two at once; its summary, and how many died."""
    chance = random.Random(seed)
    words = ("--servers", "2", "--processors", "2", *settings(f"iterations={iterations}", *SHARED, *OFTEN))
    driver = Faulty(tmp_path / f"run-{seed}", *words)
    dead = 0
    while dead < kills and driver.process.poll() is None:
        time.sleep(chance.choice([0.0, 0.05, 0.3, 1.0, 2.0]))  # also while a recovery is under way
        for role in chance.sample(ROLES, chance.choice([1, 1, 1, 2])):
            try:
                driver.signal(role, signal.SIGKILL)
            except ProcessLookupError:
                continue  # its next process has not said its number
            dead += 1
        if chance.random() < 0.7:
            before = driver.times("went on from")
            driver.wait_until(lambda before=before: driver.times("went on from") > before)
    return driver.summary(), dead


def test_random_kills_of_real_processes(tmp_path, capsys):
    seed = int(os.environ.get("BAGPIPE_CHAOS_SEED", random.SystemRandom().randrange(10**6)))
    runs, kills = int(os.environ.get("BAGPIPE_CHAOS_RUNS", 5)), int(os.environ.get("BAGPIPE_CHAOS_KILLS", 40))
    alone = expected(tmp_path, 4000, *SHARED)["parameters_sha256"]
    lines = [f"{'seed':>8} {'faults':>7} {'recovered':>10} {'median s':>9} {'longest s':>10} {'mismatches':>11}"]
    wrong = 0
    for number in range(runs):
        summary, dead = random_kills(tmp_path, seed + number, kills, 4000)
        took = sorted(incident["seconds"] for incident in summary["recoveries"])
        mismatch = summary["parameters_sha256"] != alone
        wrong += mismatch
        middle, longest = (took[len(took) // 2], took[-1]) if took else (0.0, 0.0)
        lines.append(f"{seed + number:>8} {dead:>7} {len(took):>10} {middle:>9.1f} {longest:>10.1f} {mismatch:>11d}")
    with capsys.disabled():
        print("\nkill -9 of real processes (BAGPIPE_CHAOS_SEED repeats it)\n" + "\n".join(lines))
    assert not wrong


@pytest.mark.parametrize("role", ["trainer-1", "server-0", "oracle"])
def test_a_process_that_stops_for_ten_seconds_goes_on_as_if_nothing_had_happened(tmp_path, role):
    driver = Faulty(tmp_path / "run", "--servers", "2", *settings("iterations=1500", *SHARED, *OFTEN))
    driver.signal(role, signal.SIGSTOP)
    time.sleep(10)
    driver.signal(role, signal.SIGCONT)
    summary = driver.summary()
    assert summary["recoveries"] == []
    assert summary["parameters_sha256"] == expected(tmp_path, 1500, *SHARED)["parameters_sha256"]


@pytest.mark.parametrize("role", ["trainer-1", "server-0", "processor-0"])
def test_a_process_that_stops_for_long_is_replaced(tmp_path, role):
    words = settings("iterations=1500", "wire.deadline_s=24", *SHARED, *OFTEN)
    driver = Faulty(tmp_path / "run", "--servers", "2", *words)
    stopped = driver.pid(role)
    os.kill(stopped, signal.SIGSTOP)
    summary = driver.summary()
    assert not is_there(stopped)
    assert [incident["role"] for incident in summary["recoveries"]] == [role.replace("-", " ")]
    assert "said nothing for 12 s" in summary["recoveries"][0]["cause"]
    assert summary["parameters_sha256"] == expected(tmp_path, 1500, *SHARED)["parameters_sha256"]


def test_after_the_death_of_the_launch_itself_it_is_resumed_with_the_same_bits(tmp_path, scratch):
    words = ("--servers", "2", *settings("iterations=600", "checkpoint.every=50", "recovery.every=50", *SHARED))
    driver = Faulty(tmp_path / "run", *words)
    checkpoints = tmp_path / "run" / "checkpoints"
    driver.wait_until(lambda: any(checkpoints.glob("0*")))
    driver.end(signal.SIGKILL)
    driver.assert_nothing_is_left()
    assert list(scratch.iterdir()) == []
    fault = {failpoints.VARIABLE: "server-1/server.write.applied=kill@30", failpoints.ONCE_VARIABLE: str(tmp_path)}
    done = bagpipe("launch", "--resume", str(tmp_path / "run"), "--json", "--servers", "3", **fault)
    assert done.returncode == 0, done.stderr
    summary = json.loads(done.stdout)
    assert summary["resumed_from"] >= 50
    assert [incident["role"] for incident in summary["recoveries"]] == ["server 1"]
    assert summary["parameters_sha256"] == expected(tmp_path, 600, *SHARED)["parameters_sha256"]
    again = bagpipe("launch", "--resume", str(tmp_path / "run"), "--json")
    assert again.returncode == 1
    assert "has ended" in json.loads(again.stdout)["message"]


SCRIPT = """
import hashlib, sys, torch, bagpipe
from bagpipe.data import Loader, generated
from bagpipe.models import build_model
from bagpipe.row_parameter import dense_parameters_of
torch.set_num_threads(1)
torch.manual_seed(0)
data = generated("tiny", 4000)
model = build_model("wide_deep", data.tables, data.num_dense, 4, torch.device("meta"), seed=0)
rows = bagpipe.optim.Adagrad(0.1)
optimizer = torch.optim.Adam(model.parameters(), 0.01)
loader = Loader(data, 50, seed=3, epochs=2)
cache = bagpipe.Cache(lookahead=8)  # so that rows are written all the time
model, optimizer, loader = bagpipe.prepare(model, optimizer, loader, rows=rows, features=data.tables, cache=cache)
if "--register" in sys.argv:
    loader.register_for_checkpointing()
for epoch in range(loader.epoch, 1):
    for batch in loader:
        loss = torch.nn.functional.binary_cross_entropy_with_logits(model(batch.dense, batch.sparse), batch.labels)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
if loader.rank == 0:
    values = [value.detach().numpy().tobytes() for _, value in dense_parameters_of(model)]
    values += [pair for table in range(3) for pair in sorted(
        (ids.tobytes(), rows.tobytes()) for ids, rows in loader.loop.store.iterate(table, 1))]
    print(hashlib.sha256(repr(values).encode()).hexdigest(), flush=True)
"""


@pytest.mark.parametrize(("trainers", "registered"), [(1, "--register"), (1, ""), (2, "--register")])
def test_a_script_is_run_again_and_goes_on_from_the_last_mark(tmp_path, trainers, registered):
    script, once = tmp_path / "script.py", tmp_path / "once"
    script.write_text(SCRIPT)
    once.mkdir()
    words = ("launch", "--servers", "2", "--trainers", str(trainers), "--set", "recovery.every=10")
    words = (*words, "--set", "threads=1", str(script), *filter(None, [registered]))
    kills = "server-1/server.write.applied=kill@60, trainer-0/trainer.step.updated=kill@50"
    fault = {failpoints.VARIABLE: kills, failpoints.ONCE_VARIABLE: str(once)}
    done = subprocess.run(
        [*BAGPIPE, *words],
        capture_output=True,
        text=True,
        timeout=400,
        check=False,
        cwd=tmp_path,
        env=os.environ | fault,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    assert len(list(once.iterdir())) == 2
    assert ("going back to the checkpoint after" in done.stderr) == bool(registered)
    if trainers == 1:
        alone = subprocess.run([sys.executable, str(script), registered], capture_output=True, text=True, check=True)
    else:
        alone = subprocess.run(
            [*BAGPIPE, *words], capture_output=True, text=True, timeout=400, check=True, cwd=tmp_path
        )
    assert done.stdout.splitlines()[-1] == alone.stdout.splitlines()[-1]


def test_a_process_that_was_kept_ready_takes_the_place_of_a_lost_one(tmp_path):
    driver = Faulty(tmp_path / "run", "--servers", "2", *settings("iterations=3000", *SHARED, *OFTEN))

    def ready():
        return [pid for pid in keeper.children_of(driver.process.pid) if title(pid) == "ray::Post"]

    driver.wait_until(ready)
    waiting = ready()
    driver.signal("oracle", signal.SIGKILL)
    driver.wait_until(lambda: driver.times("went on from"))
    assert driver.pid("oracle") in waiting
    summary = driver.summary()
    assert summary["parameters_sha256"] == expected(tmp_path, 3000, *SHARED)["parameters_sha256"]


def test_a_node_that_dies_with_everything_on_it_is_done_without(tmp_path):
    with ray_nodes(2, cores=6) as nodes:
        words = ("--address", nodes.address, "--servers", "2", "--trainer-cores", "1")
        driver = Faulty(tmp_path / "run", *words, *settings("iterations=1000", *SHARED, *OFTEN), **TOKEN)
        nodes.lose_one()
        summary = driver.summary()
        assert [incident["role"] for incident in summary["recoveries"]], "somebody was on it"
        assert summary["parameters_sha256"] == expected(tmp_path, 1000, *SHARED)["parameters_sha256"]
        assert not [each for each in keeper.children_of(nodes.pid) if "Post" in title(each)]


def test_the_benchmark_says_how_long_each_role_takes_to_be_replaced():
    done = subprocess.run(
        [*BAGPIPE, "bench", "recovery", "--quick", "--json"], capture_output=True, text=True, timeout=600, check=False
    )
    assert done.returncode == 0, done.stderr
    results = json.loads(done.stdout)["results"]
    assert [result["role"] for result in results] == ["trainer", "server", "oracle", "processor"]
    assert all(result["kills"] == 1 and result["median_s"] > 0 for result in results)
