"""What one trainer exchanges with the others in an iteration: lists that both sides know, so that only values travel.

Gradients go to who updates a row, new vectors to who uses it next. What the next iteration uses is exchanged before it
(critical), the rest beside it (delayed). A row may change its owner with a vector: its state goes with it then.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from bagpipe.oracle.row_list import RowList

Int32s = NDArray[np.int32]
Int64s = NDArray[np.int64]


@dataclass(frozen=True, slots=True, eq=False)
class Lists:
    """One list for each trainer, each table by table, end to end."""

    items: Int32s
    bounds: Int64s
    """[r, t]: where table t of trainer r begins; one more for its end."""

    def __len__(self) -> int:
        return len(self.items)

    def of(self, rank: int) -> Iterator[tuple[int, Int32s]]:
        """The parts of a trainer's list that are not empty: table, items."""
        bounds = self.bounds[rank]
        for table in np.flatnonzero(np.diff(bounds)).tolist():
            yield table, self.items[bounds[table] : bounds[table + 1]]

    def counts(self) -> Int64s:
        """[r, t]: how many."""
        return np.diff(self.bounds, axis=1)


@dataclass(frozen=True, slots=True, eq=False)
class Gradients:
    """Gradients that are added up at one time, and the rows that they update."""

    rows: RowList
    """Rows that this trainer alone updates."""
    send: Lists
    """For each trainer, itself included: which of its rows of the table (by index) it sends the gradients of."""
    add: Lists
    """For each trainer, itself included: to which of `rows` of the table its gradients are added; in order of rank."""
    shared: RowList
    """Rows that every trainer updates, with the sum of everyone's gradients."""
    own: Lists
    """A single list: which of its rows of the table are shared."""
    own_at: Int32s
    """To which of `shared` of the table each of `own` is added."""


@dataclass(frozen=True, slots=True, eq=False)
class Values:
    """Vectors that are sent at one time."""

    send: Lists
    """For each trainer the slots of the rows that it is sent."""
    receive: Lists
    """For each trainer the slots of the rows that it sends."""
    slot_after: int
    """They are received once this plan's evictions are copied out; -1: no wait."""
    give: Lists
    """For each trainer the slots of those among the rows it is sent that it owns from then on."""
    take: Lists
    """For each trainer the slots of those among the rows it sends that this one owns from then on."""
    taken: Int64s
    """The ids of the rows to take."""

    @property
    def empty(self) -> bool:
        """Whether this trainer neither sends nor receives."""
        return not len(self.send) and not len(self.receive)


@dataclass(frozen=True, slots=True, eq=False)
class Sync:
    """All that a trainer exchanges for one iteration."""

    rank: int
    samples: tuple[tuple[int, ...], ...]
    """[m][r]: of trainer r in micro-batch m of this iteration, usually the only one."""
    fetched: Values
    """Rows that their owner has fetched, before the iteration begins."""
    gradients: Gradients
    """Right after the backward pass."""
    values: Values
    """Right after the update."""
    later_gradients: Gradients
    """Beside the next iteration."""
    later_values: Values
    """After those; used by the iteration after the next."""
    drop: RowList
    """Rows that leave with this plan and that another trainer writes back, where all have copies that were updated."""
    drop_victims: RowList
    """The same of those that make room for this plan's fetches."""

    @property
    def divisor(self) -> int:
        """What sums of weighted gradients are divided by: the samples of the first micro-batch that has any."""
        return next((total for total in map(sum, self.samples) if total), 1)

    def weight(self, micro: int) -> float:
        """What this trainer's mean gradients of a micro-batch count: its samples, were the batch as large as the first.

        So every micro-batch has its mean over all trainers, and these are added up, as with one trainer.
        """
        total = sum(self.samples[micro])
        return self.samples[micro][self.rank] * (self.divisor / total) if total else 0.0

    @property
    def totals(self) -> tuple[int, ...]:
        """Samples of each trainer in the iteration."""
        return tuple(map(sum, zip(*self.samples, strict=True)))
