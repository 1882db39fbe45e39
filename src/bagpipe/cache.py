"""The rows that are on the training device: one array of slots for each row width.

Slots are filled and emptied by plans only. The training loop, prefetch and write-back touch disjoint slots at any time
(plans see to it), so they share the arrays without locks; who lives in a slot and whether it was updated since it was
last written is kept beside them, for flushes and for the checker. Its size is fixed at the start (I5); which width has
how many slots may change while no row is there.
"""

from __future__ import annotations

import threading
from collections.abc import Iterator, Sequence
from operator import mul
from typing import NamedTuple

import numpy as np
import numpy.typing as npt
import torch

from bagpipe.arrays import Floats
from bagpipe.config import Size
from bagpipe.errors import CapacityError
from bagpipe.row_ops import ops_on

Ids = npt.NDArray[np.int64]
Slots = npt.NDArray[np.int32]

VACANT = -1
UNLIMITED = 2**62


class TableRows(NamedTuple):
    """Rows of one table on their way between cache and store."""

    table: int
    ids: Ids
    values: Floats


def group_by_width(widths: Sequence[int]) -> tuple[list[int], list[int]]:
    """The slot space of each table, and the row width of each slot space: tables of equal width share one."""
    group, distinct = spaces(widths, [0] * len(widths))
    return group, [width for width, _ in distinct]


def spaces(widths: Sequence[int], oracles: Sequence[int]) -> tuple[list[int], list[tuple[int, int]]]:
    """The same where tables of equal width share a slot space if they have the same oracle too: width and oracle."""
    pairs = list(zip(widths, oracles, strict=True))
    distinct = sorted(set(pairs), key=lambda pair: (-pair[0], pair[1]))
    return [distinct.index(pair) for pair in pairs], distinct


def num_bytes(capacity: Sequence[int], widths: Sequence[int]) -> int:
    """What so many slots of each width take."""
    return sum(4 * slots * width for slots, width in zip(capacity, widths, strict=True))


def divide(
    size: int | Size,
    widths: Sequence[int],
    needed: Sequence[int],
    most: Sequence[int | None],
    *,
    oracles: Sequence[int] = (),
    whole: bool = False,
    bytes_max: int = UNLIMITED,
) -> list[int]:
    """Slots of each row width, for a cache of so many rows or bytes; where each table has an oracle, of each width and
    oracle (`spaces`).

    Each gets what a batch needs of it (`needed` rows of each table), and of the rest a part in that proportion, but not
    more than its tables have (`most`); what one can't use goes to the others. `whole`: all that they have. Where that
    takes more than `bytes_max`, there is less of the rest.
    """
    space, distinct = spaces(widths, oracles or [0] * len(widths))
    in_bytes = isinstance(size, Size)
    price = [4 * width if in_bytes else 1 for width, _ in distinct]
    total = size.num_bytes if isinstance(size, Size) else size
    floor, limit = [0] * len(distinct), [0] * len(distinct)
    for each, rows, known in zip(space, needed, most, strict=True):
        floor[each] += rows
        limit[each] += UNLIMITED if known is None else known
    if whole and max(limit) < UNLIMITED:
        return limit
    floor = [max(1, rows) for rows in floor]
    every = [width for width, _ in distinct]
    if sum(map(mul, floor, price)) > total:
        raise _too_small(total, in_bytes, floor, every, sum(map(mul, floor, price)))
    slots = list(floor)
    while growing := [each for each in range(len(slots)) if slots[each] < limit[each]]:
        left, shares = total - sum(map(mul, slots, price)), sum(floor[each] * price[each] for each in growing)
        for each in growing:
            slots[each] = min(slots[each] + floor[each] * left // shares, limit[each])
        if all(slots[each] < limit[each] for each in growing):
            break
    if num_bytes(slots, every) > bytes_max:
        least = num_bytes(floor, every)
        if least > bytes_max:
            raise _too_small(bytes_max, True, floor, every, least)
        rest, room = num_bytes(slots, every) - least, bytes_max - least
        slots = [few + (many - few) * room // rest for few, many in zip(floor, slots, strict=True)]
    return slots


def _too_small(total: int, in_bytes: bool, floor: Sequence[int], widths: Sequence[int], least: int) -> CapacityError:
    return CapacityError(
        f"a cache of {total:,} {'bytes' if in_bytes else 'rows'} is too small, the first batch needs "
        f"{told_rows(floor, widths)}: give at least cache={repr(f'{-(-least // 1000)}KB') if in_bytes else least}, or "
        "smaller batches"
    )


def told_rows(counts: Sequence[int], widths: Sequence[int]) -> str:
    """So many rows of each width, for messages."""
    sums = {width: sum(c for c, w in zip(counts, widths, strict=True) if w == width) for width in dict.fromkeys(widths)}
    return ", ".join(
        f"{rows:,} {'row' if rows == 1 else 'rows'} of {width} {'float' if width == 1 else 'floats'}"
        for width, rows in sums.items()
    )


class RowCache:
    """Slots for rows, on one device."""

    def __init__(self, widths: Sequence[int], capacity: Sequence[int], device: torch.device) -> None:
        self.group, self.widths = group_by_width(widths)
        self.device, self.ops = device, ops_on(device)
        self.num_bytes = num_bytes(capacity, self.widths)
        self._alone: list[npt.NDArray[np.bool_]] = []
        self._rank, self._copies = 0, 1
        self._make_slots(capacity)
        # Held while tenants change outside of training, so that a flush sees all of a change or nothing.
        self.moving = threading.Lock()
        self.num_rows = self.peak_rows = 0
        """Rows that this trainer updates and has in slots, or that are about to take them: now, and at the most."""
        self._counting = threading.Lock()

    def divide(self, capacity: Sequence[int]) -> None:
        """Give each row width so many slots, within the bytes that there are, while all are empty."""
        with self.moving:
            # Of rows that another trainer updates, vectors may still be here.
            assert not self.num_rows, f"{self.num_rows} rows are in the cache"
            self.release()
            self._make_slots(capacity)

    def _make_slots(self, capacity: Sequence[int]) -> None:
        self.capacity = tuple(capacity)
        self.data = [self.ops.zeros(slots, width) for slots, width in zip(capacity, self.widths, strict=True)]
        self.tenant_table = [np.full(slots, VACANT, np.int32) for slots in capacity]
        self.tenant_id = [np.zeros(slots, np.int64) for slots in capacity]
        self.dirty = [np.zeros(slots, np.bool_) for slots in capacity]
        if self._copies > 1:
            self._alone = [np.zeros(slots, np.bool_) for slots in capacity]

    def expect(self, num_rows: int) -> None:
        """So many rows are about to take slots that are free; those that another trainer updates do not count."""
        self._count(num_rows)

    def insert(self, table: int, ids: Ids, slots: Slots, values: Floats) -> None:
        """Rows from the store take their slots.

        Of rows that another trainer updates there may be the first columns only, their vectors. The others then stay as
        the slot's last tenant left them: who does not update a row neither looks at its state nor writes it back.
        """
        group = self.group[table]
        self.ops.write(self.data[group], slots, values)
        self.tenant_table[group][slots] = table
        self.tenant_id[group][slots] = ids
        self.dirty[group][slots] = False
        if self._alone:
            self._alone[group][slots] = False

    def share(self, rank: int, trainers: int) -> None:
        """So many trainers have copies of rows, and each of them a part of the slots that it flushes for all."""
        self._rank, self._copies = rank, trainers
        self._alone = [np.zeros(slots, np.bool_) for slots in self.capacity]

    def flushes(self, slots: Slots) -> npt.NDArray[np.bool_]:
        """Whether this trainer flushes what is in these slots, for all that have copies."""
        own: npt.NDArray[np.bool_] = slots % self._copies == self._rank
        return own

    def mark_updated(self, table: int, slots: Slots) -> None:
        """The rows in these slots differ from the store from now on; not those that another trainer will write."""
        group = self.group[table]
        self.dirty[group][slots] = self.tenant_table[group][slots] != VACANT

    def keep_alone(self, table: int, ids: Ids, slots: Slots) -> None:
        """Others give up their copies of these rows, if they are there: they are this trainer's to write."""
        group = self.group[table]
        if self._alone:
            there = (self.tenant_table[group][slots] == table) & (self.tenant_id[group][slots] == ids)
            self._alone[group][slots[there]] = True

    def copy_out(self, table: int, ids: Ids, slots: Slots) -> TableRows:
        """Rows leave their slots; those that were updated since they were last written are returned."""
        rows = self.copy_kept(table, ids, slots)
        self.tenant_table[self.group[table]][slots] = VACANT
        self._count(-len(slots))
        return rows

    def copy_kept(self, table: int, ids: Ids, slots: Slots) -> TableRows:
        """Those of the rows that were updated since they were last written; they stay, and count as written now."""
        group = self.group[table]
        changed = self.dirty[group][slots]
        self.dirty[group][slots] = False
        return TableRows(table, ids[changed], self.read(group, slots[changed]))

    def drop(self, table: int, ids: Ids, slots: Slots) -> None:
        """Rows that another trainer writes back leave their slots, if they are there.

        If not, an earlier tenant may be, which this trainer has still to write.
        """
        group = self.group[table]
        slots = slots[(self.tenant_table[group][slots] == table) & (self.tenant_id[group][slots] == ids)]
        self.dirty[group][slots] = False
        self.tenant_table[group][slots] = VACANT
        self._count(-len(slots))

    def give(self, table: int, slots: Slots) -> npt.NDArray[np.bool_]:
        """Rows become another trainer's to update and to write; of each whether the store has something older."""
        group = self.group[table]
        changed = self.dirty[group][slots]
        self.dirty[group][slots] = False
        self.tenant_table[group][slots] = VACANT
        self._count(-len(slots))
        return changed

    def take(self, table: int, ids: Ids, slots: Slots, changed: npt.NDArray[np.bool_]) -> None:
        """Rows that are in these slots become this trainer's."""
        group = self.group[table]
        self.tenant_table[group][slots] = table
        self.tenant_id[group][slots] = ids
        self.dirty[group][slots] = changed
        self._count(len(slots))

    def take_dirty(self, most: int = UNLIMITED) -> Iterator[list[TableRows]]:
        """Updated rows of all tables, which stay in their slots and count as written from now on.

        They come in blocks of at most `most` rows, each table once in a block, as they are when it is asked for: rows
        may leave in between. Copies that another trainer flushes only count as written.
        """
        block: list[TableRows] = []
        room = most
        for group, dirty in enumerate(self.dirty):
            first = 0
            for stop in range(most, len(dirty) + most, most):
                begin = stop - most
                if np.count_nonzero(dirty[begin:stop]) > room:
                    block += self._take_dirty(group, first, begin)
                    yield block
                    block, room, first = [], most, begin
                room -= int(np.count_nonzero(dirty[begin:stop]))
            block += self._take_dirty(group, first, len(dirty))
        yield block

    def _take_dirty(self, group: int, first: int, stop: int) -> Iterator[TableRows]:
        """Those in a range of slots."""
        dirty = self.dirty[group]
        slots = (first + np.flatnonzero(dirty[first:stop])).astype(np.int32)
        if self._alone:
            others = ~(self._alone[group][slots] | self.flushes(slots))
            dirty[slots[others]] = False
            slots = slots[~others]
        tables = self.tenant_table[group][slots]
        for table in np.unique(tables).tolist():
            chosen = slots[tables == table]
            yield self.copy_kept(table, self.tenant_id[group][chosen], chosen)

    def read(self, group: int, slots: Slots) -> Floats:
        """What is in these slots now."""
        return self.ops.read(self.data[group], slots)

    def _count(self, change: int) -> None:
        with self._counting:  # rows come and go in several threads
            self.num_rows += change
            self.peak_rows = max(self.peak_rows, self.num_rows)

    def fence(self) -> None:
        """The training thread has queued all of its work on the slots so far; transfers will wait for it."""
        self.ops.fence()

    def release(self) -> None:
        """Give the memory of the slots back."""
        self.data = [part.new_empty(0, part.shape[1]) for part in self.data]
