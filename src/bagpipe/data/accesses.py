"""How often the rows of a table are used, counted exactly in a stream: by day, by batch and in all.

What is kept of a finished count is small (how many rows have which number of accesses) and adds up, over tables and
over parts of a table's rows, so that a count that does not fit the memory is made in several passes (I5).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from bagpipe.arrays import Int64s
from bagpipe.data.count import NUM_WORDS, TODAY, TOTAL, close_day, count_accesses, count_rows, set_levels
from bagpipe.errors import ValueRangeError
from bagpipe.kernels.idmap import IdMap, mixed_by_numpy
from bagpipe.types import Ids, Table

COMMON = 1 << 16
"""Rows with fewer accesses than this are counted in an array, the few others are sorted."""
ROWS_DIRECT_MIN = 1 << 16
"""A table of so few rows has an array, however little of it is used."""


@dataclass(frozen=True, slots=True, eq=False)
class Sums:
    """One sum for each of some numbers of accesses, ascending."""

    counts: Int64s
    sums: Int64s

    @classmethod
    def none(cls) -> Sums:
        """No counts."""
        return cls(np.empty(0, np.int64), np.empty(0, np.int64))

    def __add__(self, other: Sums) -> Sums:
        counts, places = np.unique(np.concatenate([self.counts, other.counts]), return_inverse=True)
        sums = np.zeros(len(counts), np.int64)
        np.add.at(sums, places, np.concatenate([self.sums, other.sums]))
        return Sums(counts, sums)

    def total(self) -> int:
        """The sum of all."""
        return int(self.sums.sum())


def share_of_top(rows: Sums, num_top: int, accesses: Sums) -> float | None:
    """The share of `accesses` that goes to the `num_top` rows of the highest counts; None where there are none.

    `rows` says how many rows have each count, `accesses` how often those are used (the day of the count, or another).
    Where the last places fall among rows of equal counts, these take part alike: no order of ids decides.
    """
    whole = accesses.total()
    if not whole or not len(rows.counts):
        return None
    places = np.searchsorted(accesses.counts, rows.counts)
    missing = places == len(accesses.counts)
    places[missing] = 0
    missing |= accesses.counts[places] != rows.counts
    each = np.where(missing, 0, accesses.sums[places])[::-1]
    sizes = rows.sums[::-1]
    taken = np.clip(num_top - (np.cumsum(sizes) - sizes), 0, sizes)
    full = taken == sizes
    partial = each[~full] * (taken[~full] / sizes[~full])
    return float(int(each[full].sum()) + partial.sum()) / whole


@dataclass(slots=True)
class DayTally:
    """What one day used."""

    accesses: int
    rows: int
    new_rows: int
    """Never used before."""
    repeated_rows: int
    """Used the day before too."""
    repeated_accesses: int
    """Accesses of those."""
    popularity: Sums
    """Rows by their accesses of this day."""
    by_first: Sums
    """Accesses of this day by how often the row was used on the first day (0: not)."""

    def __add__(self, other: DayTally) -> DayTally:
        return DayTally(
            self.accesses + other.accesses,
            self.rows + other.rows,
            self.new_rows + other.new_rows,
            self.repeated_rows + other.repeated_rows,
            self.repeated_accesses + other.repeated_accesses,
            self.popularity + other.popularity,
            self.by_first + other.by_first,
        )


@dataclass(slots=True)
class Tally:
    """What a stretch of data used of a table, of some tables, or of a part of their rows."""

    popularity: Sums
    """Rows by their accesses in all."""
    batch_rows: Int64s
    """For each batch size, the sum over all whole batches of the different rows in a batch."""
    days: tuple[DayTally, ...]

    def __add__(self, other: Tally) -> Tally:
        return Tally(
            self.popularity + other.popularity,
            self.batch_rows + other.batch_rows,
            tuple(a + b for a, b in zip(self.days, other.days, strict=True)),
        )


@dataclass(frozen=True, slots=True)
class RowPart:
    """One of 2**bits parts of the rows of every table."""

    bits: int = 0
    number: int = 0

    def halves(self) -> tuple[RowPart, RowPart]:
        """The same rows in two parts."""
        return RowPart(self.bits + 1, self.number), RowPart(self.bits + 1, self.number + (1 << self.bits))

    def selected(self, words: NDArray[np.int64] | NDArray[np.uint64]) -> NDArray[np.bool_]:
        """Which of these words lie in the part, by their lowest bits."""
        mask = words.dtype.type((1 << self.bits) - 1)
        chosen: NDArray[np.bool_] = (words & mask) == words.dtype.type(self.number)
        return chosen


def direct_rows(table: Table, num_samples: int, part: RowPart) -> int | None:
    """Rows of the array of a table whose ids are places in it; None: of an id only a map knows the place."""
    if table.rows is None or table.rows > max(ROWS_DIRECT_MIN, num_samples):
        return None
    return -(-table.rows // (1 << part.bits))


class AccessCount:
    """Counts the accesses of one table's rows, or of a part of them, in the order of the samples."""

    def __init__(self, table: Table, num_samples: int, batch_sizes: Sequence[int], part: RowPart | None = None) -> None:
        self.table, self._part = table, part or RowPart()
        self._sizes = np.array(batch_sizes, np.int64)
        self._stops = num_samples // self._sizes * self._sizes
        self._batch_rows = np.zeros(len(self._sizes), np.int64)
        rows = direct_rows(table, num_samples, self._part)
        self._map = IdMap() if rows is None else None
        self._words = np.zeros((rows or 0, NUM_WORDS), np.int64)
        self._first: Int64s | None = None
        self._days: list[DayTally] = []

    @property
    def nbytes(self) -> int:
        """Memory in use."""
        return self._words.nbytes + (0 if self._map is None else self._map.nbytes)

    def add(self, first: int, features: Sequence[Ids]) -> None:
        """Count samples first, first + 1, ...: their ids, one entry a feature of the table."""
        offsets, values = _by_sample(features)
        self._check(values, offsets, first)
        positions = self._positions(values)
        count_accesses(positions, offsets, first, self._words, self._sizes, self._stops, self._batch_rows)

    def end_day(self, is_day: bool = True) -> None:
        """The samples since the last end were a day, or samples that belong to none."""
        words = self._words if self._map is None else self._words[: len(self._map)]
        popularity = _popularity(words, TODAY) if is_day else Sums.none()
        if is_day and self._first is None:
            self._first = popularity.counts
            set_levels(words, popularity.counts)
        levels = self._first if self._first is not None else np.empty(0, np.int64)
        by_level, sums = np.zeros(len(levels) + 1, np.int64), np.zeros(5, np.int64)
        close_day(words, by_level, sums, is_day)
        if is_day:
            by_first = Sums(np.concatenate([np.zeros(1, np.int64), levels]), by_level)
            accesses, rows, new, again, again_accesses = sums.tolist()
            self._days.append(DayTally(accesses, rows, new, again, again_accesses, popularity, by_first))

    def finish(self) -> Tally:
        """What was counted until the last end of a day."""
        words = self._words if self._map is None else self._words[: len(self._map)]
        return Tally(_popularity(words, TOTAL), self._batch_rows, tuple(self._days))

    def _check(self, values: Int64s, offsets: Int64s, first: int) -> None:
        rows = self.table.rows
        if rows is None or not len(values) or (values.min() >= 0 and values.max() < rows):
            return
        place = int(np.flatnonzero((values < 0) | (values >= rows))[0])
        sample = first + int(np.searchsorted(offsets, place, side="right")) - 1
        raise ValueRangeError(
            f"sample {sample}: id {values[place]} is out of range for table {self.table.name!r} ({rows} rows): "
            "raise the table's rows or check the data"
        )

    def _positions(self, ids: Int64s) -> Int64s:
        """The row of `_words` of each id, -1 for those of another part."""
        part = self._part
        if self._map is None:
            return ids if not part.bits else np.where(part.selected(ids), ids >> part.bits, -1)
        if not part.bits:
            positions = np.empty(len(ids), np.int64)
            self._map.find_or_insert(ids, positions)
        else:
            # By mixed bits: ids may all be even.
            chosen = part.selected(mixed_by_numpy(ids))
            positions = np.full(len(ids), -1, np.int64)
            found = np.empty(np.count_nonzero(chosen), np.int64)
            self._map.find_or_insert(ids[chosen], found)
            positions[chosen] = found
        self._grow(len(self._map))
        return positions

    def _grow(self, rows: int) -> None:
        if rows > len(self._words):
            larger = np.zeros((max(rows, len(self._words) * 5 // 4), NUM_WORDS), np.int64)
            larger[: len(self._words)] = self._words
            self._words = larger


def _popularity(words: Int64s, column: int) -> Sums:
    rows = np.zeros(COMMON, np.int64)
    beyond = count_rows(words, column, rows)
    counts = np.flatnonzero(rows)
    if not beyond:
        return Sums(counts, rows[counts])
    many = words[:, column]
    frequent, each = np.unique(many[many >= COMMON], return_counts=True)
    return Sums(np.concatenate([counts, frequent]), np.concatenate([rows[counts], each]))


def _by_sample(features: Sequence[Ids]) -> tuple[Int64s, Int64s]:
    """Offsets and ids of a table, those of one sample side by side: features of a table share its rows."""
    parts = [(_offsets(ids), ids.values.numpy().reshape(-1).astype(np.int64, copy=False)) for ids in features]
    if len(parts) == 1:
        offsets, values = parts[0]
        return offsets, np.ascontiguousarray(values)
    offsets = np.sum([offsets for offsets, _ in parts], axis=0)
    merged = np.empty(offsets[-1], np.int64)
    begins = offsets[:-1].copy()
    for own, values in parts:
        lengths = np.diff(own)
        merged[np.repeat(begins - own[:-1], lengths) + np.arange(len(values))] = values
        begins += lengths
    return offsets, merged


def _offsets(ids: Ids) -> Int64s:
    if ids.offsets is None:
        return np.arange(len(ids) + 1, dtype=np.int64) * ids.values.shape[1]
    return np.append(ids.offsets.numpy().astype(np.int64), len(ids.values))
