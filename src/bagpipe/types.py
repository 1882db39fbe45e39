"""The records that travel between the parts: tables, ids and batches.

Plain data, no behaviour beyond checking itself; plans, the other record that travels, are in `bagpipe.oracle.plan`.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from bagpipe.errors import BatchError, ConfigError
from bagpipe.table import Table as Table

INDEX_TYPES = (torch.int64, torch.int32)

Order = Tensor | NDArray[np.int64]
"""Numbers of samples, 64-bit integers."""


@dataclass(frozen=True, slots=True, eq=False)
class Ids:
    """The ids of one feature in one batch: for each sample a bag of zero or more.

    With `offsets`, `values` has one dimension and bag i is values[offsets[i]:offsets[i + 1]] (the last one runs to the
    end), as in `nn.EmbeddingBag`. Without, `values` has shape (samples, ids a sample).
    """

    values: Tensor
    offsets: Tensor | None = None
    weights: Tensor | None = None
    """One factor an id, same shape as `values`."""

    def __post_init__(self) -> None:
        shape = tuple(self.values.shape)
        if self.values.dtype not in INDEX_TYPES:
            raise BatchError(f"ids are {self.values.dtype}: give int64, or int32; floats lose ids above 2**24")
        if len(shape) != (2 if self.offsets is None else 1):
            raise BatchError(
                f"ids of shape {shape} {'without' if self.offsets is None else 'with'} offsets: "
                "give 1-dimensional values with offsets, or 2-dimensional values without"
            )
        if self.offsets is not None:
            self._check_offsets(self.offsets)
        if self.weights is not None and self.weights.shape != self.values.shape:
            raise BatchError(f"weights have shape {tuple(self.weights.shape)}, ids {shape}: give one weight an id")

    def _check_offsets(self, offsets: Tensor) -> None:
        if offsets.dtype not in INDEX_TYPES or offsets.dim() != 1:
            raise BatchError(f"offsets are {offsets.dtype} of shape {tuple(offsets.shape)}: give one integer a sample")
        ends = torch.cat([offsets, offsets.new_tensor([self.values.shape[0]])])
        if int(ends[0]) != 0 or bool((ends[1:] < ends[:-1]).any()):
            raise BatchError(
                f"offsets of {len(offsets)} samples are not in order from 0 to {self.values.shape[0]}, the number of "
                "ids: bag i begins at offsets[i] and ends where the next one begins"
            )

    def __len__(self) -> int:
        return int(self.values.shape[0] if self.offsets is None else self.offsets.shape[0])

    def lengths(self) -> Tensor:
        """Number of ids of each sample."""
        if self.offsets is None:
            return self.values.new_full((len(self),), self.values.shape[1], dtype=torch.int64)
        ends = torch.cat([self.offsets[1:], self.offsets.new_tensor([self.values.shape[0]])])
        return ends - self.offsets

    def part(self, start: int, stop: int) -> Ids:
        """The ids of samples start to stop."""
        if self.offsets is None:
            weights = None if self.weights is None else self.weights[start:stop]
            return Ids(self.values[start:stop], None, weights)
        first = int(self.offsets[start]) if start < len(self) else self.values.shape[0]
        last = int(self.offsets[stop]) if stop < len(self) else self.values.shape[0]
        weights = None if self.weights is None else self.weights[first:last]
        return Ids(self.values[first:last], self.offsets[start:stop] - first, weights)

    def take(self, order: Order) -> Ids:
        """The ids of these samples, in this order, in tensors of their own."""
        samples = _sample_numbers(order)
        if self.offsets is None:
            weights = None if self.weights is None else _lines(self.weights, samples)
            return Ids(_lines(self.values, samples), None, weights)
        lengths = self.lengths().index_select(0, samples)
        offsets = lengths.cumsum(0) - lengths
        shifts = self.offsets.index_select(0, samples) - offsets
        places = torch.repeat_interleave(shifts, lengths)
        places += torch.arange(len(places))
        weights = None if self.weights is None else self.weights.index_select(0, places)
        return Ids(self.values.index_select(0, places), offsets.to(self.offsets.dtype), weights)


@dataclass(frozen=True, slots=True, eq=False)
class Batch:
    """One batch of samples: numeric features, ids by feature, labels."""

    dense: Tensor
    """float32, (samples, numeric features)"""
    sparse: Mapping[str, Ids]
    labels: Tensor
    """float32, (samples,)"""
    number: int = field(default=0, kw_only=True)
    """Position in the order of the data, counted from 0 over all epochs."""

    def __post_init__(self) -> None:
        if self.dense.dim() != 2 or self.labels.dim() != 1:
            raise BatchError(
                f"batch {self.number}: dense has shape {tuple(self.dense.shape)}, labels {tuple(self.labels.shape)}: "
                "give (samples, features) and (samples,)"
            )
        sizes = {"dense": self.dense.shape[0], "labels": self.labels.shape[0]}
        sizes |= {name: len(ids) for name, ids in self.sparse.items()}
        if len(set(sizes.values())) > 1:
            raise BatchError(f"batch {self.number}: parts differ in their number of samples: {sizes}")

    def __len__(self) -> int:
        return int(self.labels.shape[0])

    def part(self, start: int, stop: int) -> Batch:
        """Samples start to stop, as a batch of the same number."""
        sparse = {name: ids.part(start, stop) for name, ids in self.sparse.items()}
        # cloned, because the alignment of what enters a matrix product can change its bits
        return Batch(self.dense[start:stop].clone(), sparse, self.labels[start:stop].clone(), number=self.number)

    def take(self, order: Order) -> Batch:
        """These samples in this order, as a batch of the same number, in tensors of its own."""
        samples = _sample_numbers(order)
        sparse = {name: ids.take(samples) for name, ids in self.sparse.items()}
        return Batch(_lines(self.dense, samples), sparse, _lines(self.labels, samples), number=self.number)

    def __bool__(self) -> bool:
        return True  # a batch without samples is still a batch


def _sample_numbers(order: Order) -> Tensor:
    numbers = order if isinstance(order, Tensor) else torch.from_numpy(np.ascontiguousarray(order))
    if numbers.dtype != torch.int64 or numbers.dim() != 1:
        raise BatchError(f"an order is {numbers.dtype} of shape {tuple(numbers.shape)}: give one int64 number a sample")
    return numbers


def _lines(values: Tensor, samples: Tensor) -> Tensor:
    """A copy of these lines of a tensor."""
    if values.dim() == 2 and values.shape[1] == 1:  # the common case, a third of the time as one dimension
        return values.squeeze(1).index_select(0, samples).unsqueeze(1)
    return values.index_select(0, samples)


def contiguous_parts(samples: int, trainers: int) -> Iterator[tuple[int, int]]:
    """The (start, stop) of each trainer's contiguous part; sizes differ by at most one, and may be zero."""
    if trainers < 1:
        raise ConfigError(f"trainers is {trainers}: give at least 1")
    for rank in range(trainers):
        yield rank * samples // trainers, (rank + 1) * samples // trainers
