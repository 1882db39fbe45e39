"""The order in which samples are read: a pure function of their number and a seed, so a batch needs no past.

A shuffled epoch is cut in windows of 32 blocks of 1,024 neighbouring samples; which blocks meet in a window is random,
and so is the order inside it. So a shuffle reads files in runs, and what it reads together fits a processor's cache.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from functools import lru_cache

import numpy as np
from numpy.typing import NDArray

from bagpipe.data.counter import derive_key, shuffle
from bagpipe.errors import ConfigError

Ints = NDArray[np.int64]

BLOCK_SAMPLES = 1024
WINDOW_BLOCKS = 32


@dataclass(frozen=True)
class BatchOrder:
    """Which samples each batch has, over all epochs; the last batch of an epoch may be short."""

    num_samples: int
    batch_size: int
    seed: int | None = None
    """None: stored order."""
    _shuffles: dict[int, EpochShuffle] = field(default_factory=dict, repr=False, compare=False)

    def __post_init__(self) -> None:
        if self.batch_size < 1:
            raise ConfigError(f"batch_size is {self.batch_size}: give at least 1")

    @property
    def epoch_batches(self) -> int:
        """Batches of one epoch."""
        return -(-self.num_samples // self.batch_size)

    def samples(self, number: int) -> Ints:
        """The samples of a batch, in order."""
        epoch, place = divmod(number, self.epoch_batches)
        start = place * self.batch_size
        stop = min(start + self.batch_size, self.num_samples)
        if self.seed is None:
            return np.arange(start, stop)
        return self._shuffle(self.seed, epoch).samples(start, stop)

    def _shuffle(self, seed: int, epoch: int) -> EpochShuffle:
        # Threads may both make it: they make the same. At most two epochs are in flight.
        found = self._shuffles.get(epoch)
        if found is None:
            found = EpochShuffle(self.num_samples, seed, epoch)
            self._shuffles[epoch] = found
            self._shuffles.pop(epoch - 2, None)
        return found


class EpochShuffle:
    """The order of the samples in one epoch."""

    def __init__(self, num_samples: int, seed: int, epoch: int) -> None:
        self._key = ("shuffle", seed, epoch)
        blocks = np.arange(-(-num_samples // BLOCK_SAMPLES))
        shuffle(blocks, derive_key(*self._key))
        self._firsts = blocks * BLOCK_SAMPLES
        self._lengths = np.minimum(num_samples - self._firsts, BLOCK_SAMPLES)
        ends = np.cumsum(self._lengths)
        self._starts = np.append((ends - self._lengths)[::WINDOW_BLOCKS], num_samples)
        self._window = lru_cache(maxsize=8)(self._make_window)

    def samples(self, start: int, stop: int) -> Ints:
        """The samples at places start to stop of the epoch."""
        first = int(np.searchsorted(self._starts, start, side="right")) - 1
        parts = []
        while start < stop:
            place, end = int(self._starts[first]), min(stop, int(self._starts[first + 1]))
            parts.append(self._window(first)[start - place : end - place])
            start, first = end, first + 1
        return np.concatenate(parts)

    def _make_window(self, window: int) -> Ints:
        blocks = slice(window * WINDOW_BLOCKS, (window + 1) * WINDOW_BLOCKS)
        samples = np.concatenate(
            [np.arange(first, first + n) for first, n in zip(self._firsts[blocks], self._lengths[blocks], strict=True)]
        )
        shuffle(samples, derive_key(*self._key, window))
        return samples
