"""Oracle and data processors in processes of their own: the same bits, also when one is killed (I1, I2)."""

from __future__ import annotations

import json
import subprocess
import sys
from contextlib import ExitStack
from dataclasses import asdict

import pytest

from bagpipe.cluster.context import RoleWorld
from bagpipe.store import MemoryStore
from bagpipe.trainer.remote_plans import RemotePlans
from bagpipe.training import train_in, train_reference
from bagpipe.wire.stream import SocketNetwork
from harness.served import LONG, RUN, make_job, quiet

PROCESSOR = """
import json, sys
from bagpipe.data.service import DataOrder, DataProcessorService
from bagpipe.wire.listener import on_socket
job = json.loads(sys.argv[1])
service = DataProcessorService(on_socket(job["address"]), DataOrder(**job["order"]), run=bytes.fromhex(job["run"]))
print(service.start(), flush=True)
sys.stdin.read()
print(service.status().batches, flush=True)
service.close()
"""
ORACLE = """
import json, sys
from bagpipe.data.service import DataOrder, RemoteBatches
from bagpipe.oracle.service import OracleService, PlanSettings
from bagpipe.policy_options import PolicyOptions
from bagpipe.types import Table
from bagpipe.wire.client import Patience
from bagpipe.wire.listener import on_socket
from bagpipe.wire.stream import SocketNetwork
job = json.loads(sys.argv[1])
run, settings = bytes.fromhex(job["run"]), job["settings"]
settings["tables"] = tuple(Table(**table) for table in settings["tables"])
settings["widths"] = tuple(settings["widths"])
settings["options"] = PolicyOptions(**settings["options"])
network = SocketNetwork()
order = DataOrder(**job["order"])
batches = RemoteBatches(network, job["processors"], order, run=run, patience=Patience(retry_s=0.5))
service = OracleService(on_socket(), batches, PlanSettings(**settings), run=run, room=2)
print(service.start(), flush=True)
sys.stdin.read()
service.close()
"""


class Processes:
    """Processes that say where they listen and end when their input does."""

    def __init__(self):
        self.all = []

    def start(self, script, **job):
        process = subprocess.Popen(
            [sys.executable, "-c", script, json.dumps({"run": RUN.hex(), **job})],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )
        self.all.append(process)
        return process

    def address(self, process):
        address = process.stdout.readline().strip()
        assert address, f"process {process.args[-1][:80]} ended with code {process.wait()}"
        return address

    def close(self):
        for process in reversed(self.all):
            with process:
                process.stdin.close()
                try:
                    process.wait(30)
                finally:
                    process.kill()


@pytest.fixture
def processes():
    processes = Processes()
    with ExitStack() as stack:
        stack.callback(processes.close)
        yield processes


def test_processes_that_are_killed_and_replaced_do_not_change_a_bit(processes, tmp_path):
    job = make_job(tmp_path / "run", "cache=300", "lookahead=2", "threads=1", *LONG)
    order = asdict(job.data_order())
    processor = processes.start(PROCESSOR, order=order, address="tcp://127.0.0.1:0")
    where = processes.address(processor)
    oracle = processes.start(ORACLE, order=order, processors=[where], settings=asdict(job.plan_settings()))
    expected, _ = train_reference(job, quiet)
    network = SocketNetwork()
    plans = RemotePlans(network, processes.address(oracle), run=RUN)

    def kill(done, _):
        if done == 8:
            processor.kill()
            processor.wait()
            assert processes.address(processes.start(PROCESSOR, order=order, address=where)) == where

    found, summary = train_in(RoleWorld(job.config, plans, MemoryStore(job.model()[2])), job, kill, hold=True)
    assert expected.differing(found) == []
    assert summary["plan_bytes"] > 0
    replacement = processes.all[-1]
    replacement.stdin.close()
    assert int(processes.address(replacement)) > 0
    processes.close()
    assert [process.returncode for process in processes.all] == [-9, 0, 0]
