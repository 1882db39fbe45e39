"""Rows of lists to buffers and back: what goes to one trainer is one buffer, table by table, without any index.

On the CPU by kernels; elsewhere by torch operations, equal to float tolerance only and untested on a GPU.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence

import numpy as np
import torch
from torch import Tensor

from bagpipe.arrays import Int32s, Int64s
from bagpipe.cache import RowCache
from bagpipe.embedding_device import is_host
from bagpipe.kernels import move
from bagpipe.layout import RowLayout
from bagpipe.optim import Frozen
from bagpipe.oracle.row_list import RowList
from bagpipe.oracle.sync_plan import Routes


class Packing:
    """Knows how long the vectors and the gradients of each table are, and where its rows are cached."""

    def __init__(self, layouts: Sequence[RowLayout], cache: RowCache) -> None:
        self._cache, self._host = cache, is_host(cache.device)
        self._vectors: Int64s = np.array([layout.dim for layout in layouts], np.int64)
        frozen = np.array([isinstance(layout.optimizer, Frozen) for layout in layouts])
        self._gradients: Int64s = np.where(frozen, 0, self._vectors)
        """Rows that are not updated have none."""
        self._states: Int64s = np.array([layout.width - layout.dim for layout in layouts], np.int64)

    def room_for_gradients(self, lists: Routes) -> list[Tensor]:
        """An unfilled buffer for each trainer's list."""
        return self._empty(lists.counts() @ self._gradients)

    def room_for_vectors(self, lists: Routes, moved: Routes) -> list[Tensor]:
        """An unfilled buffer for each trainer's list, and behind it for what else belongs to those rows that move."""
        return self._empty(lists.counts() @ self._vectors + moved.counts() @ (self._states + 1))

    def gradients(self, lists: Routes, gradients: Mapping[int, Tensor], samples: float) -> list[Tensor]:
        """For each trainer the gradients that its list names, times the number of samples."""
        buffers = self.room_for_gradients(lists)
        for rank, buffer in enumerate(buffers):
            for table, index, part in self._parts(lists, rank, buffer, self._gradients):
                if self._host:
                    np.multiply(gradients[table].numpy()[index], np.float32(samples), out=part.numpy())
                else:
                    part.copy_(gradients[table].index_select(0, self._index(index)) * float(samples))
        return buffers

    def sums(self, rows: RowList, lists: Routes, received: Sequence[Tensor], total: int) -> Tensor:
        """What trainers have sent for rows, added up in order of rank from +0.0, over the number of samples in all."""
        sums = torch.zeros(int(np.diff(rows.bounds) @ self._gradients), device=self._cache.device)
        tables = dict(self.tables(rows, sums))
        for rank, buffer in enumerate(received):
            for table, index, part in self._parts(lists, rank, buffer, self._gradients):
                if self._host:
                    tables[table].numpy()[index] += part.numpy()
                else:
                    tables[table].index_add_(0, self._index(index), part)
        if self._host:
            values = sums.numpy()
            np.divide(values, np.float32(total), out=values)
            return sums
        return sums.div_(float(total))

    def tables(self, rows: RowList, buffer: Tensor) -> Iterator[tuple[int, Tensor]]:
        """The parts of a buffer of gradients that are not empty: table, (rows, columns)."""
        done = 0
        for table, count in enumerate(np.diff(rows.bounds).tolist()):
            dim = int(self._gradients[table])
            if count and dim:
                yield table, buffer[done : done + count * dim].view(count, dim)
                done += count * dim

    def vectors(self, lists: Routes, moved: Routes) -> list[Tensor]:
        """For each trainer the vectors in the slots that its list names, and room for what moves to it."""
        buffers = self.room_for_vectors(lists, moved)
        for rank, buffer in enumerate(buffers):
            for table, slots, part in self._parts(lists, rank, buffer, self._vectors):
                rows = self._cache.data[self._cache.group[table]]
                if self._host:
                    move.gather(rows.numpy(), slots, part.numpy())
                else:
                    part.copy_(rows[:, : part.shape[1]].index_select(0, self._index(slots)))
        return buffers

    def put_vectors(self, lists: Routes, buffers: Sequence[Tensor]) -> None:
        """Vectors from other trainers take their slots; the state beside them stays as it is."""
        for rank, buffer in enumerate(buffers):
            for table, slots, part in self._parts(lists, rank, buffer, self._vectors):
                rows = self._cache.data[self._cache.group[table]]
                if self._host:
                    move.scatter(rows.numpy(), slots, part.numpy())
                else:
                    rows[:, : part.shape[1]].index_copy_(0, self._index(slots), part)

    def give(self, moved: Routes, buffers: Sequence[Tensor]) -> None:
        """Rows go to other trainers with their state and whether the store has them: they are no longer this one's."""
        for table, slots, part in self._tails(moved, buffers):
            state, dim = int(self._states[table]), int(self._vectors[table])
            rows = self._cache.data[self._cache.group[table]][:, dim : dim + state]
            if state and self._host:
                move.gather(rows.numpy(), slots, part.numpy()[:, :state])
            elif state:
                part[:, :state] = rows.index_select(0, self._index(slots))
            part[:, state] = torch.from_numpy(self._cache.give(table, slots).astype(np.float32))

    def take(self, moved: Routes, ids: Int64s, buffers: Sequence[Tensor]) -> None:
        """Rows come from other trainers, in the order of `ids`: this one updates and writes them from now on."""
        done = 0
        for table, slots, part in self._tails(moved, buffers):
            state, dim = int(self._states[table]), int(self._vectors[table])
            rows = self._cache.data[self._cache.group[table]][:, dim : dim + state]
            if state and self._host:
                move.scatter(rows.numpy(), slots, part.numpy()[:, :state])
            elif state:
                rows.index_copy_(0, self._index(slots), part[:, :state])
            dirty = part[:, state].cpu().numpy() != 0
            self._cache.take(table, ids[done : done + len(slots)], slots, dirty)
            done += len(slots)

    def _tails(self, moved: Routes, buffers: Sequence[Tensor]) -> Iterator[tuple[int, Int32s, Tensor]]:
        """What lies behind the vectors: table, slots, their state and a flag."""
        widths = self._states + 1
        for rank, size in enumerate((moved.counts() @ widths).tolist()):
            yield from self._parts(moved, rank, buffers[rank][len(buffers[rank]) - size :], widths)

    def _empty(self, sizes: Int64s) -> list[Tensor]:
        return [torch.empty(size, dtype=torch.float32, device=self._cache.device) for size in sizes.tolist()]

    def _parts(self, lists: Routes, rank: int, buffer: Tensor, dims: Int64s) -> Iterator[tuple[int, Int32s, Tensor]]:
        done = 0
        for table, items in lists.of(rank):
            dim = int(dims[table])
            if dim:
                yield table, items, buffer[done : done + len(items) * dim].view(len(items), dim)
                done += len(items) * dim

    def _index(self, items: Int32s) -> Tensor:
        return torch.from_numpy(items.astype(np.int64)).to(self._cache.device)
