"""From any 64-bit id of some tables to a small row number, for tables too large for arrays: memory follows the rows in
use.

A row keeps its number while it lives; the number is given to another once it is forgotten. All that is known of a row
is one record, half a cache line. The index has the layout of `kernels.idmap`. It is rebuilt when numbers run out: after
each rebuild at least half of them are free, so that it costs a few operations for each new id.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

from bagpipe.arrays import Int32s, Int64s, UInt64s
from bagpipe.errors import CapacityError
from bagpipe.kernels import inlined, kernel
from bagpipe.kernels.idmap import _mix
from bagpipe.kernels.intrinsics import FAR, index, int64_at, prefetch

NUM_ROWS_MIN = 64
NUM_ROWS_MAX = 2**31 - 1

ANY_ID = np.uint64(2**64 - 1)
"""The last of all ids, where a table does not say how many rows it has."""
_HALF = np.uint64(32)
_LOWER = np.uint64(0xFFFFFFFF)
_EMPTY = np.uint64(0)
_GOLDEN = np.uint64(0x9E3779B97F4A7C15)
_MEMO_BITS = 12
_MEMO_SHIFT = np.uint64(64 - _MEMO_BITS)
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
    keys: Int64s
    """The ids that `thin` listed."""
    given: Int64s
    """Their rows, which `number` found."""
    found: Int32s
    """Their rows' index among those of the batch."""
    memo: Int32s
    """Where `thin` has listed an id with these bits, if it has: it looks."""


@inlined
def _bits(table: int, key: np.int64) -> np.uint64:
    """32 bits of table and id; tables take turns, so that id 5 of each has a place of its own."""
    return _mix(key + np.int64(table) * np.int64(0x9E3779B97F4A7C1))


@kernel
def thin(rows: Numbers, address: int, at: Int32s) -> int:
    """List the ids at an address in `keys`, hot ones once and others seldom twice; at[i] is where the i-th of them is.

    Returns how many are listed. About 2 ns an id, where `number` takes five times that.
    """
    keys, memo, listed = rows.keys, rows.memo, 0
    for i in range(at.shape[0]):
        key = int64_at(address, i)
        place = index((np.uint64(key) * _GOLDEN) >> _MEMO_SHIFT)
        where = memo[place]
        if where >= listed or keys[index(where)] != key:
            where = listed
            keys[index(listed)] = key
            memo[place] = listed
            listed += 1
        at[index(i)] = where
    return listed


@kernel
def number(rows: Numbers, table: int, last: np.uint64, keys: Int64s) -> None:
    """Write the row of each of these ids to `given`, new ones from the end of `free`; -1 for an id that is larger than
    `last`, negative ones being the largest of all.

    Three ids are at work at once: one's slot is on its way from memory, one's record, and one is compared.
    """
    slots, given, count = rows.slots, rows.given, keys.shape[0]
    num_slots, num_free = np.uint64(slots.shape[0]), rows.num_free[0]
    for ahead in range(count + 2 * FAR):
        if ahead < count:
            bits = _bits(table, keys[index(ahead)])
            given[index(ahead)] = bits
            prefetch(slots, np.int64((bits * num_slots) >> _HALF))
        if FAR <= ahead < count + FAR:
            word = slots[(np.uint64(given[index(ahead - FAR)]) * num_slots) >> _HALF]
            if word != _EMPTY:
                prefetch(rows.ids, np.int64(word & _LOWER) - 1)
        if ahead >= 2 * FAR:
            i = ahead - 2 * FAR
            key, bits = keys[index(i)], np.uint64(given[index(i)])
            slot = (bits * num_slots) >> _HALF
            row = np.int64(-1)
            while row < 0 and np.uint64(key) <= last:
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
        self._list(NUM_ROWS_MIN)
        self._memo: Int32s = np.zeros(1 << _MEMO_BITS, np.int32)
        self._free: Int32s = np.empty(0, np.int32)
        self._grow(NUM_ROWS_MIN)
        self._index()

    def __len__(self) -> int:
        return self._size - int(self._num_free[0])

    @property
    def numbers(self) -> Numbers:
        """For kernels; valid until the next `reserve`."""
        return Numbers(
            self._slots, self.ids, self.tables, self._free, self._num_free, self._keys, self._given, self._found,
            self._memo,
        )  # fmt: skip

    def reserve(self, num_ids: int, keep_read: int, keep_plan: int) -> None:
        """Make room for that many new ids, forgetting rows last read before keep_read and evicted before keep_plan."""
        self._list(num_ids)
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
        self._list(len(ids))
        number(self.numbers, table, ANY_ID, ids)
        return self._given[: len(ids)]

    def _list(self, num_ids: int) -> None:
        """Make room for lists of that many ids."""
        if num_ids > len(self._given):
            self._keys, self._given = np.empty((2, num_ids), np.int64)
            self._found: Int32s = np.empty(num_ids, np.int32)

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


@kernel
def address_of(values: Int64s) -> int:
    """Where a contiguous array is in memory; a fifth of the time that NumPy takes to tell."""
    return int(values.ctypes.data)
