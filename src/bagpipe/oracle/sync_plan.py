"""What one trainer exchanges with the others in an iteration: lists that both sides know, so that only values travel.

Gradients go to all who update a row, new vectors to who uses it next and does not update it. What the next iteration
uses is exchanged before it (critical), the rest beside it (delayed). A row may change its owner with a vector: its
state goes with it then.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

import numpy as np
from numpy.typing import NDArray

from bagpipe.arrays import Int32s, Int64s
from bagpipe.errors import WireError
from bagpipe.oracle.design import RULES
from bagpipe.oracle.plan_shape import PlanShape, check_bounds, first_outside
from bagpipe.oracle.row_list import RowList

if TYPE_CHECKING:
    from bagpipe.wire.plan_messages import DividedBy

SAMPLES_MAX = 1 << 31


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

    @property
    def flat_bounds(self) -> Int64s:
        """Where the parts of all trainers and tables begin; one more for the end."""
        return np.append(self.bounds[:, :-1].reshape(-1), self.bounds[-1, -1])

    def check(self, name: str, trainers: int, ends: Int64s) -> None:
        """WireError unless these are lists for so many trainers, whose items of each table are less than its `ends`."""
        if self.bounds.shape != (trainers, len(ends) + 1) or (self.bounds[1:, 0] != self.bounds[:-1, -1]).any():
            raise WireError(
                f"{name}: bounds of shape {self.bounds.shape} do not cut {len(self)} items by trainer and table"
            )
        if self.items.ndim != 1 or (self.whole is not None and self.whole.shape != self.items.shape):
            raise WireError(f"{name}: items of shape {self.items.shape}, with flags of other rows")
        bounds = self.flat_bounds
        check_bounds(name, bounds, trainers * len(ends), len(self))
        if (first := first_outside(self.items, bounds, np.tile(ends, trainers))) >= 0:
            end = ends[(int(np.searchsorted(bounds, first, "right")) - 1) % len(ends)]
            raise WireError(f"{name}: {self.items[first]} is there, 0 to {end - 1} are allowed")


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

    def check_vectors(self, name: str, shape: PlanShape, rank: int, iteration: int) -> None:
        """WireError unless slots and ids exist, and the wait is for an earlier iteration (I8)."""
        assert shape.division is not None, "plans for one trainer have no exchanges"
        if not -1 <= self.slot_after < iteration:
            raise WireError(
                f"{name}, slot_after of vectors: {self.slot_after} is there, -1 to {iteration - 1} are allowed"
            )
        self.send.check(f"{name} to send", shape.division.trainers, shape.slots)
        self.receive.check(f"{name} to receive", shape.division.trainers, shape.slots)
        self._check_own(name, rank)
        bounds = self.receive.moved().flat_bounds
        if self.ids.shape != (bounds[-1],):
            raise WireError(f"{name}: {bounds[-1]} rows to take have ids of shape {self.ids.shape}")
        shape.check_ids(f"{name} to take", self.ids, bounds)

    def check_gradients(self, name: str, trainers: int, rank: int, used: RowList, updated: RowList) -> None:
        """WireError unless places are those of rows that are used, and updated."""
        if self.slot_after != -1 or len(self.ids) or self.send.whole is not None or self.receive.whole is not None:
            raise WireError(f"{name}: gradients wait for no slot, and change no owner")
        self.send.check(f"{name} to send", trainers, np.diff(used.bounds))
        self.receive.check(f"{name} to add", trainers, np.diff(updated.bounds))
        self._check_own(name, rank)

    def _check_own(self, name: str, rank: int) -> None:
        if not np.array_equal(self.send.counts()[rank], self.receive.counts()[rank]):
            raise WireError(f"{name}: trainer {rank} sends itself another number than it receives")


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

    def check(self, name: str, shape: PlanShape, iteration: int, rows: RowList, batches: Sequence[int]) -> None:
        """WireError unless this can be what a trainer exchanges that uses `rows`, with so many samples a batch (I8).

        Whatever came, indices lie in the lists that they point into, slots in the cache, and what this trainer sends to
        itself is what it receives from itself.
        """
        division = shape.division
        assert division is not None, "plans for one trainer have no exchanges"
        self._check_samples(name, division, shape.trainer, batches)
        for what, vectors in (("fetched", self.fetched), ("values", self.values), ("later values", self.later_values)):
            vectors.check_vectors(f"{name}, {what}", shape, self.rank, iteration)
        for what, gradients, updated in (
            ("gradients", self.gradients, self.updated),
            ("later gradients", self.later_gradients, self.later_updated),
        ):
            updated.check(f"{name}, rows of {what}", shape)
            gradients.check_gradients(f"{name}, {what}", division.trainers, self.rank, rows, updated)
        self.drop.check(f"{name}, drop", shape)
        self.drop_victims.check(f"{name}, drop_victims", shape)
        self._check_design(name, division, len(rows))

    def _check_samples(self, name: str, division: DividedBy, trainer: int, batches: Sequence[int]) -> None:
        if self.rank != trainer or trainer >= division.trainers:
            raise WireError(f"{name} is for trainer {self.rank} of {division.trainers}, and came to trainer {trainer}")
        if len(self.samples) != len(batches) or any(len(samples) != division.trainers for samples in self.samples):
            raise WireError(
                f"{name} has the samples of {list(map(len, self.samples))} trainers in its batches: {len(batches)} "
                f"batches for {division.trainers} trainers are allowed"
            )
        for own, samples in zip(batches, self.samples, strict=True):
            if not all(0 <= each < SAMPLES_MAX for each in samples):
                raise WireError(f"{name} has {list(samples)[:8]} samples: 0 to {SAMPLES_MAX - 1} are allowed")
            if own != samples[self.rank]:
                raise WireError(
                    f"{name} has a batch of {own} samples, and says that trainer {self.rank} has {samples[self.rank]}"
                )

    def _check_design(self, name: str, division: DividedBy, num_rows: int) -> None:
        """WireError if there is something that trainers of this design never exchange, and would not look at."""
        rules, vectors = RULES[division.design], (self.fetched, self.values, self.later_values)
        later = (self.later_updated, self.later_gradients.send, self.later_gradients.receive)
        unknown: dict[str, int] = {}
        if rules.copies:
            unknown["vectors"] = sum(not each.empty for each in vectors)
        else:
            sent = len(self.gradients.send) + len(self.later_gradients.send)
            unknown["gradients of a row for several trainers"] = max(0, sent - num_rows)
        if rules.copies or rules.users_read:
            unknown["fetched vectors"] = not self.fetched.empty
        if not division.moving or not rules.moves:
            moved = [len(routes.moved()) for each in vectors for routes in (each.send, each.receive)]
            unknown["rows that change their owner"] = sum(moved)
        if not division.delayed:
            unknown["later gradients"] = sum(len(each) for each in later)
            unknown["later vectors"] = not self.later_values.empty
        for what, count in unknown.items():
            if count:
                raise WireError(
                    f"{name} has {what}, which sync.design = {division.design!r} with sync.delayed = "
                    f"{division.delayed} never exchanges"
                )
