"""From any 64-bit id of some tables to a small row number, for tables too large for arrays: memory follows the rows in
use.

A row keeps its number while it lives; the number is given to another once it is forgotten. All that is known of a row
is one record, half a cache line. The index has the layout of `kernels.idmap`. It is rebuilt when numbers run out: after
each rebuild at least half of them are free, so that it costs a few operations for each new id.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from bagpipe.errors import CapacityError
from bagpipe.kernels import inlined, kernel
from bagpipe.kernels.idmap import _mix
from bagpipe.kernels.intrinsics import FAR, index, int64_at, prefetch

Int32s = NDArray[np.int32]
Int64s = NDArray[np.int64]
UInt64s = NDArray[np.uint64]

NUM_ROWS_MIN = 64
NUM_ROWS_MAX = 2**31 - 1

_HALF = np.uint64(32)
_LOWER = np.uint64(0xFFFFFFFF)
_EMPTY = np.uint64(0)
_RECORD = 4
"""64-bit words of a record: id, last use, location and table, and one to spare, so that none spans two cache lines."""


class Numbers(NamedTuple):
    """Which id of which table has which row number. Empty for tables with arrays: there a row is its id."""

    slots: UInt64s
    """The index: upper half of a word mixed bits of table and id, lower half the row + 1; 0: empty."""
    ids: Int64s
    tables: Int32s
    free: Int32s
    """Numbers to give to new rows, the last first."""
    num_free: Int64s
    given: Int64s
    """The rows that `number` found."""


@inlined
def _bits(table: int, key: np.int64) -> np.uint64:
    """32 bits of table and id; tables take turns, so that id 5 of each has a place of its own."""
    return _mix(key + np.int64(table) * np.int64(0x9E3779B97F4A7C1))


@kernel
def number(rows: Numbers, table: int, address: int, count: int) -> None:
    """Write the row of each of the `count` ids at an address to `given`, new ones from the end of `free`.

    Three ids are at work at once: one's slot is on its way from memory, one's record, and one is compared.
    """
    slots, given = rows.slots, rows.given
    num_slots, num_free = np.uint64(slots.shape[0]), rows.num_free[0]
    for ahead in range(count + 2 * FAR):
        if ahead < count:
            bits = _bits(table, int64_at(address, ahead))
            given[index(ahead)] = bits
            prefetch(slots, np.int64((bits * num_slots) >> _HALF))
        if FAR <= ahead < count + FAR:
            word = slots[(np.uint64(given[index(ahead - FAR)]) * num_slots) >> _HALF]
            if word != _EMPTY:
                prefetch(rows.ids, np.int64(word & _LOWER) - 1)
        if ahead >= 2 * FAR:
            i = ahead - 2 * FAR
            key, bits = int64_at(address, i), np.uint64(given[index(i)])
            slot = (bits * num_slots) >> _HALF
            row = np.int64(-1)
            while row < 0:
                word = slots[slot]
                if word == _EMPTY:
                    num_free -= 1
                    row = np.int64(rows.free[index(num_free)])
                    rows.ids[index(row)] = key
                    rows.tables[index(row)] = table
                    slots[slot] = (bits << _HALF) | np.uint64(row + 1)
                elif word >> _HALF == bits:
                    row = np.int64(word & _LOWER) - 1
                    if rows.ids[index(row)] != key or rows.tables[index(row)] != table:
                        row = np.int64(-1)
                slot += np.uint64(1)
                if slot == num_slots:
                    slot = np.uint64(0)
            given[index(i)] = row
    rows.num_free[0] = num_free


@kernel
def forget(last_use: Int64s, location: Int32s, keep_read: int, keep_plan: int, free: Int32s) -> int:
    """Empty the records of rows last read before iteration keep_read and evicted before keep_plan; list all empty ones.

    A row in the cache stays. Neither bound may be negative, so that records already empty are listed too. Returns the
    length of the list.
    """
    num_free = 0
    for row in range(last_use.shape[0] - 1, -1, -1):
        where = location[row]
        if last_use[row] >> 32 <= keep_read and where <= 0 and -where - 1 < keep_plan:
            last_use[row] = 0
            location[row] = 0
            free[num_free] = row
            num_free += 1
    return num_free


@kernel
def _reindex(slots: UInt64s, ids: Int64s, tables: Int32s, last_use: Int64s) -> None:
    num_slots = np.uint64(slots.shape[0])
    for row in range(last_use.shape[0]):
        if last_use[row] != 0:
            bits = _bits(tables[row], ids[row])
            slot = (bits * num_slots) >> _HALF
            while slots[slot] != _EMPTY:
                slot += np.uint64(1)
                if slot == num_slots:
                    slot = np.uint64(0)
            slots[slot] = (bits << _HALF) | np.uint64(row + 1)


class WindowMap:
    """Rows of 64-bit ids of some tables, with last use and location each; forgets those that no plan can need."""

    def __init__(self) -> None:
        self._num_free: Int64s = np.zeros(1, np.int64)
        self._size = 0
        self._records: Int64s = np.empty((0, _RECORD), np.int64)
        self._given: Int64s = np.empty(0, np.int64)
        self._free: Int32s = np.empty(0, np.int32)
        self._grow(NUM_ROWS_MIN)
        self._index()

    def __len__(self) -> int:
        return self._size - int(self._num_free[0])

    @property
    def numbers(self) -> Numbers:
        """For kernels; valid until the next `reserve`."""
        return Numbers(self._slots, self.ids, self.tables, self._free, self._num_free, self._given)

    def reserve(self, num_ids: int, keep_read: int, keep_plan: int) -> None:
        """Make room for that many new ids, forgetting rows last read before keep_read and evicted before keep_plan."""
        if num_ids > len(self._given):
            self._given = np.empty(num_ids, np.int64)
        if num_ids <= self._num_free[0]:
            return
        self._num_free[0] = forget(self.last_use, self.location, keep_read, max(0, keep_plan), self._free)
        size = self._size
        # Half of the numbers are free after each rebuild, so that the next one is as many new ids away.
        while 2 * (len(self) + num_ids) > size:
            size *= 2
        if size > NUM_ROWS_MAX:
            raise CapacityError(
                f"the window holds {len(self) + num_ids:,} rows of tables without arrays, more than the oracle can "
                f"number ({NUM_ROWS_MAX // 2:,}): lower the lookahead or the batch size"
            )
        if size > self._size:
            self._grow(size)
        self._index()

    def number(self, table: int, ids: Int64s) -> Int64s:
        """The row of each id, valid until the next call; `reserve` came before."""
        if len(ids) > len(self._given):
            self._given = np.empty(len(ids), np.int64)
        number(self.numbers, table, address_of(ids), len(ids))
        return self._given[: len(ids)]

    def _grow(self, size: int) -> None:
        old, memory = self._size, np.zeros(_RECORD * (size + 1), np.int64)
        first = -address_of(memory) // 8 % _RECORD
        records = memory[first : first + _RECORD * size].reshape(size, _RECORD)
        halves = records.view(np.int32)
        records[:old] = self._records
        self._records, self._size = records, size
        self.ids: Int64s = records[:, 0]
        self.last_use: Int64s = records[:, 1]
        self.location: Int32s = halves[:, 4]
        self.tables: Int32s = halves[:, 5]
        free = np.empty(size, np.int32)
        free[: size - old] = np.arange(size - 1, old - 1, -1)
        num_free = int(self._num_free[0])
        free[size - old : size - old + num_free] = self._free[:num_free]
        self._free = free
        self._num_free += size - old

    def _index(self) -> None:
        self._slots: UInt64s = np.zeros(2 * self._size, np.uint64)
        _reindex(self._slots, self.ids, self.tables, self.last_use)


def address_of(values: Int64s) -> int:
    """Where a contiguous array is in memory."""
    return int(values.__array_interface__["data"][0])
