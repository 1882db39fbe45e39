"""Embedding servers that are killed as by kill -9, and come back from a checkpoint and their journal."""

from __future__ import annotations

import os
import signal
from pathlib import Path

import numpy as np
import pytest

from bagpipe.checkpoint.directory import Checkpoints
from bagpipe.checkpoint.manifest import Facts, TableEntry
from bagpipe.errors import StoreError, WireError
from bagpipe.server.local import LocalServers
from bagpipe.server.process import ServerOptions
from bagpipe.store.links import Patience
from bagpipe.store.recovering import marks_of_servers, recover_servers
from bagpipe.store.remote import RemoteStore
from bagpipe.wire.sockets import SocketNetwork
from harness.server_process import TABLES, WIDTH, read, values

IDS = np.arange(2000)
FACTS = Facts(tables=(TableEntry(name="ad", rows=None, dims=(WIDTH,), width=WIDTH, optimizer="sgd"),))


class Run:
    """Two servers of one run, each of which can be killed and started again."""

    def __init__(self, path: Path, store: str) -> None:
        self.path, self.store = path, store
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
            journal=str(self.path / "journal" / f"server-{number}"),
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
        self.network.close()
        for servers in self.servers:
            servers.close()


@pytest.mark.parametrize("store", ["memory", "mapped"])
def test_a_server_that_was_killed_comes_back_as_it_was_at_its_last_mark(tmp_path: Path, store: str) -> None:
    run = Run(tmp_path, store)
    try:
        with run.open() as old:
            old.write(0, IDS, values(0, len(IDS)))
            old.keep(1, "trainer-0", b"state" * 1_000_000)
            old.mark(1)
            with Checkpoints(tmp_path / "checkpoints").begin(1) as pending:
                pending.add(old.save(1, pending.directory, ["ad"]))
                pending.commit(FACTS)
            old.settle(1)
            old.write(0, IDS[::2], values(1, len(IDS[::2])))
            old.keep(2, "trainer-0", b"later state")
            old.mark(2)
            expected = read(old, IDS)
            old.write(0, IDS, values(2, len(IDS)))
            run.kill(1)
            run.start(1, generation=1)
            assert marks_of_servers(run.network, run.addresses, run=bytes(16), generation=1) == [[1, 2], [1, 2]]
            recover_servers(run.network, run.addresses, run=bytes(16), generation=1, done=2)
            with run.open(generation=1) as store_again:
                assert np.array_equal(read(store_again, IDS), expected)
                assert store_again.kept(2) == {"trainer-0": b"later state"}
                store_again.write(0, IDS, values(3, len(IDS)))
                with pytest.raises((WireError, StoreError)):  # server 0 knows the generation, server 1 is another one
                    old.write(0, IDS, values(4, len(IDS)))
                assert np.array_equal(read(store_again, IDS), values(3, len(IDS)))
            run.kill(0)
            run.kill(1)
            run.start(0, generation=2)
            run.start(1, generation=2)
            place = tmp_path / "checkpoints"
            recover_servers(run.network, run.addresses, run=bytes(16), generation=2, done=1, checkpoints=place)
            with run.open(generation=2) as first:
                assert np.array_equal(read(first, IDS), values(0, len(IDS)))
                assert first.kept(1) == {"trainer-0": b"state" * 1_000_000}
    finally:
        run.close()
