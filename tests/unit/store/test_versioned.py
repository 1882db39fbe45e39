"""Rows with marks, against a plain dict of what they must be: random histories, threads, bounds and refusals."""

from __future__ import annotations

import random
import threading
from pathlib import Path

import numpy as np
import pytest

from bagpipe.errors import StoreError
from bagpipe.store import MappedStore, MemoryStore
from bagpipe.store.versioned import VersionedStore

WIDTHS = (3, 1)


class Source:
    """Rows that begin as their id."""

    def __init__(self, width):
        self.width = width

    def initialise(self, ids, out):
        out[:] = ids[:, None]


TABLES = [Source(width) for width in WIDTHS]


class Model:
    """What a store with marks must hold: a dict of rows in order of first write, and copies of it at marks."""

    def __init__(self):
        self.rows = [{}, {}]
        self.marks = {}
        self.saved = None

    def copy(self):
        return [dict(rows) for rows in self.rows]

    def changes(self, done, table, full):
        now = self.marks[done][table]
        before = None if self.saved is None or full else self.saved[table]
        return dict(now) if before is None else {key: value for key, value in now.items() if before.get(key) != value}


def put(store, model, table, ids, value):
    """Write rows, each another value than all before."""
    values = [value + at for at in range(len(ids))]
    store.write(table, np.array(ids, np.int64), np.repeat(np.array(values, np.float32)[:, None], WIDTHS[table], 1))
    if model is not None:
        model.rows[table].update(zip(ids, values, strict=True))


def contents(chunks):
    return [(key, row[0]) for ids, values in chunks for key, row in zip(ids.tolist(), values.tolist(), strict=True)]


def check(store, model, chance):
    for table in (0, 1):
        expected = list(model.rows[table].items())
        assert store.num_rows(table) == len(expected)
        assert store.ids(table).tolist() == [key for key, _ in expected]
        assert contents(store.iterate(table, chance.choice([1, 3, 100]))) == expected
        ids = np.array([chance.randrange(-2, 42) for _ in range(9)])
        out = np.empty((9, chance.randint(1, WIDTHS[table])), np.float32)
        store.read(table, ids, out)
        assert out[:, 0].tolist() == [model.rows[table].get(key, key) for key in ids.tolist()]
        found = store.find(table, ids)
        assert found.there.tolist() == [key in model.rows[table] for key in ids.tolist()]
        there = np.empty((int(found.there.sum()), WIDTHS[table]), np.float32)
        found.gather(there)
        assert there[:, 0].tolist() == [model.rows[table][key] for key in ids.tolist() if key in model.rows[table]]


def step(store, model, chance, value, done):
    """One random operation on both; returns the next mark."""
    what = chance.choice(["write"] * 4 + ["mark", "mark", "rollback", "save", "saved", "release"])
    if what == "write":
        table = chance.randrange(2)
        put(store, model, table, chance.sample(range(40), chance.randrange(1, 9)), value)
    elif what == "mark":
        done += chance.randint(1, 3)
        store.mark(done)
        model.marks[done] = model.copy()
    elif what == "rollback" and store.marks():
        to = chance.choice(store.marks())
        store.rollback(to)
        model.rows = [dict(rows) for rows in model.marks[to]]
        done = to
    elif what in ("save", "saved") and store.marks():
        mark = chance.choice(store.marks())
        full = chance.random() < 0.3
        with store.changes(mark, full=full) as reader:
            put(store, model, 0, [chance.randrange(40)], value)  # training goes on
            for table in (0, 1):
                expected = model.changes(mark, table, full)
                found = contents(reader.iterate(table, chance.choice([1, 4, 50])))
                assert dict(found).items() >= expected.items(), "whatever has changed is there"
                assert dict(found).items() <= model.marks[mark][table].items()
                assert len(dict(found)) == len(found)
        if what == "saved":
            store.saved(mark)
            model.saved = model.marks[mark]
    elif what == "release":
        store.release(chance.choice([*store.marks(), done + 1]))
    return done


@pytest.mark.parametrize("seed", range(40))
@pytest.mark.parametrize("bytes_max", [None, 300])
def test_random_histories_are_those_of_a_dict(seed, bytes_max, tmp_path: Path):
    for k in range(5):
        chance = random.Random(f"{seed} {k} {bytes_max}")
        base = MemoryStore(TABLES) if chance.random() < 0.7 else MappedStore(TABLES, tmp_path / f"rows{k}")
        options = {"rollback": chance.random() < 0.6, "layer_bytes_max": bytes_max, "spill": tmp_path}
        store, model, done = VersionedStore(base, **options), Model(), 0
        put(store, model, 0, [3, 1, 2], 500.0)
        for number in range(40):
            done = step(store, model, chance, 1000.0 + 10 * number, done)
            check(store, model, chance)
        store.close()


def of(store, table=0):
    return contents(store.iterate(table))


@pytest.fixture
def store(tmp_path: Path):
    with VersionedStore(MemoryStore(TABLES), spill=tmp_path) as made:
        yield made


def test_marks_ascend_and_one_that_changed_nothing_may_be_made_again(store):
    store.mark(4)
    store.mark(4)
    put(store, None, 0, [1], 5.0)
    for done in (4, 3, -1):
        with pytest.raises(StoreError, match=f"mark {done} comes after mark 4: they are made in ascending order"):
            store.mark(done)
    store.mark(5)
    assert store.marks() == [4, 5]
    for refused in (store.rollback, store.changes):
        with pytest.raises(StoreError, match=r"there is no mark 6: there are \[4, 5\]; return to one of these"):
            refused(6)


def test_rows_are_replaced_by_those_of_a_checkpoint(store):
    put(store, None, 0, [1, 2], 5.0)
    store.mark(1)
    put(store, None, 0, [2, 3], 7.0)
    rows = [(0, np.array([9, 8]), np.full((2, 3), 4, np.float32)), (1, np.array([7]), np.full((1, 1), 6, np.float32))]
    with (
        store.changes(1),
        pytest.raises(StoreError, match="can't be replaced while they are being saved"),
        store.replacing(30),
    ):
        pass
    with store.replacing(30) as base:
        base.write_many(rows)
    assert (of(store), of(store, 1), store.marks()) == ([(9, 4), (8, 4)], [(7, 6)], [30])
    put(store, None, 0, [8, 5], 11.0)
    store.mark(31)
    with store.changes(31) as reader:
        assert contents(reader.iterate(0)) == [(8, 11), (5, 12)], "what the checkpoint has is not saved again"
    store.rollback(30)
    assert of(store) == [(9, 4), (8, 4)]
    with store.replacing(None):
        pass
    assert (of(store), of(store, 1), store.marks()) == ([], [], [])


def test_a_replacement_that_fails_halfway_must_be_done_again(store):
    put(store, None, 0, [1], 5.0)

    def replace():
        with store.replacing(30) as base:
            base.write(0, np.array([9]), np.full((1, 3), 4, np.float32))
            raise OSError("the disk is gone")

    with pytest.raises(OSError, match="the disk is gone"):
        replace()
    for call in (lambda: store.mark(1), lambda: of(store), lambda: put(store, None, 0, [1], 1.0)):
        with pytest.raises(StoreError, match="half replaced: load a checkpoint"):
            call()
    with store.replacing(3):
        pass
    assert (of(store), store.marks()) == ([], [3])


def test_a_merge_that_fails_anywhere_changes_no_row_and_is_done_again(store, monkeypatch):
    model = Model()
    put(store, model, 0, [1, 2, 3], 5.0)
    store.mark(1)
    put(store, model, 0, [3, 4], 20.0)
    put(store, model, 1, [6], 30.0)
    store.mark(2)
    put(store, model, 0, [2], 40.0)
    original, calls = store.base.put, []

    def failing(*rows):
        calls.append(rows)
        if len(calls) == failing.at:
            raise StoreError("no space left")
        return original(*rows)

    monkeypatch.setattr(store.base, "put", failing)
    for failing.at in (1, 2):
        calls.clear()
        with pytest.raises(StoreError, match="no space left"):
            store.saved(2)
        assert store.marks() == [2], "the base is not what it was at mark 1"
        check(store, model, random.Random(1))
    calls.clear()
    failing.at = 0
    store.saved(2)
    assert store.marks() == [2]
    check(store, model, random.Random(2))
    store.mark(3)
    with store.changes(3) as reader:
        assert contents(reader.iterate(0)) == [(2, 40)]
        assert contents(reader.iterate(1)) == []
    with pytest.raises(StoreError, match="closed: ask for them again"):
        next(reader.iterate(0))


def test_layers_that_take_too_much_memory_are_merged_and_their_rows_still_count_as_changed(tmp_path: Path, caplog):
    store, model = VersionedStore(MemoryStore(TABLES), layer_bytes_max=240, spill=tmp_path), Model()
    put(store, model, 0, [1, 2], 5.0)
    store.mark(1)
    store.saved(1)
    for k in range(3):
        put(store, model, 0, list(range(10 * k, 10 * k + 10)), 100.0 * (k + 1))
    assert "the way back in memory is given up" in caplog.text
    assert store.marks() == []
    check(store, model, random.Random(3))
    store.mark(9)
    with store.changes(9) as reader:
        assert sorted(contents(reader.iterate(0))) == sorted(model.rows[0].items())


def test_while_a_mark_is_saved_layers_go_to_files_instead(tmp_path: Path):
    store = VersionedStore(MemoryStore(TABLES), layer_bytes_max=4000, spill=tmp_path, chunk_bytes=1 << 10)
    model = Model()
    put(store, model, 0, list(range(100)), 1.0)
    store.mark(1)
    model.marks[1] = model.copy()
    with store.changes(1, full=True) as reader:
        for k in range(30):
            put(store, model, 0, list(range(40 * k, 40 * k + 40)), 1000.0 + 100 * k)
        stats = store.stats()
        assert stats.bytes_on_disk > 8000
        assert store.marks() == [1]
        assert contents(reader.iterate(0)) == list(model.marks[1][0].items())
        assert list(tmp_path.iterdir()) == [], "files without names"
    check(store, model, random.Random(3))
    put(store, model, 0, [5], 3.0)
    assert store.stats().bytes_on_disk == 0
    check(store, model, random.Random(3))


def test_a_full_disk_refuses_the_write_and_changes_nothing(monkeypatch, tmp_path: Path):
    def full(*_):
        raise OSError(28, "No space left on device")

    store, model = VersionedStore(MemoryStore(TABLES), layer_bytes_max=0, spill=tmp_path), Model()
    put(store, model, 0, [1, 2], 5.0)
    store.mark(1)
    with store.changes(1):
        monkeypatch.setattr("os.posix_fallocate", full)
        with pytest.raises(StoreError, match=r"while a checkpoint is written .*No space left.*: make room there, or"):
            put(store, None, 0, [2, 3], 9.0)
    check(store, model, random.Random(1))


def test_who_writes_waits_for_no_merge_while_there_is_room_for_all():
    store = VersionedStore(MemoryStore(TABLES, bytes_max=1_000_000))
    put(store, None, 0, [1, 2], 5.0)
    store.mark(1)
    put(store, None, 0, [2, 3], 6.0)
    with store._merging:
        writer = threading.Thread(target=put, args=(store, None, 0, [3, 4], 7.0), daemon=True)
        writer.start()
        writer.join(30)
        assert not writer.is_alive()
    assert store.ids(0).tolist() == [1, 2, 3, 4]


def test_rows_that_layers_have_twice_count_once_against_the_memory_of_the_base():
    row_bytes = 4 * WIDTHS[0] + 25
    base = MemoryStore(TABLES)
    store = VersionedStore(base)
    base.bytes_in_memory_max = base.stats().bytes_in_memory + 5 * row_bytes
    store.mark(1)
    for mark in (2, 3, 4):
        put(store, None, 0, [1, 2, 3, 4], 1.0)
        store.mark(mark)
    put(store, None, 0, [4, 5], 1.0)
    with pytest.raises(StoreError, match="6 more rows would take"):
        put(store, None, 0, [6], 1.0)
    assert store.num_rows(0) == 5


@pytest.mark.parametrize("rollback", [False, True])
def test_rows_are_right_while_another_thread_merges_and_saves(rollback):
    """A reader and writer that owns its rows, beside merges: every read is of what was written last."""
    store = VersionedStore(MemoryStore(TABLES), rollback=rollback, layer_bytes_max=20_000)
    stop, errors = threading.Event(), []
    values = dict.fromkeys(range(400), 0.0)
    put(store, None, 0, list(values), 0.0)
    for key in values:
        values[key] = float(key)
    store.mark(0)

    def merge():
        done = 0
        try:
            while not stop.is_set():
                for mark in store.marks():
                    with store.changes(mark) as reader:
                        for ids, rows in reader.iterate(0, 50):
                            assert (rows == rows[:, :1]).all(), "no row is torn"
                            assert len(ids)
                    store.saved(mark)
                    done += 1
                store.release(10**9)
        except BaseException as error:
            errors.append(error)

    thread = threading.Thread(target=merge)
    thread.start()
    chance, number = random.Random(4), 1000.0
    try:
        for round_ in range(1, 400):
            if not rollback and round_ % 20 == 0:
                store.mark(round_)  # this thread is the only one that writes
            ids = chance.sample(range(600), 60)
            new = [number + k for k in range(60)]
            store.write(0, np.array(ids), np.repeat(np.array(new, np.float32)[:, None], 3, 1))
            values.update(zip(ids, new, strict=True))
            number += 60
            out = np.empty((600, 3), np.float32)
            store.read(0, np.arange(600), out)
            assert out[:, 0].tolist() == [values.get(key, float(key)) for key in range(600)], round_
            assert not errors
    finally:
        stop.set()
        thread.join()
    assert not errors
    assert dict(of(store)) == values
