"""From any 64-bit id to a small entry number, for tables too large for an array: memory follows the rows in use.

Entries keep their number while they live and are given to other ids once forgotten. The index has the layout of
`kernels.idmap`. It is rebuilt when entries run out: after each rebuild at least half of them are free, so that it costs
a few operations for each new id.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from bagpipe.errors import CapacityError
from bagpipe.kernels import kernel
from bagpipe.kernels.idmap import _home, _mix, _probe
from bagpipe.kernels.intrinsics import FAR, prefetch
from bagpipe.kernels.oracle import HALF

Int32s = NDArray[np.int32]
Int64s = NDArray[np.int64]
UInt64s = NDArray[np.uint64]

NUM_ENTRIES_MIN = 64
NUM_ENTRIES_MAX = 2**31 - 1


@kernel
def find_or_take(index: UInt64s, keys: Int64s, free: Int32s, num_free: int, ids: Int64s, entries: Int64s) -> int:
    """The entry of each id, taken from the end of `free` for new ids; how many stay free."""
    num_ids = ids.shape[0]
    num_slots = index.shape[0]
    for i in range(num_ids):
        prefetch(index, _home(_mix(ids[min(i + FAR, num_ids - 1)]), num_slots))
        bits = _mix(ids[i])
        slot, entry = _probe(index, keys, ids[i], bits)
        if entry < 0:
            num_free -= 1
            entry = free[num_free]
            keys[entry] = ids[i]
            index[slot] = (bits << np.uint64(HALF)) | np.uint64(entry + 1)
        entries[i] = entry
    return num_free


@kernel
def forget(words: Int64s, places: Int32s, keep_read: int, keep_plan: int, free: Int32s) -> int:
    """Empty the entries last read before iteration keep_read and evicted before keep_plan; list all empty ones.

    A resident entry stays. Neither bound may be negative, so that entries already empty are listed too. Returns the
    length of the list.
    """
    num_free = 0
    for entry in range(words.shape[0] - 1, -1, -1):
        place = places[entry]
        if words[entry] >> HALF <= keep_read and place <= 0 and -place - 1 < keep_plan:
            words[entry] = 0
            places[entry] = 0
            free[num_free] = entry
            num_free += 1
    return num_free


@kernel
def _reindex(index: UInt64s, keys: Int64s, words: Int64s) -> None:
    for entry in range(words.shape[0]):
        if words[entry] != 0:
            bits = _mix(keys[entry])
            slot, _ = _probe(index, keys, keys[entry], bits)
            index[slot] = (bits << np.uint64(HALF)) | np.uint64(entry + 1)


class WindowMap:
    """Entries of 64-bit ids, with a word and a place each; forgets the rows that no plan can need."""

    def __init__(self) -> None:
        self.words: Int64s = np.zeros(NUM_ENTRIES_MIN, np.int64)
        self.places: Int32s = np.zeros(NUM_ENTRIES_MIN, np.int32)
        self.keys: Int64s = np.zeros(NUM_ENTRIES_MIN, np.int64)
        self._free: Int32s = np.arange(NUM_ENTRIES_MIN, dtype=np.int32)[::-1].copy()
        self._num_free = NUM_ENTRIES_MIN
        self._index: UInt64s = np.zeros(2 * NUM_ENTRIES_MIN, np.uint64)

    def __len__(self) -> int:
        return len(self.words) - self._num_free

    def reserve(self, num_ids: int, keep_read: int, keep_plan: int) -> None:
        """Make room for that many new ids, forgetting rows last read before keep_read and evicted before keep_plan."""
        if num_ids <= self._num_free:
            return
        self._num_free = forget(self.words, self.places, keep_read, max(0, keep_plan), self._free)
        size = len(self.words)
        # Half of the entries are free after each rebuild, so that the next one is as many new ids away.
        while 2 * (len(self) + num_ids) > size:
            size *= 2
        if size > NUM_ENTRIES_MAX:
            raise CapacityError(
                f"the window holds {len(self) + num_ids:,} rows of one table, more than the oracle can number "
                f"({NUM_ENTRIES_MAX // 2:,}): lower the lookahead or the batch size"
            )
        self._grow(size)
        self._index = np.zeros(2 * size, np.uint64)
        _reindex(self._index, self.keys, self.words)

    def _grow(self, size: int) -> None:
        old = len(self.words)
        if size == old:
            return
        self.words = np.append(self.words, np.zeros(size - old, np.int64))
        self.places = np.append(self.places, np.zeros(size - old, np.int32))
        self.keys = np.append(self.keys, np.zeros(size - old, np.int64))
        free = np.empty(size, np.int32)
        free[: size - old] = np.arange(size - 1, old - 1, -1)
        free[size - old : size - old + self._num_free] = self._free[: self._num_free]
        self._free = free
        self._num_free += size - old

    def find_or_take(self, ids: Int64s, entries: Int64s) -> None:
        """Write the entry of each id; `reserve` came before."""
        self._num_free = find_or_take(self._index, self.keys, self._free, self._num_free, ids, entries)
