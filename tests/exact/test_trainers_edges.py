"""Several trainers in the corners: no samples, no step, clipping, leaving early, other models (I1)."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch
from torch import nn

from bagpipe import Batch, Ids, clip_grad_norm_, optim
from harness.explorer import SYNCS, WRITES_BACK
from harness.seams import unbounded_rows
from harness.trainers import DESIGNS, Several, World, run, run_alone
from harness.world import assert_identical, make_batches

BATCHES = make_batches(7, size=5, last=2)


def assert_close(expected, found, tolerance=1e-5):
    """Equal rows and parameters, to float tolerance."""
    assert expected.dense.keys() == found.dense.keys()
    for name, value in expected.dense.items():
        torch.testing.assert_close(found.dense[name], value, rtol=tolerance, atol=tolerance)
    assert expected.rows.keys() == found.rows.keys()
    for name, (ids, values) in expected.rows.items():
        others, found_values = found.rows[name]
        order, other_order = np.argsort(ids), np.argsort(others)
        assert ids[order].tolist() == others[other_order].tolist()
        np.testing.assert_allclose(found_values[other_order], values[order], rtol=tolerance, atol=tolerance)


@pytest.mark.parametrize("delayed", [True, False])
@pytest.mark.parametrize("design", DESIGNS)
@pytest.mark.parametrize(("size", "last"), [(1, None), (3, 1), (5, 3)])
def test_trainers_without_a_sample_take_part_all_the_same(design, delayed, size, last):
    world = World(make_batches(6, size=size, last=last), "adam", trainers=4, assign="round_robin")
    found = run(world, design=design, delayed=delayed, cache=40)
    assert_identical(world.reference(), found.state)


def batches_of_users(users):
    """A batch for each item of `users`, which says for each trainer whose id its samples have; the rest is constant."""
    batches = []
    for number, of_ranks in enumerate(users):
        ids = torch.tensor(of_ranks).reshape(-1, 1)
        random = np.random.default_rng(number)
        dense = torch.from_numpy(random.random((len(ids), 3), np.float32))
        labels = torch.from_numpy((random.random(len(ids)) < 0.5).astype(np.float32))
        sparse = {"user": Ids(ids), "shown": Ids(ids % 5), "clicked": Ids(ids % 3), "words": Ids(ids * 2**50)}
        batches.append(Batch(dense, sparse, labels, number=number))
    return batches


LIFES = {
    "held but not touched": [[0, 9, 9], [9, 8, 8], [8, 9, 8], [9, 9, 0], [9, 8, 9], [0, 0, 0]],
    "exclusive, shared, exclusive": [[0, 8, 9], [0, 0, 0], [8, 0, 9], [0, 0, 9], [9, 8, 0]],
    "from hand to hand": [[0, 1, 2], [2, 0, 1], [1, 2, 0], [0, 1, 2], [2, 0, 1]],
    "comes back": [[0, 1, 2], [3, 4, 5], [6, 7, 8], [9, 10, 11], [2, 1, 0], [12, 13, 14], [0, 0, 0]],
}


@pytest.mark.parametrize("lookahead", [1, "auto"])
@pytest.mark.parametrize("design", DESIGNS)
@pytest.mark.parametrize("life", LIFES)
def test_a_row_has_its_value_wherever_it_goes(life, design, lookahead):
    world = World(batches_of_users(LIFES[life]), "momentum", trainers=3)
    for seed, last in enumerate([(SYNCS,), ((1, WRITES_BACK),)]):
        found = run(world, seed, last=last, design=design, lookahead=lookahead, cache=24)
        assert_identical(world.reference(), found.state)


def accumulating(one):
    """Two batches an iteration."""
    one.optimizer.zero_grad()
    for batch in one.batches():
        loss = nn.functional.binary_cross_entropy_with_logits(one.model(batch.dense, batch.sparse), batch.labels)
        if len(batch):
            loss.backward()
        else:
            (loss * 0).backward()
        if one.loader.step_due:
            one.step()
            one.optimizer.zero_grad()


@pytest.mark.parametrize(
    ("trainers", "size", "last", "accumulate", "assign"),
    [(2, 5, 2, 2, "contiguous"), (3, 5, 2, 3, "round_robin"), (4, 2, 1, 3, "round_robin"), (3, 4, 1, 2, "aware")],
)
def test_accumulated_batches_give_what_one_trainer_gives(trainers, size, last, accumulate, assign):
    """Also where the batches of an iteration are divided in different ways, and some parts are empty."""
    batches = make_batches(8, size=size, last=last)
    batches.insert(3, make_batches(1, size=1, seed=5)[0])
    batches = [Batch(b.dense, b.sparse, b.labels, number=number) for number, b in enumerate(batches)]
    world = World(batches, "adagrad", trainers=trainers, assign=assign)
    expected = run_alone(world, loop=accumulating, accumulate=accumulate)
    found = [
        run(world, loop=accumulating, accumulate=accumulate, design=design, delayed=delayed, lookahead=lookahead)
        for design, delayed, lookahead in [
            ("owned", True, 2), ("partitioned", True, 1), ("replicated", False, 5), ("lrpp", True, "auto"),
            ("owned", False, "auto"),
        ]
    ]  # fmt: skip
    for other in found[1:]:
        assert_identical(found[0].state, other.state)
    assert found[0].updates == expected.updates == -(-len(batches) // accumulate)
    assert_close(expected.state, found[0].state, 1e-4)


@pytest.mark.parametrize("design", DESIGNS)
@pytest.mark.parametrize("skipped", [{0, 3, 4}, {5, 6}, set(range(7))])
def test_iterations_without_a_step_change_nothing(design, skipped):
    def loop(one):
        for number, batch in enumerate(one.batches()):
            one.backward(batch)
            if number in skipped:
                one.optimizer.zero_grad()
            else:
                one.step()

    world = World(BATCHES, "adam", trainers=3)
    found = run(world, loop=loop, design=design, cache=40, lookahead=3)
    assert found.updates == 7 - len(skipped)
    if len(skipped) < 7:
        assert_identical(world.reference([b for n, b in enumerate(BATCHES) if n not in skipped]), found.state)
    else:
        assert not found.state.rows


def clipping(max_norm, norms):
    def loop(one):
        for batch in one.batches():
            one.backward(batch)
            norms.setdefault(one.rank, []).append(clip_grad_norm_(one.model.parameters(), one.loader, max_norm).item())
            one.step()

    return loop


def test_clipping_by_norm_gives_the_same_bits_whoever_has_the_rows():
    world = World(BATCHES, "adagrad", trainers=3)
    found, all_norms = [], []
    for design in DESIGNS:
        for delayed, lookahead, cache in [(True, 1, 40), (True, "auto", 300), (False, 3, 40)]:
            norms = {}
            loop = clipping(0.35, norms)
            how = {"design": design, "delayed": delayed, "lookahead": lookahead, "cache": cache}
            found.append(run(world, loop=loop, **how).state)
            assert norms[0] == norms[1] == norms[2]
            all_norms.append(norms[0])
    assert all(norms == all_norms[0] for norms in all_norms)
    assert min(all_norms[0]) < 0.35 < max(all_norms[0]), "some are clipped, some are not"
    for other in found[1:]:
        assert_identical(found[0], other)
    alone = {}
    expected = run_alone(world, loop=clipping(0.35, alone))
    assert_close(expected.state, found[0])
    np.testing.assert_allclose(all_norms[0], alone[0], rtol=1e-4)


def poison(_layer, _arguments, output):
    """A forward hook: what comes back to the layer is not finite."""
    output.register_hook(lambda grad: grad * math.inf)


def scaling(bad, where):
    """A loop with a GradScaler; at one batch one trainer has gradients that are not finite, of all or of rows only."""

    def loop(one):
        scaler = torch.amp.GradScaler("cpu", init_scale=2.0**8)
        for number, batch in enumerate(one.batches()):
            poisoned = number == bad and one.rank == 1
            handle = None
            if poisoned and where == "rows":
                handle = one.model.embeddings["user"].register_forward_hook(poison)
            loss = nn.functional.binary_cross_entropy_with_logits(one.model(batch.dense, batch.sparse), batch.labels)
            if poisoned and where == "loss":
                loss = loss * math.inf
            one.optimizer.zero_grad()
            scaler.scale(loss).backward()
            if handle is not None:
                handle.remove()
            scaler.step(one.optimizer)
            scaler.update()
        return scaler.get_scale()

    return loop


@pytest.mark.parametrize("design", DESIGNS)
def test_a_gradient_that_is_not_finite_on_one_trainer_is_skipped_by_all(design):
    world = World(BATCHES, "adagrad", trainers=3)
    found = run(world, loop=scaling(3, "loss"), design=design, cache=40)
    assert found.results == [2.0**7] * 3
    assert found.updates == 6
    assert_identical(world.reference(BATCHES[:3] + BATCHES[4:]), found.state)


def test_rows_alone_that_are_not_finite_on_one_trainer_are_skipped_by_all():
    world = World(BATCHES, "adagrad", trainers=3)
    found = [run(world, loop=scaling(3, "rows"), design=design, cache=40) for design in DESIGNS]
    for other in found:
        assert other.updates == 6
        assert other.results == [2.0**7] * 3
        assert_identical(found[0].state, other.state)
    assert all(np.isfinite(values).all() for _, values in found[0].state.rows.values())


@pytest.mark.parametrize("design", DESIGNS)
@pytest.mark.parametrize("step", [True, False])
def test_all_may_break_off(design, step):
    def loop(one):
        for number, batch in enumerate(one.loader):
            one.backward(batch)
            if number == 4 and not step:
                one.optimizer.zero_grad()
                break
            one.step()
            if number == 4:
                break

    world = World(BATCHES, "adagrad", trainers=3)
    for seed in range(3):
        found = run(world, seed, loop=loop, design=design, cache=40)
        assert_identical(world.reference(BATCHES[: 4 + step]), found.state)


class Mixed(nn.Module):
    """Vectors of other lengths in each table, one of them frozen, one averaged, one without pooling."""

    def __init__(self):
        super().__init__()
        self.output = nn.Linear(3 + 4 + 7 + 7 + 2, 1)
        with torch.device("meta"):
            self.user = nn.Embedding(40, 4)
            self.ad = nn.EmbeddingBag(25, 7, mode="mean")
            self.word = nn.EmbeddingBag(unbounded_rows(2), 2, mode="sum")
        self.word.weight.requires_grad_(False)

    def forward(self, dense, sparse):
        words = sparse["words"]
        parts = [self.user(sparse["user"].values).flatten(1), self.ad(sparse["shown"].values)]
        parts += [self.ad(sparse["clicked"].values), self.word(words.values, words.offsets, words.weights)]
        return self.output(torch.cat([dense, *parts], 1)).squeeze(1)


def make_mixed():
    torch.manual_seed(4)
    return Mixed()


@pytest.mark.parametrize("delayed", [True, False])
@pytest.mark.parametrize("design", DESIGNS)
def test_tables_may_be_frozen_shared_weighted_and_of_other_widths(design, delayed):
    for optimizer in ("adagrad", lambda: optim.PerTable(optim.Adam(0.01), {"user": optim.SGD(0.1)})):
        world = World(BATCHES, optimizer, make_mixed, trainers=3)
        for policy, cache in (("lookahead", 60), ("lru", 60)):
            found = run(world, design=design, delayed=delayed, policy=policy, cache=cache)
            assert sorted(found.state.rows) == ["ad", "user"], "the frozen table was never written"
            assert_identical(world.reference(), found.state)


@pytest.mark.parametrize("design", DESIGNS)
def test_threads_give_the_same_bits_as_one_step_at_a_time(design):
    world = World(BATCHES, "adam", trainers=3)
    for policy in ("lookahead", "lru"):
        found = Several(world, design=design, policy=policy, cache=40).run()
        assert_identical(world.reference(), found.state)
