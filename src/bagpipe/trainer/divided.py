"""From a loader's batches to what each of several trainers gets: its samples, and its part of each plan.

A batch is divided before the oracle reads it, so that every trainer's ids are contiguous; with several micro-batches an
iteration, a trainer's ids are those of all of them.
"""

from __future__ import annotations

from collections.abc import Callable, Generator, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from threading import Lock
from typing import Any, NamedTuple

import numpy as np

from bagpipe.oracle.fan_out import fan_out
from bagpipe.oracle.oracles import AnyOracle
from bagpipe.oracle.partition import Division, Partition
from bagpipe.oracle.plan import Plan
from bagpipe.oracle.reader import CutIds
from bagpipe.trainer.pipeline import Counters
from bagpipe.trainer.read_ahead import Held
from bagpipe.trainer.reading import LookBack
from bagpipe.trainer.source import Group, Ids, PlannedBatch, Plans, Source, planned_batches

Divide = Callable[[Any], Sequence[tuple[Any, int]]]
"""From a batch to each trainer's part of it, and its number of samples."""


class Divided(Source):
    """Reads a loader whose batches several trainers share."""

    def __init__(
        self,
        loader: Iterable[Any],
        divide: Divide,
        accumulate: int = 1,
        first_needed: Callable[[int], int] = lambda number: number,
    ) -> None:
        """`first_needed` says from which batch on `divide` must be shown all, to divide a given one alike."""
        super().__init__(loader, accumulate, LookBack(first_needed, divide))
        self._divide = divide

    def divided(self, oracle: AnyOracle, partition: Partition) -> Iterator[tuple[Division, list[Part]]]:
        """For each iteration its plan, and each trainer's samples; what went wrong with the loader comes after them."""
        self.scan(oracle)
        yield from partition.plans(oracle.plans(self._iterations_of_parts()))
        if self._error is not None:
            raise self._error

    def _iterations_of_parts(self) -> Iterator[tuple[CutIds, list[Part]]]:
        """For each iteration the ids, trainer by trainer, and what else each has."""
        micro: list[list[_Share]] = []
        for number, batch in self._numbered():
            try:
                shares = [self._extracted(number, *part) for part in self._divide(batch)]
                held = self.ahead.hold(number, *[share.batch for share in shares])
                micro.append([share._replace(held=held) for share in shares])
            except Exception as error:  # as if the loader had failed: what came before is trained
                self._error = error
                break
            if len(micro) == self._accumulate:
                yield _cut(micro)
                micro = []
        if micro:
            yield _cut(micro)

    def _extracted(self, number: int, batch: Any, samples: int) -> _Share:
        ids = self.adapter.extract(batch, self.features, number)
        if self._accumulate > 1:
            self._check(ids, number)
        return _Share(self.adapter.without(batch, self.features), list(ids.values()), samples)


class _Share(NamedTuple):
    """One trainer's part of one batch."""

    batch: Any
    """Without its ids."""
    ids: list[Ids]
    samples: int
    held: Held | None = None
    """The same for all parts of the batch."""


def _cut(micro: Sequence[Sequence[_Share]]) -> tuple[CutIds, list[Part]]:
    """The ids of one iteration's batches, trainer by trainer, and what else each trainer has."""
    parts, ids = [], []
    for of_trainer in zip(*micro, strict=True):
        lengths = [tuple(map(len, share.ids)) for share in of_trainer]
        group = Group([share.batch for share in of_trainer], lengths, [share.held for share in of_trainer])
        parts.append(Part(group, tuple(share.samples for share in of_trainer)))
        ids.append([np.concatenate(pieces) for pieces in zip(*(share.ids for share in of_trainer), strict=True)])
    joined = [np.concatenate(pieces) for pieces in zip(*ids, strict=True)]
    lengths_of = np.array([[len(piece) for piece in own] for own in ids], np.int64)
    cuts = np.zeros((len(joined), len(parts) + 1), np.int64)
    np.cumsum(lengths_of.T, axis=1, out=cuts[:, 1:])
    return CutIds(joined, cuts), parts


@dataclass(frozen=True, slots=True)
class Part:
    """The samples of one trainer in one iteration."""

    group: Group
    samples: tuple[int, ...]
    """How many, in each micro-batch."""


class SharedPlans:
    """The plans of one oracle for all trainers of this process: `of(rank)` is what each reads."""

    def __init__(self, source: Divided, oracle: AnyOracle, partition: Partition) -> None:
        self._source, self.oracle, self._partition = source, oracle, partition
        self._streams = fan_out(self._parts(), partition.trainers)
        self._open = partition.trainers
        self._begun = False
        # No trainer may ask for plans while another one opens the loader: it would find no data. No scheduler changes
        # trainers meanwhile.
        self._beginning = Lock()

    def of(self, rank: int) -> OwnPlans:
        """The plans of one trainer: a `PlanStream`."""
        return OwnPlans(self, self._streams[rank], rank)

    @property
    def source(self) -> Divided:
        """Where batches come from."""
        return self._source

    def begin(self) -> None:
        """Open the loader, with the first trainer that asks."""
        with self._beginning:
            if not self._begun:
                self._begun = True
                self._source.begin()

    def close_one(self) -> None:
        """One trainer needs no more plans; the last one lets go of everything."""
        self._open -= 1
        if self._open == 0:
            self._source.close()
            self.oracle.close()

    def _parts(self) -> Generator[list[tuple[Plan, list[PlannedBatch]]], None, None]:
        source = self._source
        for division, parts in source.divided(self.oracle, self._partition):
            samples = list(zip(*(part.samples for part in parts), strict=True))
            plans = [division.part(rank, *samples) for rank in range(len(parts))]
            yield [
                (plan, planned_batches(plan, part.group, source.tables, source.adapter))
                for plan, part in zip(plans, parts, strict=True)
            ]


class OwnPlans:
    """One trainer's plans."""

    goes_on = False

    def __init__(self, shared: SharedPlans, stream: Plans, rank: int) -> None:
        self._shared, self._stream, self._rank = shared, stream, rank
        self._closed = False

    def epoch(self, traffic: Counters) -> Plans:
        """All plans, of the one epoch that there is; what the first trainer counts goes for all."""
        if self._rank == 0:
            self._shared.oracle.measure(traffic)
        self._shared.begin()
        return self._stream

    def stats(self) -> dict[str, Any]:
        """How long the loader was waited for, by whoever asked."""
        return {"waited_s": self._shared.source.reading.seconds()}

    def position(self, iterations: int) -> dict[str, Any]:
        """Where in the data training is."""
        return self._shared.source.position(iterations)

    def resume(self, position: Mapping[str, Any]) -> None:
        """Begin where another run was; the same for all trainers."""
        self._shared.source.resume(position)

    def interrupt(self) -> None:
        """A loader can't be interrupted: it is waited for."""

    def close(self) -> None:
        """Let go; a second call does nothing."""
        if not self._closed:
            self._closed = True
            self._stream.close()
            self._shared.close_one()
