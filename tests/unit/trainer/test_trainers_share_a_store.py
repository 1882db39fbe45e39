"""Pipelines of several trainers over one store and one source of plans: no update is lost under any schedule."""

from __future__ import annotations

import threading

import numpy as np
import pytest
import torch

from bagpipe import optim
from bagpipe.cache import RowCache
from bagpipe.errors import BagpipeError, DeadlineError, StoreError
from bagpipe.initial import Constant
from bagpipe.layout import RowLayout
from bagpipe.oracle.fan_out import fan_out
from bagpipe.oracle.plan import Fetch, Plan, RowList, Victims
from bagpipe.store import MemoryStore
from bagpipe.store.views import StoreView, shared_views
from bagpipe.together import run_threads
from bagpipe.trainer.pipeline import Pipeline
from bagpipe.trainer.stages import Threads
from bagpipe.types import Table
from harness.explorer import LOOP, WRITES_BACK, Together

TRAINERS, ROWS, ITERATIONS, SEEDS = 3, 6, 12, 200
LASTS = (frozenset(), frozenset({WRITES_BACK}), frozenset({(1, WRITES_BACK)}), frozenset({(2, LOOP)}))


def uses_of(seed):
    """[iteration, row]: the trainer that uses it, or none."""
    return np.random.default_rng(seed).integers(-1, TRAINERS, (ITERATIONS, ROWS))


def plans(uses):
    """For each iteration a part for each trainer: rows travel from trainer to trainer through the store."""
    written = np.full(ROWS, -1, np.int32)
    left = np.full((TRAINERS, ROWS), -1, np.int32)
    for iteration, users in enumerate(uses):
        parts = []
        for trainer in range(TRAINERS):
            ids = np.flatnonzero(users == trainer)
            rows = RowList(ids, ids.astype(np.int32), np.array([0, len(ids)]))
            fetch = Fetch(rows.ids, rows.slots, rows.bounds, written[ids], left[trainer, ids])
            none = RowList(ids[:0], rows.slots[:0], np.zeros(2, np.int64))
            victims = Victims(none.ids, none.slots, none.bounds)
            parts.append((Plan(iteration, rows, (), fetch, rows, victims, 1, 0), None))
            left[trainer, ids] = iteration
        written[users >= 0] = iteration
        yield parts


def train(part, view, driver):
    """Every row counts how often it was used."""
    cache = RowCache([2], [ROWS], torch.device("cpu"))
    pipeline = Pipeline(cache, view, driver, 2)
    pipeline.begin(part)
    while pipeline.wait():
        plan, _ = pipeline.take()
        _, slots = plan.rows.of_table(0)
        cache.data[0].numpy()[slots] += 1
        cache.mark_updated(0, slots)
        pipeline.updated(plan)
    pipeline.close()
    return pipeline.traffic.iterations


def run(seed, drivers, run_loops):
    """How often each row was used, and how often the store says."""
    uses = uses_of(seed)
    store = MemoryStore([RowLayout(Table("only", ROWS), (2,), optim.SGD(0.1), Constant(0.0))])
    views = shared_views(store, TRAINERS, [driver.notify for driver in drivers])
    parts = fan_out(plans(uses), TRAINERS)
    with views[0], views[1], views[2]:
        trained = run_loops([lambda given=given: train(*given) for given in zip(parts, views, drivers, strict=True)])
        assert trained == [ITERATIONS] * TRAINERS
        rows = np.empty((ROWS, 2), np.float32)
        store.read(0, np.arange(ROWS), rows)
    return rows[:, 0].tolist(), (uses >= 0).sum(0).tolist()


def run_seeded(seed):
    together = Together(seed, eagerness=(0.0, 0.5, 3.0)[seed % 3], last=LASTS[seed // 3 % len(LASTS)])
    return run(seed, [together.driver(rank) for rank in range(TRAINERS)], together.run)


def test_every_use_is_counted_under_any_schedule():
    for seed in range(SEEDS):
        found, expected = run_seeded(seed)
        assert found == expected, seed


def test_every_use_is_counted_in_threads():
    for seed in range(20):
        found, expected = run(seed, [Threads(60) for _ in range(TRAINERS)], run_threads)
        assert found == expected, seed


@pytest.mark.parametrize(
    "reached",
    [
        pytest.param(lambda view, after: True, id="nobody is waited for"),
        pytest.param(lambda view, after: view._watermark.reached >= after - 1, id="one iteration too early"),
        pytest.param(
            lambda view, after: sorted(view._watermark._passed.values())[1] >= after, id="the slowest is left out"
        ),
        pytest.param(lambda view, after: view._watermark._passed[view._trainer] >= after, id="only itself"),
    ],
)
def test_a_read_before_everyone_has_passed_is_found(monkeypatch, reached):
    monkeypatch.setattr(StoreView, "reached", reached)
    assert any(found != expected for found, expected in map(run_seeded, range(SEEDS)))


def test_an_empty_write_that_does_not_count_is_found(monkeypatch):
    write_many = StoreView.write_many

    def forgetful(view, parts, passed):
        write_many(view, parts, passed if parts else -1)

    monkeypatch.setattr(StoreView, "write_many", forgetful)
    with pytest.raises(DeadlineError, match=r"nothing can run: .*fetch-\d: iteration \d+ to be in the store"):
        list(map(run_seeded, range(SEEDS)))


@pytest.fixture
def full_disk(monkeypatch):
    """The write-back of trainer 1 fails in iteration 4: the others wait for rows that never come."""
    before = threading.active_count()
    write_many = StoreView.write_many

    def failing(view, parts, passed):
        if view._trainer == 1 and passed == 4:
            raise StoreError("the disk of trainer 1 is full")
        write_many(view, parts, passed)

    monkeypatch.setattr(StoreView, "write_many", failing)
    yield
    assert threading.active_count() == before


@pytest.mark.usefixtures("full_disk")
def test_a_trainer_that_fails_ends_all_under_any_schedule():
    for seed in range(20):
        with pytest.raises(StoreError, match="the disk of trainer 1 is full"):
            run_seeded(seed)


@pytest.mark.usefixtures("full_disk")
def test_a_trainer_that_fails_ends_all_in_threads():
    for seed in range(10):
        drivers = [Threads(60) for _ in range(TRAINERS)]

        def abort(error, drivers=drivers):
            for driver in drivers:
                driver.abort(error)

        with pytest.raises(StoreError, match="the disk of trainer 1 is full"):
            run(seed, drivers, lambda loops, abort=abort: run_threads(loops, 60, abort))
        for driver in drivers:
            with pytest.raises(BagpipeError, match="trainer 1 is full"):
                driver.join()
