"""The same script in plain PyTorch and after `bagpipe.prepare`: everything that it leaves behind must be equal."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch
from torch import nn

import bagpipe
from harness.plain import assert_close, loss_of, make_batches, make_net

SMALL = {"cache": bagpipe.Cache(60, lookahead=2), "options": bagpipe.Options(check=True)}
"""Rows leave the cache and come back, and every value is followed."""


def adagrad(model, lr=0.1, **settings):
    """Of all parameters."""
    return torch.optim.Adagrad(model.parameters(), lr=lr, **settings)


def sgd(model, lr=0.3, **settings):
    """Of all parameters."""
    return torch.optim.SGD(model.parameters(), lr=lr, **settings)


def adam_and_sparse_adam(model):
    """SparseAdam takes no dense gradients, so that its users have two optimizers."""
    tables, rest = weights_of(model), rest_of(model)
    return [torch.optim.Adam(rest, lr=0.02), torch.optim.SparseAdam(tables, lr=0.05)]


def weights_of(model):
    """The weights of embedding layers."""
    return [part.weight for part in model.modules() if isinstance(part, nn.EmbeddingBag | nn.Embedding)]


def rest_of(model):
    """All other parameters."""
    weights = {id(weight) for weight in weights_of(model)}
    return [parameter for parameter in model.parameters() if id(parameter) not in weights]


def listed(optimizer):
    """One or several, as several."""
    return list(optimizer) if isinstance(optimizer, list | tuple) else [optimizer]


def sparse_net():
    """What SparseAdam needs."""
    return make_net(sparse=True)


def epochs(model, optimizer, loader, log, number=2, loss_of=loss_of, after_step=None):
    """What most people write."""
    for _ in range(number):
        for batch in loader:
            loss = loss_of(model, batch)
            for each in listed(optimizer):
                each.zero_grad()
            loss.backward()
            for each in listed(optimizer):
                each.step()
            log.append(loss.item())
            if after_step is not None:
                after_step()


def run(script, prepared, model=make_net, optimizer=adagrad, loader=make_batches, **options):
    """Run it, prepared or not; what there is at its end."""
    torch.manual_seed(1)
    made, batches = model(), loader()
    optimizers, log = optimizer(made), []
    if prepared:
        made, optimizers, batches = bagpipe.prepare(made, optimizers, batches, **SMALL | options)
    script(made, optimizers, batches, log)
    states = [each.state_dict() for each in listed(optimizers)]
    weights = {name: value.detach().clone() for name, value in made.state_dict().items()}
    return SimpleNamespace(
        weights=weights, log=log, states=states, random=torch.get_rng_state(), loader=batches, model=made
    )


def assert_equal_to_plain(script=epochs, moved=True, **given):
    """Weights, states of optimizers, everything logged and the state of the random generator."""
    model = given.get("model", make_net)
    plain_given = {name: given[name] for name in ("model", "optimizer", "loader") if name in given}
    plain, ours = run(script, False, **plain_given), run(script, True, **given)
    assert_close(plain.weights, ours.weights)
    torch.testing.assert_close(torch.tensor(ours.log), torch.tensor(plain.log))
    for of_plain, of_ours in zip(plain.states, ours.states, strict=True):
        assert_states_close(of_plain, of_ours)
    assert torch.equal(plain.random, ours.random), "random numbers were drawn"
    if moved:
        torch.manual_seed(1)
        first = model().state_dict()
        assert [name for name in first if torch.equal(first[name], ours.weights[name])] == [], "was not trained"


def assert_states_close(expected, found):
    """State dicts of one kind of optimizer."""
    assert [group["params"] for group in found["param_groups"]] == [g["params"] for g in expected["param_groups"]]
    assert {key for key in found["state"] if found["state"][key]} == {
        key for key in expected["state"] if expected["state"][key]
    }
    for key, state in expected["state"].items():
        for name, value in state.items():
            if value is not None:
                torch.testing.assert_close(
                    torch.as_tensor(found["state"][key][name]).float(), torch.as_tensor(value).float(),
                    msg=lambda text, k=key, n=name: f"{n} of {k}: {text}",
                )  # fmt: skip


def refuses(error, words, script, **given):
    """What the script meets, once prepared, is named by these words."""
    with pytest.raises(error, match=words):
        run(script, True, **given)
