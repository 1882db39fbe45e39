"""From any 64-bit id to a dense position 0, 1, 2, ... in order of first insertion; only the last ones can be removed.

Open addressing with linear probing. A slot is one 64-bit word: the upper half of the id's mixed bits and its position
plus one, so that a probe rarely looks beyond the word, and growing reads no id: slots lie in order of those mixed
bits, hence it is one sweep over both arrays. Costs 19-25 B an id once past the smallest size, and at most twice that
for a moment while it grows. Finding an id costs one cache miss if it is absent and two if it is present; a bulk of ids
overlaps them.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from bagpipe.arrays import Int64s, UInt64s
from bagpipe.errors import StoreError
from bagpipe.kernels import inlined, kernel
from bagpipe.kernels.intrinsics import prefetch

Integer = int | np.int64

_NUM_SLOTS_MIN = 64
_NUM_SLOTS_MAX = 2**32  # as many as 32 mixed bits can tell apart


def _num_ids_max(num_slots: int) -> int:
    """Seven tenths full at most: above, linear probing takes long walks."""
    return num_slots * 7 // 10


NUM_IDS_MAX = _num_ids_max(_NUM_SLOTS_MAX)

_HALF = np.uint64(32)
_LOWER = np.uint64(0xFFFFFFFF)
_EMPTY = np.uint64(0)
_FACTOR = np.uint64(0xD6E8FEB86659FD93)

_AHEAD = 8
"""How many ids later a cache line that was asked for is used."""


@inlined
def _mix(key: np.int64) -> np.uint64:
    """32 bits in which each bit of the id flips about half: dense and strided ids spread like random ones."""
    bits = np.uint64(key)
    bits = (bits ^ (bits >> _HALF)) * _FACTOR
    bits = (bits ^ (bits >> _HALF)) * _FACTOR
    return bits >> _HALF


def mixed_by_numpy(ids: Int64s) -> UInt64s:
    """Twin of `_mix` over an array."""
    bits = ids.astype(np.uint64)
    for _ in range(2):
        bits = (bits ^ (bits >> _HALF)) * _FACTOR
    return bits >> _HALF


@inlined
def _home(bits: np.uint64, num_slots: int) -> Integer:
    """The slot where a probe starts: scaling instead of a mask lets the number of slots be any number."""
    return np.int64((bits * np.uint64(num_slots)) >> _HALF)


@inlined
def _seek(slots: UInt64s, slot: Integer, bits: np.uint64) -> Integer:
    """The first slot from this one on that is empty or has these bits."""
    while slots[slot] != _EMPTY and slots[slot] >> _HALF != bits:
        slot += 1
        if slot == slots.shape[0]:
            slot = 0
    return slot


@inlined
def _position(word: np.uint64) -> Integer:
    """-1 for an empty slot."""
    return np.int64(word & _LOWER) - 1


@inlined
def _probe(slots: UInt64s, keys: Int64s | UInt64s, key: Any, bits: np.uint64) -> tuple[Integer, Integer]:
    """The slot that holds the id and its position; or the empty slot where it belongs and -1."""
    slot = _seek(slots, _home(bits, slots.shape[0]), bits)
    position = _position(slots[slot])
    while position >= 0 and keys[position] != key:  # another id with the same bits
        slot = _seek(slots, (slot + 1) % slots.shape[0], bits)
        position = _position(slots[slot])
    return slot, position


@kernel
def _find(slots: UInt64s, keys: Int64s, ids: Int64s, positions: Int64s) -> int:
    """Three ids at work at once: one's slot is on its way from memory, one's key, and one is compared."""
    num_ids, num_slots = ids.shape[0], slots.shape[0]
    num_missing = 0
    for ahead in range(num_ids + 2 * _AHEAD):
        if ahead < num_ids:
            prefetch(slots, _home(_mix(ids[ahead]), num_slots))
        i = ahead - _AHEAD
        if 0 <= i < num_ids:
            bits = _mix(ids[i])
            positions[i] = _position(slots[_seek(slots, _home(bits, num_slots), bits)])
            if positions[i] >= 0:
                prefetch(keys, positions[i])
        i -= _AHEAD
        if i >= 0:
            if positions[i] >= 0 and keys[positions[i]] != ids[i]:
                _, positions[i] = _probe(slots, keys, ids[i], _mix(ids[i]))
            if positions[i] < 0:
                num_missing += 1
    return num_missing


@kernel
def _find_or_insert(
    slots: UInt64s, keys: Int64s, size: int, ids: Int64s, positions: Int64s, start: int
) -> tuple[int, int]:
    """Work from ids[start] until all are done or keys are full; how many ids are done, how many keys there are."""
    for i in range(start, ids.shape[0]):
        if i + _AHEAD < ids.shape[0]:
            prefetch(slots, _home(_mix(ids[i + _AHEAD]), slots.shape[0]))
        bits = _mix(ids[i])
        slot, position = _probe(slots, keys, ids[i], bits)
        if position < 0:
            if size == keys.shape[0]:
                return i, size
            position = size
            keys[position] = ids[i]
            size += 1
            slots[slot] = (bits << _HALF) | np.uint64(size)
        positions[i] = position
    return ids.shape[0], size


@kernel
def _rehash(slots: UInt64s, others: UInt64s, size: int) -> None:
    """Put the ids of the first `size` positions into other, empty slots."""
    num_slots = others.shape[0]
    for i in range(slots.shape[0]):
        word = slots[i]
        if word != _EMPTY and _position(word) < size:
            slot = _home(word >> _HALF, num_slots)
            while others[slot] != _EMPTY:
                slot += 1
                if slot == num_slots:
                    slot = 0
            others[slot] = word


class IdMap:
    """Positions of 64-bit ids in order of first insertion. Not for two threads at once: who shares it locks it."""

    def __init__(self) -> None:
        self._slots: UInt64s = np.zeros(_NUM_SLOTS_MIN, np.uint64)
        self._keys: Int64s = np.empty(_num_ids_max(_NUM_SLOTS_MIN), np.int64)
        self._size = 0

    def __len__(self) -> int:
        return self._size

    @property
    def nbytes(self) -> int:
        """Memory in use."""
        return self._slots.nbytes + self._keys.nbytes

    def ids(self, start: int = 0, stop: int | None = None) -> Int64s:
        """A copy of the ids of positions start to stop, by default of all."""
        return self._keys[: self._size][start:stop].copy()

    def find(self, ids: Int64s, positions: Int64s) -> int:
        """Write the position of each id, -1 where it has none; the number of those."""
        return _find(self._slots, self._keys, ids, positions[: len(ids)])

    def find_or_insert(self, ids: Int64s, positions: Int64s) -> int:
        """Write the position of each id, giving the next one to each id not seen before; the number of those."""
        size_before = self._size
        done = 0
        while True:
            done, self._size = _find_or_insert(self._slots, self._keys, self._size, ids, positions[: len(ids)], done)
            if done == len(ids):
                return self._size - size_before
            self.reserve(1)

    def reserve(self, num_ids: int) -> None:
        """Make room for that many more ids, so that inserting them can't fail; nothing changes if memory is short."""
        needed = self._size + num_ids
        if needed <= len(self._keys):
            return
        if needed > NUM_IDS_MAX:
            raise StoreError(
                f"a table of {needed:,} touched rows is more than one store can index ({NUM_IDS_MAX:,}): "
                "spread the table over more servers"
            )
        num_slots = min(max(len(self._slots) * 5 // 4, needed * 10 // 7 + 1), _NUM_SLOTS_MAX)
        slots = np.zeros(num_slots, np.uint64)
        keys = np.empty(_num_ids_max(num_slots), np.int64)
        keys[: self._size] = self._keys[: self._size]
        _rehash(self._slots, slots, self._size)
        self._slots, self._keys = slots, keys

    def truncate(self, size: int) -> None:
        """Forget the ids of all positions from `size` on; nothing changes if memory is short."""
        if size < self._size:
            slots = np.zeros_like(self._slots)  # a hole in the old ones would end the search for whatever lies behind
            _rehash(self._slots, slots, size)
            self._slots, self._size = slots, size
