"""A small model under `bagpipe.accelerate` with Adagrad for its rows, started, stepped and trained to the end."""

from __future__ import annotations

import bagpipe
from bagpipe.embedding import CachedLayer
from harness.plain import loss_of, make_batches, make_net, sgd


def adagrad():
    """The optimizer of rows."""
    return bagpipe.optim.Adagrad(0.1)


def start(batches=None, net=None, **options):
    """Model, optimizer of rows, loop and optimizer of dense parameters, before the first batch."""
    net, rows = net or make_net(), adagrad()
    loop = bagpipe.accelerate(net, make_batches() if batches is None else batches, rows, **({"cache": 60} | options))
    return net, rows, loop, sgd(net.parameters())


def step(net, batch, dense, rows):
    """One iteration of one batch."""
    dense.zero_grad()
    loss_of(net, batch).backward()
    dense.step()
    rows.step()


def train(net, rows, loop, dense):
    """What `start` gave, to the end of its data."""
    with loop:
        for batch in loop:
            loss_of(net, batch).backward()
            if loop.step_due:
                dense.step()
                rows.step()
                dense.zero_grad()


def assert_untouched(net):
    """No layer was replaced."""
    assert not any(isinstance(part, CachedLayer) for part in net.modules())
