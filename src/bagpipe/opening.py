"""Where the rows of a model live, as a script says: in memory, in files, on servers, or by a function."""

from __future__ import annotations

import zlib
from collections.abc import Callable, Sequence
from pathlib import Path

import numpy as np

from bagpipe.cluster.context import current
from bagpipe.config import check_store, store_memory_bytes
from bagpipe.errors import ConfigError
from bagpipe.layout import RowLayout
from bagpipe.store import MappedStore, MemoryStore, Store
from bagpipe.store.mapped import RESIDENT_BYTES_MAX

OpenStore = Callable[[Sequence[RowLayout]], Store]


def memory_of_files(store: str | Path | OpenStore, store_memory: str | None) -> int:
    """How many bytes of rows on disk may be in memory; ConfigError where that says nothing."""
    if store_memory is None:
        return RESIDENT_BYTES_MAX
    if callable(store):
        raise ConfigError(f"store_memory ({store_memory!r}) is for the function that opens the store: leave it out")
    return store_memory_bytes(store_memory, store)


def open_rows(store: str | Path | OpenStore, layouts: Sequence[RowLayout], resident_bytes_max: int) -> Store:
    """The store for rows of these layouts."""
    if callable(store):
        return store(layouts)
    launch = current()
    if launch is not None:
        if store != "memory":
            raise ConfigError(
                f"store={str(store)!r}: under bagpipe launch the servers hold the rows: leave store out, and give "
                "--set store=mapped to bagpipe launch where they should be in files"
            )
        return launch.open_store(layouts)
    if store == "memory":
        return MemoryStore(layouts)
    if isinstance(store, str) and store != "mapped":
        check_store(store)
    return MappedStore(layouts, None if store == "mapped" else store, resident_bytes_max=resident_bytes_max)


def first_values(layout: RowLayout) -> str:
    """A checksum of what a few rows of a table begin with, which tells a seed from another."""
    last = (layout.table.rows or 2**63) - 1
    ids = np.unique(np.linspace(0, last, 16).astype(np.uint64).clip(max=last).astype(np.int64))
    values = np.empty((len(ids), layout.width), np.float32)
    layout.initialise(ids, values)
    return f"{zlib.crc32(values.data):08x}"


def label(layout: RowLayout) -> str:
    """What the rows of a table are; its first values are told by those of a few ids."""
    dims = "+".join(map(str, layout.dims))
    return (
        f"table {layout.table.name}, {layout.table.rows or 'any number of'} rows of {dims} floats, "
        f"{layout.optimizer.name}, first values {first_values(layout)}"
    )
