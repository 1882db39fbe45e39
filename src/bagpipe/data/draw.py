"""The kernels of the generator: ids, numeric features and row effects of any list of samples, and their NumPy twins.

Everything is integer arithmetic until the last conversion, so kernels, twins and machines agree on every bit.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from bagpipe.arrays import Floats
from bagpipe.data.counter import LANE, LOW, ONE, R32, below, permute
from bagpipe.kernels import kernel
from bagpipe.kernels.random import GOLDEN, mix

Ints = NDArray[np.int64]
UInts = NDArray[np.uint64]

BURST = np.uint64(0x5851F42D4C957F2D)
"""What sets the stream of bursts apart from that of ids."""
ZERO, HALF_WORD, R16, R48 = (np.uint64(n) for n in (0, 0xFFFF, 16, 48))
BELL_MEAN = 2 * 0xFFFF
BELL_DEVIATION = 65536 / 3**0.5
"""Standard deviation of `bell`."""
WEIGHT_STEPS = 256
"""Weights are multiples of 1/256, so they are exact as floats and as integers."""


class Law(NamedTuple):
    """What the ids of a feature depend on besides the sample."""

    key: np.uint64
    keep: UInts
    other: Ints
    first: UInts
    table_key: np.uint64
    rows: np.uint64
    """0: the table has no size, ranks become 64-bit ids."""
    side: np.uint64
    pivots: UInts
    """One word a day, from day 1; each exchanges the popularity of pairs of rows."""
    drift: np.uint64
    """Share of the ranks that move each day, in units of 2^-32."""
    day_samples: np.int64
    burst: np.uint64
    """Probability that an id repeats an earlier one, in units of 2^-32."""
    burst_samples: np.uint64


@kernel
def bell(word: np.uint64) -> np.int64:
    """Nearly normal with mean 0: the sum of the word's four 16-bit parts."""
    parts = (word & HALF_WORD) + ((word >> R16) & HALF_WORD) + ((word >> R32) & HALF_WORD) + (word >> R48)
    return np.int64(parts) - np.int64(BELL_MEAN)


@kernel
def drifted(rank: np.uint64, day: np.int64, law: Law) -> np.uint64:
    """The rank whose row this rank has on a day: each day swaps random pairs of ranks."""
    ranks = law.first[-1]
    for pivot in law.pivots[:day]:
        partner = (pivot >> R32) % ranks + ranks - rank
        if partner >= ranks:
            partner -= ranks
        pair = min(rank, partner)
        if (mix(pivot + pair * GOLDEN) >> R32) < law.drift:
            rank = partner
    return rank


@kernel
def draw_ids(counters: Ints, offsets: Ints, law: Law, ids: Ints) -> None:
    """Fill bag i, ids[offsets[i]:offsets[i + 1]], with the ids that belong to counters[i]; about 20 ns an id."""
    buckets = np.uint64(len(law.keep))
    for i in range(len(counters)):
        for place in range(offsets[i], offsets[i + 1]):
            stream = law.key + np.uint64(place - offsets[i]) * LANE
            counter = np.uint64(counters[i])
            if law.burst > ZERO:
                word = mix((stream ^ BURST) + counter * GOLDEN)
                back = ONE + (((word & LOW) * law.burst_samples) >> R32)
                if (word >> R32) < law.burst and back <= counter:
                    counter -= back
            word = mix(stream + counter * GOLDEN)
            bucket = np.int64(below(word, buckets))
            if (word & LOW) >= law.keep[bucket]:
                bucket = law.other[bucket]
            rank = law.first[bucket]
            width = law.first[bucket + 1] - rank
            if width > ONE:
                rank += below(mix(word), width)
            if law.drift > ZERO:
                rank = drifted(rank, np.int64(counter) // law.day_samples, law)
            if law.rows > ZERO:
                ids[place] = np.int64(permute(rank, law.rows, law.side, law.table_key))
            else:
                ids[place] = np.int64(mix(law.table_key + rank * GOLDEN))


@kernel
def draw_weights(counters: Ints, offsets: Ints, key: np.uint64, weights: Floats) -> None:
    """Fill the weights of bag i with multiples of 1/256 in (0, 2]."""
    for i in range(len(counters)):
        for place in range(offsets[i], offsets[i + 1]):
            word = mix(key + np.uint64(place - offsets[i]) * LANE + np.uint64(counters[i]) * GOLDEN)
            weights[place] = np.float32((word >> np.uint64(55)) + ONE) / np.float32(WEIGHT_STEPS)


@kernel
def draw_dense(counters: Ints, keys: UInts, factors: Ints, dense: Floats, score: Ints) -> None:
    """Fill the numeric features with nearly standard normal numbers and add factor times bell to the scores."""
    scale = np.float32(1 / BELL_DEVIATION)
    for i in range(len(counters)):
        step = np.uint64(counters[i]) * GOLDEN
        for j in range(len(keys)):
            number = bell(mix(keys[j] + step))
            dense[i, j] = np.float32(number) * scale
            score[i] += factors[j] * number


@kernel
def add_effects(ids: Ints, offsets: Ints, weights: Floats, key: np.uint64, factors: Ints, score: Ints) -> None:
    """Add to each sample's score the hidden effects of its rows: factors[n] / 2^24 times their weighted sum.

    n is the number of ids in the bag. Without weights, an empty array, each counts 1.
    """
    for i in range(len(score)):
        total = np.int64(0)
        for place in range(offsets[i], offsets[i + 1]):
            weight = np.int64(WEIGHT_STEPS)
            if len(weights) > 0:
                weight = np.int64(weights[place] * np.float32(WEIGHT_STEPS))
            total += weight * bell(mix(key + np.uint64(ids[place]) * GOLDEN))
        score[i] += (total * factors[offsets[i + 1] - offsets[i]]) >> 24


def _flat(counters: Ints, offsets: Ints) -> tuple[UInts, UInts]:
    """The counter of each id, and its place in its bag."""
    lengths = np.diff(offsets)
    places = np.arange(offsets[-1]) - np.repeat(offsets[:-1], lengths)
    return np.repeat(counters, lengths).astype(np.uint64), places.astype(np.uint64)
