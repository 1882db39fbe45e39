"""Rows that no batch of the window needs any more, and that keep their slots while nobody else needs those.

Algorithm 1 lets a row go right after its last use in the window. Where the cache has room beyond what the window needs,
that costs fetches: while the window still grows, and for rows that come back after more batches than it holds. Rows
that linger are outside of the arithmetic that proves that the slots suffice (I5); so after each plan there are no more
of them than the next plans leave room for. Who leaves is what no batch of the window needs, the oldest first, then what
is needed latest, and what the next batches need only if nothing else is left.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

import numpy as np
from numpy.typing import NDArray

from bagpipe.kernels.oracle import KEEP
from bagpipe.kernels.victims import NEVER, lowest, mark_needed
from bagpipe.oracle.row_list import RowList
from bagpipe.oracle.shard import Shard
from bagpipe.oracle.slots import Group
from bagpipe.oracle.tenants import Tenants
from bagpipe.oracle.uses import Uses

Int32s = NDArray[np.int32]
Int64s = NDArray[np.int64]
Stays = NDArray[np.uint16]
Flags = NDArray[np.bool_]


class Lingering:
    """The lingering rows of all groups."""

    def __init__(self, groups: Sequence[Group], tenants: Tenants, shards: Sequence[Shard], ahead: int) -> None:
        self._groups, self._tenants = groups, tenants
        self._slots = [LingeringSlots(group.slots.capacity) for group in groups]
        self._needs = [Needs(group, tenants, shards, ahead) for group in groups]

    def keep(self, room: Sequence[int], bounds: Int64s, stays: Stays) -> bool:
        """Let the rows of a batch that would leave after it linger, in the groups that have room for all of them.

        Whether there were any.
        """
        kept = False
        for group, num_rows in zip(self._groups, room, strict=True):
            own = group.collect(stays, bounds)
            leaving = own == 0
            if np.count_nonzero(leaving) <= num_rows:
                own[leaving] = KEEP
                group.spread(own, stays, bounds)
                kept = True
        return kept

    def leave(
        self, iteration: int, window: int, room: Sequence[int], rows: RowList, stays: Stays, left: int | None
    ) -> RowList:
        """The lingering rows that this plan evicts, so many that no more stay than there is room for.

        The window has so many batches, that of this plan included. `left`: so many plans follow before the data ends;
        rows that none of them needs leave evenly until then.
        """
        leaving = []
        for group, slots, needs, num_rows in zip(self._groups, self._slots, self._needs, room, strict=True):
            needs.end = iteration + window - 1
            of_batch = group.collect(rows.slots, rows.bounds)
            slots.settle(of_batch, group.collect(stays, rows.bounds) == KEEP, iteration)
            look = 0 if left is None else -(-len(slots) // (left + 1))
            leaving.append(slots.pop(num_rows, look, iteration, needs))
        return self._tenants.evict(leaving, iteration)


class Needed(Protocol):
    """What the window tells of the tenants of slots."""

    def last(self, slots: Int32s) -> Int64s:
        """The iteration of the last batch read that needs each."""

    def soon(self, slots: Int32s, iteration: int) -> Flags:
        """Whether one of the batches right after an iteration needs each."""


class Needs:
    """The same of a group, from what the oracle remembers."""

    def __init__(self, group: Group, tenants: Tenants, shards: Sequence[Shard], ahead: int) -> None:
        self._group, self._tenants, self._ahead = group, tenants, ahead
        self._shards = [(shard, shard.members(group.tables)) for shard in shards]
        self.end = -1
        """The iteration of the last batch read."""
        self._marks: Int32s = np.zeros(group.slots.capacity, np.int32)
        """The last iteration whose batch, or one right behind it, was seen to need each slot's tenant."""

    def last(self, slots: Int32s) -> Int64s:
        """The iteration of the last batch read that needs each."""
        return self._tenants.last_reads(self._group.number, slots)

    def soon(self, slots: Int32s, iteration: int) -> Flags:
        """Whether the next batch needs each, or one whose rows may be on their way while that trains."""
        first, last = iteration + 1, min(iteration + 1 + self._ahead, self.end)
        for shard, members in self._shards:
            mark_needed(shard.state, shard.rings, members, first, last, self._marks)
        needed: Flags = self._marks[slots] == first
        return needed


class LingeringSlots:
    """The slots of one group whose rows linger, those used longest ago first."""

    def __init__(self, capacity: int) -> None:
        self._uses = Uses(capacity)
        self._lingers: Flags = np.zeros(capacity, np.bool_)
        self._count = 0

    def __len__(self) -> int:
        return self._count

    def settle(self, slots: Int32s, lingering: Flags, iteration: int) -> None:
        """A batch has its rows in these slots: from now on those that are marked linger, and the others do not."""
        self._count += int(np.count_nonzero(lingering)) - int(np.count_nonzero(self._lingers[slots]))
        self._lingers[slots] = lingering
        self._uses.last[slots] = iteration
        self._uses.push(slots[lingering], iteration)

    def pop(self, room: int, look: int, iteration: int, needs: Needed) -> Int32s:
        """Take out so many slots that no more than `room` are left, oldest first.

        Of the first `look` all are taken whose rows are not needed again. Rows that are needed are taken only when
        there are no others, those needed soon last; else they go to the end of the queue.
        """
        chosen: list[Int32s] = []
        passed: list[Int32s] = []
        until: list[Int64s] = []
        lacking, unseen = self._count - room, self._count
        while (size := min(max(lacking, look), unseen)) > 0:
            slots, _ = self._uses.pop_oldest(size)
            last = needs.last(slots)
            needed = last > iteration
            chosen.append(slots[~needed])
            passed.append(slots[needed])
            until.append(last[needed])
            unseen, look, lacking = unseen - size, look - size, lacking - len(chosen[-1])
        over = np.concatenate([*passed, np.empty(0, np.int32)])
        if lacking > 0:
            taken = _needed_latest(lacking, np.concatenate(until), needs.soon(over, iteration))
            chosen.append(over[taken])
            over = np.delete(over, taken)
        self._uses.push(over, iteration)
        result = np.concatenate([*chosen, np.empty(0, np.int32)])
        self._lingers[result] = False
        self._count -= len(result)
        return result


def _needed_latest(count: int, until: Int64s, soon: Flags) -> Int32s:
    """The numbers of so many rows, those needed soon last; what is needed more than once counts by the last time."""
    taken = np.empty(count, np.int32)
    lowest(NEVER - until + soon * np.int64(NEVER), count, taken)
    return taken
