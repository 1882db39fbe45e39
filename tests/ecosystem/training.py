"""One model trained in plain PyTorch and with `bagpipe.prepare`, and how far apart the two end.

Beside that stand two distances within plain PyTorch, of the same model on the same data: from float64, which is what
rounding to float32 costs, and from sparse gradients of embeddings, which are added in another order.
"""

from __future__ import annotations

import random
import re
import tempfile
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from copy import copy
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any
from unittest.mock import patch

import numpy as np
import torch
from safetensors.torch import load_file
from torch import Tensor, nn

import bagpipe
from bagpipe.errors import CapacityError

BATCH_SIZE, NUM_BATCHES = 16, 10
ROOM = 1.5
"""The cache holds so many times the rows of the first batch."""
SPREAD = 0.1
"""Of the first values of tables that their library begins with less."""
EPS = 1e-3
"""Larger than rounding: Adagrad and Adam divide a gradient by its size, and one that is nothing but rounding would move
a number by the learning rate, differently in any two orders of adding."""
Optimizers = list[torch.optim.Optimizer]


def sgd(tables: Sequence[nn.Parameter], dense: Sequence[nn.Parameter]) -> Optimizers:
    return [torch.optim.SGD([*tables, *dense], 0.1)]


def adagrad(tables: Sequence[nn.Parameter], dense: Sequence[nn.Parameter]) -> Optimizers:
    return [torch.optim.Adagrad([*tables, *dense], 0.05, eps=EPS)]


def sparse_adam(tables: Sequence[nn.Parameter], dense: Sequence[nn.Parameter]) -> Optimizers:
    return [torch.optim.SparseAdam(tables, 0.01, eps=EPS), *(sgd((), dense) if dense else [])]


OPTIMIZERS = {"SGD": sgd, "Adagrad": adagrad, "SparseAdam": sparse_adam}
OTHERS = {"float64": {"double": True}, "sparse": {"sparse": True}}
"""How else plain PyTorch trains a model, by which it is apart from itself."""


def others_of(optimizer: str) -> dict[str, dict[str, bool]]:
    """Those of an optimizer; SparseAdam has sparse gradients anyway."""
    return {name: other for name, other in OTHERS.items() if (optimizer, name) != ("SparseAdam", "sparse")}


@dataclass
class Trial:
    """A model that is ready to be trained: how to build it, its data, and what its author does with a batch."""

    build: Callable[[], nn.Module]
    batches: Sequence[Any]
    loss: Callable[[Any, Any], Tensor]
    predict: Callable[[Any, Any], Any]
    features: Mapping[str, str | Sequence[str]] | None = None
    keep: Sequence[str] = ()
    """Layers that look up what no batch holds, such as positions."""


@dataclass
class Outcome:
    """What a training ends with."""

    losses: list[float] = field(default_factory=list)
    predictions: list[Tensor] = field(default_factory=list)
    """In mid-training, of a batch that comes later, and at the end."""
    state: dict[str, Tensor] = field(default_factory=dict)
    """Dense parameters, buffers and rows."""
    evicted: bool = False


def train_plain(trial: Trial, optimizer: str, *, double: bool = False, sparse: bool = False) -> Outcome:
    """Plain PyTorch."""
    model = built(trial)
    for layer in tables_of(trial, model):
        layer.sparse = sparse or optimizer == "SparseAdam"
    if double:
        trial = replace(trial, batches=[doubled(batch) for batch in trial.batches])
        with in_double():
            model = doubled_model(model)
            outcome = _trained(trial, model, optimizers_of(trial, model, optimizer), trial.batches)
    else:
        outcome = _trained(trial, model, optimizers_of(trial, model, optimizer), trial.batches)
    outcome.state = {name: value.detach().clone() for name, value in model.state_dict().items()}
    return outcome


def train_prepared(trial: Trial, optimizer: str) -> Outcome:
    """The same with rows in a cache that can't hold all of them; values are checked, and read from an export."""
    model = built(trial)
    made = optimizers_of(trial, model, optimizer)
    options = bagpipe.Options(keep=trial.keep, check=True)

    def prepare(cache: int) -> bagpipe.PreparedLoader:
        return bagpipe.prepare(model, made, trial.batches, cache=cache, features=trial.features, options=options)[2]

    try:
        loader = prepare(1)
    except CapacityError as error:  # before the model is touched
        loader = prepare(int(int(re.findall(r"cache=(\d+)", str(error))[0]) * ROOM))
    try:
        with loader:
            outcome = _trained(trial, model, made, loader)
            outcome.evicted = loader.stats()["fetched_rows"] > loader.stats()["cache_rows"]
        with tempfile.TemporaryDirectory() as directory:
            path = Path(directory) / "model.safetensors"
            bagpipe.export(model, path)
            outcome.state = load_file(path)
    finally:
        loader.loop.store.close()
    return outcome


def built(trial: Trial) -> nn.Module:
    """The same first values every time, of rows not too small to matter."""
    seed(5)
    model = trial.build()
    with torch.no_grad():
        for layer in model.modules():
            if isinstance(layer, nn.Embedding) and layer.weight.std() < SPREAD:
                layer.weight.mul_(SPREAD / layer.weight.std())
    return model


def tables_of(trial: Trial, model: nn.Module) -> list[nn.Embedding]:
    """The layers that `prepare` is to take over."""
    return [
        layer for name, layer in model.named_modules() if isinstance(layer, nn.Embedding) and name not in trial.keep
    ]


def optimizers_of(trial: Trial, model: nn.Module, optimizer: str) -> Optimizers:
    """The optimizers of all parameters of a model."""
    tables = [layer.weight for layer in tables_of(trial, model)]
    taken = {id(weight) for weight in tables}
    return OPTIMIZERS[optimizer](tables, [each for each in model.parameters() if id(each) not in taken])


def seed(number: int) -> None:
    """All generators that a model may draw from."""
    random.seed(number)
    np.random.seed(number)  # noqa: NPY002
    torch.manual_seed(number)


def _trained(trial: Trial, model: nn.Module, optimizers: Optimizers, batches: Iterable[Any]) -> Outcome:
    outcome = Outcome()
    seed(6)
    model.train()
    for number, batch in enumerate(batches):
        for optimizer in optimizers:
            optimizer.zero_grad()
        loss = trial.loss(model, batch)
        loss.backward()
        for optimizer in optimizers:
            optimizer.step()
        outcome.losses.append(loss.item())
        if number == NUM_BATCHES // 2:
            outcome.predictions += _predicted(trial, model, trial.batches[-1])
    outcome.predictions += _predicted(trial, model, trial.batches[0])
    return outcome


def _predicted(trial: Trial, model: nn.Module, batch: Any) -> list[Tensor]:
    model.eval()
    with torch.no_grad():
        found = trial.predict(model, batch)
    model.train()
    return [each.detach().clone() for each in (found if isinstance(found, tuple | list) else [found])]


def moved(trial: Trial, outcome: Outcome) -> float:
    """How far a row has moved, at the most."""
    layers = [(name, layer) for name, layer in built(trial).named_modules() if isinstance(layer, nn.Embedding)]
    state = [(layer.weight, outcome.state[f"{name}.weight"]) for name, layer in layers if name not in trial.keep]
    return max(float((after - before).abs().max()) for before, after in state)


def distance(expected: Outcome, found: Outcome) -> float:
    """The largest difference of any loss, prediction or parameter, relative to the number where that is above 1."""
    assert list(found.state.keys() - expected.state.keys()) == []
    pairs = [(expected.state[name], value) for name, value in found.state.items()]
    assert len(pairs) == len(expected.state)
    pairs += list(zip(expected.predictions, found.predictions, strict=True))
    pairs.append((torch.tensor(expected.losses), torch.tensor(found.losses)))
    return max(_difference(a.double(), b.double()) for a, b in pairs if a.numel())


def _difference(expected: Tensor, found: Tensor) -> float:
    assert expected.shape == found.shape
    assert expected.isfinite().all()
    return float(((found - expected).abs() / expected.abs().clamp(min=1)).max())


@contextmanager
def in_double() -> Iterator[None]:
    """Models that convert to float32 by name convert to float64."""
    first, single, double = torch.get_default_dtype(), torch.float32, Tensor.double
    randn, rand = torch.randn, torch.rand
    with (
        patch.object(Tensor, "float", double),
        patch.object(torch, "FloatTensor", torch.DoubleTensor),
        patch.object(torch, "randn", lambda *shape, **options: double(randn(*shape, **options, dtype=single))),
        patch.object(torch, "rand", lambda *shape, **options: double(rand(*shape, **options, dtype=single))),
        patch.multiple(torch, float=torch.float64, float32=torch.float64, cfloat=torch.complex128),
    ):
        torch.set_default_dtype(torch.float64)
        try:
            yield
        finally:
            torch.set_default_dtype(first)


def doubled_model(model: nn.Module) -> nn.Module:
    """With float64, also in tensors that are no buffers."""
    for part in model.modules():
        for name, value in vars(part).items():
            if isinstance(value, Tensor) and value.is_floating_point():
                vars(part)[name] = value.double()
    return model.double()


def doubled(batch: Any) -> Any:
    """With float64 where there was float32; of dicts, and of objects that hold one."""
    if not isinstance(batch, dict):
        batch = copy(batch)
        batch.interaction = doubled(batch.interaction)
        return batch
    return {name: part.double() if part.is_floating_point() else part for name, part in batch.items()}
