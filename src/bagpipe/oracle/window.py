"""The batches that were read and have no plan yet: their unique rows and how long each stays, in rings of arrays.

Owns the memory of the lookahead; it grows to the largest window met and is bounded by the number of batches (I5).
"""

from __future__ import annotations

from collections import deque
from typing import Any

import numpy as np
from numpy.typing import NDArray

Int32s = NDArray[np.int32]
Int64s = NDArray[np.int64]
Stays = NDArray[np.uint16]
Masks = NDArray[Any]
MaskType = type[np.unsignedinteger[Any]]


class Window:
    """A queue of batches, known by their iterations; a batch's column in `begins` is iteration & mask."""

    def __init__(self, num_tables: int, length_max: int, first: int, masks: MaskType | None = None) -> None:
        columns = 1 << int(length_max + 1).bit_length()
        self.mask = columns - 1
        self.begins: Int64s = np.zeros((num_tables + 1, columns), np.int64)
        """Where table t of a batch begins in `entries` and `stays`: [t, column]."""
        self.entries: Int32s = np.empty(0, np.int32)
        self.stays: Stays = np.empty(0, np.uint16)
        self._masks = masks
        self.users: Masks = np.empty(0, masks or np.uint8)
        """The trainers that use each row, if there are several."""
        self.previous: Int64s = np.empty(0, np.int64)
        """The word of each row before this use of it, if there are several trainers."""
        self.next: Masks = np.empty(0, masks or np.uint8)
        self.later: Masks = np.empty(0, masks or np.uint8)
        """The trainers that use each row at its next use, and at the one after that; none: the window does not tell."""
        self.inverses: deque[tuple[Int32s, ...]] = deque()
        self.first = first
        """Iteration of the oldest batch."""
        self.length_max = length_max
        self._end = 0

    def __len__(self) -> int:
        return len(self.inverses)

    @property
    def num_rows(self) -> int:
        """Unique rows, counted once a batch."""
        columns = np.arange(self.first, self.first + len(self)) & self.mask
        return int((self.begins[-1, columns] - self.begins[0, columns]).sum())

    def push(self, counts: Int64s, inverse: tuple[Int32s, ...]) -> None:
        """Enter a batch with that many unique rows of each table; they are to be written at its `begins`."""
        assert len(self) < self.length_max, f"the window is full with {len(self)} batches: emit a plan first"
        column = (self.first + len(self)) & self.mask
        begin = self._allocate(int(counts.sum()))
        self.begins[0, column] = begin
        np.cumsum(counts, out=self.begins[1:, column])
        self.begins[1:, column] += begin
        self.inverses.append(inverse)
        self._end = int(self.begins[-1, column])

    def oldest(self) -> tuple[Int64s, Int32s, Stays]:
        """Bounds, entries and stays of the oldest batch; valid until the next `push`."""
        bounds = self.begins[:, self.first & self.mask]
        here = slice(bounds[0], bounds[-1])
        return bounds - bounds[0], self.entries[here], self.stays[here]

    def pop(self) -> tuple[Int32s, ...]:
        """Drop the oldest batch; its inverse."""
        self.first += 1
        return self.inverses.popleft()

    def _allocate(self, count: int) -> int:
        """A free stretch of the rings, right behind the newest batch or at the beginning."""
        if not self:
            self._end = 0
        oldest = int(self.begins[0, self.first & self.mask]) if self else len(self.entries)
        wrapped = bool(self) and self._end <= oldest
        if self._end + count <= (oldest if wrapped else len(self.entries)):
            return self._end
        if self and not wrapped and count <= oldest:
            return 0
        return self._grow(count)

    def _grow(self, count: int) -> int:
        """Move all batches to the beginning of larger rings; the end of them."""
        used = self.num_rows
        size = 64 + (used + count) * 3 // 2
        olds: list[Any] = [self.entries, self.stays]
        olds += [] if self._masks is None else [self.users, self.previous, self.next, self.later]
        news: list[Any] = [np.empty(size, old.dtype) for old in olds]
        end = 0
        for iteration in range(self.first, self.first + len(self)):
            begins = self.begins[:, iteration & self.mask]
            length = int(begins[-1] - begins[0])
            for old, new in zip(olds, news, strict=True):
                new[end : end + length] = old[begins[0] : begins[-1]]
            begins += end - begins[0]
            end += length
        self.entries, self.stays = news[:2]
        if self._masks is not None:
            self.users, self.previous, self.next, self.later = news[2:]
        return end
