"""Mistakes that public implementations of this idea make; each has a test here that would fail if we made it too."""

from __future__ import annotations

import random
import time

import numpy as np
import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader

import bagpipe
from bagpipe import Table
from bagpipe.errors import BatchError, PipelineError, ValueRangeError
from harness import seams
from harness.explorer import explorer
from harness.flat import prepare
from harness.plain import (
    assert_close,
    assert_same_bits,
    loss_of,
    make_batches,
    make_net,
    sgd,
    train_fast,
    train_plain,
)


def step(model, optimizer, batch):
    optimizer.zero_grad()
    loss_of(model, batch).backward()
    optimizer.step()


def prepared(loader, rows=None, **options):
    """Of the net, with SGD for its rows."""
    net = make_net()
    return prepare(net, sgd(net.parameters()), loader, rows or bagpipe.optim.SGD(0.1), **({"cache": 40} | options))


def test_prefetched_values_reach_the_cache():
    """Elsewhere they are assigned to a temporary. Every row of every batch is read as it was written last."""
    plain, batches = make_net(), make_batches()
    of_plain = sgd(plain.parameters())
    net, optimizer, loader = prepared(batches, policy="nocache")
    for batch, given in zip(loader, batches, strict=True):
        with torch.no_grad():
            torch.testing.assert_close(net.user(batch["user"]), plain.user(given["user"]))
        step(net, optimizer, batch)
        step(plain, of_plain, given)


def test_rows_that_one_batch_alone_uses_are_updated():
    """Elsewhere rows used by a single trainer never are."""
    batches = [batch | {"user": torch.full((6, 1), number)} for number, batch in enumerate(make_batches())]
    before = make_net().state_dict()["user.weight"]
    found = train_fast(make_net(), batches)["user.weight"]
    assert (before[:8] != found[:8]).any(1).all()
    assert torch.equal(before[8:], found[8:])


def test_row_gradients_are_averaged_exactly_as_dense_ones_are():
    """Elsewhere embedding gradients are summed while dense ones are averaged: a model with one sample repeated gives
    the same as with the sample alone, in rows and in dense parameters."""
    batches = make_batches(5, size=1)
    repeated = [{name: value.repeat_interleave(8, 0) for name, value in batch.items()} for batch in batches]
    assert_close(train_fast(make_net(), batches), train_fast(make_net(), repeated))


@pytest.mark.parametrize("optimizer", [bagpipe.optim.Adagrad, bagpipe.optim.Momentum, bagpipe.optim.Adam])
def test_optimizer_state_does_not_leak_to_the_next_tenant_of_a_slot(optimizer):
    """Rows take turns in the same few slots; each row's state must be that of its own updates alone."""
    batches = [batch | {"user": torch.full((6, 1), number % 3), "item": torch.full((6, 3), number % 3)}
               for number, batch in enumerate(make_batches(12))]  # fmt: skip
    alone = train_fast(make_net(), batches, optimizer(0.05), cache=60)
    crowded = train_fast(make_net(), batches, optimizer(0.05), cache=2, lookahead=1)
    assert_same_bits(alone, crowded)


@pytest.mark.parametrize("num_batches", [1, 2, 3, 7])
@pytest.mark.parametrize("lookahead", [1, 4, 200])
def test_the_last_batches_are_trained_too(num_batches, lookahead):
    """Elsewhere the last L batches are never sent, nor a last partial one."""
    rows, seen = bagpipe.optim.SGD(0.1), []
    data = DataLoader(Samples(num_batches * 6 - 4), batch_size=6)
    net, optimizer, loader = prepared(data, rows, lookahead=lookahead)
    for batch in loader:
        seen.append(len(batch["label"]))
        step(net, optimizer, batch)
    assert seen == [6] * (num_batches - 1) + [2]
    assert rows.updates == num_batches


@pytest.mark.parametrize("num_batches", [5, 6])
def test_the_last_group_of_accumulated_batches_is_trained_too(num_batches):
    rows = bagpipe.optim.SGD(0.1)
    net, optimizer, loader = prepared(make_batches(num_batches), rows, accumulate=4, cache=60)
    for batch in loader:
        loss_of(net, batch).backward()
        if loader.step_due:
            optimizer.step()
            optimizer.zero_grad()
    assert rows.updates == 2


class Samples(torch.utils.data.Dataset):
    def __init__(self, size, slow=False):
        batches = make_batches(-(-size // 6))
        self.columns = {name: torch.cat([batch[name] for batch in batches])[:size] for name in batches[0]}
        self.slow = slow

    def __len__(self):
        return len(self.columns["label"])

    def __getitem__(self, index):
        if self.slow:
            time.sleep(random.Random(index).random() * 0.004)
        return {name: column[index] for name, column in self.columns.items()}


def test_the_order_of_batches_does_not_depend_on_which_loader_process_is_fastest():
    expected = train_fast(make_net(), DataLoader(Samples(40), batch_size=4))
    loader = DataLoader(Samples(40, slow=True), batch_size=4, num_workers=2)
    assert_same_bits(expected, train_fast(make_net(), loader))


def test_plans_are_trained_in_their_order_whatever_the_schedule():
    """Elsewhere a trainer takes whatever plan arrived first."""
    batches = [batch | {"number": torch.tensor([float(number)])} for number, batch in enumerate(make_batches(15))]
    for seed in range(10):
        _, _, loader = prepared(batches, policy="lru", driver=explorer(seed, 5.0))
        assert [batch["number"].item() for batch in loader] == list(range(15))


def test_large_ids_never_pass_through_floats():
    """Above 2**24 neighbours would collide in float32, above 2**53 in float64."""
    ids = [2**24, 2**24 + 1, 2**53, 2**53 + 1, 2**62, 2**62 + 1, -(2**63), 2**63 - 1]
    model = nn.ModuleDict({"word": nn.EmbeddingBag(10**6, 2, mode="sum", device="meta")})
    batches = [{"word": torch.tensor(ids).reshape(-1, 1)}] * 3
    model, optimizer, loader = prepare(
        model, torch.optim.SGD(model.parameters(), lr=1.0), batches, features=[Table("word", None)], cache=20,
        initial=lambda _: bagpipe.initial.Constant(0.0),
    )  # fmt: skip
    for batch in loader:
        weights = torch.arange(1.0, 1 + len(ids))
        optimizer.zero_grad()
        (model["word"](batch["word"]).sum(1) * weights).sum().backward()
        optimizer.step()
    values = loader.loop.read_rows(0, np.array(ids))
    assert values[:, 0].tolist() == [-3.0 * (1 + position) for position in range(len(ids))]
    with pytest.raises(BatchError, match="floats lose ids"):
        bagpipe.Ids(torch.tensor([[2.0**24]]))


def test_counts_are_not_taken_for_ids():
    """Offsets and lengths stand beside ids as integers; they must stay what they are."""
    values, offsets = torch.tensor([7, 7, 3]), torch.tensor([0, 2])
    batches = [{"feature": (values, offsets), "lengths": torch.tensor([2, 1])}] * 2
    model = nn.ModuleDict({"feature": nn.EmbeddingBag(9, 2, mode="sum")})
    _, _, loader = bagpipe.prepare(model, sgd(model.parameters()), batches)
    for batch in loader:
        assert batch["feature"][1].tolist() == [0, 2]
        assert batch["lengths"].tolist() == [2, 1]
        assert batch["feature"][0].tolist() == [7, 7, 3]


@pytest.mark.parametrize("policy", ["lookahead", "lru", "nocache"])
def test_two_misses_never_get_the_same_slot(policy):
    """The checker stops at a slot with two tenants; a cache of exactly one batch leaves no room for chance."""
    batches = make_batches(10)
    largest = max(len(batch["user"].unique()) + len(batch["item"].unique()) for batch in batches)
    expected = train_fast(make_net(), batches, bagpipe.optim.Adagrad(0.1), cache=50)
    found = train_fast(make_net(), batches, bagpipe.optim.Adagrad(0.1), cache=largest, policy=policy)
    assert_same_bits(expected, found)


def test_victims_are_written_back():
    """Every row ends in the store, also those that left the cache to make room."""
    net, optimizer, loader = prepared(make_batches(), policy="lru", cache=22, check=True)
    for batch in loader:
        step(net, optimizer, batch)
    for table, name in enumerate(("user", "item")):
        touched = torch.cat([batch[name].reshape(-1) for batch in make_batches()]).unique()
        assert sorted(loader.loop.store.ids(table).tolist()) == touched.tolist()


def test_errors_of_background_threads_are_not_swallowed(monkeypatch):
    """Elsewhere they are logged, and training goes on with what there is."""
    rows = bagpipe.optim.SGD(0.1)
    net, optimizer, loader = prepared(make_batches(), rows, cache=22, policy="lru", driver=seams.threads(20))
    store = loader.loop.store
    read = store.read

    def fails(table, ids, out):
        if rows.updates == 3:
            raise RuntimeError("bits have rotted")
        read(table, ids, out)

    monkeypatch.setattr(store, "read", fails)

    def train():
        for batch in loader:
            step(net, optimizer, batch)

    with pytest.raises(PipelineError, match=r"fetch-\d thread failed.*bits have rotted"):
        train()


def test_the_state_dict_is_complete():
    """Elsewhere maps and host weights are left out: here the plain model goes on from it, untouched rows included."""
    net = make_net()
    state = train_fast(net, make_batches(4))
    expected = train_plain(make_net(), make_batches(4))
    assert_close(expected, state)
    fresh = make_net()
    fresh.load_state_dict(state, strict=True)
    assert_close(train_plain(make_net(), make_batches()), train_plain(fresh, make_batches()[4:]))


def test_rows_keep_their_names_whatever_the_order_of_their_first_use():
    """Elsewhere a reorder by frequency permutes the index but not the weights."""
    batches = make_batches()
    backwards = [{name: value.flip(0) for name, value in batch.items()} for batch in batches]
    assert_close(train_fast(make_net(), batches), train_fast(make_net(), backwards))


@pytest.mark.parametrize("bad", [20, -1, 2**40])
def test_ids_out_of_range_are_an_error_and_not_a_zero(bad):
    batches = make_batches(3)
    batches[1] = batches[1] | {"item": torch.full((6, 3), bad)}
    with pytest.raises(ValueRangeError, match=rf"batch 1: feature 'item' has id {bad}"):
        train_fast(make_net(), batches)
