"""Embedding servers with marks on a simulated network, and the checkpoints that outlive them."""

from __future__ import annotations

import itertools

import numpy as np
import pytest

from bagpipe.checkpoint.directory import Checkpoints, complete_points
from bagpipe.checkpoint.manifest import RunFacts, TableEntry
from bagpipe.checkpoint.point import START, ResumePoint
from bagpipe.server.client import RemoteStore
from bagpipe.server.rows_state import Safety
from bagpipe.server.server import EmbeddingServer
from bagpipe.wire.client import Patience
from benchmarks.simulated import SimulatedNetwork
from harness.calls import overheard
from harness.remote_world import RUN, Rows

WIDTHS = {"ad": 3, "user": 2}
NAMES = list(WIDTHS)
FACTS = RunFacts(
    tables=tuple(
        TableEntry(name=name, rows=None, dims=(width,), width=width, optimizer="sgd") for name, width in WIDTHS.items()
    )
)
PATIENT = Patience(retry_s=0.5, deadline_s=10_000.0, work_s=10_000.0)


TABLES = tuple(map(Rows, WIDTHS.values()))


def at_once(work):
    """What takes long is done before anything else goes on, so that a test is a function of its seed."""
    work()


class Marking:
    """So many servers and the checkpoints of their run, which are all that is left of a server that is killed."""

    def __init__(self, path, servers=2, seed=0, disk=None, safety=(), **network):
        """Checkpoints are on `disk`; `safety` has options of how rows are made safe."""
        self.path, self.directory = path, path / "checkpoints"
        options = {"checkpoints": (path,), **dict(safety)} | ({} if disk is None else {"disk": disk})
        self.safety = Safety(**options)
        self.checkpoints = Checkpoints(self.directory, keep=2, disk=disk)
        self.network = SimulatedNetwork(seed, **network)
        self.servers, self.listeners, self.stores = [None] * servers, [None] * servers, []
        self.generation, self.tokens = 0, itertools.count(1)
        for number in range(servers):
            self.start(number)

    @property
    def addresses(self):
        return [f"server-{number}" for number in range(len(self.servers))]

    def start(self, number):
        server = EmbeddingServer(
            server=number,
            servers=len(self.servers),
            run=RUN,
            generation=self.generation,
            safety=self.safety,
            clock=self.network.now,
            waits=self.network.waits,
            background=at_once,
        )
        self.servers[number] = server
        self.listeners[number] = self.network.listen(f"server-{number}", server.handle)

    def kill(self, number):
        """It answers nobody any more, and its memory is gone."""
        self.listeners[number].close()
        self.servers[number] = None

    def replace(self, number, handler):
        """Something else listens where the server did; it is given what the server would be."""
        handle = self.servers[number].handle
        self.listeners[number].close()
        self.listeners[number] = self.network.listen(
            f"server-{number}", lambda peer, message: handler(handle, peer, message)
        )

    def overhear(self, number, change):
        """What the server says passes through `change(message, body, buffers)`."""
        heard = overheard(self.servers[number].handle, change)
        self.replace(number, lambda _, peer, message: heard(peer, message))

    def store(self, **options):
        options.setdefault("patience", PATIENT)
        options.setdefault("shared_memory", False)
        made = RemoteStore(TABLES, self.addresses, self.network, run=RUN, **options)
        self.stores.append(made)
        return made

    def recover(self, point=START):
        self.generation += 1
        for server in self.servers:
            server.recover(self.generation, point)

    def points(self):
        """What a run can continue from, as whoever looks after it finds out."""
        told = {path for server in self.servers for path in server.checkpoints()}
        return complete_points(told, self.directory, self.checkpoints.disk)

    def save(self, store, done, tell=True):
        """A complete checkpoint of the rows as they are; `tell`: servers come to know of it."""
        token = f"{next(self.tokens):016x}"
        store.mark(done, token)
        with self.checkpoints.begin(done, token=token) as pending:
            pending.add(store.save(done, pending.directory, NAMES, since=pending.base))
            pending.write_blob("trainer-0", b"%d" % done)
            point = ResumePoint.of(pending.commit(FACTS, store.confirm))
        if tell:
            store.saved(done, point.checkpoint)
            self.checkpoints.tidy()
        return point

    def rows(self):
        """Every row that was ever written, by table and id, with its bytes."""
        found = [{}, {}]
        for server in self.servers:
            held = server._held.rows.store
            for table in range(len(TABLES)):
                for ids, values in held.iterate(table):
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
