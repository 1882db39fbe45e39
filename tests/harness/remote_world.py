"""Embedding servers on a simulated network and the stores of their clients, and rows to write and read there."""

from __future__ import annotations

from collections.abc import Callable, Iterator

import numpy as np
import pytest

from bagpipe.server.client import RemoteStore
from bagpipe.server.limits import ServerLimits
from bagpipe.server.rows_state import Safety
from bagpipe.server.server import EmbeddingServer
from bagpipe.server.work import in_a_thread
from bagpipe.wire.client import Patience
from benchmarks.simulated import SimulatedNetwork
from harness.calls import overheard

RUN = bytes(16)
FAST = Patience(retry_s=0.5, deadline_s=20.0, work_s=30.0)
TROUBLE = {"delay": (0.0, 0.3), "breaks": 0.15}


class Rows:
    """Rows that begin as their id."""

    def __init__(self, width: int) -> None:
        self.width = width

    def initialise(self, ids: np.ndarray, out: np.ndarray) -> None:
        out[:] = (ids % 1000).astype(np.float32)[:, None]


TABLES = (Rows(4), Rows(7))


class World:
    """Servers on a simulated network, and the stores of their clients."""

    def __init__(
        self,
        num_servers: int = 2,
        limits: ServerLimits | None = None,
        seed: int = 0,
        storages=(),
        safety: Safety | None = None,
        background=in_a_thread,
        **network,
    ) -> None:
        self.network = SimulatedNetwork(seed, **network)
        self.servers = [
            EmbeddingServer(
                dict(storages).get(k),
                server=k,
                servers=num_servers,
                limits=limits,
                safety=safety,
                background=background,
                clock=self.network.now,
                waits=self.network.waits,
            )
            for k in range(num_servers)
        ]
        self.addresses = [f"server-{k}" for k in range(num_servers)]
        self.listeners = [
            self.network.listen(address, server.handle)
            for address, server in zip(self.addresses, self.servers, strict=True)
        ]
        self.stores: list[RemoteStore] = []

    def store(self, tables=TABLES, **options) -> RemoteStore:
        options.setdefault("patience", FAST)
        options.setdefault("shared_memory", False)
        made = RemoteStore(tables, self.addresses, self.network, run=RUN, **options)
        self.stores.append(made)
        return made

    def replace(self, server: int, handler) -> None:
        """Something else listens where the server did."""
        self.listeners[server].close()
        self.listeners[server] = self.network.listen(self.addresses[server], handler)

    def overhear(self, server: int, change) -> None:
        """What the server says passes through `change(message, body, buffers)`."""
        self.replace(server, overheard(self.servers[server].handle, change))

    def close(self) -> None:
        for store in self.stores:
            store.close()
        self.network.close()
        for server in self.servers:
            server.close()


@pytest.fixture(name="worlds")
def fixture_worlds() -> Iterator[Callable[..., World]]:
    made: list[World] = []

    def make(*arguments, **options) -> World:
        made.append(World(*arguments, **options))
        return made[-1]

    yield make
    for world in made:
        world.close()


def ids(*numbers: int) -> np.ndarray:
    return np.array(numbers, np.int64)


def values(seed: int, num_rows: int, table: int = 0) -> np.ndarray:
    return np.random.default_rng(seed).standard_normal((num_rows, TABLES[table].width), np.float32)


def read(store, some: np.ndarray, table: int = 0, after: int = -1, columns: int | None = None) -> np.ndarray:
    out = np.full((len(some), columns or TABLES[table].width), np.nan, np.float32)
    store.read_many([(table, some, out)], after)
    return out
