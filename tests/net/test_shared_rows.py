"""Vectors that no gradient reaches stay, under momentum and Adam too: where another layer shares their row, and where
their layer is frozen.
"""

from __future__ import annotations

import pytest
import torch
from torch import nn

import bagpipe
from bagpipe.errors import ModelError
from harness.plain import assert_close, nothing_left  # noqa: F401
from harness.scripts import Trainers

pytestmark = [
    pytest.mark.usefixtures("nothing_left"),
    pytest.mark.filterwarnings("ignore:Sparse invariant checks"),
]
ROWS, LR = 40, 0.05
BOTH = {"first": ["left", "right"], "second": ["left", "right"]}


class Two(nn.Module):
    """Each layer looks up the ids of one feature, though both are fed by two."""

    def __init__(self):
        super().__init__()
        self.left, self.right = (nn.Embedding(ROWS, dim, sparse=True, padding_idx=3) for dim in (4, 16))
        self.top = nn.Linear(20, 1)

    def forward(self, batch):
        vectors = [self.left(batch["first"]).sum(1), self.right(batch["second"]).sum(1)]
        return self.top(torch.cat(vectors, 1)).squeeze(1)


def make_net():
    torch.manual_seed(5)
    return Two()


def make_batches(num_batches=8):
    random = torch.Generator().manual_seed(6)  # of their own: trainers are threads
    ids = torch.randint(0, ROWS, (num_batches, 2, 6, 2), generator=random)
    return [{"first": first, "second": second, "label": torch.rand(6, generator=random)} for first, second in ids]


def loss_of(net, batch, number=0):
    return (net(batch) - batch["label"]).square().mean()


def without_right(net, batch, number):
    """Leaves one of them out of every third iteration."""
    net.right.requires_grad_(number % 3 != 2)
    return loss_of(net, batch)


def of_rows(weights):
    return torch.optim.SparseAdam(weights, LR)


def train(net, loader, optimizers, loss):
    for number, batch in enumerate(loader):
        for optimizer in optimizers:
            optimizer.zero_grad()
        loss(net, batch, number).backward()
        for optimizer in optimizers:
            optimizer.step()
    return net


def prepared(net, rows=None, **options):
    weights = [net.left.weight, net.right.weight]
    dense = torch.optim.SGD(net.top.parameters(), 0.1)
    optimizers = [dense] if rows else [of_rows(weights), dense]
    options = {"cache": 30, "features": BOTH, "options": bagpipe.Options(check=True)} | options
    return bagpipe.prepare(net, optimizers, make_batches(), rows=rows, **options)


def plain(loss=loss_of, rows=of_rows, epochs=1):
    net = make_net()
    optimizers = [rows([net.left.weight, net.right.weight]), torch.optim.SGD(net.top.parameters(), 0.1)]
    for _ in range(epochs):
        train(net, make_batches(), optimizers, loss)
    return net.state_dict()


def test_a_vector_that_its_layer_does_not_look_up_keeps_its_momentum():
    net, optimizers, loader = prepared(make_net())
    assert_close(
        plain(epochs=2), train(train(net, loader, optimizers, loss_of), loader, optimizers, loss_of).state_dict()
    )


@pytest.mark.parametrize("rows", [bagpipe.optim.Momentum, bagpipe.optim.AdamW])
def test_a_vector_of_a_layer_that_is_left_out_stays_with_its_state(rows):
    """Also where it is the whole layer, and it had been trained before."""
    net, optimizers, loader = prepared(make_net(), rows(LR))
    batches = iter(loader)
    train(net, [next(batches) for _ in range(1)], optimizers, loss_of)
    kept = net.state_dict()["right.weight"]
    net.right.requires_grad_(False)
    train(net, batches, optimizers, loss_of)
    found = net.state_dict()
    assert torch.equal(found["right.weight"], kept)
    assert not torch.equal(found["left.weight"], make_net().left.weight)


def test_steps_that_torch_would_count_apart_are_refused_before_anything_moves():
    net, optimizers, loader = prepared(make_net())
    with pytest.raises(
        ModelError, match=r"'left', 'right' look up the same ids.*'left' has a gradient now.*under two names"
    ):
        train(net, loader, optimizers, without_right)
    expected = make_net()
    given = [of_rows([expected.left.weight, expected.right.weight]), torch.optim.SGD(expected.top.parameters(), 0.1)]
    assert_close(train(expected, make_batches()[:2], given, loss_of).state_dict(), net.state_dict())


def test_layers_with_features_of_their_own_count_their_steps_apart():
    net, optimizers, loader = prepared(make_net(), features={"first": "left", "second": "right"})
    assert_close(plain(without_right), train(net, loader, optimizers, without_right).state_dict())


def test_what_does_not_count_steps_may_leave_a_layer_out():
    def adagrad(weights):
        return torch.optim.Adagrad(weights, LR)

    net = make_net()
    optimizers = [adagrad([net.left.weight, net.right.weight]), torch.optim.SGD(net.top.parameters(), 0.1)]
    net, optimizers, loader = bagpipe.prepare(net, optimizers, make_batches(), cache=30, features=BOTH)
    assert_close(plain(without_right, adagrad), train(net, loader, optimizers, without_right).state_dict())


def only_left(net, batch, number):
    return net.top(torch.cat([net.left(batch["first"]).sum(1), torch.zeros(6, 16)], 1)).square().mean()


def test_a_layer_that_was_never_trained_has_no_state_and_none_is_taken_for_it():
    net, optimizers, loader = prepared(make_net())
    train(net, loader, optimizers, only_left)
    saved = optimizers[0].state_dict()
    assert list(saved["state"]) == [0]
    other, others, again = prepared(make_net())
    others[0].load_state_dict(saved)
    other.load_state_dict(net.state_dict())
    train(other, again, others, only_left)
    assert_close(plain(only_left, epochs=2), other.state_dict())
    with pytest.raises(ModelError, match="'right' would differ"):
        train(other, again, others, loss_of)


def test_a_state_of_layers_that_were_trained_apart_is_refused():
    net = make_net()
    optimizer = of_rows([net.left.weight, net.right.weight])
    train(net, make_batches(), [optimizer], without_right)
    _, others, _ = prepared(make_net())
    with pytest.raises(ModelError, match=r"'left', 'right' share rows.*8, 6 steps"):
        others[0].load_state_dict(optimizer.state_dict())


def frozen_amid_training(trainers, rows, when=3):
    """How far the rows of the layer have moved since."""

    nets = [make_net() for _ in range(trainers.trainers)]

    def script(rank):
        net, optimizers, loader = prepared(nets[rank], rows(), store=trainers.options(rank)["store"], options=None)
        for number, batch in enumerate(loader):
            if number == when:
                loader.flush()
                before = looked_up(net)
                net.right.requires_grad_(False)
            train(net, [batch], optimizers, loss_of)
        loader.flush()
        return float((looked_up(net) - before).abs().max())

    return trainers.run(script)


def looked_up(net):
    with torch.no_grad():
        return net.right(torch.arange(ROWS)).clone()


@pytest.mark.parametrize("rows", [bagpipe.optim.SGD, bagpipe.optim.Adagrad])
def test_with_several_trainers_a_frozen_layer_stays(rows):
    assert frozen_amid_training(Trainers(2), lambda: rows(LR)) == [0.0, 0.0]


@pytest.mark.parametrize("rows", [bagpipe.optim.Adam, bagpipe.optim.AdamW, bagpipe.optim.Momentum])
def test_with_several_trainers_a_frozen_layer_that_would_move_is_refused(rows):
    with pytest.raises(ModelError, match=r"layer 'right' is frozen.*SGD or Adagrad"):
        frozen_amid_training(Trainers(2), lambda: rows(LR))


def test_with_several_trainers_a_layer_that_is_frozen_from_the_beginning_has_no_momentum_to_move_it():
    assert frozen_amid_training(Trainers(2), lambda: bagpipe.optim.Adam(LR), when=0) == [0.0, 0.0]
