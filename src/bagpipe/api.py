"""`bagpipe.accelerate`: swap the embedding layers of a model, and iterate over batches whose rows are on the device.

Everything that can be refused is refused here, before the first iteration (I8): the first batch is read, features are
mapped to layers, sizes are checked. Then the pipeline runs in the background until the loop ends, breaks or fails.
"""

from __future__ import annotations

import gc
import math
import os
import tempfile
from collections.abc import Callable, Collection, Iterable, Sequence
from pathlib import Path
from typing import Any, Literal

import numpy as np
import torch
from torch import nn

from bagpipe.cache import RowCache, group_by_width
from bagpipe.config import cache_size
from bagpipe.errors import BatchError, CapacityError, ConfigError, ModelError
from bagpipe.initial import Given, Initial, Normal
from bagpipe.kernels.parallel import Workers
from bagpipe.layers import Binding, FeatureMap, bind
from bagpipe.layout import RowLayout
from bagpipe.optim import Frozen, PerTable, RowOptimizer
from bagpipe.oracle.lookahead import Oracle
from bagpipe.oracle.tables import OracleTable
from bagpipe.store import MappedStore, MemoryStore, Store
from bagpipe.trainer.batches import Batches
from bagpipe.trainer.pipeline import DEPTH
from bagpipe.trainer.source import Source
from bagpipe.trainer.stages import Driver, Threads
from bagpipe.types import Table


def accelerate(
    model: nn.Module,
    loader: Iterable[Any],
    rows: RowOptimizer | PerTable,
    *,
    cache: int | str = "1GB",
    lookahead: int | Literal["auto"] = "auto",
    policy: str = "lookahead",
    store: str | Path = "memory",
    features: FeatureMap | None = None,
    tables: Sequence[Table] = (),
    keep: Collection[str] = (),
    initial: Callable[[Table], Initial] | None = None,
    epochs: int = 1,
    accumulate: int = 1,
    seed: int = 0,
    check: bool = False,
    depth: int = DEPTH,
    threads: int | None = None,
    driver: Driver | None = None,
) -> Batches:
    """Move the embedding tables of a model out of the way and iterate over its loader with the rows in a small cache.

    The embedding layers are swapped at once, so build the dense optimizer afterwards. Use the result as a context
    manager around the training loop; leaving it, also by `break` or an exception, writes every row back.

    Args:
        model: Has `nn.EmbeddingBag` or `nn.Embedding` layers; those on the meta device take no memory.
        loader: Yields batches of any shape (dicts, tuples, dataclasses, `bagpipe.Batch`, KeyedJaggedTensors).
        rows: The optimizer of the embedding rows, or a `bagpipe.optim.PerTable`.
        cache: Size of the cache on the device: a number of rows, or bytes such as "2GB", optimizer state included.
        lookahead: How many batches the oracle reads ahead; "auto" fills the cache.
        policy: What the oracle keeps: "lookahead", "lru", "nocache" or "ideal".
        store: Where all rows live: "memory", "mapped" (files in a temporary directory), or a directory for the files.
        features: Which layer or layers each feature feeds, where names do not tell.
        tables: Names and sizes of the data's tables, where known; ids of a table without a size are any 64-bit number.
        keep: Layers to leave as they are.
        initial: Makes the first values of a table whose layers are on the meta device; by default N(0, 1), as PyTorch.
        epochs: How often to go through the loader, in one window.
        accumulate: Batches an iteration; call `rows.step()` after so many.
        seed: Fixes the initial values.
        check: Follow every row and stop at the first wrong value; slow.
        depth: How many plans may be ready before they are trained.
        threads: For kernels; as torch uses by default.
        driver: Runs the background stages; for tests.
    """
    _at_least("epochs", epochs, 1)
    _at_least("accumulate", accumulate, 1)
    _at_least("depth", depth, 1)
    source = Source(loader, epochs, accumulate)
    if source.first is None:
        raise BatchError("the loader is empty: there is nothing to train on")
    binding = bind(model, list(source.adapter.paths), features, tables, keep)
    _refuse_held_parameters(binding)
    source.features = tuple(name for table in binding.tables for name in table.features)
    layouts = _layouts(binding, rows, initial, seed)
    capacity = _capacity(source, layouts, cache, policy)
    workers = Workers(threads or torch.get_num_threads())
    oracle = Oracle(
        [
            OracleTable(layout.table.name, layout.table.rows, layout.table.features, group)
            for layout, group in zip(layouts, group_by_width([layout.width for layout in layouts])[0], strict=True)
        ],
        capacity,
        lookahead=lookahead,
        policy=policy,
    )
    return Batches(
        model,
        source,
        binding,
        rows,
        layouts,
        oracle,
        RowCache([layout.width for layout in layouts], capacity, torch.device("cpu")),
        _open_store(store, layouts),
        workers,
        driver or Threads(),
        depth,
        check,
    )


def _layouts(
    binding: Binding, rows: RowOptimizer | PerTable, initial: Callable[[Table], Initial] | None, seed: int
) -> list[RowLayout]:
    layouts = []
    for number, table in enumerate(binding.tables):
        layers = [layer for layer in binding.layers if layer.table == number]
        optimizer = rows.for_table(table.name, [layer.name for layer in layers])
        if binding.frozen(number):
            optimizer = Frozen()
        if all(layer.module.weight.is_meta for layer in layers):
            first = Normal(seed, table.name) if initial is None else initial(table)
        elif any(layer.module.weight.is_meta for layer in layers):
            raise ModelError(
                f"layers {[layer.name for layer in layers]} share rows: put all or none on the meta device"
            )
        else:
            first = Given([layer.module.weight.detach().cpu().numpy() for layer in layers])
        layouts.append(RowLayout(table, binding.dims(number), optimizer, first))
    return layouts


def _capacity(source: Source, layouts: Sequence[RowLayout], cache: int | str, policy: str) -> list[int]:
    """Slots of each row width: the cache is divided as the rows of the first batch are."""
    rows_or_bytes = cache_size(cache)
    ids = source.adapter.extract(source.first, source.features, 0)
    unique = [len(np.unique(np.concatenate([ids[name] for name in layout.table.features]))) for layout in layouts]
    group, widths = group_by_width([layout.width for layout in layouts])
    capacity = []
    weights = [1 if isinstance(rows_or_bytes, int) else 4 * width for width in widths]
    shares = [sum(u for u, g in zip(unique, group, strict=True) if g == each) for each in range(len(widths))]
    whole = max(1, sum(share * weight for share, weight in zip(shares, weights, strict=True)))
    total = rows_or_bytes if isinstance(rows_or_bytes, int) else rows_or_bytes.num_bytes
    for each, share in enumerate(shares):
        sizes = [layout.table.rows for layout, g in zip(layouts, group, strict=True) if g == each]
        known = None if None in sizes else sum(size for size in sizes if size is not None)
        slots = total * share // whole
        if policy == "ideal" and known is not None:
            slots = known
        capacity.append(max(1, slots if known is None else min(slots, known)))
        if capacity[-1] < share:
            needed = whole if isinstance(rows_or_bytes, int) else f"{math.ceil(whole / 1000)}KB"
            raise CapacityError(
                f"cache={cache!r} holds {capacity[-1]} rows of {widths[each]} floats, the first batch has {share}: "
                f"give at least cache={needed!r}, or smaller batches"
            )
    return capacity


def _open_store(store: str | Path, layouts: Sequence[RowLayout]) -> Store:
    if store == "memory":
        return MemoryStore(layouts)
    if store == "mapped":
        return MappedStore.create(tempfile.mkdtemp(prefix="bagpipe-"), layouts)
    if isinstance(store, str) and os.sep not in store:
        raise ConfigError(f"store={store!r}: give 'memory', 'mapped', or the path of a directory for the files")
    return MappedStore.create(store, layouts, keep=True)


def _refuse_held_parameters(binding: Binding) -> None:
    """A dense optimizer that was built before the swap would go on holding whole tables."""
    weights = {id(layer.module.weight): layer.name for layer in binding.layers}
    for thing in gc.get_objects():
        if issubclass(type(thing), torch.optim.Optimizer):
            for group in thing.param_groups:
                for parameter in group["params"]:
                    if id(parameter) in weights:
                        raise ModelError(
                            f"a {type(thing).__name__} holds the weight of layer {weights[id(parameter)]!r}, which "
                            "bagpipe takes over: build it from model.parameters() after bagpipe.accelerate"
                        )


def _at_least(name: str, value: object, least: int) -> None:
    if isinstance(value, bool) or not isinstance(value, int) or value < least:
        raise ConfigError(f"{name} is {value!r}: give a whole number of at least {least}")
