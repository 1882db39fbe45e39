"""What every source of training data offers: tables, and batches in an order that depends on no thread (I1).

A source only has to say which columns belong to a list of samples; order, batches, threads and parts are made here.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterator
from functools import partial
from itertools import accumulate, pairwise
from typing import TYPE_CHECKING, Protocol, runtime_checkable

import numpy as np
from numpy.typing import NDArray

from bagpipe.data.order import BLOCK_SAMPLES, WINDOW_BLOCKS, BatchOrder
from bagpipe.data.ordered import ordered_map
from bagpipe.data.samples import Samples
from bagpipe.errors import ConfigError
from bagpipe.table import Table

if TYPE_CHECKING:
    from bagpipe.types import Batch

Ints = NDArray[np.int64]

GROUP_SAMPLES = BLOCK_SAMPLES * WINDOW_BLOCKS
"""Batches are read several at once, up to this many samples: a window of a shuffle is then read once, not for each."""
GROUP_BATCHES = 64
"""But no more of them, so that the first batch does not wait for thousands."""


@runtime_checkable
class Dataset(Protocol):
    """Samples that can be read in batches, any number of times."""

    @property
    def tables(self) -> tuple[Table, ...]:
        """The tables whose rows the ids are."""
        ...

    @property
    def num_dense(self) -> int:
        """Numeric features of a sample."""
        ...

    @property
    def num_samples(self) -> int:
        """Samples of an epoch."""
        ...

    def batches(
        self, batch_size: int, *, epochs: int = 1, seed: int | None = None, start: int = 0, workers: int = 1
    ) -> Iterator[Batch]:
        """Read the data in batches, ahead of the consumer on `workers` threads.

        Batches are numbered over all epochs; the last one of an epoch may be short. Without a seed samples come in
        stored order, with one in another order each epoch. `start` is the first batch to give: it and all that follow
        are those of a run from the beginning. The number of workers changes nothing but speed.
        """
        ...

    def part(self, start: int, stop: int) -> Dataset:
        """Samples start to stop as a data set of their own."""
        ...


class IndexedDataset(ABC):
    """A data set that can read any list of samples."""

    tables: tuple[Table, ...]
    num_dense: int
    num_samples: int

    @abstractmethod
    def gather(self, samples: Ints) -> Samples:
        """The columns of these samples, in this order, in memory of their own; called from several threads at once."""

    def batches(
        self, batch_size: int, *, epochs: int = 1, seed: int | None = None, start: int = 0, workers: int = 1
    ) -> Iterator[Batch]:
        """Read the data in batches; see `Dataset.batches`."""
        for name, value, least in (("epochs", epochs, 0), ("start", start, 0), ("workers", workers, 1)):
            if value < least:
                raise ConfigError(f"{name} is {value}: give at least {least}")
        order = BatchOrder(self.num_samples, batch_size, seed)
        return self._read(order, range(start, epochs * order.epoch_batches), workers)

    def part(self, start: int, stop: int) -> Part:
        """Samples start to stop as a data set of their own."""
        return Part(self, start, stop)

    def read_group(self, order: BatchOrder, numbers: range) -> Samples:
        """The samples of some batches, one batch after the other."""
        return self.gather(np.concatenate([order.samples(number) for number in numbers]))

    def _read(self, order: BatchOrder, numbers: range, workers: int) -> Iterator[Batch]:
        def read(group: range) -> list[Batch]:
            return cut(self.read_group(order, group), order, group)

        step = group_size(order.batch_size)
        groups = (numbers[place : place + step] for place in range(0, len(numbers), step))
        reading = ordered_map(read, groups, workers, "reader")
        try:
            for batches in reading:
                yield from batches
        finally:
            # Not left to garbage collection: threads must be gone when the consumer's close() returns.
            reading.close()


def group_size(batch_size: int) -> int:
    """How many batches are read at once."""
    return min(GROUP_BATCHES, max(1, GROUP_SAMPLES // batch_size))


def group_samples(order: BatchOrder, numbers: range) -> int:
    """How many samples some batches have."""
    return sum(map(partial(_batch_samples, order), numbers))


def cut(samples: Samples, order: BatchOrder, numbers: range) -> list[Batch]:
    """The batches that these samples are, one after the other."""
    return [samples.batch(start, stop, number) for number, (start, stop) in batch_spans(order, numbers)]


def batch_spans(order: BatchOrder, numbers: range) -> Iterator[tuple[int, tuple[int, int]]]:
    """Each of some batches that lie one after the other, with its first sample and the first of the next."""
    stops = list(accumulate(map(partial(_batch_samples, order), numbers)))
    return zip(numbers, pairwise([0, *stops]), strict=True)


def _batch_samples(order: BatchOrder, number: int) -> int:
    return min(order.batch_size, order.num_samples - number % order.epoch_batches * order.batch_size)


class Part(IndexedDataset):
    """A view on a range of samples of another data set."""

    def __init__(self, whole: IndexedDataset, start: int, stop: int) -> None:
        if not 0 <= start <= stop <= whole.num_samples:
            raise ConfigError(
                f"part {start} to {stop} of {whole.num_samples} samples: give 0 <= start <= stop <= samples"
            )
        self.tables, self.num_dense, self.num_samples = whole.tables, whole.num_dense, stop - start
        self.whole, self.start = whole, start

    def gather(self, samples: Ints) -> Samples:
        """The columns of these samples of the part."""
        return self.whole.gather(samples + self.start)
