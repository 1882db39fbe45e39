"""Counting the accesses of rows: how often today and ever, when last, and so which rows are new to a batch or a day.

A row has four 64-bit words side by side, so that an access costs one cache miss; sweeps at the end of a day visit all
rows once. Every figure is a sum over rows, so that rows can be counted in parts, one pass over the data each (I5).
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from bagpipe.kernels import kernel
from bagpipe.kernels.prefetch import FAR, prefetch

Int64s = NDArray[np.int64]

TODAY, LAST, TOTAL, LEVEL = range(4)
"""The words of a row: accesses since the day began; 1 + the last sample that used it (0: none yet); accesses of the
days before; and twice its level of popularity on the first day, odd if it was used the day before."""
NUM_WORDS = 4


@kernel
def count_accesses(
    positions: Int64s, offsets: Int64s, first: int, words: Int64s, sizes: Int64s, stops: Int64s, unique: Int64s
) -> None:
    """Count the accesses of samples first, first + 1, ...; about 3 ns each while the rows are in a processor's cache.

    Sample s has positions[offsets[s]:offsets[s + 1]]; negative ones are not counted. Batches of sizes[j] samples begin
    at sample 0, up to sample stops[j]; unique[j] grows by the rows that are new to one of them.
    """
    starts = np.empty_like(sizes)
    boundary, latest = first, np.int64(-1)
    num_ids = positions.shape[0]
    for s in range(offsets.shape[0] - 1):
        sample = first + s
        if sample >= boundary:
            boundary, latest = np.iinfo(np.int64).max, np.int64(-1)
            for j in range(sizes.shape[0]):
                start = sample - sample % sizes[j]
                boundary = min(boundary, start + sizes[j])
                starts[j] = start if sample < stops[j] else -1
                latest = max(latest, starts[j])
        for i in range(offsets[s], offsets[s + 1]):
            prefetch(words, max(0, positions[min(i + FAR, num_ids - 1)]))
            position = positions[i]
            if position < 0:
                continue
            last = words[position, LAST]
            if last <= latest:
                for j in range(sizes.shape[0]):
                    if last <= starts[j]:
                        unique[j] += 1
            words[position, TODAY] += 1
            words[position, LAST] = sample + 1


def count_accesses_by_numpy(
    positions: Int64s, offsets: Int64s, first: int, words: Int64s, sizes: Int64s, stops: Int64s, unique: Int64s
) -> None:
    """Twin of `count_accesses`."""
    samples = first + np.repeat(np.arange(len(offsets) - 1), np.diff(offsets))
    positions, samples = positions[positions >= 0], samples[positions >= 0]
    last = words[positions, LAST]
    order = np.argsort(positions, kind="stable")
    again = np.flatnonzero(np.diff(positions[order]) == 0)
    last[order[again + 1]] = samples[order[again]] + 1
    for j, (size, stop) in enumerate(zip(sizes, stops, strict=True)):
        unique[j] += np.count_nonzero((last <= samples - samples % size) & (samples < stop))
    np.add.at(words[:, TODAY], positions, 1)
    np.maximum.at(words[:, LAST], positions, samples + 1)


@kernel
def count_rows(words: Int64s, column: int, rows: Int64s) -> int:
    """Add to rows[c] the number of rows with c > 0 accesses; how many have more than fit there."""
    num_beyond = 0
    for i in range(words.shape[0]):
        count = words[i, column]
        if count >= rows.shape[0]:
            num_beyond += 1
        elif count > 0:
            rows[count] += 1
    return num_beyond


def count_rows_by_numpy(words: Int64s, column: int, rows: Int64s) -> int:
    """Twin of `count_rows`."""
    counts = words[:, column]
    fitting = counts[(counts > 0) & (counts < len(rows))]
    rows += np.bincount(fitting, minlength=len(rows))
    return int((counts >= len(rows)).sum())


@kernel
def set_levels(words: Int64s, counts: Int64s) -> None:
    """Note for each row which of these ascending counts is today's, as 1, 2, ...; 0: not used."""
    for i in range(words.shape[0]):
        if words[i, TODAY] > 0:
            words[i, LEVEL] = 2 * (np.searchsorted(counts, words[i, TODAY]) + 1)


def set_levels_by_numpy(words: Int64s, counts: Int64s) -> None:
    """Twin of `set_levels`."""
    used = words[:, TODAY] > 0
    words[used, LEVEL] = 2 * (np.searchsorted(counts, words[used, TODAY]) + 1)


@kernel
def close_day(words: Int64s, by_level: Int64s, sums: Int64s, is_day: bool) -> None:
    """Move the day's accesses to the total. by_level[l] grows by those of rows of level l.

    sums grow by: accesses, rows used, of these rows never used before, rows used the day before too, accesses of those.
    Samples that are no day leave the marks of the day before.
    """
    for i in range(words.shape[0]):
        count, level = words[i, TODAY], words[i, LEVEL]
        if is_day:
            words[i, LEVEL] = level & ~1 | (count > 0)
        if count == 0:
            continue
        sums[0] += count
        sums[1] += 1
        if words[i, TOTAL] == 0:
            sums[2] += 1
        if level & 1:
            sums[3] += 1
            sums[4] += count
        by_level[level >> 1] += count
        words[i, TODAY] = 0
        words[i, TOTAL] += count


def close_day_by_numpy(words: Int64s, by_level: Int64s, sums: Int64s, is_day: bool) -> None:
    """Twin of `close_day`."""
    today, levels = words[:, TODAY].copy(), words[:, LEVEL].copy()
    used, again = today > 0, (today > 0) & (levels & 1 == 1)
    new = used & (words[:, TOTAL] == 0)
    sums += [today.sum(), used.sum(), new.sum(), again.sum(), today[again].sum()]
    np.add.at(by_level, levels[used] >> 1, today[used])
    words[:, TOTAL] += today
    words[:, TODAY] = 0
    if is_day:
        words[:, LEVEL] = levels & ~1 | used
