"""What one trainer exchanges with the others in an iteration: lists that both sides know, so that only values travel.

Gradients go to all who update a row, new vectors to who uses it next and does not update it. What the next iteration
uses is exchanged before it (critical), the rest beside it (delayed). A row may change its owner with a vector: its
state goes with it then.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray

from bagpipe.arrays import Int32s, Int64s
from bagpipe.oracle.row_list import RowList


@dataclass(frozen=True, slots=True, eq=False)
class Routes:
    """Rows that go from trainer to trainer: lists for some pairs of them, each table by table, end to end."""

    items: Int32s
    bounds: Int64s
    """[k, t]: where table t of list k begins; one more for its end. A trainer's exchange has a list for each other."""
    whole: NDArray[np.bool_] | None = None
    """Of each item: the row goes with its state, and its receiver updates it from then on. None: not one does."""

    def __len__(self) -> int:
        return len(self.items)

    def of(self, rank: int) -> Iterator[tuple[int, Int32s]]:
        """The parts of a trainer's list that are not empty: table, items."""
        bounds = self.bounds[rank]
        for table in np.flatnonzero(np.diff(bounds)).tolist():
            yield table, self.items[bounds[table] : bounds[table + 1]]

    def counts(self) -> Int64s:
        """[k, t]: how many."""
        return np.diff(self.bounds, axis=1)

    def lists(self, chosen: slice) -> Routes:
        """Some of the lists; those that are side by side are not copied."""
        bounds = self.bounds[chosen]
        ends = np.cumsum(bounds[:, -1] - bounds[:, 0])
        part = slice(bounds[0, 0], bounds[-1, -1])
        items, whole = self.items[part], None if self.whole is None else self.whole[part]
        if chosen.step not in (None, 1):
            parts = [slice(own[0], own[-1]) for own in bounds]
            items = np.concatenate([self.items[part] for part in parts])
            whole = None if self.whole is None else np.concatenate([self.whole[part] for part in parts])
        whole = whole if whole is not None and whole.any() else None
        return Routes(items, bounds - bounds[:, -1:] + ends[:, None], whole)

    def only(self, flags: NDArray[np.bool_] | None) -> Routes:
        """The same lists, with those of the items alone whose flag is set."""
        if flags is None:
            return Routes(self.items[:0], np.zeros_like(self.bounds))
        return Routes(self.items[flags], np.concatenate([[0], np.cumsum(flags)])[self.bounds])

    def moved(self) -> Routes:
        """Those of the rows that are whole."""
        return self.only(self.whole)


@dataclass(frozen=True, slots=True, eq=False)
class Exchange:
    """What this trainer sends to each trainer at one time and receives from each, itself included.

    Vectors by the slots of their rows. Gradients by index: what is sent among its rows of the table, what is received
    among those of the table that it updates then, to which gradients are added in order of rank.
    """

    send: Routes
    receive: Routes
    slot_after: int = -1
    """Vectors are received once this plan's evictions are copied out; -1: no wait."""
    ids: Int64s = field(default_factory=lambda: np.empty(0, np.int64))
    """Of the rows that are received whole."""

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
    fetched: Exchange
    """Vectors of rows that their owner has fetched, before the iteration begins."""
    gradients: Exchange
    """Right after the backward pass; the rows that this trainer updates with them."""
    updated: RowList
    values: Exchange
    """Vectors, right after the update."""
    later_gradients: Exchange
    """Beside the next iteration."""
    later_updated: RowList
    later_values: Exchange
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
