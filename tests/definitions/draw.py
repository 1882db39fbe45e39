"""What the kernels of `bagpipe.data.draw` compute, in plain Python and NumPy: tests compare them with it."""

from __future__ import annotations

import numpy as np

from bagpipe.arrays import Floats
from bagpipe.data.counter import LANE, LOW, ONE, R32, below_reference
from bagpipe.data.draw import (
    BELL_DEVIATION,
    BELL_MEAN,
    BURST,
    HALF_WORD,
    R16,
    R48,
    WEIGHT_STEPS,
    Ints,
    Law,
    UInts,
    _flat,
)
from bagpipe.kernels.random import GOLDEN, mix_numpy
from definitions.counter import define_permute


def define_draw_ids(counters: Ints, offsets: Ints, law: Law, ids: Ints) -> None:
    """`draw_ids` in NumPy."""
    counter, places = _flat(counters, offsets)
    streams = law.key + places * LANE
    words = mix_numpy((streams ^ BURST) + counter * GOLDEN)
    back = ONE + (((words & LOW) * law.burst_samples) >> R32)
    repeats = ((words >> R32) < law.burst) & (back <= counter)
    counter[repeats] -= back[repeats]
    words = mix_numpy(streams + counter * GOLDEN)
    buckets = below_reference(words, np.uint64(len(law.keep))).astype(np.int64)
    buckets = np.where((words & LOW) >= law.keep[buckets], law.other[buckets], buckets)
    widths = law.first[buckets + 1] - law.first[buckets]
    ranks = law.first[buckets] + below_reference(mix_numpy(words), widths)
    if law.drift:
        ranks = define_drifted(ranks, counter.astype(np.int64) // law.day_samples, law)
    if law.rows:
        ids[:] = define_permute(ranks, law.rows, law.side, law.table_key).astype(np.int64)
    else:
        ids[:] = mix_numpy(law.table_key + ranks * GOLDEN).astype(np.int64)


def define_draw_weights(counters: Ints, offsets: Ints, key: np.uint64, weights: Floats) -> None:
    """`draw_weights` in NumPy."""
    counter, places = _flat(counters, offsets)
    words = mix_numpy(key + places * LANE + counter * GOLDEN)
    weights[:] = ((words >> np.uint64(55)) + ONE).astype(np.float32) / np.float32(WEIGHT_STEPS)


def define_draw_dense(counters: Ints, keys: UInts, factors: Ints, dense: Floats, score: Ints) -> None:
    """`draw_dense` in NumPy."""
    numbers = define_bell(mix_numpy(keys + (counters.astype(np.uint64) * GOLDEN)[:, None]))
    dense[:] = numbers.astype(np.float32) * np.float32(1 / BELL_DEVIATION)
    score += numbers @ factors


def define_add_effects(ids: Ints, offsets: Ints, weights: Floats, key: np.uint64, factors: Ints, score: Ints) -> None:
    """`add_effects` in NumPy."""
    lengths = np.diff(offsets)
    steps = (weights * np.float32(WEIGHT_STEPS)).astype(np.int64) if len(weights) else WEIGHT_STEPS
    totals = np.zeros(len(score), dtype=np.int64)
    np.add.at(
        totals,
        np.repeat(np.arange(len(score)), lengths),
        steps * define_bell(mix_numpy(key + ids.astype(np.uint64) * GOLDEN)),
    )
    score += (totals * factors[lengths]) >> 24


def define_bell(words: UInts) -> Ints:
    """`bell` for arrays, in NumPy."""
    parts = (words & HALF_WORD) + ((words >> R16) & HALF_WORD) + ((words >> R32) & HALF_WORD) + (words >> R48)
    numbers: Ints = parts.astype(np.int64) - BELL_MEAN
    return numbers


def define_drifted(ranks: UInts, days: Ints, law: Law) -> UInts:
    """`drifted` for arrays, in NumPy."""
    size = law.first[-1]
    for day, pivot in enumerate(law.pivots, start=1):
        partners = ((pivot >> R32) % size + size - ranks) % size
        pairs = np.minimum(ranks, partners)
        moves = (days >= day) & ((mix_numpy(pivot + pairs * GOLDEN) >> R32) < law.drift)
        ranks = np.where(moves, partners, ranks)
    return ranks
