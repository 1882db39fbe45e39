"""Trainers in processes of their own over gloo: the same bits as in memory, and peers that are killed or do nothing."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from contextlib import contextmanager
from pathlib import Path

import numpy as np
import torch

from bagpipe.reference import _mean_dense

COMMON = """
import json, os, signal, sys, threading, time
import scipy.linalg  # Numba takes its BLAS from there with the first kernel, and that has a thread
import torch
from torch import nn
from bagpipe.errors import BagpipeError
from bagpipe.trainer.collective import sum_in_rank_order
from bagpipe.trainer.dense_sync import DenseSync
from bagpipe.trainer.meeting import MeetingPoint
from bagpipe.trainer.process_group import open_groups
from bagpipe.trainer.stages import Threads
rank, size = int(sys.argv[1]), int(sys.argv[2])
torch.set_num_threads(1)

def held():
    paths = [f"/proc/self/fd/{number}" for number in os.listdir("/proc/self/fd")]
    kinds = [os.readlink(path) for path in paths if os.path.exists(path)]
    return len(os.listdir("/proc/self/task")), sum(kind.startswith(("socket", "anon")) for kind in kinds)

def held_at_last():
    "A thread that has ended is still listed for a moment."
    deadline = time.monotonic() + 20
    while held() != before and time.monotonic() < deadline:
        time.sleep(0.01)
    return held()

def report(**found):
    print(json.dumps(found), flush=True)

torch.ones(8, 8, requires_grad=True).sum().backward()
before = held()
meeting = MeetingPoint() if rank == 0 else sys.argv[3]
if rank == 0:
    print(meeting.address, flush=True)
"""
WORK = """
groups = open_groups(rank, size, meeting, deadline_s=60)

def turns(group, wrong):
    for turn in range(20):
        lengths = [[(a * 7 + b * 3 + turn) % 5 * 40_000 for b in range(size)] for a in range(size)]
        send = [torch.full((lengths[rank][peer],), float(rank * 10 + peer + turn)) for peer in range(size)]
        receive = [torch.empty(lengths[peer][rank]) for peer in range(size)]
        group.exchange(send, receive, f"turn {turn}").wait()
        wrong.extend(p for p in range(size) if not (receive[p] == p * 10 + rank + turn).all())

wrong = []
threads = [threading.Thread(target=turns, args=(g, wrong)) for g in (groups.critical, groups.delayed)]
for thread in threads:
    thread.start()
drawn = torch.Generator().manual_seed(rank)
summed = torch.randn(1001, generator=drawn)
mine = summed.tolist()
sum_in_rank_order(groups.dense, summed, "numbers", 7.0).add().wait()

driver = Threads(60)
torch.manual_seed(0)
model = nn.Sequential(nn.Linear(4, 300), nn.Linear(300, 300), nn.Linear(300, 1))
sync = DenseSync(model.named_parameters(), groups.dense, driver, bucket_bytes=100_000)
sync.begin(rank, 3)
inputs = torch.randn(rank, 4, generator=drawn)
alone = torch.autograd.grad(model(inputs).mean(), list(model.parameters())) if rank else []
model(inputs).mean().backward()
sync.close()
driver.join()
for thread in threads:
    thread.join()
torch.save({"alone": list(alone), "mean": [p.grad for p in model.parameters()]}, sys.argv[4] + f"/{rank}.pt")
groups.close()

again = open_groups(rank, size, meeting, generation=1, deadline_s=1.0)
ones = [torch.ones(3) for _ in range(size)]
late = None
if rank != 1:
    try:
        again.critical.exchange(ones, [torch.empty(3) for _ in range(size)], "the rows of iteration 5").wait()
    except BagpipeError as error:
        late = type(error).__name__, str(error)
print("ended", flush=True)
sys.stdin.readline()
again.close()
again.close()
if rank == 0:
    meeting.close()
    meeting.close()
sums = {"mine": mine, "summed": summed.tolist()}
report(wrong=wrong, **sums, late=late, before=before, after=held_at_last())
"""
KILLED = """
groups = open_groups(rank, size, meeting, deadline_s=120)
large = [torch.ones(20_000_000) for _ in range(size)]
receive = [torch.empty(20_000_000) for _ in range(size)]
error = None
try:
    pending = groups.delayed.exchange(large, receive, "the gradients of iteration 9")
    if rank == 1:
        os.kill(os.getpid(), signal.SIGSTOP)
    pending.wait()
except BagpipeError as caught:
    error = caught
again = None
try:
    groups.delayed.exchange(large, receive, "more")
except BagpipeError as caught:
    again = str(caught)
groups.close()
if rank == 0:
    meeting.close()
lost = getattr(error, "rank", None)
report(kind=type(error).__name__, rank=lost, message=str(error), again=again, before=before, after=held_at_last())
"""


@contextmanager
def trainers(script, *arguments):
    """Three processes; all of them are gone afterwards."""
    processes = []

    def start(rank, *rest):
        command = [sys.executable, "-c", COMMON + script, str(rank), "3", *map(str, rest)]
        processes.append(subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True))

    try:
        start(0, "", *arguments)
        address = processes[0].stdout.readline().strip()
        assert address, "the first trainer ended"
        start(1, address, *arguments)
        start(2, address, *arguments)
        yield processes
    finally:
        for process in processes:
            with process:
                process.kill()


def last_line(process):
    out, _ = process.communicate(timeout=60)
    assert process.returncode == 0
    return json.loads(out.splitlines()[-1])


def test_three_processes_exchange_add_and_train_and_one_that_skips_an_exchange_is_named(tmp_path):
    with trainers(WORK, tmp_path) as processes:
        for process in processes:
            assert process.stdout.readline() == "ended\n"
        reports = [last_line(process) for process in processes]
    expected = np.zeros(1001, np.float32)
    for found in reports:
        expected += np.array(found["mine"], np.float32)
    expected /= np.float32(7)
    saved = [torch.load(tmp_path / f"{rank}.pt") for rank in range(3)]
    means = [_mean_dense(grads, [1.0, 2.0], 3.0) for grads in zip(saved[1]["alone"], saved[2]["alone"], strict=True)]
    for rank, found in enumerate(reports):
        assert found["wrong"] == []
        np.testing.assert_array_equal(np.array(found["summed"], np.float32), expected)
        assert all(torch.equal(left, right) for left, right in zip(saved[rank]["mean"], means, strict=True))
        assert found["after"] == found["before"], "threads or sockets are left"
    assert reports[1]["late"] is None
    for rank in (0, 2):
        kind, message = reports[rank]["late"]
        assert kind == "DeadlineError"
        assert f"trainer {rank} waited 1 s for the rows of iteration 5 from trainer 1" in message


def test_a_trainer_that_is_killed_in_mid_exchange_is_named_by_the_others():
    with trainers(KILLED) as processes:
        while "\nState:\tT" not in Path(f"/proc/{processes[1].pid}/status").read_text():
            assert processes[1].poll() is None
            time.sleep(0.05)
        os.kill(processes[1].pid, signal.SIGKILL)
        for process in (processes[0], processes[2]):
            found = last_line(process)
            assert (found["kind"], found["rank"]) == ("PeerLostError", 1), found
            assert "the gradients of iteration 9" in found["message"]
            assert "more can't be exchanged" in found["again"]
            assert found["after"] == found["before"], "threads or sockets are left"
