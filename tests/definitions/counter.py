"""What the kernels of `bagpipe.data.counter` compute, in plain Python and NumPy: tests compare them with it."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from bagpipe.data.counter import FEISTEL_ROUNDS, LANE, ONE, UInts, below_reference
from bagpipe.kernels.random import GOLDEN, mix_numpy


def define_shuffle(words: NDArray[np.int64], key: np.uint64) -> None:
    """`shuffle` in NumPy."""
    places = np.arange(len(words), dtype=np.uint64)
    others = below_reference(mix_numpy(key + places * GOLDEN), places + ONE).tolist()
    for last in range(len(words) - 1, 0, -1):
        words[last], words[others[last]] = words[others[last]], words[last]


def define_permute(ranks: UInts, rows: np.uint64, side: np.uint64, key: np.uint64) -> UInts:
    """`permute` for arrays, in NumPy."""
    lefts = np.uint64(-(-int(rows) // int(side)))
    done, pending = ranks.copy(), np.arange(len(ranks))
    while len(pending):
        left, right = np.divmod(done[pending], side)
        turn = np.array([key])
        for _ in range(FEISTEL_ROUNDS):
            left = (left + below_reference(mix_numpy(turn + right * GOLDEN), lefts)) % lefts
            turn += LANE
            right = (right + below_reference(mix_numpy(turn + left * GOLDEN), side)) % side
            turn += LANE
        done[pending] = left * side + right
        pending = pending[done[pending] >= rows]
    return done
