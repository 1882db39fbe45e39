"""A client that orders marks and returns of a server without a network, and servers that vanish and come back."""

from __future__ import annotations

import zlib
from pathlib import Path

import numpy as np
import pytest
from bagpipe.server.shard import Recording

from bagpipe.server.core import EmbeddingServer
from bagpipe.wire.messages import Message, Open, Opened, Part, Read, Rows, Write
from bagpipe.wire.recovery_messages import Keep
from harness.server_peer import RUN


class Peer:
    """A client of one table with rows of one number, which numbers what it sends by itself."""

    def __init__(self, server, name=b"a", generation=0, trainer=0, trainers=1, opens=True):
        self.server, self.name, self.generation, self.trainer = server, name, generation, trainer
        self.heard, self.request = [], 0
        if not opens:
            return
        opened = self.ask(Open(trainer, trainers, [1]))
        self.sequence = opened.sequence if isinstance(opened, Opened) else 0
        self.opened = opened

    def send(self, body, *buffers):
        self.request += 1
        views = [memoryview(buffer).cast("B") for buffer in buffers]
        self.server.handle(self.name, Message(RUN, self.generation, self.request, body, views), self.heard.append)

    def ask(self, body, *buffers):
        self.send(body, *buffers)
        return self.heard.pop().body

    def ask_for_buffers(self, body):
        self.send(body)
        return self.heard.pop().buffers

    def order(self, kind, *fields):
        self.sequence += 1
        return self.ask(kind(self.trainer, self.sequence, *fields))

    def write(self, ids, value, passed=-1):
        self.sequence += 1
        rows = np.full(len(ids), value, np.float32)
        return self.ask(Write(self.trainer, self.sequence, passed, [Part(0, len(ids))]), np.array(ids, np.int64), rows)

    def read(self, *ids):
        self.send(Read([Part(0, len(ids))]), np.array(ids, np.int64))
        message = self.heard.pop()
        assert isinstance(message.body, Rows), message.body
        flags = np.frombuffer(message.buffers[0], np.bool_)
        there = np.array(ids)[flags].tolist()
        return dict(zip(there, np.frombuffer(message.buffers[1], np.float32).tolist(), strict=True))

    def keep(self, done, name, blob, *, offset=0, part=None, num_bytes=None, crc32=None):
        body = Keep(
            done, name, len(blob) if num_bytes is None else num_bytes, zlib.crc32(blob) if crc32 is None else crc32,
            offset,
        )  # fmt: skip
        return self.ask(body, blob[offset:] if part is None else part)


def made(**options):
    options.setdefault("background", lambda work: work())
    return EmbeddingServer(run=RUN, **options)


@pytest.fixture(name="server")
def fixture_server():
    one = made()
    yield one
    one.close()


def recording(path: Path) -> Recording:
    return Recording(path / "journal", checkpoints=(path,))


def vanish(server: EmbeddingServer) -> None:
    """As the system does for a process that ends: nothing more is written, and what was locked is free."""
    server._shard._journal._claim.close()
