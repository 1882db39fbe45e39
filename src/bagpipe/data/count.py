"""Counting the accesses of rows: how often today and ever, when last, and so which rows are new to a batch or a day.

A row has four 64-bit words side by side, so that an access costs one cache miss; sweeps at the end of a day visit all
rows once. Every figure is a sum over rows, so that rows can be counted in parts, one pass over the data each (I5).
"""

from __future__ import annotations

import numpy as np

from bagpipe.arrays import Int64s
from bagpipe.kernels import kernel
from bagpipe.kernels.intrinsics import FAR, prefetch

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


def count_rows(words: Int64s, column: int, rows: Int64s) -> int:
    """Add to rows[c] the number of rows with c > 0 accesses; how many have more than fit there."""
    counts = words[:, column]
    rows += np.bincount(counts[(counts > 0) & (counts < len(rows))], minlength=len(rows))
    return int(np.count_nonzero(counts >= len(rows)))


def set_levels(words: Int64s, counts: Int64s) -> None:
    """Note for each row which of these ascending counts is today's, as 1, 2, ...; 0: not used."""
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
