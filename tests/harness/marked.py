"""Embedding servers that can be returned to marks, on a simulated network, with what outlives them on disks."""

from __future__ import annotations

import numpy as np
import pytest
from bagpipe.server.shard import Recording

from bagpipe.checkpoint.directory import Checkpoints
from bagpipe.checkpoint.manifest import Facts, TableEntry
from bagpipe.server.core import EmbeddingServer
from bagpipe.store.links import Patience
from bagpipe.store.remote import RemoteStore
from benchmarks.simulated import SimulatedNetwork
from harness.remote_world import RUN, Rows

WIDTHS = {"ad": 3, "user": 2}
NAMES = list(WIDTHS)
FACTS = Facts(
    tables=tuple(
        TableEntry(name=name, rows=None, dims=(width,), width=width, optimizer="sgd") for name, width in WIDTHS.items()
    )
)
PATIENT = Patience(retry_s=0.5, deadline_s=10_000.0)


TABLES = tuple(map(Rows, WIDTHS.values()))


def at_once(work):
    """What takes long is done before anything else goes on, so that a test is a function of its seed."""
    work()


class Marking:
    """So many servers and the directories of their run; a server that is killed leaves its journal, no more."""

    def __init__(self, path, servers=2, seed=0, disks=None, disk=None, journal=True, **network):
        """Each server has a disk of its own in `disks`, or else shares `disk` with those who write checkpoints."""
        self.path, self.journal = path, journal
        self.disks = disks or ({} if disk is None else dict.fromkeys(range(servers), disk))
        self.checkpoints = Checkpoints(self.directory, full_every=3, keep=2, disk=disk)
        self.network = SimulatedNetwork(seed, **network)
        self.servers, self.listeners, self.stores = [], [], []
        self.generation = 0
        for number in range(servers):
            self.servers.append(None)
            self.listeners.append(None)
            self.start(number, servers)

    @property
    def addresses(self):
        return [f"server-{number}" for number in range(len(self.servers))]

    @property
    def directory(self):
        return self.path / "checkpoints"

    def recording(self, number, **options):
        if number in self.disks:
            options["disk"] = self.disks[number]
        journal = self.path / "journal" / f"server-{number}" if self.journal else None
        return Recording(journal, checkpoints=(self.directory, self.path), **options)

    def start(self, number, servers=None, generation=0):
        server = EmbeddingServer(
            server=number,
            servers=servers or len(self.servers),
            run=RUN,
            generation=generation,
            recording=self.recording(number),
            clock=self.network.now,
            background=at_once,
        )
        self.servers[number] = server
        self.listeners[number] = self.network.listen(f"server-{number}", server.handle)

    def kill(self, number):
        """It answers nobody any more, and its memory is gone."""
        self.listeners[number].close()
        if (journal := self.servers[number]._shard._journal) is not None:
            journal._claim.close()  # as the system does for a process that ends
        self.servers[number] = None

    def store(self, **options):
        options.setdefault("patience", PATIENT)
        options.setdefault("shared_memory", False)
        made = RemoteStore(TABLES, self.addresses, self.network, run=RUN, **options)
        self.stores.append(made)
        return made

    def recover(self, done, checkpoint=None):
        self.generation += 1
        for server in self.servers:
            server.recover(self.generation, done, checkpoint)

    def save(self, store, done):
        """A complete checkpoint of a mark."""
        with self.checkpoints.begin(done) as pending:
            pending.add(store.save(done, pending.directory, NAMES, since=pending.base))
            for name, blob in store.kept(done).items():
                pending.write_blob(name, blob)
            pending.commit(FACTS)
        store.settle(done)

    def rows(self):
        """Every row that was ever written, by table and id, with its bytes."""
        found = [{}, {}]
        for server in self.servers:
            recorded = server._shard.rows.store
            for table in range(len(TABLES)):
                for ids, values in recorded.iterate(table):
                    part = {key: row.tobytes() for key, row in zip(ids.tolist(), values, strict=True)}
                    assert not part.keys() & found[table].keys()
                    found[table] |= part
        return found

    def close(self):
        for store in self.stores:
            store.close()
        self.network.close()
        for server in self.servers:
            if server is not None:
                server.close()


@pytest.fixture(name="worlds")
def fixture_worlds(tmp_path):
    made = []

    def make(*arguments, **options):
        made.append(Marking(tmp_path / f"run-{len(made)}", *arguments, **options))
        return made[-1]

    yield make
    for world in made:
        world.close()


def rows(*numbers):
    return np.array(numbers, np.int64)


def full(number, num_rows, table=0):
    return np.full((num_rows, TABLES[table].width), number, np.float32)


def some_rows(rng, num_ids=40):
    """A write of both tables, or of one, or of nothing."""
    parts = []
    for table, source in enumerate(TABLES):
        ids = np.flatnonzero(rng.random(num_ids) < rng.choice([0.0, 0.2, 0.6])) * 7919 - 50_000
        if len(ids):
            parts.append((table, ids, rng.standard_normal((len(ids), source.width), np.float32)))
    return parts


def read(store, ids, table=0, after=-1):
    out = np.full((len(ids), TABLES[table].width), np.nan, np.float32)
    store.read_many([(table, np.asarray(ids, np.int64), out)], after)
    return out
