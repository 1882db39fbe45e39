"""Embedding servers that are killed as by kill -9, and come back with the rows of a checkpoint."""

from __future__ import annotations

import os
import signal
from pathlib import Path
from typing import Literal

import numpy as np
import pytest

from bagpipe.checkpoint.directory import Checkpoints
from bagpipe.checkpoint.manifest import RunFacts, TableEntry
from bagpipe.checkpoint.point import ResumePoint
from bagpipe.errors import StoreError, WireError
from bagpipe.server.client import RemoteStore, marks_of_servers, recover_servers
from bagpipe.server.local import LocalServers
from bagpipe.server.process import ServerOptions
from bagpipe.wire.client import Patience
from bagpipe.wire.stream import SocketNetwork
from harness.server_process import TABLES, WIDTH, read, values

IDS = np.arange(2000)
FACTS = RunFacts(tables=(TableEntry(name="ad", rows=None, dims=(WIDTH,), width=WIDTH, optimizer="sgd"),))


class Run:
    """Two servers of one run, each of which can be killed and started again."""

    def __init__(self, path: Path, store: Literal["memory", "mapped"], rollback: bool) -> None:
        self.path, self.store, self.rollback = path, store, rollback
        self.servers = [LocalServers(bytes(16)) for _ in range(2)]
        self.network = SocketNetwork()
        for number in range(2):
            self.start(number)

    def start(self, number: int, generation: int = 0) -> None:
        options = ServerOptions(
            server=number,
            servers=2,
            run=bytes(16),
            store=self.store,
            directory=str(self.path / "rows" / f"server-{number}") if self.store == "mapped" else None,
            parent=os.getpid(),
            generation=generation,
            rollback=self.rollback,
            checkpoints=(str(self.path / "checkpoints"),),
        )
        self.servers[number] = LocalServers(bytes(16))
        self.servers[number].start(options, self.path / f"server-{number}.log")
        self.servers[number].wait_until_ready(120)

    def kill(self, number: int) -> None:
        os.kill(self.servers[number].pids[0], signal.SIGKILL)
        self.servers[number].close()

    @property
    def addresses(self) -> list[str]:
        return [servers.addresses[0] for servers in self.servers]

    def open(self, generation: int = 0) -> RemoteStore:
        patience = Patience(retry_s=1.0, deadline_s=30.0)
        return RemoteStore(
            TABLES, self.addresses, self.network, run=bytes(16), generation=generation, patience=patience
        )

    def close(self) -> None:
        for servers in self.servers:
            servers.close()

    def save(self, store: RemoteStore, checkpoints: Checkpoints, done: int) -> ResumePoint:
        token = f"{done:08x}"
        store.mark(done, token)
        with checkpoints.begin(done, token=token) as pending:
            pending.add(store.save(done, pending.directory, ["ad"], since=pending.base))
            point = ResumePoint.of(pending.commit(FACTS, store.confirm))
        assert point.checkpoint is not None
        store.saved(done, point.checkpoint)
        return point

    def recover(self, generation: int, point: ResumePoint) -> None:
        recover_servers(self.network, self.addresses, run=bytes(16), generation=generation, point=point)


@pytest.mark.parametrize("rollback", [True, False])
@pytest.mark.parametrize("store", ["memory", "mapped"])
def test_servers_that_were_killed_come_back_with_the_rows_of_a_checkpoint(tmp_path, store, rollback) -> None:
    run, checkpoints = Run(tmp_path, store, rollback), Checkpoints(tmp_path / "checkpoints")
    try:
        with run.open() as old:
            old.write(0, IDS, values(0, len(IDS)))
            first = run.save(old, checkpoints, 1)
            old.write(0, IDS[::2], values(1, len(IDS[::2])))
            second = run.save(old, checkpoints, 2)
            expected = read(old, IDS)
            old.write(0, IDS, values(2, len(IDS)))
            run.kill(1)
            run.start(1, generation=1)
            told = marks_of_servers(run.network, run.addresses, run=bytes(16), generation=1)
            assert [each.checkpoints for each in told] == [[str(second.checkpoint)], []]
            assert [each.marks for each in told] == [[2] if rollback else [], []]
            run.recover(1, second)
            with run.open(generation=1) as again:
                assert np.array_equal(read(again, IDS), expected)
                again.write(0, IDS, values(3, len(IDS)))
                with pytest.raises((WireError, StoreError)):  # server 0 knows the generation, server 1 is another one
                    old.write(0, IDS, values(4, len(IDS)))
                with pytest.raises((WireError, StoreError)):
                    old.confirm()
                assert np.array_equal(read(again, IDS), values(3, len(IDS)))
            for number in range(2):
                run.kill(number)
                run.start(number, generation=2)
            run.recover(2, first)
            with run.open(generation=2) as last:
                assert np.array_equal(read(last, IDS), values(0, len(IDS)))
    finally:
        run.close()
