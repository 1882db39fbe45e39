"""The ground truth itself, compared with plain PyTorch and with its own definition."""

from pathlib import Path

import numpy as np
import pytest
import torch
from torch import nn

import bagpipe.reference
from bagpipe import optim
from bagpipe.layers import bind
from bagpipe.layout import RowLayout
from bagpipe.models import build_model
from bagpipe.oracle.assign import Assigner, Assignment
from bagpipe.reference import Reference, Rows
from bagpipe.state import of_reference
from bagpipe.types import Batch, Ids, Table, contiguous_parts
from harness.world import OPTIMIZERS, TABLES, assert_identical, dense_sgd, initial, make_batches, train_reference

SIZED = (Table("user", 40), Table("ad", 25, ("shown", "clicked")))


def sized(batch):
    """Without the feature that has 64-bit ids, which nn.EmbeddingBag can't look up."""
    return Batch(batch.dense, {name: batch.sparse[name] for name in ("user", "shown", "clicked")}, batch.labels)


def test_it_reads_from_top_to_bottom_in_under_200_lines():
    assert len(Path(bagpipe.reference.__file__).read_text().splitlines()) < 200


@pytest.mark.parametrize("name", ["dlrm", "wide_deep", "deep_cross", "deepfm"])
def test_training_equals_plain_pytorch_within_tolerance(name):
    batches = [sized(batch) for batch in make_batches(10, last=2)]
    plain = build_model(name, SIZED, 3, 5, seed=3)
    model = build_model(name, SIZED, 3, 5, torch.device("meta"), seed=3)
    binding = bind(model, list(batches[0].sparse), tables=SIZED)
    layouts = [RowLayout(t, binding.dims(n), optim.SGD(0.1), initial(t)) for n, t in enumerate(binding.tables)]
    for layer in binding.layers:
        layout = layouts[layer.table]
        rows = np.empty((layout.table.rows, layout.width), np.float32)
        layout.initialise(np.arange(layout.table.rows), rows)
        column = layout.columns[layer.part]
        vectors = torch.from_numpy(rows[:, column : column + layer.module.embedding_dim])
        plain.get_submodule(layer.name).weight.data.copy_(vectors)
    reference = Reference(model, binding, layouts, dense_sgd)
    optimizer = torch.optim.SGD(plain.parameters(), lr=0.1)
    for batch in batches:
        loss = nn.functional.binary_cross_entropy_with_logits(plain(batch.dense, batch.sparse), batch.labels)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        assert reference.step(batch) == pytest.approx(loss.item(), rel=1e-5)
    state = of_reference(reference)
    for key, value in state.dense.items():
        torch.testing.assert_close(value, plain.get_parameter(key))
    for layer in binding.layers:
        ids, rows = state.rows[binding.tables[layer.table].name]
        column = layouts[layer.table].columns[layer.part]
        found = torch.from_numpy(rows[:, column : column + layer.module.embedding_dim])
        torch.testing.assert_close(found, plain.get_submodule(layer.name).weight.detach()[ids])


@pytest.mark.parametrize("trainers", [2, 3, 4])
@pytest.mark.parametrize("optimizer", OPTIMIZERS)
def test_several_trainers_train_as_one_within_tolerance(trainers, optimizer):
    """Uneven parts and trainers without a sample included: six samples on four trainers, and a last batch of two."""
    batches = make_batches(6, last=2)
    one, _ = train_reference(batches, OPTIMIZERS[optimizer](), "wide_deep")
    many, _ = train_reference(batches, OPTIMIZERS[optimizer](), "wide_deep", trainers)
    for name, value in one.dense.items():
        torch.testing.assert_close(many.dense[name], value, rtol=1e-3, atol=1e-5)
    for name, (ids, rows) in one.rows.items():
        found_ids, found = many.rows[name]
        assert sorted(ids) == sorted(found_ids)
        np.testing.assert_allclose(found[np.argsort(found_ids)], rows[np.argsort(ids)], rtol=1e-3, atol=1e-4)


def test_gradients_of_trainers_are_averaged_over_samples_in_rank_order():
    """By hand: g = (n_1 * g_1 + n_2 * g_2) / N with g_i from each trainer's own part, for rows and dense alike."""
    batch = make_batches(1, size=5)[0]
    both, _ = train_reference([batch], optim.SGD(1.0), "wide_deep", trainers=2)
    parts = [batch.part(start, stop) for start, stop in contiguous_parts(5, 2)]
    alone = [train_reference([part], optim.SGD(1.0), "wide_deep")[0] for part in parts]
    ids = np.array([int(both.rows["user"][0][0])])
    first = np.empty((1, 5), np.float32)
    initial(TABLES[0]).fill(ids, first)
    total = np.zeros((1, 5), np.float32)
    for part, state in zip(parts, alone, strict=True):
        where = np.flatnonzero(state.rows["user"][0] == ids[0])
        if len(where):
            total += len(part) * (first - state.rows["user"][1][where])
    found = both.rows["user"][1][np.flatnonzero(both.rows["user"][0] == ids[0])]
    np.testing.assert_allclose(found, first - total / 5, rtol=1e-4, atol=1e-6)


def uneven(batch):
    """Three trainers: one with the odd samples, one with none, one with the even samples."""
    odd, even = np.arange(1, len(batch), 2), np.arange(0, len(batch), 2)
    return Assignment(np.concatenate([odd, even]), (0, len(odd), len(odd), len(batch)))


@pytest.mark.parametrize("optimizer", OPTIMIZERS)
def test_any_assignment_of_samples_trains_as_one_trainer_within_tolerance(optimizer):
    batches = make_batches(4, last=2)
    one, _ = train_reference(batches, OPTIMIZERS[optimizer](), "wide_deep")
    for assign in (Assigner("round_robin", 3), uneven):
        many, _ = train_reference(batches, OPTIMIZERS[optimizer](), "wide_deep", 3, assign)
        for name, value in one.dense.items():
            torch.testing.assert_close(many.dense[name], value, rtol=1e-3, atol=1e-5)
        for name, (ids, rows) in one.rows.items():
            found_ids, found = many.rows[name]
            assert sorted(ids) == sorted(found_ids)
            np.testing.assert_allclose(found[np.argsort(found_ids)], rows[np.argsort(ids)], rtol=1e-3, atol=1e-4)


def test_an_assignment_is_the_contiguous_one_of_the_samples_in_its_order():
    batches = make_batches(4, size=7, last=3)
    assigner = Assigner("round_robin", 3)
    assigned, losses = train_reference(batches, optim.Adagrad(0.1), "wide_deep", 3, assigner)
    arranged = [batch.take(assigner(batch).order) for batch in batches]
    bounds = {len(batch): assigner(batch).bounds for batch in batches}
    expected, expected_losses = train_reference(
        arranged, optim.Adagrad(0.1), "wide_deep", 3, lambda batch: Assignment(None, bounds[len(batch)])
    )
    assert losses == expected_losses
    assert_identical(expected, assigned)
    plain, _ = train_reference(batches, optim.Adagrad(0.1), "wide_deep", 3)
    assert plain.sha256() != assigned.sha256()


def test_without_an_assignment_parts_are_contiguous():
    batches = make_batches(4, size=7, last=3)
    plain, losses = train_reference(batches, optim.Adam(0.1), "wide_deep", 4)
    given, given_losses = train_reference(batches, optim.Adam(0.1), "wide_deep", 4, Assigner("contiguous", 4))
    assert losses == given_losses
    assert_identical(plain, given)


def test_a_trainer_without_samples_changes_nothing():
    def without_the_empty_part(batch):
        return Assignment(uneven(batch).order, (0, len(batch) // 2, len(batch)))

    batches = make_batches(3)
    without, _ = train_reference(batches, optim.SGD(0.1), "wide_deep", 2, without_the_empty_part)
    with_empty, _ = train_reference(batches, optim.SGD(0.1), "wide_deep", 3, uneven)
    assert_identical(without, with_empty)


def test_reading_rows_creates_none():
    rows = Rows(RowLayout(TABLES[2], (3,), optim.Adagrad(0.1), initial(TABLES[2])))
    ids = np.array([5, -(2**63), 2**63 - 1])
    once, again = rows.read(ids), rows.read(ids)
    assert rows.written == {}
    assert (once == again).all()
    assert len(np.unique(once[:, 0])) == 3


def test_evaluation_changes_nothing():
    batches = make_batches(4)
    model = build_model("wide_deep", TABLES, 3, 5, torch.device("meta"), seed=3)
    binding = bind(model, list(batches[0].sparse), tables=TABLES)
    layouts = [RowLayout(t, binding.dims(n), optim.Adam(0.1), initial(t)) for n, t in enumerate(binding.tables)]
    reference = Reference(model, binding, layouts, dense_sgd)
    for batch in batches:
        reference.step(batch)
        before = of_reference(reference).sha256()
        reference.predict(batches[-1])
        assert of_reference(reference).sha256() == before
    expected, _ = train_reference(batches, optim.Adam(0.1), "wide_deep")
    assert of_reference(reference).sha256() == expected.sha256()


class Pooled(nn.Module):
    """Layers of every kind on one table each."""

    def __init__(self, device=None):
        super().__init__()
        self.mean = nn.EmbeddingBag(9, 3, mode="mean", padding_idx=2, device=device)
        self.plain = nn.Embedding(9, 3, padding_idx=1, device=device)
        self.frozen = nn.EmbeddingBag(9, 3, mode="sum", device=device)
        self.frozen.weight.requires_grad_(False)

    def forward(self, dense, sparse):
        mean = self.mean(sparse["mean"].values, sparse["mean"].offsets)
        plain = self.plain(sparse["plain"].values).sum(1)
        frozen = self.frozen(sparse["frozen"].values)
        return (mean * plain + frozen).sum(1) + dense.sum(1)


def test_mean_pooling_padding_single_look_ups_and_frozen_layers_equal_pytorch():
    random = torch.Generator().manual_seed(1)

    def ids(*shape):
        return torch.randint(0, 9, shape, generator=random)

    batches = [
        Batch(
            torch.rand(4, 2, generator=random),
            {
                "mean": Ids(ids(7), torch.tensor([0, 0, 3, 5])),
                "plain": Ids(ids(4, 3)),
                "frozen": Ids(ids(4, 1)),
            },
            torch.randint(0, 2, (4,), generator=random).float(),
        )
        for _ in range(8)
    ]
    plain, model = Pooled(), Pooled("meta")
    binding = bind(model, ["mean", "plain", "frozen"])
    layouts = []
    for number, table in enumerate(binding.tables):
        layouts.append(RowLayout(table, binding.dims(number), optim.SGD(0.3), initial(table)))
        layout_rows = np.empty((9, 3), np.float32)
        layouts[-1].initialise(np.arange(9), layout_rows)
        plain.get_submodule(table.name).weight.data.copy_(torch.from_numpy(layout_rows))
    reference = Reference(model, binding, layouts, dense_sgd)
    optimizer = torch.optim.SGD([p for p in plain.parameters() if p.requires_grad], lr=0.3)
    for batch in batches:
        optimizer.zero_grad()
        nn.functional.binary_cross_entropy_with_logits(plain(batch.dense, batch.sparse), batch.labels).backward()
        optimizer.step()
        reference.step(batch)
    state = of_reference(reference)
    assert "frozen" not in state.rows
    for name in ("mean", "plain"):
        found, rows = state.rows[name]
        torch.testing.assert_close(torch.from_numpy(rows), plain.get_submodule(name).weight.detach()[found])
