"""The rows that are on the training device: one array of slots for each row width.

Slots are filled and emptied by plans only. The training loop, prefetch and write-back touch disjoint slots at any time
(plans see to it), so they share the arrays without locks; who lives in a slot and whether it was updated since it was
last written is kept beside them, for flushes and for the checker. Its size is fixed at the start (I5).
"""

from __future__ import annotations

import threading
from collections.abc import Iterator, Sequence
from typing import NamedTuple

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from bagpipe.kernels import move

Floats = npt.NDArray[np.float32]
Ids = npt.NDArray[np.int64]
Slots = npt.NDArray[np.int32]

VACANT = -1


class TableRows(NamedTuple):
    """Rows of one table on their way between cache and store."""

    table: int
    ids: Ids
    values: Floats


def group_by_width(widths: Sequence[int]) -> tuple[list[int], list[int]]:
    """The slot space of each table, and the row width of each slot space: tables of equal width share one."""
    distinct = sorted(set(widths), reverse=True)
    return [distinct.index(width) for width in widths], distinct


class RowCache:
    """Slots for rows, on one device."""

    def __init__(self, widths: Sequence[int], capacity: Sequence[int], device: torch.device) -> None:
        self.group, self.widths = group_by_width(widths)
        self.capacity = tuple(capacity)
        self.device = device
        self.data: list[Tensor] = [
            torch.zeros(slots, width, device=device) for slots, width in zip(capacity, self.widths, strict=True)
        ]
        self.tenant_table = [np.full(slots, VACANT, np.int32) for slots in capacity]
        self.tenant_id = [np.zeros(slots, np.int64) for slots in capacity]
        self.dirty = [np.zeros(slots, np.bool_) for slots in capacity]
        self.moving = (
            threading.Lock()
        )  # held while tenants change outside of training, so that a flush sees all or none

    @property
    def num_bytes(self) -> int:
        """Memory of all slots."""
        return sum(part.numel() * 4 for part in self.data)

    def insert(self, table: int, ids: Ids, slots: Slots, values: Floats) -> None:
        """Rows from the store take their slots."""
        group = self.group[table]
        if self.device.type == "cpu":
            move.scatter(self.data[group].numpy(), slots, values)
        else:
            _scatter_on_device(self.data[group], slots, values)
        self.tenant_table[group][slots] = table
        self.tenant_id[group][slots] = ids
        self.dirty[group][slots] = False

    def mark_updated(self, table: int, slots: Slots) -> None:
        """The rows in these slots differ from the store from now on."""
        self.dirty[self.group[table]][slots] = True

    def copy_out(self, table: int, ids: Ids, slots: Slots) -> TableRows:
        """Rows leave their slots; those that were updated since they were last written are returned."""
        group = self.group[table]
        changed = self.dirty[group][slots]
        self.tenant_table[group][slots] = VACANT
        self.dirty[group][slots] = False
        return TableRows(table, ids[changed], self._read(group, slots[changed]))

    def take_dirty(self) -> Iterator[TableRows]:
        """Updated rows of all tables, which stay in their slots and count as written from now on."""
        for group, dirty in enumerate(self.dirty):
            slots = np.flatnonzero(dirty).astype(np.int32)
            tables = self.tenant_table[group][slots]
            for table in np.unique(tables):
                chosen = slots[tables == table]
                values = self._read(group, chosen)
                self.dirty[group][chosen] = False
                yield TableRows(int(table), self.tenant_id[group][chosen], values)

    def _read(self, group: int, slots: Slots) -> Floats:
        if self.device.type != "cpu":
            return _gather_on_device(self.data[group], slots)
        values = np.empty((len(slots), self.widths[group]), np.float32)
        move.gather(self.data[group].numpy(), slots, values)
        return values


def _scatter_on_device(data: Tensor, slots: Slots, values: Floats) -> None:
    index = torch.from_numpy(slots.astype(np.int64)).to(data.device)
    staged = torch.from_numpy(values)
    if data.device.type == "cuda":
        staged = staged.pin_memory()
    data.index_copy_(0, index, staged.to(data.device))


def _gather_on_device(data: Tensor, slots: Slots) -> Floats:
    index = torch.from_numpy(slots.astype(np.int64)).to(data.device)
    return data.index_select(0, index).cpu().numpy()
