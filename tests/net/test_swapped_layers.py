"""A layer that was swapped out refuses to be called: whoever still holds it would train a copy that nobody reads."""

from __future__ import annotations

import copy
import pickle

import pytest
import torch
from torch import nn

import bagpipe
from bagpipe.errors import ModelError
from harness.flat import prepare
from harness.plain import (
    Net,
    assert_same_bits,
    loss_of,
    make_batches,
    make_net,
    nothing_left,  # noqa: F401
    sgd,
    train_fast,
    train_plain,
)

pytestmark = pytest.mark.usefixtures("nothing_left")
ID = torch.tensor([[0]])


class Hidden(Net):
    """Calls one of its layers through a plain list, which `prepare` can't see."""

    def __init__(self):
        super().__init__()
        self.layers = [self.user, self.item]

    def forward(self, batch):
        vectors = [layer(batch[name]) for layer, name in zip(self.layers, ("user", "item"), strict=True)]
        return self.top(torch.cat([*vectors, batch["dense"]], 1)).squeeze(1)


def prepared(net, **options):
    return prepare(net, sgd(net.parameters()), make_batches(), bagpipe.optim.SGD(0.1), cache=60, **options)


def test_a_model_that_keeps_its_layers_in_a_plain_list_is_refused_at_its_first_look_up():
    net = Hidden()
    before = net.layers[0].weight.clone()
    _, _, loader = prepared(net)
    batches = iter(loader)
    with pytest.raises(ModelError, match=r"layer 'user' is no longer part.*the model's own 'user'.*nn\.ModuleList"):
        loss_of(net, next(batches))
    assert torch.equal(before, net.layers[0].weight)


@pytest.mark.parametrize("kind", [nn.EmbeddingBag, nn.Embedding])
def test_a_layer_that_a_closure_holds_refuses_by_its_name_in_the_model(kind):
    net = nn.ModuleDict({"tables": nn.ModuleList([kind(20, 4)])})
    held = net["tables"][0]
    bagpipe.prepare(net, sgd(net.parameters()), [{"item": ID}], cache=9)
    for call in (held, held.forward):
        with pytest.raises(ModelError, match=r"layer 'tables\.0'"):
            call(ID)


@pytest.mark.parametrize("copied", [copy.copy, copy.deepcopy, lambda layer: pickle.loads(pickle.dumps(layer))])
def test_copies_of_a_swapped_layer_refuse_too(copied):
    net = make_net()
    held = net.user
    prepared(net)
    with pytest.raises(ModelError, match="'user'"):
        copied(held)(ID)
    assert torch.equal(copied(held).weight, held.weight)


def test_the_model_itself_goes_on_after_an_epoch_and_in_further_ones():
    batches = make_batches()
    expected = train_fast(make_net(), batches + batches)
    net = make_net()
    held = net.user
    net, optimizer, loader = prepared(net)

    def train():
        for batch in loader:
            optimizer.zero_grad()
            loss_of(net, batch).backward()
            optimizer.step()

    train()
    saved = {name: value.clone() for name, value in net.state_dict().items()}
    train()
    assert_same_bits(expected, net.state_dict())
    net.load_state_dict(saved)
    train()
    assert_same_bits(expected, net.state_dict())
    assert net(batches[0]).shape == (6,)
    with pytest.raises(ModelError):
        held(ID)


def test_a_layer_under_several_names_of_a_model_is_called_by_all_of_them():
    def tied():
        net = make_net()
        net.alias = net.item
        net.forward = lambda batch: net.top(
            torch.cat([net.user(batch["user"]), net.alias(batch["item"]), batch["dense"]], 1)
        ).squeeze(1)
        return net

    features = {"user": "user", "item": "alias"}
    plain = train_plain(tied(), make_batches())
    fast = train_fast(tied(), make_batches(), features=features)
    for name, value in plain.items():
        torch.testing.assert_close(fast[name], value)


def test_a_swapped_layer_in_another_model_is_refused_there():
    net, other = make_net(), make_net()
    other.user = net.user
    prepared(net)
    with pytest.raises(ModelError, match=r"layer 'user' was 'user' of another model.*one nn\.Module"):
        prepared(other)
    assert other.user is not net.user
    with pytest.raises(ModelError, match="no longer part"):
        other.user(ID)


def test_a_layer_that_was_kept_is_not_swapped_and_still_works():
    net = make_net()
    held = net.user
    prepared(net, keep=["user"])
    assert held is net.user
    held(ID)


def test_what_code_has_set_on_a_layer_is_still_there_but_nothing_that_acts_on_its_former_weight():
    net = make_net()
    net.user.bias, net.user.regulariser, net.user.scale = None, 0.1, torch.ones(1)
    prepared(net)
    assert (net.user.bias, net.user.regulariser, net.user.sparse) == (None, 0.1, False)
    for name in ("scale", "reset_parameters", "absent"):
        with pytest.raises(AttributeError, match=name):
            getattr(net.user, name)


def test_a_forward_of_the_layer_s_own_is_still_refused():
    net = make_net()
    net.user.forward = lambda ids: ids
    with pytest.raises(ModelError, match="forward of its own"):
        prepared(net)
