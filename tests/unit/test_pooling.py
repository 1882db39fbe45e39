"""Pooling ahead for all layers of a batch: the bits of layers that pool for themselves, whatever the model asks for."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from torch import nn

from bagpipe.pooling import GivenIds, Pooling
from harness.started import start

SAMPLES = 7


class Net(nn.Module):
    """Three kinds of layers; `asks` says, batch by batch, what is looked up."""

    def __init__(self):
        super().__init__()
        torch.manual_seed(1)
        self.total = nn.EmbeddingBag(20, 4, mode="sum")
        self.mean = nn.EmbeddingBag(30, 3, mode="mean")
        self.single = nn.Embedding(15, 5)
        self.padded = nn.EmbeddingBag(9, 2, mode="sum", padding_idx=3)
        self.output = nn.Linear(14, 1)

    def forward(self, batch, ask):
        total, mean, single = batch["total"], batch["mean"], batch["single"]
        if ask == "reversed":
            total = total.flip(0)
        vectors = [self.total(total), self.mean(mean), self.single(single), self.padded(batch["padded"])]
        if ask == "fewer":
            vectors[1] = torch.zeros_like(vectors[1])
        if ask == "twice":
            vectors[0] = vectors[0] + self.total(batch["total"])
        if ask == "in place":
            vectors[0].mul_(2.0)
        if ask == "slice":
            vectors[2] = torch.cat([self.single(single[:3]), self.single(single[3:])])
        return self.output(torch.cat(vectors, 1)).sum()


def make_batch(seed, samples=SAMPLES):
    draw = torch.Generator().manual_seed(seed)
    sizes = {
        "total": (20, (samples, 2)),
        "mean": (30, (samples, 3)),
        "single": (15, (samples,)),
        "padded": (9, (samples, 2)),
    }
    return {name: torch.randint(0, rows, shape, generator=draw) for name, (rows, shape) in sizes.items()}


def train(asks, threads=2, samples=SAMPLES):
    net = Net()
    batches = [make_batch(number, samples - (number == len(asks) - 1)) for number in range(len(asks))]
    net, optimizer, loader = start(batches, net, cache=70, threads=threads, check=True)
    for batch, ask in zip(loader, asks, strict=True):
        optimizer.zero_grad()
        net(batch, ask).backward()
        optimizer.step()
    return net.state_dict()


@pytest.fixture
def taken(monkeypatch):
    """Counts outputs that were pooled ahead and used."""
    counts = {"ahead": 0, "alone": 0}
    take = Pooling.take

    def counted(self, *arguments):
        pooled = take(self, *arguments)
        counts["alone" if pooled is None else "ahead"] += 1
        return pooled

    monkeypatch.setattr(Pooling, "take", counted)
    return counts


@pytest.mark.parametrize("split", [1, 10_000])
@pytest.mark.parametrize(
    "asks",
    [
        ["same"] * 4,
        ["same", "reversed", "same", "reversed"],
        ["same", "fewer", "twice", "same"],
        ["twice", "in place", "same", "slice", "same"],
    ],
)
def test_what_is_pooled_ahead_has_the_bits_of_what_layers_pool_alone(monkeypatch, asks, split):
    monkeypatch.setattr("bagpipe.row_ops.SPLIT_BAGS", split)
    found = train(asks)
    with monkeypatch.context() as alone:
        alone.setattr(Pooling, "take", lambda *_: None)
        expected = train(asks, threads=1)
    for name, value in expected.items():
        assert np.array_equal(value.numpy().view(np.int32), found[name].numpy().view(np.int32)), name


def test_all_but_the_first_batch_are_pooled_ahead_also_a_short_one(taken):
    train(["same"] * 4)
    assert taken == {"ahead": 9, "alone": 3}


def test_ids_in_another_order_are_not_given_the_output_of_the_batch(taken):
    train(["same", "reversed", "same"])
    # `flip` makes new ids, for which nothing is looked for; the batch after it has no forecast for that layer.
    assert taken == {"ahead": 2 + 2, "alone": 3 + 1}


def test_outputs_that_nobody_takes_are_dropped_with_their_batch():
    pooling = Pooling()
    pooling.begin([GivenIds(torch.arange(3), np.arange(3, dtype=np.int32), 0)])
    pooling.end()
    assert not pooling._ready
    assert pooling._given == []
