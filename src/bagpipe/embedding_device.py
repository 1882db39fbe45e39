"""Look-ups and gradients of rows that lie on an accelerator, as torch operations on slots.

Additions are made segment by segment over stably sorted occurrences, in a fixed order, but not in that of the NumPy
definition: results are equal to float tolerance. Untested on a GPU: the tests run this code on the CPU.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from bagpipe.kernels.bag import NO_PADDING
from bagpipe.layout import RowLayout
from bagpipe.optim import Scalars

Slots = npt.NDArray[np.int32]

_force = False
"""Tests set it to run this code on the CPU."""


def is_host(device: torch.device) -> bool:
    """Whether compiled kernels can reach the rows, so that this module is not needed."""
    return device.type == "cpu" and not _force


@dataclass(frozen=True, slots=True)
class DeviceBags:
    """What one call of an embedding layer looks up, on the device."""

    places: Tensor
    """For each occurrence the index of its row in the plan."""
    bag: Tensor
    """For each occurrence its bag."""
    counts: Tensor
    """Occurrences of each bag."""
    weights: Tensor | None
    mean: bool

    @classmethod
    def make(
        cls, shaped: Tensor, offsets: Tensor | None, weights: Tensor | None, mean: bool, padding: int
    ) -> DeviceBags:
        """From the places of rows, shaped as their ids are, and the other arguments of an embedding layer."""
        places, device = shaped.reshape(-1).to(torch.int64), shaped.device
        if offsets is None:
            counts = torch.full((shaped.shape[0],), shaped.shape[1], dtype=torch.int64, device=device)
        else:
            starts = offsets.to(device, torch.int64)
            counts = torch.diff(starts, append=starts.new_tensor([len(places)]))
        bag = torch.repeat_interleave(counts)
        factors = None if weights is None else weights.detach().to(device).reshape(-1)
        if padding != NO_PADDING:
            kept = places != padding
            places, bag = places[kept], bag[kept]
            factors = None if factors is None else factors[kept]
            counts = torch.bincount(bag, minlength=len(counts))
        return cls(places, bag, counts, factors, mean)

    def __len__(self) -> int:
        return len(self.counts)


def pool(rows: Tensor, slots: Slots, bags: DeviceBags, column: int, dim: int) -> Tensor:
    """The pooled vectors, (bags, dim)."""
    vectors = rows[:, column : column + dim].index_select(0, _index(slots, rows.device)[bags.places])
    if bags.weights is not None:
        vectors = vectors * bags.weights[:, None]
    sums = _add_up(vectors, bags.counts)
    return sums / bags.counts.clamp(min=1)[:, None] if bags.mean else sums


def accumulate(grad: Tensor, bags: DeviceBags, buffer: Tensor, column: int) -> None:
    """Add the gradients of all bags to the columns of their rows in `buffer`, one row for each of the plan."""
    if bags.mean:
        grad = grad / bags.counts.clamp(min=1)[:, None]
    vectors = grad.index_select(0, bags.bag)
    if bags.weights is not None:
        vectors = vectors * bags.weights[:, None]
    order = torch.argsort(bags.places, stable=True)
    counts = torch.bincount(bags.places, minlength=len(buffer))
    buffer[:, column : column + grad.shape[1]] += _add_up(vectors[order], counts)


def apply(layout: RowLayout, rows: Tensor, slots: Slots, grads: Tensor, scalars: Scalars) -> None:
    """Update rows in their slots: the rows of the batch pass through the CPU, where the definition is."""
    index = _index(slots, rows.device)
    values = rows.index_select(0, index).cpu().numpy()
    layout.optimizer.apply(values, grads.cpu().numpy(), layout.dims, scalars)
    rows.index_copy_(0, index, torch.from_numpy(values).to(rows.device))


def _add_up(vectors: Tensor, counts: Tensor) -> Tensor:
    """The sum of the first counts[0] vectors, of the next counts[1], and so on."""
    if not vectors.numel():
        return vectors.new_zeros(len(counts), vectors.shape[1])
    return torch.segment_reduce(vectors, "sum", lengths=counts, axis=0, unsafe=True, initial=0.0)


def _index(slots: Slots, device: torch.device) -> Tensor:
    return torch.from_numpy(slots.astype(np.int64)).to(device)
