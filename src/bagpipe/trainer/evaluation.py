"""Batches for evaluation: their rows are read from the store into a buffer of their own; nothing is changed (I1)."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any

import numpy as np
import numpy.typing as npt
import torch

from bagpipe.adapt import Adapter
from bagpipe.embedding import Lookups, TableView, check_range
from bagpipe.types import Table

Ids = npt.NDArray[np.int64]
ReadRows = Callable[[int, Ids], npt.NDArray[np.float32]]


def private_batches(
    loader: Iterable[Any], tables: Sequence[Table], read_rows: ReadRows, device: torch.device
) -> Iterator[tuple[Any, list[TableView]]]:
    """Each batch of the loader, and where its rows are."""
    adapter: Adapter | None = None
    features = [name for table in tables for name in table.features]
    for number, batch in enumerate(_read(loader)):
        adapter = adapter or Adapter(batch)
        adapter.require(features)
        ids = adapter.extract(batch, features, number)
        views: list[TableView] = []
        for table, of_table in enumerate(tables):
            parts = [ids[name] for name in of_table.features]
            check_range(of_table, parts)
            unique = np.unique(np.concatenate(parts))
            rows = torch.from_numpy(read_rows(table, unique)).to(device)
            views.append(TableView(rows, np.arange(len(unique), dtype=np.int32), unique))
        yield batch, views


def _read(loader: Iterable[Any]) -> Iterator[Any]:
    """What the loader yields, without a trace in the global random generator: training goes on as if it had not run."""
    of_training = torch.get_rng_state()
    batches = iter(loader)
    own = torch.get_rng_state()
    torch.set_rng_state(of_training)
    while True:
        of_training = torch.get_rng_state()
        torch.set_rng_state(own)
        try:
            batch = next(batches)
        except StopIteration:
            return
        finally:
            own = torch.get_rng_state()
            torch.set_rng_state(of_training)
        yield batch


def shown(
    batches: Iterable[tuple[Any, list[TableView]]], lookups: Lookups, current: Callable[[], list[TableView] | None]
) -> Iterator[Any]:
    """The batches, each while the layers look its own rows up; then those of the batch in training, if there is one."""
    own: list[TableView] | None = None
    try:
        for batch, views in batches:
            lookups.view = own = views
            lookups.recording = False
            yield batch
    finally:
        if own is not None and lookups.view is own:
            lookups.view = current()
            lookups.recording = lookups.view is not None
