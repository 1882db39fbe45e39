"""The same training in plain PyTorch and with `bagpipe.prepare`, and a look at what is left behind."""

from __future__ import annotations

import gc
import tempfile
import threading
import time
from pathlib import Path

import numpy as np
import pytest
import torch
from torch import nn

import bagpipe
from harness.flat import prepare

ROWS = {"user": 30, "item": 20}
loss_fn = nn.BCEWithLogitsLoss()


class Net(nn.Module):
    """Two tables, one with a feature of its own, one with bags; called on a dict."""

    def __init__(self, dims=(4, 4), sparse=False, device=None, **options):
        super().__init__()
        self.user = nn.EmbeddingBag(ROWS["user"], dims[0], mode="sum", sparse=sparse, device=device)
        self.item = nn.EmbeddingBag(ROWS["item"], dims[1], sparse=sparse, device=device, **({"mode": "sum"} | options))
        self.top = nn.Sequential(nn.Linear(sum(dims) + 2, 5), nn.ReLU(), nn.Linear(5, 1))

    def forward(self, batch):
        vectors = [self.user(batch["user"]), self.item(batch["item"]), batch["dense"]]
        return self.top(torch.cat(vectors, 1)).squeeze(1)


def make_net(**options):
    """The same weights every time."""
    torch.manual_seed(5)
    return Net(**options)


def make_batches(num_batches=8, size=6, seed=0, rows=ROWS):
    """Dicts of tensors, ids skewed."""
    random = np.random.default_rng(seed)

    def ids(name, shape):
        return torch.from_numpy((random.random(shape) ** 2 * rows[name]).astype(np.int64))

    return [
        {
            "user": ids("user", (size, 1)),
            "item": ids("item", (size, 3)),
            "dense": torch.from_numpy(random.random((size, 2), np.float32)),
            "label": torch.from_numpy((random.random(size) < 0.5).astype(np.float32)),
        }
        for _ in range(num_batches)
    ]


def loss_of(model, batch):
    """The loss of a model that is called on a dict."""
    return loss_fn(model(batch), batch["label"])


def sgd(parameters):
    """The optimizer of dense parameters, and in plain PyTorch of all."""
    return torch.optim.SGD(parameters, lr=0.1)


def train_plain(model, batches, optimizers=(sgd,), loss=loss_of):
    """Plain PyTorch; several optimizers get the embedding weights and the rest, in this order."""
    weights = [m.weight for m in model.modules() if isinstance(m, nn.EmbeddingBag | nn.Embedding)]
    weights = [weight for weight in weights if weight.requires_grad]
    rest = [p for p in model.parameters() if all(p is not weight for weight in weights)]
    parts = [[*weights, *rest]] if len(optimizers) == 1 else [weights, rest]
    optimizers = [make(part) for make, part in zip(optimizers, parts, strict=True)]
    for batch in batches:
        for optimizer in optimizers:
            optimizer.zero_grad()
        loss(model, batch).backward()
        for optimizer in optimizers:
            optimizer.step()
    return {name: value.clone() for name, value in model.state_dict().items()}


def train_fast(model, batches, rows=None, dense=sgd, loss=loss_of, **options):
    """The same with rows in a cache; returns the plain weights too."""
    options = {"cache": 60, "check": True} | options
    optimizer = dense(model.parameters())
    model, optimizer, loader = prepare(model, optimizer, batches, rows or bagpipe.optim.SGD(0.1), **options)
    for batch in loader:
        optimizer.zero_grad()
        loss(model, batch).backward()
        optimizer.step()
    return {name: value.clone() for name, value in model.state_dict().items()}


def assert_close(expected, found, **tolerance):
    """Equal names, shapes and, to float tolerance, values."""
    assert list(expected) == list(found)
    for name in expected:
        torch.testing.assert_close(found[name], expected[name], msg=lambda text, n=name: f"{n}: {text}", **tolerance)


def assert_same_bits(expected, found):
    """Equal to the last bit."""
    assert list(expected) == list(found)
    for name, value in expected.items():
        assert value.numpy().tobytes() == found[name].numpy().tobytes(), name


def threads_left(seconds=5.0, before=()):
    """Names of bagpipe's threads that are still there; those that were told to end get some time."""
    until = time.monotonic() + seconds
    while True:
        new = [thread for thread in threading.enumerate() if thread not in before]
        names = [thread.name for thread in new if thread.name.startswith("bagpipe")]
        if not names or time.monotonic() > until:
            return names
        time.sleep(0.01)


def directories_left():
    """Temporary directories of mapped stores."""
    return sorted(str(path) for path in Path(tempfile.gettempdir()).glob("bagpipe-*"))


@pytest.fixture
def nothing_left(tmp_path_factory, monkeypatch):
    """No thread and no temporary directory may outlive the test."""
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path_factory.mktemp("temporary")))
    before = threading.enumerate()  # of tests of other parts that ran in this process
    yield
    if threads_left(0, before) or directories_left():
        gc.collect()
    assert threads_left(before=before) == []
    assert directories_left() == []
