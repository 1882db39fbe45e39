"""`bagpipe.accelerate`: swap the embedding layers of a model, and iterate over batches whose rows are on the device.

Everything that can be refused is refused here, before the first iteration and before the model is touched (I8): the
first batch is read, features are mapped to layers, sizes are checked. The pipeline starts with the first batch.
"""

from __future__ import annotations

import gc
import os
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import torch
from torch import nn

from bagpipe.adapt import Adapter
from bagpipe.cache import RowCache
from bagpipe.checkpointing import Checkpointing, plan_script
from bagpipe.cluster.context import current
from bagpipe.config import cache_size
from bagpipe.embedding import CachedLayer, Lookups
from bagpipe.errors import BatchError, ConfigError, ModelError
from bagpipe.initial import Given, Initial, Normal
from bagpipe.layers import Binding, FeatureMap, bind, embedding_layers
from bagpipe.layout import RowLayout
from bagpipe.opening import OpenStore, label, memory_of_files, open_rows, same_store
from bagpipe.optim import Frozen, PerTable, RowOptimizer
from bagpipe.oracle.capacity import make_oracle
from bagpipe.oracle.service import PlanSettings
from bagpipe.policies import make_policy
from bagpipe.policy_options import PolicyOptions, as_options
from bagpipe.resuming import Resume
from bagpipe.several import open_loader, share_batches
from bagpipe.trainer.agreement import refuse_ranks
from bagpipe.trainer.batches import Batches
from bagpipe.trainer.pipeline import DEPTH
from bagpipe.trainer.row_sync import Peers
from bagpipe.trainer.source import LocalPlans, PlanSource, Source
from bagpipe.trainer.stages import Driver, Threads
from bagpipe.types import Table

WRAPPERS = {"DistributedDataParallel", "FullyShardedDataParallel", "FSDPModule"}
"""Of torch; by name, since their modules take long to load."""


def accelerate(
    model: nn.Module,
    loader: Iterable[Any],
    rows: RowOptimizer | PerTable,
    *,
    cache: int | str = "1GB",
    lookahead: int | Literal["auto"] = "auto",
    policy: str = "lookahead",
    policy_options: PolicyOptions | Mapping[str, Any] | None = None,
    store: str | Path | OpenStore = "memory",
    store_memory: str | None = None,
    device: torch.device | str | None = None,
    features: FeatureMap | None = None,
    tables: Sequence[Table] = (),
    keep: Collection[str] = (),
    initial: Callable[[Table], Initial] | None = None,
    epochs: int = 1,
    accumulate: int = 1,
    seed: int = 0,
    checkpoint: Checkpointing | None = None,
    resume: Resume = None,
    check: bool = False,
    depth: int = DEPTH,
    threads: int | None = None,
    driver: Driver | None = None,
) -> Batches:
    """Move the embedding tables of a model out of the way and iterate over its loader with the rows in a small cache.

    The embedding layers are swapped at once, so build the dense optimizer afterwards. Use the result as a context
    manager around the training loop; leaving it, also by `break` or an exception, writes every row back. A model whose
    earlier loop has ended can be accelerated again, and goes on with its rows. With several trainers
    (docs/trainers.md), `rank` of the result says which one this is.

    Args:
        model: Has `nn.EmbeddingBag` or `nn.Embedding` layers; those on the meta device take no memory.
        loader: Yields batches of any shape (dicts, tuples, dataclasses, `bagpipe.Batch`, KeyedJaggedTensors), each in
            tensors of its own; it is read ahead, by another thread. Under `bagpipe launch --trainers N` the first
            trainer's batches are shared by all, and of the others' loaders only the first batch is looked at.
        rows: The optimizer of the embedding rows, or a `bagpipe.optim.PerTable`.
        cache: Size of the cache on the device: a number of rows, bytes such as "2GB", optimizer state included, or a
            share of all rows such as "1.5%".
        lookahead: How many batches the oracle reads ahead, the current one included: a row whose next use is among them
            stays in the cache. "auto" reads as far as fills it, and lets rows go only when their place is needed.
        policy: What the oracle keeps; docs/policies.md tells which to choose. "lookahead", "belady", "scratchpipe",
            "windowed", "frequency", "static", "lfu", "lru", "nocache" or "ideal".
        policy_options: Settings of the policy, such as {"sample": 32}; `bagpipe.policies.PolicyOptions` has them all.
        store: Where all rows live: "memory", "mapped" (files in the directory of temporary files), another directory
            for the files, or a function that opens a `bagpipe.store.Store` for the layouts of rows that it is given.
            The files have no names and end with the process: what outlives it is in checkpoints and exports.
        store_memory: How much of rows on disk the operating system may keep in memory, such as "4GB"; 1 GiB by default.
        device: Where the cache is; by default where the model's other parameters are. Other devices than the CPU use
            torch operations, equal to float tolerance only; untested on a GPU.
        features: Which layer or layers each feature feeds, where names do not tell. Of two tensors side by side in a
            tuple under the key "words", "words" means (values, offsets) of bags, "words.0" and "words.1" two features.
        tables: Names and sizes of the data's tables, where known; ids of a table without a size are any 64-bit number.
        keep: Layers to leave as they are.
        initial: Makes the first values of a table whose layers are on the meta device; by default N(0, 1), as PyTorch.
        epochs: How often to go through the loader, in one window.
        accumulate: Batches an iteration; call `rows.step()` after so many, when `batches.step_due`.
        seed: Fixes the initial values.
        checkpoint: Where and how often to write checkpoints; docs/checkpoints.md tells how to use them.
        resume: Go on from a checkpoint: True from the last one of `checkpoint`, "auto" from there if there is one, or
            the path of a checkpoint, of a directory of them, or of a run. Attach dense optimizers and whatever else has
            a state by `batches.attach` before the first batch.
        check: Follow every row and stop at the first wrong value; slow.
        depth: How many plans may be ready before they are trained.
        threads: For kernels; as torch uses by default.
        driver: Runs the background stages; for tests.
    """
    if not isinstance(rows, RowOptimizer | PerTable):
        raise ModelError(f"rows is a {type(rows).__name__}: give one of bagpipe.optim, such as bagpipe.optim.SGD(0.1)")
    _at_least("epochs", epochs, 1)
    plans = PlanChoice(cache, lookahead, policy, as_options(policy_options))
    training = Training(
        model, loader, plans, store, store_memory, device=device, accumulate=accumulate, epochs=epochs, seed=seed,
        check=check, depth=depth, threads=threads, driver=driver,
    )  # fmt: skip
    _refuse_earlier_optimizers(training.bind(features, tables, keep))
    earlier = _earlier(model)
    if earlier is not None and (checkpoint is not None or resume):
        raise ConfigError(
            "checkpoint and resume are for the first loop over a model: give epochs=N instead of several loops, or "
            "build the model anew"
        )
    training.lay_out(rows, initial, earlier)
    return training.open(checkpoint, resume, earlier)


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


class Training:
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
        epochs: int,
        seed: int,
        check: bool,
        depth: int,
        threads: int | None,
        driver: Driver | None,
    ) -> None:
        if not isinstance(model, nn.Module):
            raise ModelError(f"model is a {type(model).__name__}: give an nn.Module")
        if not isinstance(loader, Iterable):
            raise BatchError(f"the loader is a {type(loader).__name__}: give something that yields batches")
        _refuse_wrapped(model)
        self.launch = current()
        if self.launch is None or self.launch.trainers == 1:
            refuse_ranks(os.environ.get("WORLD_SIZE") if self.launch is None else None)
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
        self.accumulate, self.epochs, self.seed, self.check, self.depth = accumulate, epochs, seed, check, depth
        self.resident_bytes_max = memory_of_files(store, store_memory)
        self.driver, self.threads = driver or Threads(), threads or torch.get_num_threads()
        if self.launch is not None and self.launch.trainers > 1:
            _refuse_with_several(self.launch.trainers, check, self.policy.exact)
        self.read(loader)
        if self.source.empty:
            raise BatchError("the loader is empty: there is nothing to train on")
        if self.policy.samples:
            self.source.check_sample(plans.options.sample)
        self._device = device

    def read(self, loader: Iterable[Any]) -> None:
        """Begin to read a loader; nothing beyond its first batch."""
        if self.launch is not None and self.launch.trainers > 1:
            self.source = open_loader(self.launch, loader, self.epochs, self.accumulate)
        else:
            self.source = Source(loader, self.epochs, self.accumulate)

    def bind(self, features: FeatureMap | None, tables: Sequence[Table], keep: Collection[str]) -> Binding:
        """Find out which layer looks up which feature."""
        self.binding = _bind(self.model, self.source.adapter, features, tables, keep)
        self.device = _usable(self._device) if self._device is not None else _device_of(self.model, self.binding)
        return self.binding

    def bind_again(self) -> None:
        """The same for another reading of the same loader."""
        names = [name for table in self.binding.tables for name in table.features]
        bags = any(isinstance(layer.module, nn.EmbeddingBag) for layer in self.binding.layers)
        self.source.adapter.choose(names, bags=bags)
        self.source.adapter.require(names)

    def lay_out(
        self,
        rows: RowOptimizer | PerTable,
        initial: Callable[[Table], Initial] | None,
        earlier: Batches | None = None,
        *,
        frozen: bool = True,
    ) -> None:
        """Find out what a row of each table is; with `frozen` weights that are so now will always be."""
        _refuse_unknown_optimizers(rows, self.binding)
        self.rows = rows
        self.layouts = _layouts(self.binding, rows, initial, self.seed, earlier, frozen)

    def open(
        self,
        checkpoint: Checkpointing | None = None,
        resume: Resume = None,
        earlier: Batches | None = None,
        *,
        lookups: Lookups | None = None,
    ) -> Batches:
        """The training loop over what is being read; `earlier` was the one before, over the same rows, whose layers go
        on looking up if their `lookups` are given."""
        launch, binding, layouts, plans = self.launch, self.binding, self.layouts, self.plans
        self.source.tables = binding.tables
        widths = [layout.width for layout in layouts]
        saving = None
        if earlier is None:
            saving = plan_script(launch, self.source, self.model, binding, layouts, checkpoint, resume, self.accumulate)

        def make(source: PlanSource, capacity: Sequence[int], peers: Peers | None = None) -> Batches:
            row_cache, checkpointer = RowCache(widths, capacity, self.device), None
            if earlier is None:
                opened = open_rows(self.store, layouts, self.resident_bytes_max)
            else:
                opened = earlier.store if lookups is not None else same_store(self.store, earlier)
            try:
                if saving is not None:
                    opened, checkpointer = saving.open(opened, 0 if peers is None else peers.rank)
                return Batches(
                    self.model, binding, self.rows, layouts, source, row_cache, opened, self.driver,
                    depth=self.depth, threads=self.threads, check=self.check, peers=peers, checkpointer=checkpointer,
                    ahead=self.policy.lead(plans.lookahead, plans.options),
                    before=0 if earlier is None else earlier.in_store, lookups=lookups,
                )  # fmt: skip
            except BaseException:
                if earlier is None:
                    opened.close()
                raise

        if launch is None or launch.trainers == 1:
            oracle = make_oracle(
                binding.tables, widths, cache_size(plans.cache), self.source.first_ids(), self.source.other_ids(),
                lookahead=plans.lookahead, policy=plans.policy, options=plans.options,
            )  # fmt: skip
            return make(LocalPlans(self.source, oracle), oracle.capacity)
        costs = tuple(layout.move_cost for layout in layouts)
        settings = PlanSettings(
            binding.tables, tuple(widths), plans.cache, plans.lookahead, plans.policy, self.accumulate,
            options=plans.options, move_costs=costs,
        )  # fmt: skip
        wanted = {"epochs": self.epochs, "rows": [_wanted(layout) for layout in layouts]}
        point = "" if saving is None else saving.point
        return share_batches(launch, self.source, binding, settings, wanted, point, self.driver, make)


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
    earlier: Batches | None,
    frozen: bool,
) -> list[RowLayout]:
    before = {layout.table.name: layout for layout in earlier.layouts} if earlier is not None else {}
    layouts = []
    for number, table in enumerate(binding.tables):
        layers = [layer for layer in binding.layers if layer.table == number]
        on_meta = {layer.module.weight.is_meta for layer in layers}
        first: Initial
        if table.name in before:
            first = before[table.name].initial
        elif on_meta == {True}:
            first = Normal(seed, table.name) if initial is None else initial(table)
        elif on_meta == {False}:
            first = Given([layer.module.weight.detach().cpu().numpy() for layer in layers])
        else:
            names = [layer.name for layer in layers]
            raise ModelError(f"layers {names} share rows: put all or none on the meta device")
        named = [layer.name for layer in layers]
        optimizer = Frozen() if frozen and binding.frozen(number) else rows.for_table(table.name, named)
        layouts.append(RowLayout(table, binding.dims(number), optimizer, first))
    if earlier is not None:
        _refuse_other_rows(layouts, earlier.layouts)
    return layouts


def _earlier(model: nn.Module) -> Batches | None:
    """The loop that has trained this model before, which must have ended."""
    for name, part in model.named_modules():
        if isinstance(part, CachedLayer):
            earlier = part.lookups.reader
            assert isinstance(earlier, Batches)
            if not earlier.closed:
                raise ModelError(
                    f"layer {name!r} is in a training loop of bagpipe.accelerate already: leave its 'with' block first"
                )
            return earlier
    return None


def _refuse_other_rows(layouts: Sequence[RowLayout], before: Sequence[RowLayout]) -> None:
    def described(layout: RowLayout) -> tuple[Any, ...]:
        state = layout.optimizer.initial_state(layout.dims).tolist()
        return layout.table.name, layout.table.rows, layout.dims, layout.optimizer.name, state

    if [described(layout) for layout in layouts] != [described(layout) for layout in before]:
        raise ModelError(
            f"the rows of this model were laid out for {_summary(before)}, and now for {_summary(layouts)}: use the "
            "features and row optimizers of its first bagpipe.accelerate, or load its weights into a new model"
        )


def _summary(layouts: Sequence[RowLayout]) -> str:
    return ", ".join(f"{layout.table.name} {layout.dims} {layout.optimizer.name}" for layout in layouts)


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


def _wanted(layout: RowLayout) -> str:
    """What the rows of a table are, and how they will be updated."""
    optimizer = layout.optimizer
    lr = "by a schedule" if callable(optimizer.lr) else optimizer.lr
    settings = {name: getattr(optimizer, name) for name in optimizer.settings}
    return f"{label(layout)}, lr {lr}, {settings}, after {optimizer.updates} updates"


def _refuse_with_several(trainers: int, check: bool, exact: bool) -> None:
    if check:
        raise ConfigError("check=True follows the rows of one trainer: leave it out where there are several")
    if not exact:
        raise ConfigError(f"policy option mode 'stale' is for one trainer, not {trainers}: use 'strict'")


def _refuse_earlier_optimizers(binding: Binding) -> None:
    """A dense optimizer that was built before the swap would go on holding whole tables."""
    weights = {id(layer.module.weight): layer.name for layer in binding.layers}
    kinds = _with_subclasses(torch.optim.Optimizer)
    for optimizer in [thing for thing in gc.get_objects() if type(thing) in kinds]:
        for group in getattr(optimizer, "param_groups", ()):
            for parameter in group["params"]:
                if id(parameter) in weights:
                    raise ModelError(
                        f"a {type(optimizer).__name__} holds the weight of layer {weights[id(parameter)]!r}, which "
                        "bagpipe takes over: build it from model.parameters() after bagpipe.accelerate"
                    )


def _refuse_wrapped(model: nn.Module) -> None:
    """What averages gradients over ranks would miss those of rows, and may have taken copies of the layers already."""
    for name, part in model.named_modules():
        found = {kind.__name__ for kind in type(part).__mro__ if kind.__module__.startswith("torch.")} & WRAPPERS
        if found:
            raise ModelError(
                f"{f'part {name!r} of the model' if name else 'the model'} is a {found.pop()}, which knows nothing of "
                "rows: give bagpipe.accelerate the module without it, and for several trainers start the script with "
                "'bagpipe launch --trainers N SCRIPT', which averages the gradients of dense parameters and rows itself"
            )


def _with_subclasses(kind: type) -> set[type]:
    below: list[type] = kind.__subclasses__()
    return {kind}.union(*map(_with_subclasses, below))


def _at_least(name: str, value: object, least: int, others: str = "") -> None:
    if isinstance(value, bool) or not isinstance(value, int) or value < least:
        raise ConfigError(f"{name} is {value!r}: give a whole number of at least {least}{others}")
