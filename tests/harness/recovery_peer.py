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
from bagpipe.server.rows_state import Safety
from bagpipe.server.server import EmbeddingServer
from bagpipe.wire.messages import Open, Opened, Part, Read, Rows, Write, Written
from bagpipe.wire.recovery_messages import Mark, Save, Saved, Worked
from harness.calls import Call, Connection
from harness.server_peer import RUN

NAMES = ["ad"]
FACTS = RunFacts(tables=(TableEntry(name="ad", rows=None, dims=(1,), width=1, optimizer="sgd"),))


class Peer(Connection):
    """A client of one table with rows of one number, which numbers what it sends by itself."""

    def __init__(self, server, name=b"a", generation=0, trainer=0, trainers=1, opens=True):
        super().__init__(server.handle, run=RUN, generation=generation, name=name.decode())
        self.server, self.trainer = server, trainer
        if not opens:
            return
        opened = self.ask(Open(trainer, trainers, [1], "writes"))
        self.sequence = opened.sequence if isinstance(opened, Opened) else 0
        self.opened = opened

    def order(self, kind, *fields):
        self.sequence += 1
        return self.ask(kind(self.trainer, self.sequence, *fields))

    def write(self, ids, value, passed=-1):
        self.sequence += 1
        rows = np.full(len(ids), value, np.float32)
        return self.ask(Write(self.trainer, self.sequence, passed, [Part(0, len(ids))]), np.array(ids, np.int64), rows)

    def begin_order(self, kind, *fields):
        """What takes long: answered when it is done."""
        self.sequence += 1
        return self.begin(kind(self.trainer, self.sequence, *fields))

    def read(self, *ids):
        body, buffers = self.begin(Read([Part(0, len(ids))]), np.array(ids, np.int64)).answer()
        assert isinstance(body, Rows), body
        flags = np.frombuffer(buffers[0], np.bool_)
        there = np.array(ids)[flags].tolist()
        return dict(zip(there, np.frombuffer(buffers[1], np.float32).tolist(), strict=True))

    def save(self, checkpoints: Checkpoints, done: int, token: str = "") -> ResumePoint:
        """A complete checkpoint of the rows as they are now."""
        assert self.order(Mark, done, token) == Written(self.sequence)
        with checkpoints.begin(done, token=token) as pending:
            pending.add(files_of(self.begin_order(Save, done, str(pending.directory), NAMES, pending.base)))
            point = ResumePoint.of(pending.commit(FACTS))
        assert self.order(Saved, done, str(point.checkpoint)) == Worked()
        return point


def files_of(save: Call) -> list[FileEntry]:
    """What came of a `Save`."""
    body, buffers = save.answer()
    assert body == Worked(), body
    return msgspec.json.decode(buffers[0], type=list[FileEntry])


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
