"""Samples as columns: NumPy arrays, feature by feature, from which batches are cut without work per sample."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from bagpipe.arrays import Floats
from bagpipe.kernels import kernel

if TYPE_CHECKING:
    from bagpipe.types import Batch, Ids

Ints = NDArray[np.int64]


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
