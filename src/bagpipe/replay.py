"""What a lookahead costs, from the ids alone: one pass over the data answers for every lookahead at once.

A row that was last used g batches ago is in the cache exactly if g is less than the lookahead, so how many rows have
which gap decides fetches and cache size: no rows are moved, no plans made. The figures are those of the oracle
with slots to spare, its growing window included. Memory is bounded by the longest lookahead (I5).
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from itertools import islice

import numpy as np
from numpy.typing import NDArray

from bagpipe.arrays import Int64s
from bagpipe.data import Dataset
from bagpipe.errors import ConfigError, DataError
from bagpipe.kernels.oracle import KEEP
from bagpipe.oracle.reader import Reader
from bagpipe.oracle.shard import make_shards
from bagpipe.oracle.tables import OracleTable
from bagpipe.policies.lookahead import RAMP
from bagpipe.types import Batch

Ids = Sequence[NDArray[np.integer]]

AHEAD = 2
"""Plans whose rows may be on their way while an earlier one trains; as the oracle has it."""
LOOKAHEADS = (1, 2, 5, 10, 20, 50, 100, 200, 300)
SAVING_MIN = 0.1
"""A lookahead twice as long is worth its memory while it saves this share of the fetches."""


@dataclass(frozen=True, slots=True)
class TableForecast:
    """What a lookahead means for one table; rows an iteration, mean."""

    table: str
    unique_rows: float
    fetched_rows: float
    hit_rate: float


@dataclass(frozen=True, slots=True)
class Forecast:
    """What a lookahead would cost; rows an iteration are means over all iterations of the replay."""

    lookahead: int
    cache_rows: int
    """Different rows in the cache or on their way at the peak: rows of a batch, rows that stay across it, and those
    fetched for the next two. A row that leaves and comes back counts once: its fetch waits for its write-back. With as
    many slots the oracle never shortens this lookahead, and from lookahead 3 on prefetching waits for none."""
    unique_rows: float
    """Rows of a batch."""
    fetched_rows: float
    """Rows of a batch that must come from the store. As many are written back."""
    steady_fetched_rows: float | None
    """The same without the iterations at the beginning that could not look back a whole window; None: all are such."""
    shared_rows: float
    """Rows of batch t that one of batches t+1 to t+lookahead-1 needs too, so that they stay in the cache. On several
    trainers, what a replicated cache keeps equal; all other rows go back to the store right after their use."""
    critical_rows: float
    """Rows of batch t that batch t+1 needs, whatever the lookahead: on several trainers their updates must reach all
    users before t+1 begins, those of other rows can travel while it trains. In one process: the next batch's share."""
    window_rows: float
    """Different rows in as many batches in a row as the lookahead: what a cache takes that loads a whole window."""
    hit_rate: float
    """Share of a batch's unique rows that are in the cache when it is planned."""
    tables: tuple[TableForecast, ...]


def forecast(
    data: Dataset,
    batch_size: int,
    lookaheads: Sequence[int] = LOOKAHEADS,
    iterations: int | None = None,
    report: Callable[[int], None] = lambda _: None,
    workers: int = 1,
) -> list[Forecast]:
    """Replay a data set in stored order, all of it or the first `iterations` batches."""
    tables = [OracleTable(table.name, table.rows, table.features) for table in data.tables]
    names = [feature for table in tables for feature in table.features]

    def read(batches: Iterator[Batch]) -> Iterator[Ids]:
        for number, batch in enumerate(batches, start=1):
            yield [batch.sparse[name].values.numpy().reshape(-1) for name in names]
            report(number)

    return replay(read(islice(data.batches(batch_size, workers=workers), iterations)), tables, lookaheads)


def replay(
    batches: Iterable[Ids], tables: Sequence[OracleTable], lookaheads: Sequence[int] = LOOKAHEADS, ahead: int = AHEAD
) -> list[Forecast]:
    """A forecast for each lookahead from the ids of batches in order, one array for each feature of each table."""
    lookaheads = sorted(set(lookaheads))
    for lookahead in lookaheads:
        if not 1 <= lookahead < KEEP:
            raise ConfigError(f"lookahead is {lookahead}: give numbers from 1 to {KEEP - 1}")
    if not lookaheads:
        raise ConfigError("there is no lookahead to replay: give at least one")
    reach = max(1, ahead, lookaheads[-1] - 1)
    reader = Reader(tables, make_shards(tables, reach, None), reach, threads=1)
    tallies = [_Tally(lookahead, len(tables), ahead) for lookahead in lookaheads]
    iteration = 0
    for ids in batches:
        window = min(iteration, reach)
        batch = reader.read(ids, iteration, window, keep=0, keep_plan=0)
        for tally in tallies:
            tally.add(batch.counts, batch.gaps[:, : window + 1])
        for shard in reader.shards:
            shard.entered(iteration)
        iteration += 1
    if not iteration:
        raise DataError("there is no batch to replay: the data is empty")
    return [tally.forecast([table.name for table in tables]) for tally in tallies]


class _Tally:
    """Sums for one lookahead."""

    def __init__(self, lookahead: int, num_tables: int, ahead: int) -> None:
        self._lookahead, self._ahead = lookahead, ahead
        self._windows = _windows(lookahead)
        self._iteration = self._cache_rows = self._critical = 0
        self._steady_iterations = self._steady_fetched = 0
        self._whole_windows = self._window_rows = 0
        self._unique, self._hits = np.zeros((2, num_tables), np.int64)
        columns = 1 << (max(lookahead, ahead) + 1).bit_length()
        self._mask = columns - 1
        self._held, self._union = np.zeros((2, columns), np.int64)

    def add(self, counts: Int64s, gaps: Int64s) -> None:
        """One more batch: its unique rows, and how long ago each was used."""
        window = next(self._windows)
        seen = gaps[:, 1 : window + 1]
        staying, need = seen.sum(axis=0), int(counts.sum())
        self._unique += counts
        self._hits += seen.sum(axis=1)
        self._critical += int(gaps[:, 1:2].sum())
        if window == self._lookahead - 1:
            self._steady_iterations += 1
            self._steady_fetched += need - int(staying.sum())
        returning = gaps[:, 1 : self._ahead + 1].sum(axis=0)
        returning[:window] = 0  # these stay
        self._hold(need, staying, returning)
        self._add_to_windows(need, gaps[:, 1 : self._lookahead].sum(axis=0))
        self._iteration += 1

    def forecast(self, names: Sequence[str]) -> Forecast:
        """The means."""
        iterations = self._iteration
        unique, hits = int(self._unique.sum()), int(self._hits.sum())
        window_rows = self._window_rows / self._whole_windows if self._whole_windows else float(self._union[0])
        return Forecast(
            lookahead=self._lookahead,
            cache_rows=self._cache_rows,
            unique_rows=unique / iterations,
            fetched_rows=(unique - hits) / iterations,
            steady_fetched_rows=self._steady_fetched / self._steady_iterations if self._steady_iterations else None,
            shared_rows=hits / iterations,  # each stay ends in one hit
            critical_rows=self._critical / iterations,
            window_rows=window_rows,
            hit_rate=hits / unique if unique else math.nan,
            tables=tuple(
                TableForecast(name, u / iterations, (u - h) / iterations, h / u if u else math.nan)
                for name, u, h in zip(names, self._unique.tolist(), self._hits.tolist(), strict=True)
            ),
        )

    def _hold(self, need: int, staying: Int64s, returning: Int64s) -> None:
        """Count the rows of the batch, those of it since their last use, and its fetches while others train.

        returning[g - 1] of those fetches are of rows that left g batches ago: until then they are counted already.
        """
        iteration, mask = self._iteration, self._mask
        self._held[iteration & mask] = need
        crossed = (iteration - np.arange(1, len(staying) + 1)) & mask
        self._held[crossed] += staying.sum() - np.cumsum(staying)
        before = (iteration - np.arange(1, len(returning) + 1)) & mask
        self._held[before] += need - staying.sum() - np.cumsum(returning)
        self._cache_rows = max(self._cache_rows, int(self._held.max()))

    def _add_to_windows(self, need: int, recent: Int64s) -> None:
        """Count the rows that are new to each of the windows that this batch is in."""
        self._union[self._iteration & self._mask] = 0
        columns = (self._iteration - np.arange(len(recent) + 1)) & self._mask
        self._union[columns] += need - np.concatenate([[0], np.cumsum(recent)])
        if len(recent) == self._lookahead - 1:
            self._whole_windows += 1
            self._window_rows += int(self._union[columns[-1]])


def _windows(lookahead: int) -> Iterator[int]:
    """How many batches without a plan the oracle holds as it reads each batch: its window grows while plans go out."""
    target, length = min(RAMP, lookahead), 0
    while True:
        while length < target:
            yield length
            length += 1
        length -= 1
        target = min(lookahead, target + RAMP)


def advised(forecasts: Sequence[Forecast], cache_rows: int | None = None) -> Forecast:
    """The lookahead to take: the longest that fits the cache and still pays; if none fits, the one that needs least."""
    fitting = [each for each in forecasts if cache_rows is None or each.cache_rows <= cache_rows]
    if not fitting:
        return min(forecasts, key=lambda each: each.cache_rows)
    chosen = fitting[0]
    for longer in fitting[1:]:
        if saving(chosen, longer) >= SAVING_MIN:
            chosen = longer
    return chosen


def saving(shorter: Forecast, longer: Forecast) -> float:
    """Share of the fetches that the longer lookahead saves with each doubling, once the window is full."""
    few, many = longer.steady_fetched_rows, shorter.steady_fetched_rows
    if few is None or many is None:
        few, many = longer.fetched_rows, shorter.fetched_rows
    if not many:
        return 0.0
    return 1.0 - float((few / many) ** (1 / math.log2(longer.lookahead / shorter.lookahead)))
