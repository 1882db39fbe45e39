"""A data set in batches, as something that can be iterated over, stopped at any batch and continued exactly there.

The order is a pure function of data, batch size and seed, so a position is a number; a saved one also says what it
belongs to, and is refused elsewhere (I8).
"""

from __future__ import annotations

from collections.abc import Generator, Iterator, Mapping
from itertools import islice
from typing import TYPE_CHECKING, Any

import numpy as np

from bagpipe.data.dataset import Dataset
from bagpipe.data.described import describe, fingerprint
from bagpipe.data.order import BatchOrder
from bagpipe.data.processors.pool import DEADLINE_S, read
from bagpipe.errors import ConfigError
from bagpipe.loaders import Rereadable

if TYPE_CHECKING:
    from bagpipe.types import Batch


class Loader(Rereadable):
    """Batches of a data set, for `bagpipe.prepare` or a loop of your own."""

    def __init__(
        self,
        dataset: Dataset,
        batch_size: int,
        *,
        epochs: int = 1,
        seed: int | None = None,
        start: int = 0,
        stop: int | None = None,
        workers: int = 1,
        processes: int = 0,
        deadline_s: float = DEADLINE_S,
    ) -> None:
        """Read a data set `epochs` times.

        Args:
            dataset: Shards, generated data, or a part of them; with processes=0 any data set.
            batch_size: Samples of a batch; the last one of an epoch may have fewer.
            epochs: How often to go through the data.
            seed: Another order each epoch, fixed by this number; None: stored order.
            start: The first batch to give, counted over all epochs.
            stop: The batch before which to end, counted alike; None: the end of the last epoch.
            workers: Threads that read, with processes=0.
            processes: Data processors that read instead; 0: threads of this process. Changes nothing but speed.
            deadline_s: How long a data processor may take for a batch before another one takes its place.
        """
        if not isinstance(dataset, Dataset):
            raise ConfigError(
                f"the data set is a {type(dataset).__name__}: give bagpipe.data.Shards(path), or of a frame "
                "bagpipe.data.from_frame(frame, ...)"
            )
        for name, value, least in (
            ("epochs", epochs, 0),
            ("start", start, 0),
            ("workers", workers, 1),
            ("processes", processes, 0),
            ("stop", 0 if stop is None else stop, 0),
        ):
            if value < least:
                raise ConfigError(f"{name} is {value}: give at least {least}")
        if not deadline_s > 0:
            raise ConfigError(f"deadline_s is {deadline_s}: give a number of seconds above 0")
        if processes:
            describe(dataset)  # refused now rather than at the first batch
        self.dataset, self.batch_size, self.epochs, self.seed = dataset, batch_size, epochs, seed
        self.workers, self.processes, self.deadline_s = workers, processes, deadline_s
        self._order = BatchOrder(dataset.num_samples, batch_size, seed)
        self._start, self._stop = start, stop
        self._next = start

    def __len__(self) -> int:
        """Batches of all epochs, up to where it stops."""
        batches = self.epochs * self._order.epoch_batches
        return batches if self._stop is None else min(batches, self._stop)

    def __iter__(self) -> Generator[Batch, None, None]:
        """The batches from the position on; iterating again gives the same ones again."""
        self._next = self._start
        return self._count(self._read())

    def peek(self) -> Batch | None:
        """A batch as they will come, without starting anything; None if the data set is empty."""
        if not len(self):
            return None
        reading = self.dataset.batches(
            self.batch_size, epochs=self.epochs, seed=self.seed, start=min(self._start, len(self) - 1)
        )
        return next(reading)

    def spread(self, count: int) -> Iterator[tuple[int, Batch]]:
        """So many of its batches with their numbers, in stored order and evenly spread over the data."""
        data, size = self.dataset, self.batch_size
        num_batches = -(-data.num_samples // size)
        if not 0 < count < num_batches:
            yield from enumerate(data.batches(size, workers=self.workers))
            return
        for number in np.linspace(0, num_batches - 1, count).astype(np.int64).tolist():
            yield number, next(data.part(number * size, min((number + 1) * size, data.num_samples)).batches(size))

    def state_dict(self, given: int | None = None) -> dict[str, Any]:
        """The position after the batches given so far, or after this many from where the iteration began."""
        position = self._next if given is None else self._start + given
        epoch, batch = divmod(position, self._order.epoch_batches or 1)
        return {
            "iteration": position,
            "epoch": epoch,
            "batch": batch,
            "batch_size": self.batch_size,
            "seed": self.seed,
            "data": fingerprint(self.dataset),
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Begin at a saved position, at the next iteration; ConfigError if it is one of other data or another order."""
        here = self.state_dict()
        for key, what in (("data", "data of fingerprint"), ("batch_size", "batch size"), ("seed", "seed")):
            if key not in state or state[key] != here[key]:
                raise ConfigError(
                    f"the saved position is one of {what} {state.get(key)!r}, this loader has {here[key]!r}: "
                    "build the loader that was saved, or begin anew"
                )
        position = state.get("iteration")
        if not isinstance(position, int) or position < 0:
            raise ConfigError(f"the saved position has iteration {position!r}: it is damaged")
        self._start = self._next = position

    def _read(self) -> Iterator[Batch]:
        if not self.processes:
            return self.dataset.batches(
                self.batch_size, epochs=self.epochs, seed=self.seed, start=self._start, workers=self.workers
            )
        return read(
            self.dataset,
            self.batch_size,
            epochs=self.epochs,
            seed=self.seed,
            start=self._start,
            processes=self.processes,
            deadline_s=self.deadline_s,
        )

    def _count(self, reading: Iterator[Batch]) -> Generator[Batch, None, None]:
        try:
            for batch in islice(reading, max(0, len(self) - self._start)):
                self._next = batch.number + 1
                yield batch
        finally:
            close = getattr(reading, "close", None)
            if close is not None:
                close()
