"""How far training with Bagpipe is from plain PyTorch: what README.md and docs/guarantees.md say, measured."""

from pathlib import Path

import pytest
import torch
from torch import nn

import bagpipe
from bagpipe.data import generated
from bagpipe.models import build_model

ROOT = Path(__file__).parents[2]
ITERATIONS, BATCH_SIZE, LR = 10, 64, 0.1
ATOL, RTOL, LOSS_RTOL = 1e-5, 1.3e-6, 1e-4
MODELS = ("dlrm", "wide_deep", "deep_cross", "deepfm")
OPTIMIZERS = {
    "sgd": (lambda: bagpipe.optim.SGD(LR), lambda weights: torch.optim.SGD(weights, LR)),
    "adagrad": (lambda: bagpipe.optim.Adagrad(0.05), lambda weights: torch.optim.Adagrad(weights, 0.05)),
    "adam": (lambda: bagpipe.optim.Adam(0.01), lambda weights: torch.optim.SparseAdam(weights, 0.01)),
}
DATA = generated("movielens-like", ITERATIONS * BATCH_SIZE, seed=1)
BATCHES = list(DATA.batches(BATCH_SIZE))


def make(name):
    return build_model(name, DATA.tables, DATA.num_dense, 8, torch.device("cpu"), seed=3)


def loss_of(model, batch):
    return nn.functional.binary_cross_entropy_with_logits(model(batch.dense, batch.sparse), batch.labels)


def train_plain(name, optimizer):
    """PyTorch's own layers and optimizers; the losses and all weights."""
    model, losses = make(name), []
    layers = [layer for layer in model.modules() if isinstance(layer, nn.EmbeddingBag | nn.Embedding)]
    for layer in layers:
        layer.sparse = True
    tables = {id(layer.weight) for layer in layers}
    rows = OPTIMIZERS[optimizer][1]([layer.weight for layer in layers])
    dense = torch.optim.SGD([each for each in model.parameters() if id(each) not in tables], LR)
    for batch in BATCHES:
        loss = loss_of(model, batch)
        for each in (rows, dense):
            each.zero_grad()
        loss.backward()
        for each in (rows, dense):
            each.step()
        losses.append(loss.item())
    return losses, model.state_dict()


def train_fast(name, optimizer):
    """The same with `prepare`, and a cache that can't hold all rows."""
    model, rows, losses = make(name), OPTIMIZERS[optimizer][0](), []
    dense = torch.optim.SGD(model.parameters(), LR)
    model, dense, loader = bagpipe.prepare(model, dense, BATCHES, rows=rows, cache=600, features=DATA.tables)
    for batch in loader:
        loss = loss_of(model, batch)
        dense.zero_grad()
        loss.backward()
        dense.step()
        losses.append(loss.item())
    return losses, model.state_dict()


@pytest.mark.parametrize("name", MODELS)
def test_with_sgd_every_parameter_is_as_close_as_the_documents_say(name):
    _, expected = train_plain(name, "sgd")
    _, found = train_fast(name, "sgd")
    assert set(found) == set(expected)
    first = make(name).state_dict()
    for key, value in expected.items():
        torch.testing.assert_close(found[key], value, rtol=RTOL, atol=ATOL, msg=lambda text, key=key: f"{key}: {text}")
        assert not torch.equal(first[key], value), f"{key} was not trained"


@pytest.mark.filterwarnings("ignore:Sparse invariant checks")
@pytest.mark.parametrize("optimizer", ["adagrad", "adam"])
@pytest.mark.parametrize("name", MODELS)
def test_with_adagrad_and_adam_every_loss_is_as_close_as_the_documents_say(name, optimizer):
    expected, found = train_plain(name, optimizer)[0], train_fast(name, optimizer)[0]
    assert found == pytest.approx(expected, rel=LOSS_RTOL)
    assert len(set(expected)) == ITERATIONS


def test_the_documents_give_these_figures():
    said = f"within {ATOL:.0e} + {RTOL:g} of its size".replace("e-05", "e-5").replace("e-06", "e-6")
    guarantees = " ".join((ROOT / "docs/guarantees.md").read_text().split())
    for text in (" ".join((ROOT / "README.md").read_text().split()), guarantees):
        assert said in text, said
        assert f"after {ITERATIONS} iterations" in text
    assert f"learning rate {LR}, batches of {BATCH_SIZE}" in guarantees
    assert f"each of the {ITERATIONS} losses is within 1e-4 of its size" in guarantees
    assert all(f"`{name}`" in guarantees for name in MODELS)
