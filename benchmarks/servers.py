"""Eight clients read and write a few thousand random rows at a time on two servers, for a minute: latencies, rows a
second, and whether the servers' memory stays as it is; through shared memory and over sockets.

Each client has ids of its own, all written before the clock starts, and checks every row that it reads against what it
wrote last, so `errors` counts wrong rows too. Clients are threads of two processes. `server_memory_bytes_early` is
what both servers hold after a sixth of the time, `..._end` at its end.
"""

from __future__ import annotations

import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import msgspec
import numpy as np

from bagpipe.allocator import keep_freed_memory
from bagpipe.arrays import Int64s
from bagpipe.errors import PipelineError
from bagpipe.server.client import RemoteStore
from bagpipe.server.local import LocalServers, start_servers
from bagpipe.server.storage import Width
from bagpipe.wire.stream import SocketNetwork
from benchmarks import Benchmark, Results

NUM_SERVERS = 2
NUM_PROCESSES, CLIENTS_PER_PROCESS = 2, 4
NUM_CLIENTS = NUM_PROCESSES * CLIENTS_PER_PROCESS
WIDTH = 48
IDS_PER_CLIENT = 50_000
ROWS_MIN, ROWS_MAX = 1_000, 5_000
EARLY = 1 / 6
"""Of the time."""
_PERCENTILES = {"p50": 50, "p95": 95, "p99": 99, "max": 100}


class Job(msgspec.Struct, frozen=True):
    """What a process of clients is told."""

    addresses: list[str]
    run: bytes
    process: int
    seconds: float
    shared_memory: bool


class Outcome(msgspec.Struct):
    """What clients have seen."""

    read_ms: list[float] = []
    write_ms: list[float] = []
    rows_read: int = 0
    rows_written: int = 0
    errors: list[str] = []

    def add(self, other: Outcome) -> None:
        """Those of one more."""
        self.read_ms += other.read_ms
        self.write_ms += other.write_ms
        self.rows_read += other.rows_read
        self.rows_written += other.rows_written
        self.errors += other.errors


class Client:
    """One trainer's store, and what it wrote last to each of its rows."""

    def __init__(self, job: Job, number: int, network: SocketNetwork) -> None:
        self.outcome = Outcome()
        self._rng = np.random.default_rng(number)
        self._ids = np.arange(IDS_PER_CLIENT) * NUM_CLIENTS + number
        self._versions = np.zeros(IDS_PER_CLIENT, np.int64)
        self._store = RemoteStore(
            [Width(WIDTH)], job.addresses, network, run=job.run, trainer=number, trainers=NUM_CLIENTS,
            shared_memory=job.shared_memory,
        )  # fmt: skip
        self._write(np.arange(IDS_PER_CLIENT))

    def hammer(self, until: float) -> None:
        """Write and read in turn; the first error ends it."""
        try:
            while time.monotonic() < until:
                count = int(self._rng.integers(ROWS_MIN, ROWS_MAX + 1))
                chosen = self._rng.choice(IDS_PER_CLIENT, count, replace=False, shuffle=False)
                self.outcome.write_ms.append(self._write(chosen))
                self.outcome.rows_written += count
                self.outcome.read_ms.append(self._read(self._rng.integers(0, IDS_PER_CLIENT, count)))
                self.outcome.rows_read += count
        except Exception as error:  # whatever it is, it is a result
            self.outcome.errors.append(f"{type(error).__name__}: {error}")

    def close(self) -> None:
        """Let the connections go."""
        self._store.close()

    def _write(self, chosen: Int64s) -> float:
        values = np.repeat(self._ids[chosen].astype(np.float32), WIDTH).reshape(-1, WIDTH)
        values[:, -1] = self._versions[chosen] + 1
        start = time.perf_counter()
        self._store.write(0, self._ids[chosen], values)
        taken = time.perf_counter() - start
        self._versions[chosen] += 1
        return taken * 1e3

    def _read(self, chosen: Int64s) -> float:
        ids, rows = self._ids[chosen], np.empty((len(chosen), WIDTH), np.float32)
        start = time.perf_counter()
        self._store.read(0, ids, rows)
        taken = time.perf_counter() - start
        wrong = (rows[:, :-1] != ids[:, None]).any(axis=1) | (rows[:, -1] != self._versions[chosen])
        if wrong.any():
            raise PipelineError(f"{np.count_nonzero(wrong)} of {len(ids)} rows are not as they were written")
        return taken * 1e3


def run(quick: bool) -> Results:
    """With shared memory and without; about two and a half minutes."""
    return [_hammered(2.0 if quick else 60.0, shared_memory) for shared_memory in (True, False)]


def _hammered(seconds: float, shared_memory: bool) -> dict[str, Any]:
    outcome = Outcome()
    with ExitStack() as stack:
        logs = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="bagpipe-bench-")))
        servers = start_servers(NUM_SERVERS, logs=logs)
        stack.callback(servers.close)
        children = []
        for process in range(NUM_PROCESSES):
            children.append(child := _start(Job(servers.addresses, servers.run, process, seconds, shared_memory)))
            stack.callback(_end, child)
        for child in children:
            _heard(child)
        for child in children:
            assert child.stdin is not None
            child.stdin.write(b"\n")
            child.stdin.flush()
        memory = []
        for share in (EARLY, 1 - EARLY):
            time.sleep(seconds * share)
            memory.append(_resident_bytes(servers))
        for child in children:
            outcome.add(msgspec.json.decode(_heard(child), type=Outcome))
    return {
        "clients": NUM_CLIENTS,
        "servers": NUM_SERVERS,
        "shared_memory": shared_memory,
        "seconds": seconds,
        "errors": len(outcome.errors),
        "first_error": next(iter(outcome.errors), None),
        "requests_per_second": (len(outcome.read_ms) + len(outcome.write_ms)) / seconds,
        "rows_read_per_second": outcome.rows_read / seconds,
        "rows_written_per_second": outcome.rows_written / seconds,
        **_latencies("read", outcome.read_ms),
        **_latencies("write", outcome.write_ms),
        "server_memory_bytes_early": memory[0],
        "server_memory_bytes_end": memory[1],
        "server_memory_growth": memory[1] / memory[0] - 1,
    }


def _latencies(what: str, taken_ms: Sequence[float]) -> dict[str, float | None]:
    return {
        f"{what}_ms_{name}": float(np.percentile(taken_ms, share)) if taken_ms else None
        for name, share in _PERCENTILES.items()
    }


def _resident_bytes(servers: LocalServers) -> int:
    """Of all servers: their own memory, without what clients share with them."""
    total = 0
    for process in servers.pids:
        for line in Path(f"/proc/{process}/status").read_text(encoding="ascii", errors="replace").splitlines():
            total += int(line.split()[1]) * 1024 if line.startswith(("RssAnon:", "RssFile:")) else 0
    return total


def _start(job: Job) -> subprocess.Popen[bytes]:
    command = [sys.executable, "-m", "benchmarks.servers"]
    child = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE)  # noqa: S603 - this module
    assert child.stdin is not None
    child.stdin.write(msgspec.json.encode(job) + b"\n")
    child.stdin.flush()
    return child


def _heard(child: subprocess.Popen[bytes]) -> bytes:
    assert child.stdout is not None
    line = child.stdout.readline()
    if not line:
        raise PipelineError(f"a process of clients ended with {child.wait()}: see above")
    return line


def _end(child: subprocess.Popen[bytes]) -> None:
    child.kill()
    child.communicate()


def _run_clients() -> None:
    """What a process of clients does."""
    keep_freed_memory()
    job = msgspec.json.decode(sys.stdin.buffer.readline(), type=Job)
    network = SocketNetwork()
    first = job.process * CLIENTS_PER_PROCESS
    clients = [Client(job, number, network) for number in range(first, first + CLIENTS_PER_PROCESS)]
    sys.stdout.buffer.write(b"ready\n")
    sys.stdout.flush()
    sys.stdin.buffer.readline()
    until = time.monotonic() + job.seconds
    threads = [threading.Thread(target=client.hammer, args=(until,)) for client in clients]
    for thread in threads:
        thread.start()
    outcome = Outcome()
    for thread, client in zip(threads, clients, strict=True):
        thread.join()
        outcome.add(client.outcome)
        client.close()
    sys.stdout.buffer.write(msgspec.json.encode(outcome) + b"\n")
    sys.stdout.flush()


BENCHMARK = Benchmark("servers", "eight clients on two servers for a minute: latencies, rows a second, memory", run)

if __name__ == "__main__":
    _run_clients()
