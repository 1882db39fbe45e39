"""Small worlds for tests: tables, batches, and the same training by the reference and by the system."""

from __future__ import annotations

import numpy as np
import torch
from torch import nn

from bagpipe import optim
from bagpipe.initial import Uniform
from bagpipe.layers import bind
from bagpipe.layout import RowLayout
from bagpipe.models import build_model
from bagpipe.reference import Reference
from bagpipe.state import of_reference, of_store
from bagpipe.types import Batch, Ids, Table
from harness.flat import prepare

TABLES = (Table("user", 40), Table("ad", 25, ("shown", "clicked")), Table("word", None, ("words",)))
OPTIMIZERS = {
    "sgd": lambda: optim.SGD(0.1),
    "momentum": lambda: optim.Momentum(0.1),
    "adagrad": lambda: optim.Adagrad(0.1),
    "rowwise_adagrad": lambda: optim.RowwiseAdagrad(0.1),
    "adam": lambda: optim.Adam(0.01),
    "adamw": lambda: optim.AdamW(0.01),
}


def make_batches(num_batches=12, size=6, seed=0, rows=40, last=None):
    """Batches with skewed ids: one id, two features on one table, weighted bags of none to three 64-bit ids."""
    random = np.random.default_rng(seed)
    batches = []
    for number in range(num_batches):
        samples = last if last is not None and number == num_batches - 1 else size
        lengths = random.integers(0, 4, samples)
        words = random.integers(-5, 6, int(lengths.sum())) * (2**60 + 7)
        starts = torch.from_numpy(np.cumsum(lengths) - lengths)
        weights = torch.from_numpy(random.random(len(words), np.float32))
        sparse = {
            "user": Ids(skewed(random, rows, (samples, 1))),
            "shown": Ids(skewed(random, min(25, rows), (samples, 2))),
            "clicked": Ids(skewed(random, min(25, rows), (samples, 1))),
            "words": Ids(torch.from_numpy(words), starts, weights),
        }
        dense = torch.from_numpy(random.random((samples, 3), np.float32)).clone()
        labels = torch.from_numpy((random.random(samples) < 0.5).astype(np.float32))
        batches.append(Batch(dense, sparse, labels, number=number))
    return batches


def skewed(random, rows, shape):
    """Ids of which a few are frequent."""
    return torch.from_numpy((random.random(shape) ** 3 * rows).astype(np.int64))


def make_model(name="dlrm", dim=5, tables=TABLES):
    """A model with its embedding layers on the meta device."""
    return build_model(name, tables, 3, dim, torch.device("meta"), seed=3)


def initial(table):
    """First values of rows."""
    return Uniform(7, table.name, 0.5)


def dense_sgd(parameters):
    """The dense optimizer of all tests."""
    return torch.optim.SGD(parameters, lr=0.1)


def make_reference(batches, optimizer, name="dlrm", trainers=1, assign=None):
    """The ground truth, before its first iteration."""
    model = make_model(name)
    binding = bind(model, list(batches[0].sparse), tables=TABLES)
    layouts = [
        RowLayout(t, binding.dims(n), optimizer.for_table(t.name), initial(t)) for n, t in enumerate(binding.tables)
    ]
    return Reference(model, binding, layouts, dense_sgd, trainers, assign)


def train_reference(batches, optimizer, name="dlrm", trainers=1, assign=None):
    """The ground truth, and its losses."""
    reference = make_reference(batches, optimizer, name, trainers, assign)
    losses = [reference.step(batch) for batch in batches]
    return of_reference(reference), losses


def train_prepared(batches, optimizer, name="dlrm", check=True, epochs=1, **options):
    """The same by the system, under the runtime checker."""
    model = make_model(name)
    options = {"cache": 300, "features": TABLES, "initial": initial, "check": check} | options
    dense = dense_sgd(list(model.parameters()))
    model, dense, loader = prepare(model, dense, batches, optimizer, **options)
    losses = []
    for _ in range(epochs):
        for batch in loader:
            loss = nn.functional.binary_cross_entropy_with_logits(model(batch.dense, batch.sparse), batch.labels)
            dense.zero_grad()
            loss.backward()
            dense.step()
            losses.append(loss.item())
    loader.close()
    loop = loader.loop
    state = of_store(model, [layout.table.name for layout in loop.layouts], loop.store)
    loop.store.close()
    return state, losses


def assert_identical(expected, found):
    """Equal to the last bit, or say what is not."""
    differing = expected.differing(found)
    assert not differing, f"{len(differing)} differ, first {differing[:3]}"
