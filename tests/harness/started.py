"""A small model after `bagpipe.prepare` with Adagrad for its rows, stepped and trained to the end."""

from __future__ import annotations

import bagpipe
from bagpipe.embedding import CachedLayer
from harness.flat import prepare
from harness.plain import loss_of, make_batches, make_net, sgd


def adagrad():
    """The optimizer of rows."""
    return bagpipe.optim.Adagrad(0.1)


def start(batches=None, net=None, rows=None, **options):
    """Model, optimizer and loader, before the first batch."""
    net = net or make_net()
    loader = make_batches() if batches is None else batches
    return prepare(net, sgd(net.parameters()), loader, rows or adagrad(), **({"cache": 60} | options))


def step(net, batch, optimizer):
    """One iteration of one batch."""
    optimizer.zero_grad()
    loss_of(net, batch).backward()
    optimizer.step()


def train(net, optimizer, loader):
    """What `start` gave, to the end of its data."""
    for batch in loader:
        loss_of(net, batch).backward()
        if loader.step_due:
            optimizer.step()
            optimizer.zero_grad()


def assert_untouched(net):
    """No layer was replaced."""
    assert not any(isinstance(part, CachedLayer) for part in net.modules())
