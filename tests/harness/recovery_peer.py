"""A client that orders marks and checkpoints of a server without a network, and servers that take the place of dead
ones."""

from __future__ import annotations

from pathlib import Path

import msgspec
import numpy as np
import pytest

from bagpipe.checkpoint.directory import Checkpoints
from bagpipe.checkpoint.manifest import FileEntry, RunFacts, TableEntry
from bagpipe.checkpoint.point import ResumePoint
from bagpipe.server.core import EmbeddingServer
from bagpipe.server.rows_state import Safety
from bagpipe.wire.messages import Message, Open, Opened, Part, Read, Rows, Write, Written
from bagpipe.wire.recovery_messages import AskWork, Mark, Save, Saved, Worked
from harness.server_peer import RUN

NAMES = ["ad"]
FACTS = RunFacts(tables=(TableEntry(name="ad", rows=None, dims=(1,), width=1, optimizer="sgd"),))


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

    def written_files(self, number):
        """What came of a `Save` of this number."""
        self.send(AskWork(number))
        message = self.heard.pop()
        assert message.body == Worked(), message.body
        return msgspec.json.decode(message.buffers[0], type=list[FileEntry])

    def save(self, checkpoints: Checkpoints, done: int, token: str = "") -> ResumePoint:
        """A complete checkpoint of the rows as they are now; its server does at once what takes long."""
        assert self.order(Mark, done, token) == Written(self.sequence)
        with checkpoints.begin(done, token=token) as pending:
            assert self.order(Save, done, str(pending.directory), NAMES, pending.base) == Written(self.sequence)
            pending.add(self.written_files(self.sequence))
            point = ResumePoint.of(pending.commit(FACTS))
        assert self.order(Saved, done, str(point.checkpoint)) == Written(self.sequence)
        return point


def made(**options):
    options.setdefault("background", lambda work: work())
    return EmbeddingServer(run=RUN, **options)


@pytest.fixture(name="server")
def fixture_server(tmp_path: Path):
    one = made(safety=Safety(checkpoints=(tmp_path,)))
    yield one
    one.close()


def remove_rows_of(point: ResumePoint) -> None:
    """Whoever reads this checkpoint from now on fails; its manifest is still there."""
    assert point.checkpoint is not None
    (only,) = point.checkpoint.glob("rows-*")
    only.unlink()
