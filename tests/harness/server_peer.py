"""A client that talks to a server without a network, with buffers or through shared memory."""

from __future__ import annotations

import os

import numpy as np
import pytest

from bagpipe.server.limits import ServerLimits
from bagpipe.server.server import EmbeddingServer
from bagpipe.wire.messages import Body, Failed, Open, Opened, Part, Read, Rows, Write
from bagpipe.wire.shared import OwnMemory, regions
from harness.calls import Connection

RUN = bytes(range(16))
WIDTHS = [3, 2]


class Clock:
    now = 100.0

    def __call__(self) -> float:
        return self.now


class Peer(Connection):
    """A client that says what it is told to, and keeps what it hears."""

    def __init__(self, server: EmbeddingServer, name: bytes = b"a", generation: int = 0, run: bytes = RUN) -> None:
        super().__init__(server.handle, run=run, generation=generation, name=name.decode())
        self.server = server

    def open(self, trainer: int = 0, trainers: int = 1, widths: list[int] | None = None) -> Opened:
        answer = self.ask(Open(trainer, trainers, widths or WIDTHS, "writes"))
        assert isinstance(answer, Opened), answer
        return answer

    def write(self, sequence: int, ids: list[int], value: float, passed: int = -1, trainer: int = 0) -> Body:
        rows = np.full((len(ids), 3), value, np.float32)
        return self.ask(Write(trainer, sequence, passed, [Part(0, len(ids))]), array(ids), rows)

    def read(self, ids: list[int]) -> dict[int, float]:
        """The rows that are there, which have one value in all columns."""
        body, (flags, rows) = self.begin(Read([Part(0, len(ids))]), array(ids)).answer()
        there = [key for key, flag in zip(ids, flags, strict=True) if flag]
        values = np.frombuffer(rows, np.float32).reshape(-1, 3)
        assert body == Rows(len(there))
        assert (values == values[:, :1]).all()
        return dict(zip(there, values[:, 0].tolist(), strict=True))


class Sharing(Peer):
    """A client whose ids and rows lie in memory that it shares with the server."""

    def __init__(self, server: EmbeddingServer, name: bytes = b"s", size: int = 1 << 16, trainers: int = 1) -> None:
        super().__init__(server, name)
        self.own = OwnMemory(size)
        self.descriptor = os.dup(self.own.descriptor)
        opened = self.ask(Open(0, trainers, WIDTHS, "writes", size))
        assert isinstance(opened, Opened)
        assert opened.shared

    def lay(self, ids: list[int], values: np.ndarray) -> None:
        layout = regions(len(ids), len(ids) * 3)
        self.own.memory[layout.ids] = array(ids).data.cast("B")
        self.own.memory[layout.rows] = values.data.cast("B")


def array(ids: list[int]) -> np.ndarray:
    return np.array(ids, np.int64)


@pytest.fixture(name="server")
def fixture_server():
    made = EmbeddingServer(server=1, servers=3)
    yield made
    made.close()


@pytest.fixture(name="peer")
def fixture_peer(server: EmbeddingServer) -> Peer:
    made = Peer(server)
    made.open()
    return made


def two_trainers(**limits: float) -> tuple[EmbeddingServer, Clock, Peer, Peer]:
    clock = Clock()
    server = EmbeddingServer(limits=ServerLimits(**limits), clock=clock)  # type: ignore[arg-type]
    peers = [Peer(server, bytes([k])) for k in range(2)]
    for trainer, peer in enumerate(peers):
        peer.open(trainer, 2)
    return server, clock, peers[0], peers[1]


def refused(answer: Body, error: str = "StoreError") -> str:
    assert isinstance(answer, Failed), answer
    assert answer.error == error, answer
    return answer.message
