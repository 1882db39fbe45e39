"""The ids of the batch in training: recognised where a layer is given them, and pooled ahead of its call.

A batch is given as its loader made it, with plain ids, so a layer has to find out where their rows are. It knows the
memory in which the loop has put them and every view of it, and compares the content before it trusts it, since anybody
may write there; whatever else a model makes of ids is looked up by id.

A model calls its embedding layers one by one, and waking a thread for each costs as much as the thread saves. So the
first call of a batch pools for all layers that were called in the last one; a layer takes its output if it is called
with just those ids, and otherwise pools for itself. What is pooled, and every bit of it, is the same either way (I1).
"""

from __future__ import annotations

import math
from bisect import bisect_right
from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, NamedTuple

import numpy as np
import torch
from numpy.lib.stride_tricks import as_strided
from torch import Tensor

from bagpipe.arrays import Int32s, Int64s
from bagpipe.kernels.bag import Bags, are_at
from bagpipe.kernels.parallel import Workers
from bagpipe.row_ops import pool_part, split

if TYPE_CHECKING:
    from bagpipe.embedding import CachedLayer, TableView


class GivenIds(NamedTuple):
    """The ids of one feature as they stand in a batch that is given."""

    ids: Tensor
    """The very tensor in the batch, or what lies in its memory."""
    places: Int32s
    """For each id, flattened, the place of its row among those of the table."""
    table: int


class Recognised(NamedTuple):
    """A tensor that is one of the batch's own, or a view of one."""

    places: Int32s
    """Shaped like the tensor."""
    feature: int | None
    """Its number, if these are all of its ids, in order."""


@dataclass(frozen=True, slots=True)
class Pooled:
    """The output of a look-up that has not been asked for yet."""

    feature: int
    shape: tuple[int, ...]
    """Of the ids."""
    bags: Bags
    output: Tensor


class Pooling:
    """What the layers of a model have asked for in the last batch, and have been given ahead in this one."""

    def __init__(self) -> None:
        self._given: Sequence[GivenIds] = []
        self._starts: list[int] = []
        """Where the ids of a feature begin in memory, in ascending order."""
        self._features: list[int] = []
        """Which feature that is."""
        self._expected: dict[CachedLayer, tuple[int, tuple[int, ...]]] = {}
        self._asked: dict[CachedLayer, tuple[int, tuple[int, ...]]] = {}
        self._ready: dict[CachedLayer, Pooled] = {}

    def begin(self, given: Sequence[GivenIds]) -> None:
        """A batch begins whose features have these ids."""
        self._expected, self._asked, self._ready = self._asked, {}, {}
        self._given = given
        starts = sorted(
            (each.ids.data_ptr(), feature)
            for feature, each in enumerate(given)
            if each.ids.is_cpu and each.ids.is_contiguous() and each.ids.numel()
        )
        self._starts, self._features = [start for start, _ in starts], [feature for _, feature in starts]

    def end(self) -> None:
        """There is no batch now."""
        self._given, self._starts, self._features, self._ready = [], [], [], {}

    def drop(self) -> None:
        """Forget what was pooled ahead."""
        self._ready = {}

    def recognise(self, tensor: Tensor, table: int, view: TableView) -> Recognised | None:
        """Where the rows of these ids are, if they lie in the batch's own memory and have not been changed."""
        if not tensor.is_cpu or not tensor.numel():
            return None
        address = tensor.data_ptr()
        position = bisect_right(self._starts, address) - 1
        if position < 0:
            return None
        feature = self._features[position]
        ids, places, of_table = self._given[feature]
        if of_table != table or ids.dtype != tensor.dtype:
            return None
        offset, rest = divmod(address - self._starts[position], ids.element_size())
        shape, strides = tensor.shape, tensor.stride()
        last = offset + sum((size - 1) * stride for size, stride in zip(shape, strides, strict=True))
        if rest or last >= len(places):
            return None
        whole = offset == 0 and tensor.numel() == len(places) and tensor.is_contiguous()
        if whole:
            found = places.reshape(shape)
        else:
            steps = [stride * places.itemsize for stride in strides]
            found = np.ascontiguousarray(as_strided(places[offset:], shape, steps, writeable=False))
        if not are_at(flat_ids(tensor), found.reshape(-1), view.ids):
            return None
        return Recognised(found, feature if whole else None)

    def take(
        self,
        layer: CachedLayer,
        feature: int,
        shape: tuple[int, ...],
        views: Sequence[TableView],
        workers: Workers | None,
    ) -> Pooled | None:
        """The output of a layer for all ids of a feature in this shape, if it was foreseen."""
        if not self._asked and workers is not None:
            self._pool_ahead(views, workers)
        self._asked.setdefault(layer, (feature, shape[1:]))
        found = self._ready.pop(layer, None)
        return found if found is not None and (found.feature, found.shape) == (feature, shape) else None

    def _pool_ahead(self, views: Sequence[TableView], workers: Workers) -> None:
        tasks = []
        for layer, (feature, of_sample) in self._expected.items():
            if feature >= len(self._given) or self._given[feature].table != layer.table:
                continue
            places = self._given[feature].places
            if not len(places) or len(places) % math.prod(of_sample):
                continue
            shape = (len(places) // math.prod(of_sample), *of_sample)
            view = views[layer.table]
            width = 1 if layer.mode is None else of_sample[0]
            bags = Bags(places.reshape(-1, width), mean=layer.mode == "mean")
            pooled_shape = shape if layer.mode is None else shape[:1]
            output = torch.empty((*pooled_shape, layer.embedding_dim), dtype=torch.float32, device="cpu")
            self._ready[layer] = Pooled(feature, shape, bags, output)
            rows, out = view.rows.numpy(), output.numpy().reshape(len(bags), layer.embedding_dim)

            pooling = partial(pool_part, rows, view.slots, bags, layer.column, out)
            tasks += [partial(pooling, *part) for part in split(len(bags), workers)]
        workers.run(tasks)


def flat_ids(tensor: Tensor) -> Int64s:
    """The ids of a tensor on the CPU, one after the other."""
    flat: Int64s = (tensor if tensor.dtype is torch.int64 else tensor.to(torch.int64)).numpy().reshape(-1)
    return flat
