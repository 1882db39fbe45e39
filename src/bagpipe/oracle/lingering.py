"""Rows that no batch of the window needs any more, and that keep their slots while nobody else needs those.

Algorithm 1 lets a row go right after its last use in the window. Where the cache has room beyond what the window needs,
that costs fetches: while the window still grows, and for rows that come back after more batches than it holds. Rows
that linger are outside of the arithmetic that proves that the slots suffice (I5); so after each plan there are no more
of them than the next plans leave room for, and the others leave, the oldest first.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import numpy as np
from numpy.typing import NDArray

from bagpipe.kernels.plan import KEEP
from bagpipe.oracle.row_list import RowList
from bagpipe.oracle.slots import Group
from bagpipe.oracle.tenants import Tenants
from bagpipe.oracle.uses import Uses

Int32s = NDArray[np.int32]
Int64s = NDArray[np.int64]
Stays = NDArray[np.uint16]
Flags = NDArray[np.bool_]


class Lingering:
    """The lingering rows of all groups."""

    def __init__(self, groups: Sequence[Group], tenants: Tenants) -> None:
        self._groups, self._tenants = groups, tenants
        self._slots = [LingeringSlots(group.slots.capacity) for group in groups]

    @property
    def nbytes(self) -> int:
        """Memory in use once every page is touched."""
        return sum(slots.nbytes for slots in self._slots)

    def keep(self, room: Sequence[int], bounds: Int64s, stays: Stays) -> None:
        """Let the rows of a batch that would leave after it linger, in the groups that have room for all of them."""
        for group, num_rows in zip(self._groups, room, strict=True):
            own = group.collect(stays, bounds)
            leaving = own == 0
            if np.count_nonzero(leaving) <= num_rows:
                own[leaving] = KEEP
                group.spread(own, stays, bounds)

    def leave(self, iteration: int, room: Sequence[int], rows: RowList, stays: Stays, left: int | None) -> RowList:
        """The lingering rows that this plan evicts, so many that no more stay than there is room for.

        `left`: so many plans follow before the data ends; rows that none of them needs leave evenly until then.
        """
        leaving = []
        for group, slots, num_rows in zip(self._groups, self._slots, room, strict=True):
            of_batch = group.collect(rows.slots, rows.bounds)
            slots.settle(of_batch, group.collect(stays, rows.bounds) == KEEP, iteration)
            look = 0 if left is None else -(-len(slots) // (left + 1))
            leaving.append(slots.pop(len(slots) - num_rows, look, iteration, self._is_needed(group, iteration)))
        return self._tenants.evict(leaving, iteration)

    def _is_needed(self, group: Group, iteration: int) -> Callable[[Int32s], Flags]:
        return lambda slots: self._tenants.were_read_after(iteration, group.number, slots)


class LingeringSlots:
    """The slots of one group whose rows linger, those used longest ago first."""

    def __init__(self, capacity: int) -> None:
        self._uses = Uses(capacity)
        self._lingers: Flags = np.zeros(capacity, np.bool_)
        self._count = 0

    def __len__(self) -> int:
        return self._count

    @property
    def nbytes(self) -> int:
        """Memory in use once every page is touched."""
        return self._uses.nbytes + self._lingers.nbytes

    def settle(self, slots: Int32s, lingering: Flags, iteration: int) -> None:
        """A batch has its rows in these slots: from now on those that are marked linger, and the others do not."""
        self._count += int(np.count_nonzero(lingering)) - int(np.count_nonzero(self._lingers[slots]))
        self._lingers[slots] = lingering
        self._uses.last[slots] = iteration
        self._uses.push(slots[lingering], iteration)

    def pop(self, least: int, look: int, iteration: int, is_needed: Callable[[Int32s], Flags]) -> Int32s:
        """Take out at least so many slots, oldest first, and of the first `look` all whose rows are not needed again.

        Rows that are needed are taken only when there are no others; else they go to the end of the queue.
        """
        chosen: list[Int32s] = []
        passed: list[Int32s] = []
        lacking, unseen = least, self._count
        while (size := min(max(lacking, look), unseen)) > 0:
            slots, _ = self._uses.pop_oldest(size)
            needed = is_needed(slots)
            chosen.append(slots[~needed])
            passed.append(slots[needed])
            unseen, look, lacking = unseen - size, look - size, lacking - len(chosen[-1])
        over = np.concatenate([*passed, np.empty(0, np.int32)])
        taken = max(0, lacking)
        self._uses.push(over[taken:], iteration)
        result = np.concatenate([*chosen, over[:taken]])
        self._lingers[result] = False
        self._count -= len(result)
        return result
