"""The models that come with Bagpipe, by name: plain PyTorch modules, which know nothing of the engine.

Same seed, same model: `build_model` draws initial values from a generator of its own (I1).
"""

from __future__ import annotations

import inspect
from collections.abc import Sequence
from threading import Lock
from typing import Any

import torch

from bagpipe.errors import ConfigError
from bagpipe.models.base import Device, RecommendationModel, count_dense, dense_parameters, unbounded_rows
from bagpipe.models.deep_cross import DeepCross
from bagpipe.models.deepfm import DeepFM
from bagpipe.models.dlrm import DLRM
from bagpipe.models.wide_deep import WideDeep
from bagpipe.types import Table

__all__ = [
    "DLRM",
    "MODELS",
    "DeepCross",
    "DeepFM",
    "RecommendationModel",
    "WideDeep",
    "build_model",
    "count_dense",
    "dense_parameters",
    "unbounded_rows",
]

MODELS: dict[str, type[RecommendationModel]] = {
    "dlrm": DLRM,
    "wide_deep": WideDeep,
    "deep_cross": DeepCross,
    "deepfm": DeepFM,
}


_BUILDING = Lock()
"""The global generator is borrowed: two models that are made at once would draw each other's numbers."""


def build_model(
    name: str,
    tables: Sequence[Table],
    num_dense: int,
    dim: int = 48,
    device: Device = None,
    *,
    seed: int = 0,
    **layers: Any,
) -> RecommendationModel:
    """The model of this name; `device` is that of the embedding layers, "meta" leaves the tables unallocated.

    `layers` are the model's own sizes, such as `top=(64, 32)`; the defaults are the published ones. Initial values
    depend on the seed and the sizes only, and the global random generator stays as it is.
    """
    if name not in MODELS:
        raise ConfigError(f"there is no model {name!r}: choose one of {', '.join(MODELS)}")
    model = MODELS[name]
    known = inspect.signature(model).parameters.keys() - {"tables", "num_dense", "dim", "device"}
    unknown = sorted(layers.keys() - known)
    if unknown:
        raise ConfigError(f"model {name!r} has no {unknown[0]!r}: it takes {', '.join(sorted(known))}")
    with _BUILDING, torch.random.fork_rng(devices=[]):
        # Only the CPU's generator is restored afterwards, so only that one is seeded.
        torch.default_generator.manual_seed(seed)
        return model(tables, num_dense, dim, device=device, **layers)  # type: ignore[call-arg]
