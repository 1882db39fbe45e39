"""What a data set looks like to a cache: rows in use, skew, rows a batch, and drift from day to day; exact counts.

One pass over the samples where the counts of all rows fit the memory, else one for each part of the rows (I5).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from functools import reduce
from itertools import pairwise
from operator import add
from typing import Any

import numpy as np
from numpy.typing import NDArray

from bagpipe.data.accesses import AccessCount, RowPart, Sums, Tally, direct_rows, share_of_top
from bagpipe.data.count import NUM_WORDS
from bagpipe.data.dataset import Dataset
from bagpipe.errors import CapacityError, ConfigError, DataError

BATCH_SIZES = (256, 1024, 4096, 16384, 65536)
DAYS = 7
MEMORY_BYTES = 2_000_000_000
PARTS_BITS_MAX = 10
READ_SAMPLES = 1 << 14

TOP = {"0.1%": 1, "1%": 10}
"""The shares of rows whose accesses are reported, in thousandths; at least one row."""
SHARES = {"50%": 50, "90%": 90, "99%": 99}
"""The shares of accesses for which the number of rows is reported, in hundredths."""
CURVE_POINTS = 64


@dataclass(frozen=True, slots=True)
class Day:
    """A stretch of samples."""

    name: str
    start: int
    stop: int


@dataclass(frozen=True, slots=True)
class DayStats:
    """One day of a table; shares are None where nothing was used."""

    name: str
    accesses: int
    unique_rows: int
    new_rows: int
    """Of these, never used on an earlier sample."""
    repeated_rows: float | None
    """Share of the day's rows that were used the day before too; None on the first day."""
    repeated_accesses: float | None
    """Share of the day's accesses that go to those rows."""
    top_share: dict[str, float | None]
    """Share of the day's accesses that go to its own most used 0.1 % and 1 % of rows."""
    covered: dict[str, float | None]
    """Share of the day's accesses that go to the most used 0.1 % and 1 % of the first day's rows."""


@dataclass(frozen=True, slots=True)
class TableStats:
    """One table, or all of them."""

    table: str
    rows: int | None
    """Size of the table; None: any 64-bit id."""
    accesses: int
    """Ids in the data, repetitions included."""
    ids_per_sample: float
    unique_rows: int
    """Different ids in the data."""
    top_share: dict[str, float | None]
    """Share of the accesses that go to the most used 0.1 % and 1 % of the rows in the data."""
    rows_for: dict[str, int]
    """How many of the most used rows take 50 %, 90 % and 99 % of the accesses."""
    rows_per_batch: dict[int, float | None]
    """By batch size: different rows in a batch, mean over whole batches; None: there is none."""
    days: tuple[DayStats, ...]
    curve: tuple[tuple[float, float], ...]
    """(share of rows, share of accesses) from the most used row on."""


@dataclass(frozen=True, slots=True)
class Stats:
    """A data set's figures."""

    samples: int
    days: tuple[Day, ...]
    batch_sizes: tuple[int, ...]
    passes: int
    """How often the samples were read, also where the counts turned out too large on the way."""
    whole: TableStats
    """All tables together: a row is a table and an id."""
    tables: tuple[TableStats, ...]

    def record(self) -> dict[str, Any]:
        """As plain values, ready for JSON; without the curves."""
        return {
            "samples": self.samples,
            "days": [asdict(day) for day in self.days],
            "batch_sizes": list(self.batch_sizes),
            "passes": self.passes,
            "all": _record(self.whole),
            "tables": [_record(table) for table in self.tables],
        }


def _record(table: TableStats) -> dict[str, Any]:
    values = asdict(table)
    del values["curve"]
    values["rows_per_batch"] = {str(size): rows for size, rows in table.rows_per_batch.items()}
    return values


def days_of(dataset: Dataset, num_days: int | None = None, num_samples: int | None = None) -> tuple[Day, ...]:
    """The days of the first samples: those that the manifest names if there are several, else equal stretches.

    A number of days asks for so many equal stretches in any case.
    """
    end = dataset.num_samples if num_samples is None else min(num_samples, dataset.num_samples)
    named = getattr(getattr(dataset, "manifest", None), "days", None) or ()
    days = [Day(str(day.name), int(day.start), min(int(day.stop), end)) for day in named]
    days = [day for day in days if day.start < day.stop]
    if num_days is None and len(days) > 1:
        return tuple(days)
    count = DAYS if num_days is None else num_days
    if count < 1:
        raise ConfigError(f"days is {count}: give at least 1")
    bounds = pairwise(end * n // count for n in range(count + 1))
    return tuple(Day(f"{n}", start, stop) for n, (start, stop) in enumerate(bounds, start=1) if start < stop)


def measure(
    dataset: Dataset,
    *,
    batch_sizes: Sequence[int] = BATCH_SIZES,
    days: Sequence[Day] | None = None,
    memory_bytes: int = MEMORY_BYTES,
    report: Callable[[int, int], None] = lambda _done, _total: None,
    workers: int = 1,
) -> Stats:
    """Count all accesses of a data set, in stored order.

    `report` is told the samples read so far and those to read, which grow when rows do not fit `memory_bytes` and the
    data is read once more for the others.
    """
    sizes = sorted(set(batch_sizes))
    if not sizes or sizes[0] < 1:
        raise ConfigError(f"batch sizes are {list(batch_sizes)}: give at least one, each 1 or more")
    if not dataset.num_samples or not dataset.tables:
        raise DataError("the data has no samples or no tables: there is nothing to count")
    days = days_of(dataset) if days is None else _checked(days, dataset.num_samples)
    counting = _Counting(dataset, sizes, days, memory_bytes, report, workers)
    tallies = counting.run()
    figures = [
        _figures(table.name, table.rows, tally, dataset.num_samples, sizes, days)
        for table, tally in zip(dataset.tables, tallies, strict=True)
    ]
    rows = [table.rows for table in dataset.tables]
    all_rows = None if None in rows else sum(row for row in rows if row is not None)
    whole = _figures("all", all_rows, reduce(add, tallies), dataset.num_samples, sizes, days)
    return Stats(dataset.num_samples, tuple(days), tuple(sizes), counting.passes, whole, tuple(figures))


def _checked(days: Sequence[Day], num_samples: int) -> tuple[Day, ...]:
    place = 0
    for day in days:
        if not place <= day.start < day.stop <= num_samples:
            raise ConfigError(
                f"day {day.name!r} is samples {day.start} to {day.stop}, after sample {place} and of {num_samples} in "
                "all: give days in order that do not overlap"
            )
        place = day.stop
    return tuple(days)


class _TooLarge(Exception):
    """The rows of a pass do not fit the memory."""


class _Counting:
    """Passes over the data, each for a part of the rows that fits the memory."""

    def __init__(
        self,
        dataset: Dataset,
        sizes: Sequence[int],
        days: Sequence[Day],
        memory_bytes: int,
        report: Callable[[int, int], None],
        workers: int,
    ) -> None:
        self._dataset, self._sizes, self._memory_bytes = dataset, sizes, memory_bytes
        self._report, self._workers = report, workers
        self._stretches = _stretches(days, dataset.num_samples)
        self._left = [RowPart()]
        self._read = 0
        self.passes = 0

    def run(self) -> list[Tally]:
        """A tally for each table."""
        done: list[list[Tally]] = []
        while self._left:
            part = self._left.pop()
            before = self._read
            try:
                done.append(self._pass(part))
            except _TooLarge:
                if part.bits == PARTS_BITS_MAX:
                    raise CapacityError(
                        f"{self._memory_bytes:,} bytes of memory are too little to count the rows in "
                        f"{1 << PARTS_BITS_MAX:,} passes: give more"
                    ) from None
                self._read = before
                self._left += part.halves()
            self.passes += 1
        return [reduce(add, parts) for parts in zip(*done, strict=True)]

    def _pass(self, part: RowPart) -> list[Tally]:
        tables, num_samples = self._dataset.tables, self._dataset.num_samples
        if 8 * NUM_WORDS * sum(direct_rows(table, num_samples, part) or 0 for table in tables) > self._memory_bytes:
            raise _TooLarge
        counts = [AccessCount(table, num_samples, self._sizes, part) for table in tables]
        for start, stop, named in self._stretches:
            self._count(counts, start, stop)
            for count in counts:
                count.end_day(named)
        return [count.finish() for count in counts]

    def _count(self, counts: Sequence[AccessCount], start: int, stop: int) -> None:
        batches = self._dataset.part(start, stop).batches(READ_SAMPLES, workers=self._workers)
        try:
            for batch in batches:
                for count in counts:
                    count.add(start, [batch.sparse[feature] for feature in count.table.features])
                start += len(batch)
                self._read += len(batch)
                self._report(self._read, self._read + self._to_read(stop=start))
                if sum(count.nbytes for count in counts) > self._memory_bytes:
                    raise _TooLarge
        finally:
            close = getattr(batches, "close", None)
            if close is not None:
                close()

    def _to_read(self, stop: int) -> int:
        return self._dataset.num_samples * (1 + len(self._left)) - stop


def _stretches(days: Sequence[Day], num_samples: int) -> list[tuple[int, int, bool]]:
    """(start, stop, whether it is a day) of all samples in order: days need not touch."""
    stretches, place = [], 0
    for day in days:
        if place < day.start:
            stretches.append((place, day.start, False))
        stretches.append((day.start, day.stop, True))
        place = day.stop
    if place < num_samples:
        stretches.append((place, num_samples, False))
    return stretches


def _figures(
    name: str, rows: int | None, tally: Tally, samples: int, sizes: Sequence[int], days: Sequence[Day]
) -> TableStats:
    popularity = tally.popularity
    accesses = Sums(popularity.counts, popularity.counts * popularity.sums)
    total, unique = accesses.total(), popularity.total()
    return TableStats(
        table=name,
        rows=rows,
        accesses=total,
        ids_per_sample=total / samples,
        unique_rows=unique,
        top_share={top: share_of_top(popularity, _top_rows(unique, part), accesses) for top, part in TOP.items()},
        rows_for={share: _rows_for(popularity, accesses, part) for share, part in SHARES.items()},
        rows_per_batch={
            size: batch_rows / (samples // size) if samples >= size else None
            for size, batch_rows in zip(sizes, tally.batch_rows.tolist(), strict=True)
        },
        days=tuple(_day(day.name, n, tally) for n, day in enumerate(days)),
        curve=_curve(popularity, accesses),
    )


def _day(name: str, number: int, tally: Tally) -> DayStats:
    first, day = tally.days[0], tally.days[number]
    own = Sums(day.popularity.counts, day.popularity.counts * day.popularity.sums)
    return DayStats(
        name=name,
        accesses=day.accesses,
        unique_rows=day.rows,
        new_rows=day.new_rows,
        repeated_rows=day.repeated_rows / day.rows if number and day.rows else None,
        repeated_accesses=day.repeated_accesses / day.accesses if number and day.accesses else None,
        top_share={top: share_of_top(day.popularity, _top_rows(day.rows, part), own) for top, part in TOP.items()},
        covered={
            top: share_of_top(first.popularity, _top_rows(first.rows, part), day.by_first) for top, part in TOP.items()
        },
    )


def _top_rows(rows: int, thousandths: int) -> int:
    return -(-rows * thousandths // 1000)


def _rows_for(popularity: Sums, accesses: Sums, hundredths: int) -> int:
    """The least number of rows whose accesses make up this share."""
    if not len(popularity.counts):
        return 0
    wanted = -(-accesses.total() * hundredths // 100)
    counts, rows, sums = popularity.counts[::-1], popularity.sums[::-1], accesses.sums[::-1]
    reached = np.cumsum(sums)
    level = int(np.searchsorted(reached, wanted))
    short = wanted - int(reached[level] - sums[level])
    return int(rows[:level].sum()) + -(-short // int(counts[level]))


def _curve(popularity: Sums, accesses: Sums) -> tuple[tuple[float, float], ...]:
    """Points of the cumulative share, evenly on a logarithmic axis of rows; exact at each."""
    if not len(popularity.counts):
        return ()
    rows: NDArray[np.int64] = np.cumsum(popularity.sums[::-1])
    reached: NDArray[np.int64] = np.cumsum(accesses.sums[::-1])
    wanted = np.unique(np.round(np.geomspace(1, rows[-1], CURVE_POINTS)).astype(np.int64))
    level = np.searchsorted(rows, wanted)
    short = rows[level] - wanted
    shares = (reached[level] - short * popularity.counts[::-1][level]) / reached[-1]
    return tuple(zip((wanted / rows[-1]).tolist(), shares.tolist(), strict=True))
