"""What a script asks for, looked at step by step, up to the training loop over its model and loader.

Everything that can be refused is refused before the first iteration and before the model is touched (I8): the first
batch is read, features are mapped to layers, sizes are checked. The pipeline starts with the first batch.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

import torch
from torch import nn

from bagpipe.adapt import Adapter
from bagpipe.config import cache_size
from bagpipe.errors import BatchError, ConfigError, ModelError
from bagpipe.initial import Given, Initial, Normal
from bagpipe.layers import Binding, FeatureMap, bind, embedding_layers
from bagpipe.layout import RowLayout
from bagpipe.optim import PerTable, RowOptimizer
from bagpipe.policies import make_policy
from bagpipe.policy_options import PolicyOptions
from bagpipe.trainer.loop import TrainLoop
from bagpipe.trainer.source import Opened
from bagpipe.trainer.stages import Driver, Threads
from bagpipe.types import Table
from bagpipe.world import OpenStore, World, memory_of_files

if TYPE_CHECKING:
    from bagpipe.checkpointing import Checkpointing, Saving

WRAPPERS = {"DistributedDataParallel", "FullyShardedDataParallel", "FSDPModule"}
"""Of torch; by name, since their modules take long to load."""


@dataclass(frozen=True, slots=True)
class PlanChoice:
    """What the oracle is to do; refused at once if it can't."""

    cache: int | str
    lookahead: int | Literal["auto"]
    policy: str
    options: PolicyOptions

    def __post_init__(self) -> None:
        if self.lookahead != "auto":
            _at_least("lookahead", self.lookahead, 1, ", or 'auto'")
        if self.policy == "nocache" and self.lookahead not in ("auto", 1):
            raise ConfigError(
                f"policy 'nocache' keeps nothing, so lookahead ({self.lookahead}) has no effect: leave it out"
            )
        cache_size(self.cache)
        make_policy(self.policy, self.options)


class Script:
    """A model and its loader on the way to a training loop: what was asked for is looked at step by step, and nothing
    of the model is touched before all of it is known to work."""

    binding: Binding
    rows: RowOptimizer | PerTable
    layouts: list[RowLayout]

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
        driver: Driver | None = None,
    ) -> None:
        if not isinstance(model, nn.Module):
            raise ModelError(f"model is a {type(model).__name__}: give an nn.Module")
        if not isinstance(loader, Iterable):
            raise BatchError(f"the loader is a {type(loader).__name__}: give something that yields batches")
        _refuse_wrapped(model)
        self.world = World.current()
        self.world.refuse_others()
        self.model, self.plans, self.store = model, plans, store
        self.policy = make_policy(plans.policy, plans.options)
        if check and not self.policy.exact:
            raise ConfigError(
                f"policy {plans.policy!r} with these options reads old rows, which check stops at: leave one out"
            )
        for name, value in (("accumulate", accumulate), ("depth", depth)):
            _at_least(name, value, 1)
        _at_least("seed", seed, 0)
        if threads is not None:
            _at_least("threads", threads, 1)
        self.accumulate, self.seed, self.check, self.depth = accumulate, seed, check, depth
        self.resident_bytes_max = memory_of_files(store, store_memory)
        self.driver, self.threads = driver or Threads(), threads or torch.get_num_threads()
        if self.world.trainers > 1:
            _refuse_with_several(self.world.trainers, check, self.policy.exact)
        self.source = self.world.open_source(loader, accumulate)
        if self.source.empty:
            raise BatchError("the loader is empty: there is nothing to train on")
        if self.policy.samples:
            self.source.check_sample(plans.options.sample)
        self.once = isinstance(loader, Iterator)
        """Whether there is only one epoch."""
        self.saving: Saving | None = None
        """How the loop is saved, and where it continues."""
        self._device = device

    def bind(self, features: FeatureMap | None, tables: Sequence[Table], keep: Collection[str]) -> Binding:
        """Find out which layer looks up which feature."""
        self.binding = _bind(self.model, self.source.adapter, features, tables, keep)
        self.device = _usable(self._device) if self._device is not None else _device_of(self.model, self.binding)
        return self.binding

    def lay_out(self, rows: RowOptimizer | PerTable, initial: Callable[[Table], Initial] | None) -> None:
        """Find out what a row of each table is."""
        _refuse_unknown_optimizers(rows, self.binding)
        self.rows = rows
        self.layouts = _layouts(self.binding, rows, initial, self.seed)
        self.source.tables = self.binding.tables

    def open(self, checkpoint: Checkpointing | None = None, *, once: bool = False) -> TrainLoop:
        """The training loop, before its first epoch, which is the only one if the loader is read `once`."""
        self.once = self.once or once
        self.saving = self.world.plan_saving(self, checkpoint)
        with ExitStack() as stack:
            opened = self._open_plans()
            stack.callback(opened.source.close)
            if opened.peers is not None:
                stack.push(opened.peers.leave)
            store = self.world.open_rows(self.store, self.layouts, self.resident_bytes_max)
            stack.callback(store.close)
            checkpointer = None
            if self.saving is not None:
                store, checkpointer = self.saving.open(store, self.world.trainer)
            loop = TrainLoop(
                self.model, self.binding, self.rows, self.layouts, opened, store, self.driver, device=self.device,
                depth=self.depth, threads=self.threads, check=self.check, checkpointer=checkpointer,
                ahead=self.policy.lead(self.plans.lookahead, self.plans.options),
                reopen=None if once else self._open_plans,
            )  # fmt: skip
            if opened.peers is not None and self.saving is not None and self.saving.continues:
                loop.gather(0, "the rows to go on with to be in the store")
            stack.pop_all()
        return loop

    def _open_plans(self) -> Opened:
        return self.world.open_plans(self)


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


def _refuse_with_several(trainers: int, check: bool, exact: bool) -> None:
    if check:
        raise ConfigError("check=True follows the rows of one trainer: leave it out where there are several")
    if not exact:
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


def _at_least(name: str, value: object, least: int, others: str = "") -> None:
    if isinstance(value, bool) or not isinstance(value, int) or value < least:
        raise ConfigError(f"{name} is {value!r}: give a whole number of at least {least}{others}")
