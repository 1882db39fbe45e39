"""Two trainers and two servers on two machines, as far as a machine can be two: network namespaces, and TLS between."""

from __future__ import annotations

import hashlib
import json
import os
import subprocess
import sys
from contextlib import ExitStack
from pathlib import Path

import numpy as np
import pytest

from bagpipe.wire.keys import VARIABLE, write_keys
from benchmarks.namespaces import NamespaceError, joined_namespaces

RUN = bytes(range(16))
ITERATIONS = 30
TRAINER = """
import hashlib, json, sys
import numpy as np
from bagpipe.server.client import RemoteStore
from bagpipe.wire.keys import find_keys
from bagpipe.wire.stream import SocketNetwork

class Rows:
    width = 5
    def initialise(self, ids, out):
        out[:] = (ids % 13)[:, None]

told = json.loads(sys.argv[1])
rank = told["rank"]
store = RemoteStore([Rows()], told["servers"], SocketNetwork(find_keys("client")), run=bytes.fromhex(told["run"]),
                    trainer=rank, trainers=2)
ids, values = np.arange(400, dtype=np.int64), np.empty((400, 5), np.float32)
mine = ids[rank::2]
for iteration in range(told["iterations"]):
    old, new = 1000 * (iteration % 2), 1000 * ((iteration + 1) % 2)  # nobody writes what another may still read
    store.read_many([(0, ids + old, values)], iteration - 1)  # what both have written before
    store.write_many([(0, mine + new, values[mine] * np.float32(0.5) + values.mean(axis=0))], iteration)
store.read_many([(0, ids + 1000 * (told["iterations"] % 2), values)], told["iterations"] - 1)
print(hashlib.sha256(values.tobytes()).hexdigest(), flush=True)
store.close()
"""


def expected() -> str:
    """What one process comes to."""
    ids = np.arange(400)
    values = np.repeat((ids % 13).astype(np.float32)[:, None], 5, axis=1)
    for _ in range(ITERATIONS):
        values = values * np.float32(0.5) + values.mean(axis=0)
    return hashlib.sha256(values.tobytes()).hexdigest()


@pytest.fixture(name="machines")
def fixture_machines():
    try:
        with joined_namespaces(["one", "two"]) as machines:
            yield machines
    except NamespaceError as error:
        pytest.skip(f"there are no namespaces here: {error}")


class Processes:
    """Processes in namespaces, ended with the block."""

    def __init__(self, machines, stack: ExitStack, tmp_path: Path) -> None:
        self._machines, self._stack, self._tmp_path = machines, stack, tmp_path

    def start(self, side: str, name: str, *command: str, keys: Path | None) -> subprocess.Popen[str]:
        environment = {key: value for key, value in os.environ.items() if key != VARIABLE}
        if keys is not None:
            environment[VARIABLE] = str(keys)
        log = self._stack.enter_context((self._tmp_path / f"{name}.log").open("w"))
        process = subprocess.Popen(
            self._machines.command(side, [sys.executable, *command]), stdout=subprocess.PIPE, stderr=log, text=True,
            env=environment,
        )  # fmt: skip
        self._stack.callback(_end, process)
        return process

    def server(self, side: str, number: int, keys: Path | None) -> str:
        """Its address, once it listens."""
        process = self.start(
            side, f"server-{number}", "-c", "from bagpipe.cli import main; main()", "server",
            "--address", f"{self._machines.host(side)}:0",
            "--shard", str(number), "--of", "2", "--json", keys=keys,
        )  # fmt: skip
        line = process.stdout.readline()
        assert line, (self._tmp_path / f"server-{number}.log").read_text()
        return json.loads(line)["address"]

    def trainer(self, side: str, rank: int, servers: list[str], keys: Path | None) -> subprocess.Popen[str]:
        told = {"rank": rank, "servers": servers, "run": RUN.hex(), "iterations": ITERATIONS}
        return self.start(side, f"trainer-{rank}", "-c", TRAINER, json.dumps(told), keys=keys)


def _end(process: subprocess.Popen[str]) -> None:
    process.terminate()
    try:
        process.wait(30)
    finally:
        process.kill()
        process.wait()
        process.stdout.close()


def test_trainers_and_servers_on_two_machines_over_tls(machines, tmp_path):
    server, client = write_keys(tmp_path / "run")
    _, stranger = write_keys(tmp_path / "other")
    with ExitStack() as stack:
        processes = Processes(machines, stack, tmp_path)
        servers = [processes.server(side, number, server) for number, side in enumerate(("one", "two"))]
        trainers = [processes.trainer(side, rank, servers, client) for rank, side in enumerate(("one", "two"))]
        found = [process.communicate(timeout=120)[0].strip() for process in trainers]
        assert found == [expected()] * 2, (tmp_path / "trainer-0.log").read_text()[-2000:]
        for keys, said in ((stranger, "does not admit our key"), (None, "there are no keys")):
            refused = processes.trainer("two", 1, servers[:1], keys)
            refused.communicate(timeout=60)
            log = (tmp_path / "trainer-1.log").read_text()
            assert refused.returncode != 0
            assert said in log or "another key than the one that we expect" in log, log[-2000:]
    assert "cut the connection" in (tmp_path / "server-0.log").read_text()
