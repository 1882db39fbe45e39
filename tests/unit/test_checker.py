"""The checker is silent about a system without defects, and names each of many defects that are put into it."""

from __future__ import annotations

import dataclasses
import functools
import itertools
import re
from collections import deque

import numpy as np
import pytest
import torch

import bagpipe
from bagpipe.cache import RowCache, TableRows
from bagpipe.errors import ConsistencyError
from bagpipe.oracle.row_list import RowList
from bagpipe.trainer.fetching import Fetching
from bagpipe.trainer.pipeline import Pipeline, Wait
from bagpipe.trainer.source import LocalPlans
from bagpipe.trainer.stages import Threads
from harness.explorer import Seeded
from harness.plain import (
    loss_of,
    make_batches,
    make_net,
    sgd,
)

BATCHES = make_batches(12, size=4, seed=2)
SEEDS = range(40)


def train(driver, check=True, stop=None, **options):
    """The final weights and row states; Adagrad, so that rows have state."""
    net, rows = make_net(), bagpipe.optim.Adagrad(0.1)
    loop = bagpipe.accelerate(net, BATCHES, rows, check=check, driver=driver, threads=1, **options)
    dense = sgd(net.parameters())
    with loop:
        for batch in loop:
            dense.zero_grad()
            loss_of(net, batch).backward()
            dense.step()
            rows.step()
            if rows.updates == stop:
                break
    tables = loop.state_dict()["tables"]
    states = [part["rows"][torch.argsort(part["ids"])] for part in tables.values()]
    return b"".join(value.numpy().tobytes() for value in [*net.state_dict().values(), *states])


def swapped(slots):
    return slots[::-1].copy()


# Each defect takes a monkeypatch and puts itself in.


def stays_one_iteration_too_short(patch):
    """Time-to-live off by one: a row that the next batch needs is evicted."""
    plans = LocalPlans.plans

    def shortened(source):
        made = list(plans(source))
        for (plan, _), (following, _) in itertools.pairwise(made):
            leaving = {*zip(plan.evict.ids.tolist(), plan.evict.slots.tolist(), strict=True)}
            needed = {*following.rows.of_table(0)[0].tolist()} - {*following.fetch.of_table(0)[0].tolist()}
            early = [
                (row, slot)
                for row, slot in zip(*(part.tolist() for part in plan.rows.of_table(0)), strict=True)
                if row in needed and (row, slot) not in leaving
            ]
            if early:
                ids, slots = (np.array(part) for part in zip(*early, strict=True))
                evict = RowList(
                    np.concatenate([ids.astype(np.int64), plan.evict.ids]),
                    np.concatenate([slots.astype(np.int32), plan.evict.slots]),
                    plan.evict.bounds + np.where(np.arange(len(plan.evict.bounds)) > 0, len(early), 0),
                )
                object.__setattr__(plan, "evict", evict)
                break
        yield from made

    patch.setattr(LocalPlans, "plans", shortened)


def writes_back_twice(patch):
    write = Pipeline._write

    def twice(pipeline, *leaving):
        yield from write(pipeline, *leaving)
        yield from write(pipeline, *leaving)

    patch.setattr(Pipeline, "_write", twice)


def writes_back_an_old_copy(patch):
    """A copy that was made before the update, written late."""
    copy_kept = RowCache.copy_kept
    kept = {}

    def old(cache, table, ids, slots):
        rows = copy_kept(cache, table, ids, slots)
        values = rows.values.copy()
        for position, row in enumerate(rows.ids.tolist()):
            kept[table, row], values[position] = values[position].copy(), kept.get((table, row), values[position])
        return TableRows(table, rows.ids, values)

    patch.setattr(RowCache, "copy_kept", old)


def drops_a_write_back(patch):
    write = Pipeline._write
    count = itertools.count()

    def dropped(pipeline, leaving, *passed):
        yield from write(pipeline, [] if next(count) == 3 else leaving, *passed)

    patch.setattr(Pipeline, "_write", dropped)


def forgets_victims(patch):
    class Forgetful(deque):
        def append(self, item):
            pass

    make = Pipeline.__init__

    def forgetful(pipeline, *arguments):
        make(pipeline, *arguments)
        pipeline._victims = Forgetful()

    patch.setattr(Pipeline, "__init__", forgetful)


def swaps_slots(patch):
    insert = RowCache.insert
    patch.setattr(
        RowCache, "insert", lambda cache, t, ids, slots, values: insert(cache, t, ids, swapped(slots), values)
    )


def names_wrong_slots(patch):
    begin = bagpipe.Batches._begin_iteration

    def wrong(batches, plan, micro):
        rows = plan.rows
        slots = rows.slots.copy()
        first = int(rows.bounds[1])
        slots[:first] = slots[:first][::-1]
        begin(batches, dataclasses.replace(plan, rows=RowList(rows.ids, slots, rows.bounds)), micro)

    patch.setattr(bagpipe.Batches, "_begin_iteration", wrong)


def inserts_nothing(patch):
    """Prefetched values that never reach the cache."""

    def insert(cache, table, ids, slots, values):
        cache.tenant_table[cache.group[table]][slots] = table
        cache.tenant_id[cache.group[table]][slots] = ids
        cache.dirty[cache.group[table]][slots] = False

    patch.setattr(RowCache, "insert", insert)


def leaves_state_in_the_slot(patch):
    """The optimizer state of the slot's last tenant."""
    insert = RowCache.insert

    def vectors_only(cache, table, ids, slots, values):
        mixed = cache.read(cache.group[table], slots)
        mixed[:, :4] = values[:, :4]
        insert(cache, table, ids, slots, mixed)

    patch.setattr(RowCache, "insert", vectors_only)


def loses_a_dirty_flag(patch):
    mark = RowCache.mark_updated
    patch.setattr(RowCache, "mark_updated", lambda cache, table, slots: mark(cache, table, slots[1:]))


def acknowledges_too_early(patch):
    """The store does not have the rows yet."""

    def write_back(pipeline):
        while True:
            yield Wait("an update", pipeline._has_work)
            if pipeline._victims:
                yield from pipeline._write(pipeline._victims.popleft()[1])
            elif pipeline._trained:
                plan = pipeline._trained.popleft()
                leaving = pipeline._copy_out(plan.evict)
                pipeline.points.copied_out = pipeline.points.acknowledged = plan.iteration
                yield from pipeline._write(leaving)
            else:
                yield from pipeline._flush()
                return

    patch.setattr(Pipeline, "_write_back", write_back)


def acknowledges_before_the_victims(patch):
    """An iteration counts as acknowledged though its victims are still on their way."""

    def write_back(pipeline):
        while True:
            yield Wait("an update", pipeline._has_work)
            if pipeline._trained:
                plan = pipeline._trained.popleft()
                leaving = pipeline._copy_out(plan.evict)
                pipeline.points.copied_out = plan.iteration
                yield from pipeline._write(leaving)
                pipeline.points.acknowledged = plan.iteration
            elif pipeline._victims:
                yield from pipeline._write(pipeline._victims.popleft()[1])
            else:
                yield from pipeline._flush()
                return

    patch.setattr(Pipeline, "_write_back", write_back)


def weakened(point):
    """A wait for this point that does not wait."""

    def put_in(patch):
        reached = Pipeline._reached
        patch.setattr(
            Pipeline,
            "_reached",
            lambda pipeline, name, iteration: (lambda: True) if name == point else reached(pipeline, name, iteration),
        )

    return put_in


def fetches_without_waiting(patch):
    patch.setattr(Fetching, "_in_store", lambda _fetching, _after: lambda: True)


def copies_evictions_out_before_the_update(patch):
    """Wait 1 of the write-back stage: a plan comes to it when it is taken, not when it is updated."""
    take = Pipeline.take

    def early(pipeline):
        plan, batches = take(pipeline)
        pipeline._trained.append(plan)
        pipeline._driver.notify()
        return plan, batches

    def updated(pipeline, plan):
        pipeline.points.updated = plan.iteration
        pipeline._driver.notify()

    patch.setattr(Pipeline, "take", early)
    patch.setattr(Pipeline, "updated", updated)


def forgets_rows_at_the_end(patch):
    take_dirty = RowCache.take_dirty
    patch.setattr(RowCache, "take_dirty", lambda cache, most: (block[1:] for block in take_dirty(cache, most)))


SMALL = {"cache": 16, "lookahead": 3}
LRU = {"cache": 16, "policy": "lru"}
DEFECTS = {
    stays_one_iteration_too_short: (
        r"iteration \d+: row \d+ of table 'user' should be in slot \d+, where nothing is",
        {"cache": 60, "lookahead": 4},
    ),
    writes_back_twice: (
        r"after iteration \d+: row \d+ of table '\w+' is written twice",
        SMALL,
    ),
    writes_back_an_old_copy: (
        r"after iteration \d+: row \d+ of table '\w+' is written with other bits",
        SMALL,
    ),
    drops_a_write_back: (
        r"row \d+ of table '\w+' (is stale in the store|is read while its write-back|was updated at)",
        SMALL,
    ),
    forgets_victims: (
        r"row \d+ of table '\w+' (is read while its write-back|is stale|was updated at)",
        LRU,
    ),
    swaps_slots: (
        r"row \d+ of table '\w+' (has changed in slot|leaves slot|is written with other bits)",
        SMALL,
    ),
    names_wrong_slots: (
        r"row \d+ of table 'user' should be in slot \d+, where row \d+",
        SMALL,
    ),
    inserts_nothing: (
        r"row \d+ of table '\w+' has changed in slot \d+ since its initial value",
        SMALL,
    ),
    leaves_state_in_the_slot: (
        r"row \d+ of table '\w+' has changed in slot",
        SMALL,
    ),
    loses_a_dirty_flag: (
        r"row \d+ of table '\w+' (is evicted and its update of iteration \d+ dropped|was updated at)",
        SMALL,
    ),
    acknowledges_too_early: (
        r"row \d+ of table '\w+' is read while its write-back of iteration \d+ is in flight",
        SMALL,
    ),
    acknowledges_before_the_victims: (
        r"row \d+ of table '\w+' is read while its write-back of iteration \d+ is in flight",
        LRU,
    ),
    copies_evictions_out_before_the_update: (
        r"row \d+ of table '\w+'",
        SMALL,
    ),
    forgets_rows_at_the_end: (
        r"row \d+ of table '\w+' was updated at iteration \d+; the store has",
        {"cache": 60, "stop": 6},
    ),
}
WAITS = {
    "1: copy-out waits for the update": (weakened("updated"), LRU),
    "2: insertion waits for the copy-out": (weakened("copied_out"), SMALL),
    "3: a fetch waits for the acknowledgement": (fetches_without_waiting, SMALL),
}


@functools.cache
def undisturbed():
    """What training gives without a defect; asked for before one is put in."""
    return train(Threads(60), cache=60)


@pytest.fixture(autouse=True)
def computed_before():
    undisturbed()


def caught(options):
    """What the checker says under some schedule, and whether bits differ under some."""
    said, differ = None, False
    for seed in SEEDS:
        if said is None:
            try:
                train(Seeded(seed), **options)
            except ConsistencyError as error:
                said = str(error)
        if not differ:
            try:
                differ = train(Seeded(seed), check=False, **options) != undisturbed()
            except Exception:
                differ = True
        if said is not None and differ:
            break
    return said, differ


@pytest.mark.parametrize("options", [SMALL, LRU, {"cache": 60}, {"cache": 16, "policy": "nocache"}], ids=str)
def test_there_are_no_false_alarms(options):
    for seed in range(12):
        assert train(Seeded(seed), **options) == undisturbed()
    assert train(Threads(60), **options) == undisturbed()


@pytest.mark.parametrize("defect", DEFECTS, ids=lambda defect: defect.__name__)
def test_a_defect_is_named(defect, monkeypatch):
    defect(monkeypatch)
    named, options = DEFECTS[defect]
    said, differ = caught(options)
    assert said is not None, f"no schedule was noticed; bits differ: {differ}"
    assert re.search(named, said), said
    assert "defect of bagpipe" in said


@pytest.mark.parametrize("wait", WAITS)
def test_every_wait_is_needed(wait, monkeypatch):
    put_in, options = WAITS[wait]
    put_in(monkeypatch)
    said, differ = caught(options)
    assert said is not None
    assert differ
