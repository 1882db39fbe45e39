"""Which trainer gets which sample of a batch: a function of the order of the data, the number of trainers and a seed.

Never of cache, lookahead or time: training ends with the same bits whatever those are (I1). The result is an order that
makes each trainer's samples contiguous, so that nothing after it knows how they were chosen.
"""

from __future__ import annotations

from dataclasses import dataclass
from itertools import pairwise
from typing import TYPE_CHECKING

import numpy as np
from numpy.typing import NDArray

from bagpipe.errors import BatchError, ConfigError

if TYPE_CHECKING:
    from bagpipe.types import Batch

Int64s = NDArray[np.int64]


@dataclass(frozen=True, slots=True, eq=False)
class Assignment:
    """The samples of one batch, divided among trainers."""

    order: Int64s | None
    """Numbers of samples, those of trainer 0 first, each trainer's in the order of the data; None: as they are."""
    bounds: tuple[int, ...]
    """Trainer r has the samples from bounds[r] to bounds[r + 1] of that order; parts can be empty."""

    def parts(self, batch: Batch) -> list[Batch]:
        """Each trainer's samples."""
        if self.bounds[-1] != len(batch):
            raise BatchError(
                f"batch {batch.number} has {len(batch)} samples, its assignment {self.bounds[-1]}: "
                "assign the batch that is divided"
            )
        arranged = batch if self.order is None else batch.take(self.order)
        return [arranged.part(start, stop) for start, stop in pairwise(self.bounds)]


def contiguous(samples: int, trainers: int) -> Assignment:
    """Each trainer gets a part of the batch as it comes; the same parts as `bagpipe.types.contiguous_parts`."""
    return Assignment(None, tuple([rank * samples // trainers for rank in range(trainers + 1)]))


def round_robin(samples: int, trainers: int) -> Assignment:
    """Sample i goes to trainer i mod N."""
    turns = [np.arange(rank, samples, trainers) for rank in range(trainers)]
    bounds = np.cumsum([0] + [len(turn) for turn in turns])
    return Assignment(np.concatenate(turns), tuple(bounds.tolist()))


class Assigner:
    """Divides batch after batch among a fixed number of trainers; sizes of parts differ by at most one."""

    def __init__(self, name: str, trainers: int) -> None:
        if name not in ASSIGNERS:
            raise ConfigError(f"assign is {name!r}: choose one of {', '.join(ASSIGNERS)}")
        if trainers < 1:
            raise ConfigError(f"trainers is {trainers}: give at least 1")
        self.name, self.trainers = name, trainers

    def __call__(self, batch: Batch) -> Assignment:
        """Divide a batch."""
        return self.assign(len(batch))

    def assign(self, samples: int) -> Assignment:
        """Divide a batch of that many samples."""
        return ASSIGNERS[self.name](samples, self.trainers)


ASSIGNERS = {"contiguous": contiguous, "round_robin": round_robin}
