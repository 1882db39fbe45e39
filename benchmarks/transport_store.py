"""Rows through the store of a trainer from a server of its own, for `bagpipe bench transport`.

It is a process of its own, so that the package of another checkout can do the same in turn. One from before the wire
was stream sockets takes TCP where this one takes a Unix socket.
"""

from __future__ import annotations

import importlib
import os
import sys
import time
from collections.abc import Callable
from contextlib import ExitStack
from typing import Any, NamedTuple

import msgspec
import numpy as np

from bagpipe.allocator import keep_freed_memory
from bagpipe.errors import PipelineError
from bagpipe.server.process import Ready, ServerOptions
from bagpipe.server.storage import Width
from bagpipe.wire.keys import VARIABLE, Security, new_keys
from benchmarks.children import answer, child, heard, say
from benchmarks.overlap_server import ServerJob


class Way(NamedTuple):
    """How rows travel."""

    with_keys: bool = False
    local: bool = False
    shared_memory: bool = False


WAYS = {
    "tcp": Way(),
    "tls": Way(with_keys=True),
    "unix": Way(local=True),
    "shared memory": Way(local=True, shared_memory=True),
}
WRITTEN_AT_ONCE = 20_000


class StoreRole:
    """Stores of all ways, whose servers hold the same rows; the first number of a row is its id."""

    def __init__(self) -> None:
        self._stack = ExitStack()
        self._stores: dict[str, Any] = {}
        self._servers: dict[bool, int] = {}
        self._rng = np.random.default_rng(0)

    def open(self, table_rows: int, width: int) -> str:
        """Start the servers, and write all rows; where the package lies that does it."""
        import bagpipe

        keep_freed_memory()  # as servers and trainers do
        server_keys, client_keys = new_keys()
        addresses = {keyed: self._start(keyed, server_keys.text()) for keyed in (False, True)}
        for name, way in WAYS.items():
            store = _open_store(addresses[way.with_keys], client_keys if way.with_keys else None, way, width)
            self._stores[name] = self._stack.enter_context(store)
        for name in ("tcp", "tls"):
            for first in range(0, table_rows, WRITTEN_AT_ONCE):
                ids = np.arange(first, min(first + WRITTEN_AT_ONCE, table_rows))
                self._stores[name].write(0, ids, np.repeat(ids.astype(np.float32), width).reshape(-1, width))
        self._shape = table_rows, width
        return bagpipe.__file__

    def turn(self, way: str, num_rows: int, times: int) -> dict[str, float]:
        """Read so many rows so many times; milliseconds of a read, and of the processors in both processes."""
        table_rows, width = self._shape
        store, out = self._stores[way], np.empty((num_rows, width), np.float32)
        asked = [self._rng.integers(0, table_rows, num_rows) for _ in range(times)]
        seconds = []
        used = processor_s(self._servers[WAYS[way].with_keys])
        for ids in asked:
            start = time.perf_counter()
            store.read(0, ids, out)
            seconds.append(time.perf_counter() - start)
        used = processor_s(self._servers[WAYS[way].with_keys]) - used
        if not np.array_equal(out, np.repeat(asked[-1].astype(np.float32), width).reshape(-1, width)):
            raise PipelineError(f"{way} brought other rows than were asked for: a defect, please report it")
        return {"wall_ms": 1e3 * float(np.median(seconds)), "processor_ms": 1e3 * used / times}

    def close(self) -> None:
        """End the servers."""
        self._stack.close()

    def _start(self, keyed: bool, keys: str) -> str:
        command = [sys.executable, "-m", "benchmarks.overlap_server"]
        process = self._stack.enter_context(child(command, {VARIABLE: keys}))
        say(process, ServerJob(ServerOptions(parent=os.getpid()), keyed))
        ready = msgspec.json.decode(heard(process), type=Ready)
        self._servers[keyed] = ready.pid
        return ready.address


def processor_s(process: int) -> float:
    """What this process and another one have used so far."""
    return time.process_time() + time.clock_gettime(~process << 3 | 2)  # what clock_getcpuclockid(3) gives


def _open_store(address: str, security: Security, way: Way, width: int) -> Any:
    store: Callable[..., Any]
    network: Any
    try:
        store = importlib.import_module("bagpipe.server.client").RemoteStore
        network = importlib.import_module("bagpipe.wire.stream").SocketNetwork(security, local=way.local)
    except ImportError:  # a checkout from before there were
        store = importlib.import_module("bagpipe.store.remote").RemoteStore
        network = importlib.import_module("bagpipe.wire.sockets").SocketNetwork(security)
    return store([Width(width)], [address], network, run=bytes(16), shared_memory=way.shared_memory)


if __name__ == "__main__":
    answer(StoreRole())
