"""From the 64-bit keys of values to positions 0, 1, 2, ... in order of first appearance, each with a check and a count.

Slots are those of `kernels/idmap.py`: 32 mixed bits of the key and its position plus one, in order of those bits.
An entry is three words (key, check, count), so that an occurrence costs two cache misses: its slot and its entry. About
37 bytes a value, in memory or in mapped files.
"""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray

from bagpipe.data.prepare.space import PIECE, Held, Space
from bagpipe.errors import DataError
from bagpipe.kernels import inlined, kernel
from bagpipe.kernels.idmap import _home, _mix, _probe, _rehash
from bagpipe.kernels.intrinsics import prefetch

Bools = NDArray[np.bool_]
Ints = NDArray[np.int64]
Words = NDArray[np.uint64]

MISSING, RARE, RESERVED = 0, 1, 2
"""The row of missing values, that of rare and unseen ones, and the first row of a value."""
KEY, CHECK, COUNT = 0, 1, 2
"""The words of an entry."""
RUN = 1 << 16
"""So many entries are walked at once where all of them are."""

_SLOTS_MIN = 64
_SLOTS_MAX = 2**32
_BUCKETS = 1 << 16
_AHEAD = 8
_HALF = np.uint64(32)
_LOWER = np.uint64(0xFFFFFFFF)
_EMPTY = np.uint64(0)


class Clash(Exception):
    """Two values that differ have the same key: an occurrence, and the position of the value it met."""

    def __init__(self, occurrence: int, position: int) -> None:
        super().__init__(f"occurrence {occurrence} has the key of the value at position {position}")
        self.occurrence, self.position = occurrence, position


@inlined
def _ask(slots: Words, entries: Words, keys: Words, i: int) -> None:
    """Ask for the slot of an occurrence well ahead, and for the entry of a nearer one."""
    if i + 2 * _AHEAD < keys.shape[0]:
        prefetch(slots, _home(_mix(keys[i + 2 * _AHEAD]), slots.shape[0]))
    if i + _AHEAD < keys.shape[0]:
        word = slots[_home(_mix(keys[i + _AHEAD]), slots.shape[0])]
        if word != _EMPTY:
            prefetch(entries, np.int64(word & _LOWER) - 1)


@kernel
def _admit(
    slots: Words,
    entries: Words,
    size: int,
    keys: Words,
    checks: NDArray[np.uint32],
    missing: Bools,
    ids: Ints,
    fresh: Ints,
    start: int,
    grow: bool,
) -> tuple[int, int, int, int]:
    """Count occurrences from `start` on and write their rows; ends early where entries are full or a key clashes.

    How many are done, how many entries there are, how many of `fresh` (occurrences of values never seen before) were
    written, and the position that was clashed with or -1. About 20 ns an occurrence, 60 where the map is large.
    """
    num_fresh, known = 0, entries[:, KEY]
    for i in range(start, keys.shape[0]):
        _ask(slots, entries, keys, i)
        if missing[i]:
            ids[i] = MISSING
            continue
        bits = _mix(keys[i])
        slot, position = _probe(slots, known, keys[i], bits)
        if position < 0:
            if not grow:
                ids[i] = RARE
                continue
            if size == entries.shape[0]:
                return i, size, num_fresh, -1
            position = size
            entries[position, KEY] = keys[i]
            entries[position, CHECK] = checks[i]
            size += 1
            slots[slot] = (bits << _HALF) | np.uint64(size)
            fresh[num_fresh] = i
            num_fresh += 1
        elif entries[position, CHECK] != checks[i]:
            return i, size, num_fresh, int(position)
        entries[position, COUNT] += np.uint64(1)
        ids[i] = position + RESERVED
    return keys.shape[0], size, num_fresh, -1


@kernel
def _encode(slots: Words, entries: Words, keys: Words, missing: Bools, ids: Ints) -> None:
    """Write the row of each occurrence, which stands where its count was."""
    known = entries[:, KEY]
    for i in range(keys.shape[0]):
        _ask(slots, entries, keys, i)
        ids[i] = MISSING
        if not missing[i]:
            _, position = _probe(slots, known, keys[i], _mix(keys[i]))
            ids[i] = RARE if position < 0 else np.int64(entries[position, COUNT])


@kernel
def _tally(entries: Words, rows: Ints) -> None:
    for row in rows:
        if row >= RESERVED:
            entries[row - RESERVED, COUNT] += np.uint64(1)


@kernel
def _histogram(counts: Words, least: int, buckets: Ints) -> None:
    for i in range(counts.shape[0]):
        if counts[i] >= np.uint64(least):
            buckets[min(np.int64(counts[i]), buckets.shape[0] - 1)] += 1


@kernel
def _place(counts: Words, least: int, first: int, heads: Ints, order: NDArray[np.uint32]) -> None:
    for i in range(counts.shape[0]):
        if counts[i] >= np.uint64(least):
            bucket = min(np.int64(counts[i]), heads.shape[0] - 1)
            order[heads[bucket]] = first + i
            heads[bucket] += 1


class KeyMap:
    """The values of one table. Not for two threads at once."""

    def __init__(self, space: Space) -> None:
        self._space = space
        self._slots, self._entries = self._arrays(_SLOTS_MIN)
        self._size = 0

    def __len__(self) -> int:
        return self._size

    @property
    def entries(self) -> Words:
        """(values, 3): key, check and count of each, in order of first appearance."""
        return self._entries.array[: self._size]

    def admit(self, keys: Words, checks: NDArray[np.uint32], missing: Bools, ids: Ints, *, grow: bool = True) -> Ints:
        """Count occurrences and write the row of each, position plus two; those that were the first of their value.

        Without `grow` an unseen value is not taken in: its row is that of rare ones. Raises `Clash`.
        """
        fresh: list[Ints] = []
        for start, stop in self._pieces(len(keys)):
            part = np.empty(stop - start, np.int64)
            done = start
            while done < stop:
                before = done
                done, self._size, num_fresh, met = _admit(
                    self._slots.array,
                    self._entries.array,
                    self._size,
                    keys[:stop],
                    checks,
                    missing,
                    ids,
                    part,
                    before,
                    grow,
                )
                if num_fresh:
                    fresh.append(part[:num_fresh].copy())
                if met >= 0:
                    raise Clash(done, met)
                if done < stop:
                    self.reserve(1)
            self.relieve()
        return np.concatenate(fresh) if fresh else np.empty(0, np.int64)

    def load(self, keys: Words, checks: NDArray[np.uint32]) -> None:
        """Take in values that are not in it yet, in this order, without counting them."""
        before = self._size
        self.reserve(len(keys))
        self.admit(keys, checks, np.zeros(len(keys), np.bool_), np.empty(len(keys), np.int64))
        assert self._size == before + len(keys), "a vocabulary names a value twice"
        self.entries[before:, COUNT] = 0

    def tally(self, rows: Ints) -> None:
        """Count occurrences whose rows, position plus two, are known already."""
        for start, stop in self._pieces(len(rows)):
            _tally(self._entries.array, rows[start:stop])
            self.relieve()

    def encode(self, keys: Words, missing: Bools, ids: Ints) -> None:
        """Write the row of each occurrence, as `number` gave them out."""
        for start, stop in self._pieces(len(keys)):
            _encode(self._slots.array, self._entries.array, keys[start:stop], missing[start:stop], ids[start:stop])
            self.relieve()

    def rank(self, min_count: int, by_frequency: bool) -> Held:
        """The positions of the values that occurred that often: the most frequent first, or in order of appearance.

        Counting sort: counts are small except for few values, and both sweeps walk the entries from the first to the
        last, so it needs no memory where the entries are mapped.
        """
        buckets = np.zeros(_BUCKETS if by_frequency else 1, np.int64)
        for start, stop in self.runs():
            _histogram(self.entries[start:stop, COUNT], min_count, buckets)
        heads = np.concatenate([np.cumsum(buckets[::-1])[::-1][1:], [0]])
        order = self._space.zeros((int(buckets.sum()),), np.uint32)
        for start, stop in self.runs():
            _place(self.entries[start:stop, COUNT], min_count, start, heads, order.array)
        if by_frequency:
            frequent = order.array[: buckets[-1]]
            counts = self.entries[frequent, COUNT].astype(np.int64)
            frequent[:] = frequent[np.lexsort((frequent, -counts))]
        return order

    def number(self, order: NDArray[np.uint32]) -> None:
        """Put the row of each value where its count was: two and more in this order, that of rare ones for the rest."""
        for start, stop in self.runs():
            self.entries[start:stop, COUNT] = RARE
        for start, stop in self.runs(len(order)):
            self.entries[order[start:stop], COUNT] = np.arange(start, stop, dtype=np.uint64) + np.uint64(RESERVED)

    def runs(self, num: int | None = None) -> Any:
        """Stretches of all values, or of `num` of them, with memory let go after each."""
        for start in range(0, self._size if num is None else num, RUN):
            yield start, min(start + RUN, self._size if num is None else num)
            self.relieve()

    def reserve(self, num_values: int) -> None:
        """Make room for that many more values."""
        needed = self._size + num_values
        if needed <= len(self._entries.array):
            return
        if needed > _num_values_max(_SLOTS_MAX):
            raise DataError(f"a table of {needed:,} values is more than can be numbered: number it with hash or ids")
        factor = 2 if self._entries.mapped else 5 / 4
        num_slots = min(max(int(len(self._slots.array) * factor), needed * 10 // 7 + 1), _SLOTS_MAX)
        slots, entries = self._arrays(num_slots)
        for start in range(0, len(self._slots.array), RUN):
            _rehash(self._slots.array[start : start + RUN], slots.array, self._size)
            self.relieve()
        for start, stop in self.runs():
            entries.array[start:stop] = self._entries.array[start:stop]
        self._space.release(self._slots)
        self._space.release(self._entries)
        self._slots, self._entries = slots, entries

    def _arrays(self, num_slots: int) -> tuple[Held, Held]:
        return self._space.zeros((num_slots,), np.uint64), self._space.zeros((_num_values_max(num_slots), 3), np.uint64)

    def _pieces(self, num: int) -> Any:
        step = PIECE if self._is_mapped else max(num, 1)
        return ((start, min(start + step, num)) for start in range(0, num, step))

    @property
    def _is_mapped(self) -> bool:
        return self._slots.mapped is not None or self._entries.mapped is not None

    def relieve(self) -> None:
        """Let go of memory that mapped arrays took."""
        if self._is_mapped:
            self._space.relieve()


def _num_values_max(num_slots: int) -> int:
    """Seven tenths full at most: above, linear probing takes long walks."""
    return num_slots * 7 // 10
