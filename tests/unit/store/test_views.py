"""Trainers of one process share a store: who reads after an iteration sees what all have written up to it."""

from __future__ import annotations

import threading
from pathlib import Path

import numpy as np
import pytest

from bagpipe.checkpoint.directory import Checkpoints
from bagpipe.checkpoint.manifest import RunFacts, TableEntry
from bagpipe.checkpoint.point import ResumePoint
from bagpipe.checkpointing import as_marked
from bagpipe.errors import ConfigError, StoreError
from bagpipe.store import MappedStore, MemoryStore
from bagpipe.store.base import NO_ITERATION
from bagpipe.store.versioned import VersionedStore
from bagpipe.store.views import shared_views
from bagpipe.trainer.stages import Threads, Wait


class Zeros:
    """Rows of two numbers that begin as 0."""

    width = 2

    def initialise(self, ids, out):
        out[:] = 0


TABLES = (Zeros(), Zeros())
MAKERS = {
    "memory": lambda _: MemoryStore(TABLES, chunk_bytes=2048),
    "mapped": lambda path: MappedStore(TABLES, path / "store"),
}


def rows(table, ids, value):
    return table, np.asarray(ids, np.int64), np.full((len(ids), 2), value, np.float32)


NAMES = ["a", "b"]
FACTS = RunFacts(tables=tuple(TableEntry(name=name, rows=None, dims=(2,), width=2, optimizer="sgd") for name in NAMES))


def read(view, ids, after=NO_ITERATION, table=0):
    part = rows(table, ids, np.nan)
    view.read_many([part], after)
    return part[2][:, 0].tolist()


def test_an_iteration_is_reached_when_every_trainer_has_passed_it_also_without_rows():
    views = shared_views(MemoryStore(TABLES), 3)
    assert all(view.reached(NO_ITERATION) and not view.reached(0) for view in views)
    views[0].write_many([rows(0, [1], 5)], passed=1)
    views[2].write_many([], passed=2)
    assert not any(view.reached(0) for view in views)
    views[1].write_many([], passed=0)
    assert all(view.reached(0) and not view.reached(1) for view in views)
    views[1].write_many([rows(1, [1], 5)])
    assert not views[0].reached(1), "a write that names no iteration passes none"
    views[1].write_many([], passed=1)
    assert all(view.reached(1) and not view.reached(2) for view in views)
    assert read(views[2], [1, 2], after=1) == [5, 0]


def test_a_store_of_one_trainer_is_always_ready_to_be_read():
    assert MemoryStore(TABLES).reached(10**9)


def test_a_write_that_fails_passes_nothing():
    first, second = shared_views(MemoryStore(TABLES), 2)
    second.write_many([], passed=4)
    with pytest.raises(StoreError, match="twice"):
        first.write_many([rows(0, [1, 1], 5)], passed=4)
    assert not first.reached(4)


def test_everyone_is_notified_when_all_have_passed_and_not_before():
    told = []
    views = shared_views(MemoryStore(TABLES), 2, [lambda: told.append(views[0].reached(0)), lambda: told.append("b")])
    views[0].write_many([rows(0, [1], 1)], passed=0)
    assert told == []
    views[1].write_many([], passed=3)
    assert told == [True, "b"], "the watermark has moved before anyone is told"
    views[1].write_many([], passed=4)
    assert told == [True, "b"], "nothing that anyone waits for has changed"


def test_what_is_called_on_a_write_may_use_the_store():
    views = shared_views(MemoryStore(TABLES), 1, [lambda: found.append(read(views[0], [7], after=0))])
    found = []
    views[0].write_many([rows(0, [7], 3)], passed=0)
    assert found == [[3.0]]


def test_a_read_that_comes_too_early_is_refused_and_names_who_is_behind():
    views = shared_views(MemoryStore(TABLES), 3)
    views[1].write_many([], passed=7)
    views[2].write_many([], passed=6)
    with pytest.raises(StoreError, match=r"trainer 1 .* iteration 7, which trainers 0 \(at none\), 2 \(at 6\)"):
        read(views[1], [1], after=7)


def test_the_store_is_closed_with_the_last_view():
    store = MemoryStore(TABLES)
    first, second = shared_views(store, 2)
    first.close()
    first.close()
    second.write(0, np.array([1]), np.ones((1, 2), np.float32))
    assert store.num_rows(0) == 1
    with pytest.raises(StoreError, match="trainer 0's view of the store is closed"):
        first.num_rows(0)
    second.close()
    with pytest.raises(StoreError, match="the store is closed"):
        store.num_rows(0)


def test_a_store_for_no_trainers_is_refused():
    with pytest.raises(ConfigError, match="shared by 0 trainers"):
        shared_views(MemoryStore(TABLES), 0)


@pytest.mark.parametrize("kind", MAKERS)
def test_threads_that_write_and_read_at_once_lose_nothing(kind, tmp_path: Path):
    """Each trainer writes its own rows of two tables, and waits for its neighbour's of the same iteration."""
    trainers, iterations, count = 3, 40, 300
    drivers = [Threads(60) for _ in range(trainers)]
    views = shared_views(MAKERS[kind](tmp_path), trainers, [driver.notify for driver in drivers])
    failures = []

    def train(rank):
        try:
            mine = np.arange(count) * trainers + rank
            other = np.arange(count) * trainers + (rank + 1) % trainers
            for x in range(iterations):
                half = slice(x % 2, None, 2)
                views[rank].write_many([rows(table, mine[half], x + 1 + table) for table in (0, 1)], passed=x)
                drivers[rank].wait(Wait("the neighbour", lambda x=x: views[rank].reached(x)))
                found = read(views[rank], other[half], x, table=rank % 2)
                assert found == [x + 1 + rank % 2] * len(found), (rank, x)
                turn.wait(60)
        except BaseException as error:
            failures.append(error)
            turn.abort()

    turn = threading.Barrier(trainers)
    threads = [threading.Thread(target=train, args=(rank,)) for rank in range(trainers)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
    assert failures == []
    assert views[0].stats().num_rows == 2 * trainers * count
    for view in views:
        view.close()


def test_the_first_trainer_saves_and_restores_the_rows_of_all(tmp_path: Path):
    store = VersionedStore(MemoryStore(TABLES))
    first, second = views = shared_views(store, 2)
    for view in views:
        view.write_many([rows(0, [1 + view._trainer], 1)], passed=3)
    marked = as_marked(first)
    marked.mark(4, "aa")
    assert store.has_mark(4, "aa")
    second.write_many([rows(0, [2, 3], 2)], passed=4)
    with Checkpoints(tmp_path).begin(4, token="aa") as pending:
        pending.add(marked.save(4, pending.directory, NAMES))
        point = ResumePoint.of(pending.commit(FACTS, marked.confirm))
    marked.saved(4, point.checkpoint)
    other = shared_views(VersionedStore(MemoryStore(TABLES)), 2)
    other[1].write(0, np.array([3, 9]), np.full((2, 2), 9, np.float32))
    for restored in (views, other):
        as_marked(restored[0]).restore(point, NAMES)
        assert read(restored[1], [1, 2, 3, 9]) == [1, 1, 0, 0]


def test_a_store_without_marks_says_what_to_do():
    with pytest.raises(ConfigError, match="MemoryStore does not support checkpoints"):
        as_marked(shared_views(MemoryStore(TABLES), 1)[0])
