"""Pools all look-ups of a batch in one go, in the shape that the model asked for last time.

A model calls its embedding layers one by one, and waking a thread for each costs as much as the thread saves. So the
first call of a batch pools for all layers that were called in the last one; a layer takes its output if it is called
with just those ids, and otherwise pools for itself. What is pooled, and every bit of it, is the same either way (I1).
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from bagpipe.kernels.bag import Bags, pool
from bagpipe.kernels.parallel import Workers

if TYPE_CHECKING:
    from bagpipe.embedding import CachedLayer, TableView

SPLIT_BAGS = 2048
"""Fewer bags than this are pooled by one thread: handing over costs more than it saves."""


@dataclass(frozen=True, slots=True)
class Pooled:
    """The output of a look-up that has not been asked for yet."""

    place: int
    """Whose ids they are: the number of the feature."""
    shape: tuple[int, ...]
    """Of the ids."""
    bags: Bags
    output: Tensor


class Pooling:
    """What the layers of a model have asked for in the last batch, and have been given ahead in this one."""

    def __init__(self) -> None:
        self._given: list[npt.NDArray[np.int64]] = []
        self._places: dict[int, int] = {}
        self._expected: dict[CachedLayer, tuple[int, tuple[int, ...]]] = {}
        self._asked: dict[CachedLayer, tuple[int, tuple[int, ...]]] = {}
        self._ready: dict[CachedLayer, Pooled] = {}

    def begin(self, given: Sequence[Tensor]) -> None:
        """A batch begins that has these handles, one tensor a feature."""
        self._expected, self._asked, self._ready = self._asked, {}, {}
        self._given = [handles.numpy() for handles in given]
        self._places = {handles.data_ptr(): place for place, handles in enumerate(given)}

    def end(self) -> None:
        """There is no batch now."""
        self._given, self._places, self._ready = [], {}, {}

    def take(
        self, layer: CachedLayer, handles: Tensor, views: Sequence[TableView], workers: Workers | None
    ) -> Pooled | None:
        """The output of a layer for these handles, if it was foreseen."""
        place = self._places.get(handles.data_ptr())
        if place is None or handles.numel() != len(self._given[place]) or not handles.is_contiguous():
            return None
        if not self._asked and workers is not None:
            self._pool_ahead(views, workers)
        self._asked.setdefault(layer, (place, tuple(handles.shape[1:])))
        found = self._ready.pop(layer, None)
        return found if found is not None and (found.place, found.shape) == (place, tuple(handles.shape)) else None

    def _pool_ahead(self, views: Sequence[TableView], workers: Workers) -> None:
        tasks, bad = [], []
        for layer, (place, of_sample) in self._expected.items():
            if place >= len(self._given) or len(self._given[place]) % math.prod(of_sample):
                continue
            shape = (len(self._given[place]) // math.prod(of_sample), *of_sample)
            view = views[layer.table]
            width = 1 if layer.mode is None else of_sample[0]
            bags = Bags(self._given[place].reshape(-1, width), view.base, mean=layer.mode == "mean")
            pooled_shape = shape if layer.mode is None else shape[:1]
            output = torch.empty((*pooled_shape, layer.embedding_dim), dtype=torch.float32, device="cpu")
            self._ready[layer] = Pooled(place, shape, bags, output)
            rows, out = view.rows.numpy(), output.numpy().reshape(len(bags), layer.embedding_dim)

            def pool_part(
                start: int, stop: int, layer: CachedLayer = layer, view: TableView = view, bags: Bags = bags,
                rows: npt.NDArray[np.float32] = rows, out: npt.NDArray[np.float32] = out,
            ) -> None:  # fmt: skip
                if pool(rows, view.slots, bags, layer.column, out, start, stop) >= 0:
                    bad.append(layer)

            tasks += [partial(pool_part, *part) for part in split(len(bags), workers)]
        workers.run(tasks)
        for layer in bad:  # its own call finds out what is wrong
            self._ready.pop(layer, None)


def split(num_bags: int, workers: Workers | None) -> list[tuple[int, int]]:
    """The parts of a look-up, one a thread."""
    parts = workers.num_threads if workers is not None and num_bags >= SPLIT_BAGS else 1
    return [(num_bags * part // parts, num_bags * (part + 1) // parts) for part in range(parts)]
