"""Plans are executed under any schedule: what training wrote is what it reads."""

from __future__ import annotations

import threading
import weakref

import numpy as np
import pytest
import torch

from bagpipe import optim
from bagpipe.cache import VACANT, RowCache
from bagpipe.checker import Checker
from bagpipe.initial import Constant
from bagpipe.layout import RowLayout
from bagpipe.oracle.oracle import Oracle
from bagpipe.oracle.tables import OracleTable
from bagpipe.store import MemoryStore
from bagpipe.trainer.pipeline import READERS, Pipeline
from bagpipe.trainer.stages import Threads
from bagpipe.types import Table
from harness.explorer import WRITES_BACK, Seeded

ROWS, SLOTS = 12, 7


def plans(batches, policy):
    """A plan for each batch."""
    oracle = Oracle([OracleTable("only", ROWS)], [SLOTS], lookahead=3, policy=policy)
    waiting, left, source = 0, len(batches), iter(batches)
    while left:
        while waiting < oracle.policy.window and (batch := next(source, None)) is not None:
            oracle.read([batch])
            waiting += 1
        waiting, left = waiting - 1, left - 1
        number = len(batches) - left - 1
        yield oracle.emit(last=left == 0), number


def run(seed, policy, stop=None):
    """Every row counts how often it was used; returns what the store has, and what it should have."""
    random = np.random.default_rng(seed)
    batches = [random.integers(0, ROWS, 5) for _ in range(15)]
    store = MemoryStore([RowLayout(Table("only", ROWS), (2,), optim.SGD(0.1), Constant(0.0))])
    cache = RowCache([2], [SLOTS], torch.device("cpu"))
    checker = Checker(["only"], [2], cache)
    driver = Seeded(seed, eagerness=float(random.choice([0.0, 0.5, 3.0])))
    pipeline = Pipeline(cache, store, driver, 3, checker)
    pipeline.begin(plans(batches, policy))
    counted = np.zeros(ROWS, np.float32)
    while pipeline.wait():
        plan, number = pipeline.take()
        if number == stop:
            pipeline.updated(plan)
            break
        checker.training(plan)
        ids, slots = plan.rows.of_table(0)
        assert sorted(ids.tolist()) == np.unique(batches[number]).tolist()
        cache.data[0].numpy()[slots] += 1
        counted[ids] += 1
        cache.mark_updated(0, slots)
        checker.updated(plan, [0])
        pipeline.updated(plan)
    pipeline.close()
    checker.finished()
    assert cache.num_rows == occupied(cache) <= pipeline.traffic.peak_rows
    return stored(store), counted


def occupied(cache):
    return sum(np.count_nonzero(tenants != VACANT) for tenants in cache.tenant_table)


def stored(store):
    rows = np.empty((ROWS, 2), np.float32)
    store.read(0, np.arange(ROWS), rows)
    return rows[:, 0]


@pytest.mark.parametrize("policy", ["lookahead", "lru", "nocache"])
def test_every_use_of_a_row_is_counted_under_any_schedule(policy):
    for seed in range(25):
        found, expected = run(seed, policy)
        assert (found == expected).all()


@pytest.mark.parametrize("policy", ["lookahead", "lru"])
def test_closing_in_the_middle_writes_everything_back(policy):
    for seed in range(25):
        found, expected = run(seed, policy, stop=seed % 9)
        assert (found == expected).all()


@pytest.mark.parametrize("begun", [True, False])
def test_a_pipeline_that_nobody_waited_for_can_be_closed(begun):
    store = MemoryStore([RowLayout(Table("only", ROWS), (2,), optim.SGD(0.1), Constant(0.0))])
    made = plans([np.array([1])], "lookahead")
    pipeline = Pipeline(RowCache([2], [SLOTS], torch.device("cpu")), store, Seeded(0))
    if begun:
        pipeline.begin(made)
    pipeline.flush()
    pipeline.close()
    assert not begun or next(made, None) is None


@pytest.mark.parametrize("policy", ["lookahead", "lru", "static"])
def test_large_fetches_and_write_backs_come_in_blocks_of_bounded_size(policy, monkeypatch):
    reads, writes = [], []
    read_many, write_many = MemoryStore.read_many, MemoryStore.write_many

    def reading(store, parts, after=-1):
        reads.append(sum(len(ids) for _, ids, _ in parts))
        read_many(store, parts, after)

    def writing(store, parts, passed=-1):
        writes.append(sum(len(ids) for _, ids, _ in parts))
        write_many(store, parts, passed)

    monkeypatch.setattr(MemoryStore, "read_many", reading)
    monkeypatch.setattr(MemoryStore, "write_many", writing)
    for staged in (1, 2, 3, 4):
        monkeypatch.setattr("bagpipe.trainer.pipeline.STAGED_ROWS", staged)
        reads.clear()
        writes.clear()
        for seed in range(5):
            for stop in (None, 6):
                found, expected = run(seed, policy, stop)
                assert (found == expected).all()
        assert max(writes) == staged
        assert max(reads) == max(1, staged // READERS), "so many may each reader have on their way"
        assert min(reads) >= 1, "no empty blocks"


def test_victims_of_a_plan_leave_block_by_block_as_the_store_takes_them(monkeypatch):
    monkeypatch.setattr("bagpipe.trainer.pipeline.STAGED_ROWS", 2)
    left = []
    copy_out = Pipeline._copy_out

    def noting(pipeline, leaving):
        waiting = sum(len(rows.ids) for _, parts in pipeline._victims for rows in parts)
        left.append((len(leaving), waiting))
        return copy_out(pipeline, leaving)

    monkeypatch.setattr(Pipeline, "_copy_out", noting)
    batches = [np.arange(7), np.arange(7, 12)]
    cache, driver = RowCache([2], [SLOTS], torch.device("cpu")), Seeded(0, last=frozenset({WRITES_BACK}))
    store = MemoryStore([RowLayout(Table("only", ROWS), (2,), optim.SGD(0.1), Constant(0.0))])
    pipeline = Pipeline(cache, store, driver)
    pipeline.begin(plans(batches, "lru"))
    for _ in batches:
        assert pipeline.wait()
        plan, _ = pipeline.take()
        cache.data[0].numpy()[plan.rows.slots] += 1
        cache.mark_updated(0, plan.rows.slots)
        pipeline.updated(plan)
    pipeline.close()
    assert [each for each in left if each[0]] == [(2, 0), (2, 0), (1, 0), (2, 0), (2, 0), (2, 0), (1, 0)]
    assert (stored(store) == 1).all()


def test_rows_are_read_while_the_victims_of_their_plan_are_still_in_use(monkeypatch):
    early = 0
    read = Pipeline._read

    def noting(pipeline, plan, parts, after):
        nonlocal early
        early += pipeline.points.updated < plan.victims.evict_after
        return read(pipeline, plan, parts, after)

    monkeypatch.setattr(Pipeline, "_read", noting)
    for seed in range(10):
        run(seed, "lfu")
    assert early > 0


def test_rows_that_the_store_has_are_read_while_others_of_their_plan_are_still_to_be_written(monkeypatch):
    early = dict.fromkeys(("lookahead", "lru", "nocache"), 0)
    read = Pipeline._read

    def noting(pipeline, plan, parts, after):
        asked = np.concatenate([ids for _, ids, _, _ in parts]) if parts else []
        waits = plan.fetch.after[np.isin(plan.fetch.ids, asked)]
        assert (waits <= after).all()
        assert pipeline.points.acknowledged >= after
        early[policy] += len(waits) < len(plan.fetch)
        return read(pipeline, plan, parts, after)

    monkeypatch.setattr(Pipeline, "_read", noting)
    for policy in early:
        for seed in range(10):
            found, expected = run(seed, policy)
            assert (found == expected).all()
    assert early["lookahead"] > 0
    assert early["lru"] > 0
    assert early["nocache"] == 0, "nothing overlaps there"


def test_an_iteration_is_acknowledged_before_victims_of_later_plans_are_written(monkeypatch):
    seen = 0
    victims_first = Pipeline._victims_first

    def noting(pipeline):
        nonlocal seen
        first = victims_first(pipeline)
        if first:
            made_room_for = pipeline._victims[0][0]
            assert pipeline.points.acknowledged >= min(pipeline.points.updated, made_room_for - 1)
            seen += pipeline.points.updated >= made_room_for
        return first

    monkeypatch.setattr(Pipeline, "_victims_first", noting)
    for seed in range(10):
        run(seed, "lfu")
    assert seen > 0, "and those of its own plan before it"


@pytest.mark.parametrize("policy", ["lookahead", "lru", "static", "nocache"])
def test_the_peak_counts_rows_from_when_they_come_until_they_leave(policy, monkeypatch):
    peaks, insert, updated = [], RowCache.insert, Pipeline.updated

    def noting(cache, *rows):
        insert(cache, *rows)
        peaks.append(occupied(cache))

    def comparing(pipeline, plan):
        updated(pipeline, plan)
        assert pipeline._cache.num_rows == occupied(pipeline._cache)
        assert pipeline.traffic.peak_rows == max(peaks)

    monkeypatch.setattr(RowCache, "insert", noting)
    monkeypatch.setattr(Pipeline, "updated", comparing)
    for seed in range(10):
        peaks.clear()
        run(seed, policy)


class Slow(MemoryStore):
    """A store whose reads begin together: each waits for another one, as long as one is to come."""

    def __init__(self, *arguments):
        super().__init__(*arguments)
        self.together = threading.Barrier(READERS)
        self.num_reads = 0

    def read_many(self, parts, after=-1):
        self.num_reads += 1
        self.together.wait(60)
        super().read_many(parts, after)


def test_the_rows_of_two_plans_are_read_at_once_and_trained_in_order():
    batches = [np.array([2 * k, 2 * k + 1]) for k in range(READERS * 3)]
    store = Slow([RowLayout(Table("only", ROWS), (2,), optim.SGD(0.1), Constant(0.0))])
    cache = RowCache([2], [ROWS], torch.device("cpu"))
    oracle = Oracle([OracleTable("only", ROWS)], [ROWS], lookahead=3, policy="lookahead")
    pipeline = Pipeline(cache, store, Threads())
    pipeline.begin(oracle.plans(([batch], number) for number, batch in enumerate(batches)))
    taken = []
    while pipeline.wait():
        plan, number = pipeline.take()
        taken.append(number)
        assert sorted(plan.rows.ids.tolist()) == batches[number].tolist()
        pipeline.updated(plan)
    pipeline.close()
    oracle.close()
    assert taken == list(range(len(batches)))
    assert store.num_reads == len(batches)


def test_no_plan_is_read_before_the_rows_of_the_one_that_its_reader_had_are_in_their_slots(monkeypatch):
    """I5: what is on its way is bounded, however slow the insertions are."""
    under_way = most = 0
    read = Pipeline._read

    def gone(num_rows):
        nonlocal under_way
        under_way -= num_rows

    def reading(pipeline, plan, parts, after):
        nonlocal under_way, most
        fetched = read(pipeline, plan, parts, after)
        for rows, slots in fetched:
            under_way += len(slots)
            weakref.finalize(rows.values, gone, len(slots))
        most = max(most, under_way)
        return fetched

    monkeypatch.setattr(Pipeline, "_read", reading)
    monkeypatch.setattr("bagpipe.trainer.pipeline.STAGED_ROWS", 2 * READERS)
    for seed in range(20):
        run(seed, "lookahead")
    assert under_way == 0
    assert 2 < most <= 2 * READERS
