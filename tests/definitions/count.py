"""What the kernels of `bagpipe.data.count` compute, in plain Python and NumPy: tests compare them with it."""

from __future__ import annotations

import numpy as np

from bagpipe.arrays import Int64s
from bagpipe.data.count import LAST, LEVEL, TODAY, TOTAL


def define_count_accesses(
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


def define_close_day(words: Int64s, by_level: Int64s, sums: Int64s, is_day: bool) -> None:
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
