"""What a script asks for, looked at step by step, up to the spec of its training loop.

Everything that can be refused is refused before the first iteration and before the model is touched (I8): the first
batch is read, features are mapped to layers, sizes are checked. The pipeline starts with the first batch.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import nn

from bagpipe.adapt import Adapter
from bagpipe.build import PlanChoice, Spec, at_least
from bagpipe.errors import BatchError, ConfigError, ModelError
from bagpipe.initial import Given, Initial, Normal
from bagpipe.layers import Binding, FeatureMap, bind, embedding_layers
from bagpipe.layout import RowLayout
from bagpipe.optim import PerTable, RowOptimizer
from bagpipe.policies import make_policy
from bagpipe.policies.base import Policy
from bagpipe.types import Table
from bagpipe.world import OpenStore, World, memory_of_files

WRAPPERS = {"DistributedDataParallel", "FullyShardedDataParallel", "FSDPModule"}
"""Of torch; by name, since their modules take long to load."""


class Script:
    """A model and its loader on the way to a training loop: what was asked for is looked at step by step, and nothing
    of the model is touched before all of it is known to work."""

    def __init__(
        self,
        model: nn.Module,
        loader: Iterable[Any],
        plans: PlanChoice,
        store: str | Path | OpenStore,
        store_memory: str | None,
        *,
        device: torch.device | str | None,
        accumulate: int,
        seed: int,
        check: bool,
        depth: int,
        threads: int | None,
    ) -> None:
        if not isinstance(model, nn.Module):
            raise ModelError(f"model is a {type(model).__name__}: give an nn.Module")
        if not isinstance(loader, Iterable):
            raise BatchError(f"the loader is a {type(loader).__name__}: give something that yields batches")
        _refuse_wrapped(model)
        self.world = World.from_environment()
        for name, value in (("accumulate", accumulate), ("depth", depth)):
            at_least(name, value, 1)
        at_least("seed", seed, 0)
        if threads is not None:
            at_least("threads", threads, 1)
        policy = make_policy(plans.policy, plans.options)
        if check and not policy.exact:
            raise ConfigError(
                f"policy {policy.name!r} with these options reads old rows, which check stops at: leave one out"
            )
        if self.world.trainers > 1:
            _refuse_with_several(self.world.trainers, check, policy, plans.policy)
        self._spec = partial(
            Spec, model=model, plans=plans, store=store, resident_bytes_max=memory_of_files(store, store_memory),
            accumulate=accumulate, check=check, depth=depth, threads=threads,
        )  # fmt: skip
        self._model, self._seed, self._device = model, seed, device
        source = self.world.open_source(loader, accumulate)
        assert source is not None, "a script has its loader"
        if source.empty:
            raise BatchError("the loader is empty: there is nothing to train on")
        self.source = source

    def bind(self, features: FeatureMap | None, tables: Sequence[Table], keep: Collection[str]) -> Binding:
        """Find out which layer looks up which feature."""
        self.binding = _bind(self._model, self.source.adapter, features, tables, keep)
        self.device = _usable(self._device) if self._device is not None else _device_of(self._model, self.binding)
        return self.binding

    def lay_out(self, rows: RowOptimizer | PerTable, initial: Callable[[Table], Initial] | None) -> Spec:
        """Find out what a row of each table is; with that, everything is known."""
        _refuse_unknown_optimizers(rows, self.binding)
        layouts = _layouts(self.binding, rows, initial, self._seed)
        return self._spec(binding=self.binding, rows=rows, layouts=layouts, source=self.source, device=self.device)


def _bind(
    model: nn.Module, adapter: Adapter, features: FeatureMap | None, tables: Sequence[Table], keep: Collection[str]
) -> Binding:
    """Map features to layers; what the batches hold is decided first, by names and the kinds of layers."""
    layers = [layer for name, layer in embedding_layers(model).items() if name not in keep]
    names = [name for table in tables for name in table.features] if features is None else list(features)
    adapter.choose(names, bags=any(isinstance(layer, nn.EmbeddingBag) for layer in layers))
    if layers:
        adapter.require_any()
    return bind(model, list(adapter.paths), features, tables, keep, unusable=adapter.others)


def _layouts(
    binding: Binding,
    rows: RowOptimizer | PerTable,
    initial: Callable[[Table], Initial] | None,
    seed: int,
) -> list[RowLayout]:
    layouts = []
    for number, table in enumerate(binding.tables):
        layers = [layer for layer in binding.layers if layer.table == number]
        on_meta = {layer.module.weight.is_meta for layer in layers}
        first: Initial
        if on_meta == {True}:
            first = Normal(seed, table.name) if initial is None else initial(table)
        elif on_meta == {False}:
            first = Given([layer.module.weight.detach().cpu().numpy() for layer in layers])
        else:
            names = [layer.name for layer in layers]
            raise ModelError(f"layers {names} share rows: put all or none on the meta device")
        named = [layer.name for layer in layers]
        layouts.append(RowLayout(table, binding.dims(number), rows.for_table(table.name, named), first))
    return layouts


def _device_of(model: nn.Module, binding: Binding) -> torch.device:
    """Where the dense parameters are."""
    taken = {id(layer.module.weight) for layer in binding.layers}
    dense = (part for part in model.parameters() if id(part) not in taken and not part.is_meta)
    return next((part.device for part in dense), torch.device("cpu"))


def _usable(device: torch.device | str) -> torch.device:
    try:
        return torch.empty(0, device=device).device
    except (RuntimeError, AssertionError) as error:
        reason = str(error).splitlines()[0]
        raise ConfigError(f"device={str(device)!r} can't be used ({reason}): leave it out, or give another") from error


def _refuse_unknown_optimizers(rows: RowOptimizer | PerTable, binding: Binding) -> None:
    known = [table.name for table in binding.tables] + [layer.name for layer in binding.layers]
    for name in rows.tables if isinstance(rows, PerTable) else ():
        if name not in known:
            raise ConfigError(f"PerTable names {name!r}; the model has {', '.join(map(repr, dict.fromkeys(known)))}")


def _refuse_with_several(trainers: int, check: bool, policy: Policy, given: str | Policy) -> None:
    if check:
        raise ConfigError("check=True follows the rows of one trainer: leave it out where there are several")
    if isinstance(given, Policy):
        raise ConfigError(
            f"policy {policy.name!r} is an object, and {trainers} trainers can't tell whether theirs are the same: "
            "give one of the policies that have a name, or train with one trainer"
        )
    if not policy.exact:
        raise ConfigError(f"policy option mode 'stale' is for one trainer, not {trainers}: use 'strict'")


def _refuse_wrapped(model: nn.Module) -> None:
    """What averages gradients over ranks would miss those of rows, and may have taken copies of the layers already."""
    for name, part in model.named_modules():
        found = {kind.__name__ for kind in type(part).__mro__ if kind.__module__.startswith("torch.")} & WRAPPERS
        if found:
            raise ModelError(
                f"{f'part {name!r} of the model' if name else 'the model'} is a {found.pop()}, which knows nothing of "
                "rows: give bagpipe.prepare the module without it, and for several trainers start the script with "
                "'bagpipe launch --trainers N SCRIPT', which averages the gradients of dense parameters and rows itself"
            )
