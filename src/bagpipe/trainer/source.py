"""From a loader's batches to what the oracle reads, and from plans to batches whose ids are handles.

The window of the oracle may hold hundreds of batches, so ids are dropped as soon as they are read: what remains is the
plan's `inverse`, half their size. A loader that fails ends the data: what it gave before is trained, then it is raised.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from itertools import chain
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from torch.utils.data import DataLoader, RandomSampler

from bagpipe.adapt import Adapter
from bagpipe.embedding import handle_base
from bagpipe.oracle.plan import Plan
from bagpipe.types import Table

Ids = npt.NDArray[np.int64]


@dataclass(frozen=True, slots=True)
class Group:
    """The micro-batches of one iteration, without their ids."""

    batches: list[Any]
    lengths: list[tuple[int, ...]]
    """For each micro-batch the number of ids of each feature."""


class Source:
    """Reads a loader, epoch after epoch, `accumulate` batches an iteration."""

    def __init__(self, loader: Iterable[Any], epochs: int, accumulate: int) -> None:
        self.error: Exception | None = None
        self._loader, self._epochs, self._accumulate = loader, epochs, accumulate
        if epochs > 1:
            _draw_privately(loader)
        self._first_epoch = iter(loader)
        self._first = next(self._first_epoch, None)
        self.adapter = Adapter(self._first)
        self.features: tuple[str, ...] = ()

    @property
    def first(self) -> Any:
        """The first batch of the loader, or None if it is empty."""
        return self._first

    def groups(self) -> Iterator[tuple[list[Ids], Group]]:
        """For each iteration the ids of each feature, and the batches."""
        batches: list[Any] = []
        ids: list[list[Ids]] = []
        for batch, of_features in self._read():
            batches.append(batch)
            ids.append(of_features)
            if len(batches) == self._accumulate:
                yield _join(batches, ids)
                batches, ids = [], []
        if batches:
            yield _join(batches, ids)

    def _read(self) -> Iterator[tuple[Any, list[Ids]]]:
        number = 0
        try:
            for epoch in range(self._epochs):
                first, self._first = self._first, None
                batches: Iterable[Any] = self._loader
                if epoch == 0:
                    batches = chain([] if first is None else [first], self._first_epoch)
                del first
                for batch in batches:
                    ids = self.adapter.extract(batch, self.features, number)
                    yield (
                        self.adapter.replace(batch, {name: _nothing(len(part)) for name, part in ids.items()}),
                        list(ids.values()),
                    )
                    number += 1
        except Exception as error:
            self.error = error

    def rewrite(self, plan: Plan, group: Group, tables: Sequence[Table]) -> list[Any]:
        """The batches of an iteration, their ids replaced by handles."""
        owner = [number for number, table in enumerate(tables) for _ in table.features]
        handles = [
            torch.from_numpy(np.add(inverse, handle_base(table, plan.iteration), dtype=np.int64))
            for inverse, table in zip(plan.inverse, owner, strict=True)
        ]
        places = [0] * len(handles)
        batches = []
        for batch, lengths in zip(group.batches, group.lengths, strict=True):
            values = {}
            for position, (name, length) in enumerate(zip(self.features, lengths, strict=True)):
                values[name] = handles[position][places[position] : places[position] + length]
                places[position] += length
            batches.append(self.adapter.replace(batch, values))
        return batches


def _join(batches: list[Any], ids: list[list[Ids]]) -> tuple[list[Ids], Group]:
    lengths = [tuple(len(part) for part in of_features) for of_features in ids]
    joined = ids[0] if len(ids) == 1 else [np.concatenate(parts) for parts in zip(*ids, strict=True)]
    return joined, Group(batches, lengths)


def _nothing(length: int) -> torch.Tensor:
    """Has a length and takes no memory."""
    return torch.zeros(1, dtype=torch.int64).expand(length)


def _draw_privately(loader: Iterable[Any]) -> None:
    """Let a shuffling DataLoader draw from a generator of its own: reading ahead must not touch the global one."""
    if not isinstance(loader, DataLoader) or loader.generator is not None:
        return
    loader.generator = torch.Generator()
    loader.generator.manual_seed(int(torch.empty((), dtype=torch.int64).random_().item()))
    if isinstance(loader.sampler, RandomSampler) and loader.sampler.generator is None:
        loader.sampler.generator = loader.generator
