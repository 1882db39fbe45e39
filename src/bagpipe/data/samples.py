"""Samples as columns: NumPy arrays, feature by feature, from which batches are cut without work per sample.

Batches travel as such columns, so who only reads and sends them does without PyTorch.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from bagpipe.arrays import Floats
from bagpipe.errors import BatchError, WireError
from bagpipe.kernels import kernel

if TYPE_CHECKING:
    from torch import Tensor

    from bagpipe.types import Batch, Ids

Ints = NDArray[np.int64]
IDS_MAX = 1 << 31
"""Of one feature in a batch."""


@dataclass(frozen=True, slots=True)
class Column:
    """The ids of one feature for a run of samples."""

    values: Ints
    """(samples, ids a sample), or all bags one after the other."""
    offsets: Ints | None = None
    """Of bags: bag i is values[offsets[i]:offsets[i + 1]]; one more than there are samples."""
    weights: Floats | None = None
    """One factor an id, same shape as `values`."""

    def ids(self, start: int, stop: int) -> Ids:
        """The ids of samples start to stop; they share this column's memory."""
        from torch import from_numpy  # here: who only reads samples does without PyTorch

        from bagpipe.types import Ids

        part = self.part(start, stop)
        offsets = None if part.offsets is None else from_numpy(part.offsets[:-1])
        weights = None if part.weights is None else from_numpy(part.weights)
        return Ids(from_numpy(part.values), offsets, weights)

    def part(self, start: int, stop: int) -> Column:
        """The column of samples start to stop; values and weights share this one's memory."""
        if self.offsets is None:
            first, last, offsets = start, stop, None
        else:
            first, last = int(self.offsets[start]), int(self.offsets[stop])
            offsets = self.offsets[start : stop + 1] - first
        return Column(self.values[first:last], offsets, None if self.weights is None else self.weights[first:last])

    def without_ids(self) -> Column:
        """The same but for the ids, of which an empty array tells how many there are a sample, if not the offsets."""
        return Column(self.values[:0], self.offsets, self.weights)

    def received(self, num_samples: int, left_out: bool) -> Column:
        """This column of so many samples, with zeros that take no memory where ids were left out; BatchError if its
        parts do not fit each other."""
        values, offsets, shape = self.values, self.offsets, (num_samples, *self.values.shape[1:])
        if offsets is not None:
            if offsets.shape != (num_samples + 1,) or offsets[0] or (offsets[1:] < offsets[:-1]).any():
                raise BatchError(f"offsets of {num_samples} samples are not in order from 0 to the number of ids")
            shape = (int(offsets[-1]),)
        if values.ndim != (2 if offsets is None else 1) or math.prod(shape) >= IDS_MAX:
            raise BatchError(f"ids of shape {values.shape} of {num_samples} samples")
        if len(values) != (0 if left_out else shape[0]):
            raise BatchError(f"ids of shape {values.shape}, where {'none' if left_out else shape} are due")
        if left_out:
            values = np.lib.stride_tricks.as_strided(np.zeros(1, np.int64), shape, (0,) * len(shape))
        if self.weights is not None and self.weights.shape != shape:
            raise BatchError(f"weights of shape {self.weights.shape} for ids of shape {shape}")
        return Column(values, offsets, self.weights)


@dataclass(frozen=True, slots=True)
class Samples:
    """A run of samples, column by column."""

    dense: Floats
    """(samples, numeric features)"""
    columns: Mapping[str, Column]
    labels: Floats

    def __len__(self) -> int:
        return len(self.labels)

    def batch(self, start: int, stop: int, number: int) -> Batch:
        """Samples start to stop as the batch of this number."""
        import torch  # here: who only reads samples does without it

        from bagpipe.types import Batch

        # Copied into memory of torch's own: the alignment of what enters a matrix product can change bits (I1).
        # By NumPy: torch would wake its threads for it, and wait for them where all cores are busy with other reads.
        dense = torch.empty((stop - start, self.dense.shape[1]), dtype=torch.float32)
        np.copyto(dense.numpy(), self.dense[start:stop])
        labels = torch.empty(stop - start, dtype=torch.float32)
        np.copyto(labels.numpy(), self.labels[start:stop])
        sparse = {name: column.ids(start, stop) for name, column in self.columns.items()}
        return Batch(dense, sparse, labels, number=number)

    def part(self, start: int, stop: int) -> Samples:
        """Samples start to stop; they share these ones' memory."""
        columns = {name: column.part(start, stop) for name, column in self.columns.items()}
        return Samples(self.dense[start:stop], columns, self.labels[start:stop])


@dataclass(frozen=True, slots=True)
class SentBatch:
    """A batch as it travels."""

    number: int
    samples: Samples

    @classmethod
    def of(cls, batch: Batch, left_out: Collection[str] = ()) -> SentBatch:
        """A batch without the ids of these features; BatchError if its numbers are of other types."""
        columns = {name: _column(batch, name, ids) for name, ids in batch.sparse.items()}
        samples = Samples(
            _floats(batch, "dense", batch.dense),
            {name: column.without_ids() if name in left_out else column for name, column in columns.items()},
            _floats(batch, "labels", batch.labels),
        )
        return cls(batch.number, samples)

    def batch(self, left_out: Collection[str] = ()) -> Batch:
        """The batch that came; WireError if its parts do not fit each other, or other ids were left out."""
        dense, labels, found = self.samples.dense, self.samples.labels, self.samples.columns
        if self.number < 0 or dense.ndim != 2 or labels.shape != dense.shape[:1]:
            raise WireError(f"batch {self.number} has dense of shape {dense.shape} and labels of shape {labels.shape}")
        for name in left_out:
            if name not in found:
                raise WireError(f"batch {self.number} is without feature {name!r}")
        columns = {}
        for name, column in found.items():
            try:
                columns[name] = column.received(len(labels), name in left_out)
            except BatchError as error:
                raise WireError(f"batch {self.number}, feature {name!r}: {error}") from error
        return Samples(dense, columns, labels).batch(0, len(labels), self.number)


def _column(batch: Batch, name: str, ids: Ids) -> Column:
    offsets = None
    if ids.offsets is not None:
        offsets = np.append(ids.offsets.detach().cpu().numpy(), len(ids.values)).astype(np.int64)
    weights = None if ids.weights is None else _floats(batch, f"the weights of feature {name!r}", ids.weights)
    return Column(ids.values.detach().cpu().numpy(), offsets, weights)


def _floats(batch: Batch, name: str, tensor: Tensor) -> Floats:
    if str(tensor.dtype) != "torch.float32":
        raise BatchError(f"batch {batch.number}: {name} is {tensor.dtype}, and travels as float32 only: convert it")
    found: Floats = tensor.detach().cpu().numpy()
    return found


def spans(starts: Ints, lengths: Ints) -> Ints:
    """The numbers starts[i], starts[i] + 1, ... (lengths[i] of them) for each i, one run after the other."""
    ends: Ints = np.cumsum(lengths)
    places: Ints = np.arange(ends[-1] if len(ends) else 0)
    places += np.repeat(starts - (ends - lengths), lengths)
    return places


@kernel
def copy_places(values: NDArray[Any], places: Ints, width: int, out: NDArray[Any], slots: Ints) -> None:
    """Copy groups of `width` neighbours, groups `places` of `values` to groups `slots` of `out`; about 3 ns a group."""
    for i in range(len(places)):
        for j in range(width):
            out[slots[i] * width + j] = values[places[i] * width + j]
