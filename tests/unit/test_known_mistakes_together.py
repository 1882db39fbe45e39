"""Mistakes that public implementations make with several trainers, each provoked, so that its test is seen to see it.

A property is asserted of the system as it is; then the mistake is put in, and the same property must fail.
"""

from __future__ import annotations

import random

import numpy as np
import pytest
import torch

from bagpipe.errors import BagpipeError
from bagpipe.trainer import sync
from bagpipe.trainer.packing import Packing
from bagpipe.trainer.pipeline import Pipeline
from bagpipe.trainer.sync import RowSync
from bagpipe.types import Batch, Ids
from harness.explorer import SYNCS, Together
from harness.trainers import DESIGNS, Several, World, run, run_alone
from harness.world import assert_identical, make_batches

BATCHES = make_batches(7, size=6)


def fails(prove, *arguments):
    """With the mistake in, the property does not hold; the checker is off, so that nothing else sees it."""
    with pytest.raises((AssertionError, BagpipeError)):
        prove(*arguments)


def batches_of(users, repeat=1):
    """A batch for each item, with the ids of its samples, each of them so many times in a row."""
    batches = []
    for number, of_samples in enumerate(users):
        draw = np.random.default_rng(number)
        ids = torch.tensor(of_samples).reshape(-1, 1).repeat_interleave(repeat, 0)
        dense = torch.from_numpy(draw.random((len(of_samples), 3), np.float32)).repeat_interleave(repeat, 0)
        labels = torch.from_numpy((draw.random(len(of_samples)) < 0.5).astype(np.float32)).repeat_interleave(repeat, 0)
        sparse = {"user": Ids(ids), "shown": Ids(ids % 5), "clicked": Ids(ids % 3), "words": Ids(ids * 2**50)}
        batches.append(Batch(dense, sparse, labels, number=number))
    return batches


def prove_every_used_row_is_updated(design):
    """Each trainer has rows of its own in every batch."""
    world = World(batches_of([[3 * n, 3 * n + 1, 3 * n + 2] for n in range(6)]), "sgd", trainers=3)
    found = run(world, design=design, cache=24, check=False)
    assert_identical(world.reference(), found.state)
    ids, _ = found.state.rows["user"]
    assert sorted(ids.tolist()) == list(range(18))


@pytest.mark.parametrize("design", DESIGNS)
def test_rows_that_one_trainer_uses_are_updated(design, monkeypatch):
    """Elsewhere they never are."""
    prove_every_used_row_is_updated(design)
    own_rows = Packing.sums

    def without_own(packing, rows, lists, received, total):
        """What comes from a single trainer counts as nothing."""
        sums = own_rows(packing, rows, lists, received, total)
        return sums.zero_() if len([1 for part in received if part is not None and len(part)]) < 2 else sums

    shared = Packing.shared
    monkeypatch.setattr(Packing, "sums", without_own)
    monkeypatch.setattr(Packing, "shared", lambda *arguments: shared(*arguments).zero_())
    fails(prove_every_used_row_is_updated, design)


def prove_rows_and_dense_are_averaged_alike(design):
    """The same samples on every trainer give what one trainer gives with them once."""
    users = [[1, 2], [2, 3], [1, 4], [5, 1]]
    alone = run_alone(World(batches_of(users), "sgd"), cache=60).state
    world = World(batches_of(users, repeat=3), "sgd", trainers=3, assign="round_robin")
    together = run(world, design=design, cache=60, check=False).state
    for name, value in alone.dense.items():
        torch.testing.assert_close(together.dense[name], value)
    for name, (ids, values) in alone.rows.items():
        others, found = together.rows[name]
        np.testing.assert_allclose(found[np.argsort(others)], values[np.argsort(ids)], rtol=1e-5, atol=1e-7)


@pytest.mark.parametrize("design", DESIGNS)
def test_row_gradients_are_averaged_as_dense_ones_are(design, monkeypatch):
    """Elsewhere embedding gradients are summed over trainers while dense ones are averaged."""
    prove_rows_and_dense_are_averaged_alike(design)
    own, over_ranks = Packing.divided, sync.sum_in_rank_order
    monkeypatch.setattr(Packing, "divided", lambda packing, sums, total: own(packing, sums, total / 3))
    monkeypatch.setattr(
        sync, "sum_in_rank_order", lambda group, part, what, total: over_ranks(group, part, what, total / 3)
    )
    fails(prove_rows_and_dense_are_averaged_alike, design)


HELD = [[0, 9, 8], [9, 0, 8], [9, 0, 8], [8, 9, 0], [0, 0, 9], [9, 8, 0]]
"""Row 0 is in the cache all the time; trainers take turns in using it."""


def prove_copies_stay_equal(design):
    world = World(batches_of(HELD), "adagrad", trainers=3)
    several = Several(world, Together(1), design=design, cache=60, check=False)
    copies = {}

    def before_the_end(one):
        """The cache is let go of when the data ends: look at the last batch."""
        for number, batch in enumerate(one.batches):
            one.train(batch)
            if number == len(HELD) - 1:
                one.batches.barrier()
                copies[one.rank] = [part.clone() for part in one.batches.cache.data]

    assert_identical(world.reference(), several.run(before_the_end).state)
    if design == "replicated":
        for rank in (1, 2):
            for mine, other in zip(copies[0], copies[rank], strict=True):
                assert mine.numpy().tobytes() == other.numpy().tobytes()


@pytest.mark.parametrize("design", ["replicated", "lrpp"])
def test_a_row_held_but_not_touched_stays_equal_to_its_copies(design, monkeypatch):
    """Elsewhere only the trainers that use a row update it."""
    prove_copies_stay_equal(design)
    apply = RowSync._apply

    def only_touched(row_sync, iteration, sums, scalars):
        touched = row_sync.test_own.get(iteration, set())
        kept = [each for each in sums if not each.means.count_nonzero() or touched.issuperset(each.rows.ids.tolist())]
        apply(row_sync, iteration, kept, scalars)

    synchronise = RowSync.synchronise

    def remembered(row_sync, plan, gradients, scalars):
        row_sync.test_own = {plan.iteration: set(plan.rows.ids.tolist()), **getattr(row_sync, "test_own", {})}
        synchronise(row_sync, plan, gradients, scalars)

    monkeypatch.setattr(RowSync, "_apply", only_touched)
    monkeypatch.setattr(RowSync, "synchronise", remembered)
    fails(prove_copies_stay_equal, design)


@pytest.mark.parametrize("design", ["owned", "partitioned"])
def test_a_row_gets_its_newest_value_before_its_next_use(design, monkeypatch):
    """Elsewhere a trainer goes on with the value that it had when it used the row last."""
    prove_copies_stay_equal(design)
    monkeypatch.setattr(Packing, "put_vectors", lambda *_: None)
    fails(prove_copies_stay_equal, design)


def prove_all_train_the_same_batch_in_order():
    trained = {}

    def loop(one):
        for batch in one.batches:
            trained.setdefault(one.rank, []).append(int(batch.dense[0, 0]))
            one.train(batch)

    batches = []
    for number, batch in enumerate(BATCHES):
        dense = batch.dense.clone()
        dense[:, 0] = number
        batches.append(Batch(dense, batch.sparse, batch.labels, number=number))
    world = World(batches, "sgd", trainers=3)
    for seed in range(3):
        trained.clear()
        found = run(world, seed, 20.0, loop=loop, cache=300, check=False)
        assert trained == {rank: list(range(len(batches))) for rank in range(3)}
        assert_identical(world.reference(), found.state)


def test_no_trainer_takes_the_plan_that_arrives_first(monkeypatch):
    """Elsewhere it does; all trainers must train the same batch, in the order of the data."""
    prove_all_train_the_same_batch_in_order()
    take = Pipeline.take
    draw = random.Random(0)

    def any_plan(pipeline):
        pipeline._ready.rotate(draw.randrange(len(pipeline._ready)))
        return take(pipeline)

    monkeypatch.setattr(Pipeline, "take", any_plan)
    fails(prove_all_train_the_same_batch_in_order)


class Planned(Exception):
    """What the next test lets fail."""


def prove_an_error_of_a_stage_is_raised(monkeypatch):
    """It must come out as what it was, in the thread that trains."""
    several = Several(World(BATCHES, trainers=3), Together(0), cache=40)
    victim, sums = several.trainers.batches[1].cache, Packing.sums

    def failing(packing, *arguments):
        if packing._cache is victim and several.ones[1].rows.updates == 3:
            raise Planned("bits have rotted")
        return sums(packing, *arguments)

    with monkeypatch.context() as patch:
        patch.setattr(Packing, "sums", failing)
        with pytest.raises(Exception, match="bits have rotted") as caught:
            several.run()
    error, causes = caught.value, []
    while error is not None:
        causes.append(type(error))
        error = error.__cause__
    assert Planned in causes


def test_errors_of_one_trainer_are_not_swallowed(monkeypatch):
    """Elsewhere they are logged, and the others wait for ever, or go on with what there is."""
    prove_an_error_of_a_stage_is_raised(monkeypatch)
    stage, drive = RowSync.stage, RowSync._drive

    def silent_stage(row_sync):
        try:
            yield from stage(row_sync)
        except Planned:
            return

    def silent_drive(row_sync, steps):
        try:
            return drive(row_sync, steps)
        except Planned:
            return []

    monkeypatch.setattr(RowSync, "stage", silent_stage)
    monkeypatch.setattr(RowSync, "_drive", silent_drive)
    fails(prove_an_error_of_a_stage_is_raised, monkeypatch)


def prove_delayed_updates_are_of_their_own_iteration():
    """Adam's step count is in every update: those that come late must not use the next one's."""
    world = World(BATCHES, "adam", trainers=3)
    for design in ("owned", "lrpp"):
        assert_identical(world.reference(), run(world, design=design, cache=60, check=False, last=(SYNCS,)).state)


def test_a_delayed_gradient_carries_its_own_step_count(monkeypatch):
    """Elsewhere it is applied with whatever counts and rates are current when it arrives."""
    prove_delayed_updates_are_of_their_own_iteration()
    synchronise = RowSync.synchronise

    def current_ones(row_sync, plan, gradients, scalars):
        for task in row_sync._tasks:
            task.scalars = scalars
        synchronise(row_sync, plan, gradients, scalars)

    monkeypatch.setattr(RowSync, "synchronise", current_ones)
    fails(prove_delayed_updates_are_of_their_own_iteration)
