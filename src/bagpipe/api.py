"""`bagpipe.accelerate`: swap the embedding layers of a model, and iterate over batches whose rows are on the device.

Everything that can be refused is refused here, before the first iteration and before the model is touched (I8): the
first batch is read, features are mapped to layers, sizes are checked. The pipeline starts with the first batch.
"""

from __future__ import annotations

import gc
import os
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any, Literal

import torch
from torch import nn

from bagpipe.adapt import Adapter
from bagpipe.cache import RowCache
from bagpipe.checkpointing import Checkpointing, Resume, keep_script
from bagpipe.cluster.context import current
from bagpipe.config import cache_size
from bagpipe.embedding import CachedLayer
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
from bagpipe.several import open_loader, share_batches
from bagpipe.trainer.agreement import refuse_ranks
from bagpipe.trainer.batches import Batches
from bagpipe.trainer.pipeline import DEPTH
from bagpipe.trainer.source import LocalPlans, PlanSource, Source
from bagpipe.trainer.stages import Driver, Threads
from bagpipe.trainer.sync import Peers
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
        store: Where all rows live: "memory", "mapped" (files in a temporary directory), a directory for the files, or a
            function that opens a `bagpipe.store.Store` for the layouts of rows that it is given.
            A directory that an earlier process left, after its `with` block, goes on with the rows that are there, if
            they are of the same tables, sizes, row optimizer and first values; else it must be new or empty. Dense
            parameters and `rows.state_dict()` are not in it: save them beside it.
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
    if not isinstance(model, nn.Module):
        raise ModelError(f"model is a {type(model).__name__}: give an nn.Module")
    if not isinstance(rows, RowOptimizer | PerTable):
        raise ModelError(f"rows is a {type(rows).__name__}: give one of bagpipe.optim, such as bagpipe.optim.SGD(0.1)")
    if not isinstance(loader, Iterable):
        raise BatchError(f"the loader is a {type(loader).__name__}: give something that yields batches")
    _refuse_wrapped(model)
    launch = current()
    if launch is None or launch.trainers == 1:
        refuse_ranks(os.environ.get("WORLD_SIZE") if launch is None else None)
    options = as_options(policy_options)
    chosen_policy = make_policy(policy, options)
    exact = chosen_policy.exact
    if check and not exact:
        raise ConfigError(f"policy {policy!r} with these options reads old rows, which check stops at: leave one out")
    for name, value in (("epochs", epochs), ("accumulate", accumulate), ("depth", depth)):
        _at_least(name, value, 1)
    _at_least("seed", seed, 0)
    if lookahead != "auto":
        _at_least("lookahead", lookahead, 1, ", or 'auto'")
    if policy == "nocache" and lookahead not in ("auto", 1):
        raise ConfigError(f"policy 'nocache' keeps nothing, so lookahead ({lookahead}) has no effect: leave it out")
    if threads is not None:
        _at_least("threads", threads, 1)
    size = cache_size(cache)
    resident_bytes_max = memory_of_files(store, store_memory)
    if launch is not None and launch.trainers > 1:
        _refuse_with_several(launch.trainers, check, exact)
        source = open_loader(launch, loader, epochs, accumulate)
    else:
        source = Source(loader, epochs, accumulate)
    if source.empty:
        raise BatchError("the loader is empty: there is nothing to train on")
    if chosen_policy.samples:
        source.check_sample(options.sample)
    binding = _bind(model, source.adapter, features, tables, keep)
    _refuse_held_parameters(binding)
    earlier = _earlier(model)
    if earlier is not None and (checkpoint is not None or resume):
        raise ConfigError(
            "checkpoint and resume are for the first loop over a model: give epochs=N instead of several loops, or "
            "build the model anew"
        )
    _refuse_unknown_optimizers(rows, binding)
    place = _usable(device) if device is not None else _device_of(model, binding)
    source.tables = binding.tables
    layouts = _layouts(binding, rows, initial, seed, earlier)
    widths = [layout.width for layout in layouts]
    used_driver, used_threads = driver or Threads(), threads or torch.get_num_threads()

    kept = None
    if earlier is None:
        kept = keep_script(launch, source, model, binding, layouts, checkpoint, resume, accumulate)

    def make(plans: PlanSource, capacity: Sequence[int], peers: Peers | None = None) -> Batches:
        row_cache, keeping = RowCache(widths, capacity, place), None
        if earlier is None:
            opened = open_rows(store, layouts, resident_bytes_max, replace=resume not in (None, False))
        else:
            opened = same_store(store, earlier)
        try:
            if kept is not None:
                opened, keeping = kept.open(opened, 0 if peers is None else peers.rank)
            return Batches(
                model, binding, rows, layouts, plans, row_cache, opened, used_driver,
                depth=depth, threads=used_threads, check=check, peers=peers, keeping=keeping,
                ahead=chosen_policy.lead(lookahead, options),
            )  # fmt: skip
        except BaseException:
            if earlier is None:
                opened.close()
            raise

    if launch is None or launch.trainers == 1:
        oracle = make_oracle(
            binding.tables,
            widths,
            size,
            source.first_ids(),
            source.other_ids(),
            lookahead=lookahead,
            policy=policy,
            options=options,
        )
        return make(LocalPlans(source, oracle), oracle.capacity)
    costs = tuple(layout.move_cost for layout in layouts)
    settings = PlanSettings(
        binding.tables, tuple(widths), cache, lookahead, policy, accumulate, options=options, move_costs=costs
    )
    wanted = {"epochs": epochs, "rows": [_wanted(layout) for layout in layouts]}
    point = "" if kept is None else kept.point
    return share_batches(launch, source, binding, settings, wanted, point, used_driver, make)


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
        optimizer = Frozen() if binding.frozen(number) else rows.for_table(table.name, [layer.name for layer in layers])
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


def _refuse_held_parameters(binding: Binding) -> None:
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
