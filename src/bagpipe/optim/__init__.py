"""The optimizers of embedding rows (`bagpipe.optim`): what one update does to a row, defined in NumPy float32."""

from __future__ import annotations

from typing import Any

from bagpipe import schedules
from bagpipe.errors import ConfigError
from bagpipe.optim.adagrad import Adagrad, RowwiseAdagrad
from bagpipe.optim.adam import Adam, AdamW
from bagpipe.optim.base import RowOptimizer, Scalars, Stepper
from bagpipe.optim.per_table import PerTable
from bagpipe.optim.sgd import SGD, Frozen, Momentum

__all__ = [
    "SGD",
    "Adagrad",
    "Adam",
    "AdamW",
    "Frozen",
    "Momentum",
    "PerTable",
    "RowOptimizer",
    "RowwiseAdagrad",
    "Scalars",
    "Stepper",
    "build",
]

NAMES: dict[str, type[RowOptimizer]] = {
    kind.name: kind for kind in (SGD, Momentum, Adagrad, RowwiseAdagrad, Adam, AdamW)
}
"""The names that configuration files use."""


def build(name: str, **hyperparameters: Any) -> RowOptimizer:
    """The row optimizer of this name; `lr` may be a mapping of a schedule's name and settings."""
    if name not in NAMES:
        raise ConfigError(f"there is no row optimizer {name!r}: choose one of {', '.join(NAMES)}")
    kind = NAMES[name]
    schedules.check_settings(f"row optimizer {name!r}", hyperparameters, ["lr", *kind.settings])
    if "lr" in hyperparameters:
        hyperparameters["lr"] = schedules.from_config(hyperparameters["lr"])
    elif kind in (SGD, Momentum):
        raise ConfigError(f"row optimizer {name!r} has no lr: give one")
    return kind(**hyperparameters)
