"""What every store with marks promises (`bagpipe.store.base.Marked`): checkpoints of rows as they were, and the way
back to each of them, also into a store of another kind."""

from __future__ import annotations

import random
from contextlib import contextmanager

import numpy as np
import pytest

from bagpipe.checkpoint.directory import Checkpoints
from bagpipe.checkpoint.point import ResumePoint
from bagpipe.errors import CheckpointError, StoreError
from bagpipe.store import MappedStore, MemoryStore
from bagpipe.store.versioned import VersionedStore
from harness.marked import FACTS, NAMES, TABLES, Marking


@contextmanager
def over_servers(path, **options):
    world = Marking(path, 3, safety={"checkpoints": (path.parent,)} | options)
    yield world.store()
    world.close()


STORES = {
    "memory": lambda path: VersionedStore(MemoryStore(TABLES)),
    "mapped": lambda path: VersionedStore(MappedStore(TABLES, path / "rows")),
    "no way back": lambda path: VersionedStore(MemoryStore(TABLES), rollback=False),
    "little memory": lambda path: VersionedStore(MemoryStore(TABLES), layer_bytes_max=500),
    "servers": over_servers,
    "servers, no way back": lambda path: over_servers(path, rollback=False),
}


@pytest.fixture(params=STORES)
def store(request, tmp_path):
    with STORES[request.param](tmp_path / "store") as made:
        yield made


class Rows:
    """Rows that are written, and what they must be."""

    def __init__(self, seed):
        self.now = [{}, {}]
        self.chance = random.Random(seed)
        self.value = 0.0

    def write(self, *stores):
        parts = []
        for table, source in enumerate(TABLES):
            ids = self.chance.sample(range(-20, 20), self.chance.randrange(0, 8))
            values = np.empty((len(ids), source.width), np.float32)
            for key, row in zip(ids, values, strict=True):
                self.value += 1
                row[:] = self.now[table][key] = self.value
            parts.append((table, np.array(ids, np.int64), values))
        for store in stores:
            store.write_many(parts)

    def copy(self):
        return [dict(rows) for rows in self.now]


def contents(store):
    found = []
    for table in range(len(TABLES)):
        chunks = list(store.iterate(table))
        assert all((values == values[:, :1]).all() for _, values in chunks)
        found.append({key: row[0] for ids, values in chunks for key, row in zip(ids.tolist(), values, strict=True)})
    return found


class Saving:
    """Complete checkpoints of a store, each of the last mark."""

    def __init__(self, path):
        self.checkpoints = Checkpoints(path, keep=100)
        self.number = 0

    def mark(self, store, done):
        self.number += 1
        store.mark(done, f"{self.number:016x}")

    def save(self, store, done, tell=True):
        with self.checkpoints.begin(done, token=f"{self.number:016x}") as pending:
            pending.add(store.save(done, pending.directory, NAMES, since=pending.base))
            point = ResumePoint.of(pending.commit(FACTS, store.confirm))
        if tell:
            store.saved(done, point.checkpoint)
        return point


@pytest.mark.parametrize("seed", range(4))
def test_any_history_leads_back_to_any_checkpoint_in_this_store_and_another(store, tmp_path, seed):
    rows, saving, states, done = Rows(seed), Saving(tmp_path / "checkpoints"), {}, 0
    chance = rows.chance
    for _ in range(40):
        what = chance.choice(["write"] * 3 + ["save"] * 2 + ["mark", "restore"])
        if what == "write":
            rows.write(store)
        elif what == "restore" and states:
            point = chance.choice(list(states))
            store.restore(point, NAMES)
            rows.now, done = [dict(part) for part in states[point]], point.done
            saving.checkpoints.continue_from(done)
            saving.checkpoints.discard_after(done)
            states = {each: state for each, state in states.items() if each.done <= done}
        elif what in ("mark", "save"):
            done += 1
            saving.mark(store, done)
            state = rows.copy()
            rows.write(store)  # training goes on
            if what == "save":
                states[saving.save(store, done, tell=chance.random() < 0.8)] = state
        assert contents(store) == rows.now
    with VersionedStore(MemoryStore(TABLES)) as other:
        for point, state in states.items():
            other.restore(point, NAMES)
            assert contents(other) == state
        assert any(len(point.open().chain) > 1 for point in states) or len(states) < 3, "some have changes only"


def test_a_mark_is_there_until_it_is_saved(store, tmp_path):
    """However much is written first, and whatever becomes of the one before it."""
    checkpoints, rows, states = Checkpoints(tmp_path / "checkpoints"), Rows(1), {}
    for done in (1, 2):
        rows.write(store)
        store.mark(done)
        states[done] = rows.copy()
        for _ in range(10):
            rows.write(store)
        if done == 1:
            store.save(1, checkpoints.begin(1).directory, NAMES)
        else:
            store.saved(1, tmp_path / "checkpoints" / "00000001")
            rows.write(store)
            with checkpoints.begin(2) as pending:
                pending.add(store.save(2, pending.directory, NAMES))
                point = ResumePoint.of(pending.commit(FACTS))
    assert contents(store) == rows.now
    store.restore(point, NAMES)
    assert contents(store) == states[2]


def test_rows_of_a_mark_are_there_only_for_its_token(store, tmp_path):
    """Another attempt may have made a checkpoint of the same number, in the same directory."""
    saving, rows = Saving(tmp_path / "checkpoints"), Rows(1)
    with VersionedStore(MemoryStore(TABLES)) as other:
        rows.write(store, other)
        saving.mark(store, 1)
        rows.write(other)
        saving.mark(other, 1)
        point, expected = saving.save(other, 1), rows.copy()
    rows.write(store)
    store.restore(point, NAMES)
    assert contents(store) == expected


def test_a_checkpoint_that_can_not_be_read_is_named_and_the_store_refuses_all_until_one_could_be(store, tmp_path):
    saving, rows = Saving(tmp_path / "checkpoints"), Rows(1)
    rows.write(store)
    saving.mark(store, 1)
    point, expected = saving.save(store, 1), rows.copy()
    with VersionedStore(MemoryStore(TABLES)) as other:
        rows.write(other)
        saving.mark(other, 2)
        damaged = saving.save(other, 2)
    (file,) = damaged.checkpoint.glob("rows-*")
    file.write_bytes(file.read_bytes()[:-4] + b"\0\0\0\0")
    before = contents(store)
    with pytest.raises(CheckpointError, match="no checkpoint"):
        store.restore(ResumePoint(7, tmp_path / "checkpoints" / "00000007", "00"), NAMES)
    assert contents(store) == before
    with pytest.raises(CheckpointError, match=r"rows-0-00000.* is damaged"):
        store.restore(damaged, NAMES)
    for call in (lambda: contents(store), lambda: rows.write(store), lambda: store.mark(9)):
        with pytest.raises(StoreError, match="load a checkpoint"):
            call()
    store.restore(point, NAMES)
    assert contents(store) == expected
