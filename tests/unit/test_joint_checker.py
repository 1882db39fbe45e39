"""The checker of several trainers names each of many defects that are put into one of them or between them."""

from __future__ import annotations

import re

import pytest

from bagpipe.cache import RowCache
from bagpipe.errors import BagpipeError, ConsistencyError
from bagpipe.store.views import StoreView
from bagpipe.trainer.packing import Packing
from bagpipe.trainer.pipeline import Pipeline
from bagpipe.trainer.sync import RowSync, Sum
from harness.explorer import WRITES_BACK, Together
from harness.trainers import DESIGNS, Several, World
from harness.world import assert_identical, make_batches

BATCHES = make_batches(8, size=5)
WORLD = World(BATCHES, trainers=3)


def with_barrier(one):
    """A loop with a barrier in its middle."""
    for number, batch in enumerate(one.batches):
        one.train(batch)
        if number == 4:
            one.batches.barrier()


class Numbered(Several):
    """Whose caches know whose they are, for defects of one trainer only."""

    def __init__(self, *arguments, **settings):
        super().__init__(*arguments, **settings)
        for rank, batches in enumerate(self.trainers.batches):
            batches.cache.test_rank = rank


# Each defect takes a monkeypatch and puts itself in.


def a_vector_does_not_arrive(patch):
    put = Packing.put_vectors

    def lost(packing, lists, buffers):
        if packing._cache.test_rank != 1:
            put(packing, lists, buffers)

    patch.setattr(Packing, "put_vectors", lost)


def a_bit_changes_on_the_way(patch):
    put = Packing.put_vectors

    def flipped(packing, lists, buffers):
        for buffer in buffers if packing._cache.test_rank == 2 else ():
            buffer[:1] += 1e-3
        put(packing, lists, buffers)

    patch.setattr(Packing, "put_vectors", flipped)


def values_are_sent_before_the_update(patch):
    vectors = Packing.vectors
    old = {}

    def stale(packing, lists, moved):
        now = vectors(packing, lists, moved)
        key = packing._cache.test_rank
        before, old[key] = old.get(key), [buffer.clone() for buffer in now]
        same = before is not None and [len(a) for a in before] == [len(b) for b in now]
        return before if same else now

    patch.setattr(Packing, "vectors", stale)


def later_values_are_not_sent(patch):
    send = RowSync._send

    def forgetful(sync, group, values, what):
        if not what.startswith("delayed rows"):
            yield from send(sync, group, values, what)

    patch.setattr(RowSync, "_send", forgetful)


def applied(change):
    """A defect of how gradients become updates."""

    def put_in(patch):
        apply = RowSync._apply

        def changed(sync, iteration, sums, scalars):
            for rows, means, shared in sums:

                def apply_to(sync, iteration, rows, means, scalars, shared=shared):
                    apply(sync, iteration, [Sum(rows, means, shared)], scalars)

                change(sync, apply_to, iteration, rows, means, scalars)

        patch.setattr(RowSync, "_apply", changed)

    return put_in


@applied
def updates_twice(sync, apply, iteration, rows, sums, scalars):
    apply(sync, iteration, rows, sums, scalars)
    if iteration == 3:
        apply(sync, iteration, rows, sums, scalars)


@applied
def one_owner_does_not_update(sync, apply, iteration, rows, sums, scalars):
    if sync.rank != 1 or iteration < 2:
        apply(sync, iteration, rows, sums, scalars)


@applied
def one_copy_gets_another_gradient(sync, apply, iteration, rows, sums, scalars):
    apply(sync, iteration, rows, sums * 1.5 if sync.rank == 1 else sums, scalars)


@applied
def one_copy_is_not_updated(sync, apply, iteration, rows, sums, scalars):
    if sync.rank != 2:
        apply(sync, iteration, rows, sums, scalars)


def a_fetch_does_not_wait_for_other_trainers(patch):
    patch.setattr(StoreView, "reached", lambda _view, _after: True)


def nobody_writes_a_row(patch):
    copy_kept = RowCache.copy_kept

    def forgetful(cache, table, ids, slots):
        rows = copy_kept(cache, table, ids, slots)
        return rows if cache.test_rank != 1 else rows._replace(ids=rows.ids[:0], values=rows.values[:0])

    patch.setattr(RowCache, "copy_kept", forgetful)


def copies_are_not_given_up(patch):
    """A barrier then writes what its last user has updated alone, or a row twice."""
    patch.setattr(RowCache, "drop", lambda *_: None)


def a_row_is_written_by_two(patch):
    write = Pipeline._write

    def twice(pipeline, leaving, *passed):
        yield from write(pipeline, leaving)
        yield from write(pipeline, leaving, *passed)

    patch.setattr(Pipeline, "_write", twice)


def slots_are_taken_too_early(patch):
    reached = Pipeline._reached
    patch.setattr(
        Pipeline, "_reached", lambda p, name, after: (lambda: True) if name == "copied_out" else reached(p, name, after)
    )


ROW = r"trainer \d, (after )?iteration -?\d+: row -?\d+ of table '\w+' "
DEFECTS = {
    a_vector_does_not_arrive: ("owned partitioned", "came from trainer . with other bits"),
    a_bit_changes_on_the_way: ("owned partitioned", "came from trainer . with other bits"),
    values_are_sent_before_the_update: ("owned partitioned", "came from trainer . with other bits"),
    later_values_are_not_sent: ("owned partitioned", "(is stale in the cache|should be in slot)"),
    updates_twice: ("owned partitioned replicated lrpp", "is updated twice at iteration 3"),
    one_owner_does_not_update: ("owned partitioned", "(was not updated at iteration|is stale)"),
    one_copy_gets_another_gradient: ("replicated lrpp", "differs from other trainers' copies"),
    one_copy_is_not_updated: (
        "replicated lrpp",
        "(is stale in the cache|leaves stale|is updated at iteration|was not)",
    ),
    a_fetch_does_not_wait_for_other_trainers: (
        "owned lrpp",
        "is (read while trainer .* is in flight|stale in the store)",
    ),
    nobody_writes_a_row: ("owned replicated lrpp", "is evicted and its update of iteration . dropped"),
    copies_are_not_given_up: (
        "lrpp",
        "(is written by a barrier without being here|is evicted|is written twice)",
    ),
    a_row_is_written_by_two: ("owned lrpp", "(is written twice|is written without having left)"),
    slots_are_taken_too_early: ("owned replicated", "(is updated in|is put into|should be in|leaves) slot"),
}
CASES = [(defect, design) for defect, (designs, _) in DEFECTS.items() for design in designs.split()]


@pytest.mark.parametrize(("defect", "design"), CASES, ids=lambda value: getattr(value, "__name__", value))
def test_a_defect_is_named(defect, design, monkeypatch):
    defect(monkeypatch)
    said = None
    for seed in range(12):
        several = Numbered(
            WORLD, Together(seed, last=frozenset({WRITES_BACK} if seed % 2 else ())), design=design, cache=36
        )
        try:
            several.run(with_barrier)
        except BagpipeError as error:
            found = error if isinstance(error, ConsistencyError) else error.__cause__
            assert isinstance(found, ConsistencyError)
            said = str(found)
            break
    assert said is not None, "no schedule was noticed"
    assert re.match(ROW + ".*" + DEFECTS[defect][1], said), said
    assert said.endswith("this is a defect of bagpipe, please report it")


@pytest.mark.parametrize("design", DESIGNS)
def test_every_row_of_every_batch_is_looked_at(design):
    several = Several(WORLD, Together(1), design=design, cache=36)
    assert_identical(WORLD.reference(), several.run(with_barrier).state)
    for one in several.ones:
        assert one.batches._checker.checked_rows == one.batches._pipeline.traffic.unique_rows > 0


@pytest.mark.parametrize("design", DESIGNS)
def test_threads_raise_no_false_alarm(design):
    for policy in ("lookahead", "lru"):
        Several(WORLD, design=design, cache=36, policy=policy).run(with_barrier)


def test_it_costs_nothing_where_it_is_off():
    several = Several(WORLD, Together(0), check=False)
    assert [one.batches._checker for one in several.ones] == [None] * 3
    several.run()
