"""Small checkpoints for tests: rows that change from one to the next, and what loading them gives."""

from __future__ import annotations

from pathlib import Path

import numpy as np

from bagpipe.checkpoint.directory import Checkpoints
from bagpipe.checkpoint.manifest import RunFacts, TableEntry
from bagpipe.checkpoint.point import load_rows
from bagpipe.checkpoint.rows import write_rows
from bagpipe.checkpoint.tree import tree_parts
from bagpipe.server.storage import Width
from bagpipe.store.local import MemoryStore
from definitions.shards import define_servers

WIDTHS = {"user": 5, "wörd": 3}
TABLES = (
    TableEntry(name="user", rows=1000, dims=(4,), width=5, optimizer="rowwise_adagrad"),
    TableEntry(name="wörd", rows=None, dims=(2, 1), width=3, optimizer="sgd"),
)
FACTS = RunFacts(tables=TABLES, config={"seed": 3})
DIRECTORY = Path("/checkpoints")


class World:
    """Rows that every iteration changes some of; also the snapshot of them."""

    def __init__(self, rows=30):
        self.rows = [{}, {}]
        self.written = [{}, {}]
        """When each row was written last."""
        self.random = np.random.default_rng(0)
        self.ids = [np.arange(rows), self.random.integers(-(2**62), 2**62, rows)]
        self.done = 0

    def train(self, done, share=0.3):
        """Go on to iteration `done`."""
        self.done = done
        for table, width in enumerate(WIDTHS.values()):
            for key in self.ids[table][self.random.random(len(self.ids[table])) < share].tolist():
                self.rows[table][key] = self.random.random(width, np.float32).tobytes()
                self.written[table][key] = done

    def state(self):
        """What must come back."""
        return [dict(rows) for rows in self.rows]

    def shard(self, server, servers, since=None):
        """A snapshot of the rows of one server, all or those written since."""
        return _Snapshot(self, server, servers, since)


class _Snapshot:
    def __init__(self, world, server, servers, since):
        self.world, self.server, self.servers, self.since = world, server, servers, since

    def iterate(self, table, rows_per_chunk):
        written, since = self.world.written[table], self.since
        ids = np.array([key for key in written if since is None or written[key] > since], np.int64)
        ids = ids[define_servers(table, ids, self.servers) == self.server]
        width = list(WIDTHS.values())[table]
        values = np.array([np.frombuffer(self.world.rows[table][key], np.float32) for key in ids.tolist()], np.float32)
        values = values.reshape(-1, width)
        for start in range(0, len(ids), rows_per_chunk):
            yield ids[start : start + rows_per_chunk], values[start : start + rows_per_chunk]


def pack_tree(tree):
    """The bytes of a tree, as a file has them."""
    return b"".join(tree_parts(tree))


def save(checkpoints, world, servers=1, facts=FACTS, full=False, **options):
    """One checkpoint of the world as it is; then those go that are not kept."""
    with checkpoints.begin(world.done, full=full, **options) as pending:
        for server in range(servers):
            entries = write_rows(
                checkpoints.disk,
                pending.directory,
                world.shard(server, servers, pending.base),
                list(WIDTHS.items()),
                part=str(server),
                shard=(server, servers),
            )
            pending.add(entries)
        pending.write_blob("trainer-0", b"blob of %d" % world.done)
        checkpoint = pending.commit(facts)
    checkpoints.tidy()
    return checkpoint


def load(checkpoint, servers=1):
    """The rows in a checkpoint, as so many servers would hold them together."""
    found = [{}, {}]
    for server in range(servers):
        store = MemoryStore([Width(width) for width in WIDTHS.values()])
        load_rows(checkpoint, store, list(WIDTHS), shard=(server, servers))
        for table in range(len(WIDTHS)):
            for ids, values in store.iterate(table):
                part = {key: row.tobytes() for key, row in zip(ids.tolist(), values, strict=True)}
                assert not part.keys() & found[table].keys()
                found[table] |= part
        store.close()
    return found


def by_rows(checkpoint, servers=1):
    """The same by `Checkpoint.rows`."""
    found = [{}, {}]
    for table, name in enumerate(WIDTHS):
        for server in range(servers):
            for ids, values in checkpoint.rows(name, (server, servers)):
                for key, row in zip(ids.tolist(), values, strict=True):
                    assert key not in found[table]
                    found[table][key] = row.tobytes()
    return found


def opened(directory=DIRECTORY, **options):
    """Checkpoints in a directory."""
    return Checkpoints(directory, **options)
