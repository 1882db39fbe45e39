"""What public implementations get wrong with several trainers, asserted of this one.

That such defects are noticed is in tests/exact/test_sabotage.py; the one that no seam lets in is provoked here.
"""

from __future__ import annotations

import numpy as np
import pytest
import torch

from bagpipe.errors import BagpipeError
from bagpipe.trainer.row_sync import RowSync
from bagpipe.types import Batch, Ids
from harness.explorer import SYNCS, Together
from harness.trainers import DESIGNS, Several, World, run, run_alone
from harness.world import assert_identical, make_batches

BATCHES = make_batches(7, size=6)


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


@pytest.mark.parametrize("design", DESIGNS)
def test_rows_that_one_trainer_uses_are_updated(design):
    """Elsewhere they never are; each trainer has rows of its own in every batch."""
    world = World(batches_of([[3 * n, 3 * n + 1, 3 * n + 2] for n in range(6)]), "sgd", trainers=3)
    found = run(world, design=design, cache=24, check=False)
    assert_identical(world.reference(), found.state)
    ids, _ = found.state.rows["user"]
    assert sorted(ids.tolist()) == list(range(18))


@pytest.mark.parametrize("design", DESIGNS)
def test_row_gradients_are_averaged_as_dense_ones_are(design):
    """Elsewhere they are summed; the same samples on every trainer give what one gives with them once."""
    users = [[1, 2], [2, 3], [1, 4], [5, 1]]
    alone = run_alone(World(batches_of(users), "sgd"), cache=60).state
    world = World(batches_of(users, repeat=3), "sgd", trainers=3, assign="round_robin")
    together = run(world, design=design, cache=60, check=False).state
    for name, value in alone.dense.items():
        torch.testing.assert_close(together.dense[name], value)
    for name, (ids, values) in alone.rows.items():
        others, found = together.rows[name]
        np.testing.assert_allclose(found[np.argsort(others)], values[np.argsort(ids)], rtol=1e-5, atol=1e-7)


HELD = [[0, 9, 8], [9, 0, 8], [9, 0, 8], [8, 9, 0], [0, 0, 9], [9, 8, 0]]
"""Row 0 is in the cache all the time; trainers take turns in using it."""


@pytest.mark.parametrize("design", DESIGNS)
def test_a_row_held_but_not_touched_stays_equal_to_its_copies(design):
    """Elsewhere only the trainers that use a row update it, or one goes on with the value that it used last."""
    world = World(batches_of(HELD), "adagrad", trainers=3)
    several = Several(world, Together(1), design=design, cache=60, check=False)
    copies = {}

    def before_the_end(one):
        """The cache is let go of when the data ends: look at the last batch."""
        for number, batch in enumerate(one.batches()):
            one.train(batch)
            if number == len(HELD) - 1:
                one.loader.flush()
                copies[one.rank] = [part.clone() for part in one.loop.cache.data]

    assert_identical(world.reference(), several.run(before_the_end).state)
    if design == "replicated":
        for rank in (1, 2):
            for mine, other in zip(copies[0], copies[rank], strict=True):
                assert mine.numpy().tobytes() == other.numpy().tobytes()


def test_no_trainer_takes_the_plan_that_arrives_first():
    """Elsewhere it does; all trainers must train the same batch, in the order of the data."""
    trained = {}

    def loop(one):
        for batch in one.batches():
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
    with pytest.raises((AssertionError, BagpipeError)):
        prove_delayed_updates_are_of_their_own_iteration()
