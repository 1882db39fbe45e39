"""A plan: everything that one iteration does to the cache, as data. Pure records, which travel as they are.

Exactness rests on three waits that the plan names (I3): an eviction is copied out after the iteration that last updated
its rows, an insertion happens after the slot's last tenant is copied out, and a fetch after the write-backs that it
must see are acknowledged. An executor that keeps these waits reads no stale row, in whatever order and on however many
threads it works.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from bagpipe.arrays import Int32s, Int64s
from bagpipe.errors import WireError
from bagpipe.oracle.design import RULES
from bagpipe.oracle.plan_shape import PlanShape, check_range, first_outside
from bagpipe.oracle.row_list import RowList
from bagpipe.oracle.sync_plan import Sync


@dataclass(frozen=True, slots=True, eq=False)
class Fetch(RowList):
    """Rows to bring from the store into their slots before the iteration trains: of each table those that the batch
    needs, in the order of its rows, and behind them those that are brought along for later ones."""

    after: Int32s
    """For each row: reading it waits until all iterations up to this one are acknowledged; -1: no wait. It is at least
    the iteration whose eviction last wrote the row, and less than the plan's own, so no wait can be circular."""
    slot_after: Int32s
    """For each row: inserting it waits until this plan's evictions are copied out; -1: no wait beyond the order of the
    insert stage, in which the plan's own victims leave before its rows are inserted and plans come one by one."""
    whole: NDArray[np.bool_] | None = None
    """For each row whether it is read with its optimizer state, or its vectors only, since another trainer updates it
    as long as it is in the cache. None: all are read whole."""

    def only(self, chosen: NDArray[np.bool_]) -> Fetch:
        """Those of the rows that are chosen."""
        bounds = np.concatenate([[0], np.cumsum(chosen)])[self.bounds]
        whole = None if self.whole is None else self.whole[chosen]
        return Fetch(self.ids[chosen], self.slots[chosen], bounds, self.after[chosen], self.slot_after[chosen], whole)


@dataclass(frozen=True, slots=True, eq=False)
class Victims(RowList):
    """Rows that make room for this plan's fetches: they leave before its rows take their slots."""

    evict_after: int = -1
    """They are copied out once this earlier iteration is updated: no later one before this plan's uses them."""


@dataclass(frozen=True, slots=True)
class BatchSize:
    """What a plan must know of a batch that it is for."""

    number: int
    num_samples: int
    num_ids: tuple[int, ...]
    """Of each feature, in the order of the plan's tables."""


@dataclass(frozen=True, slots=True, eq=False)
class Sharing:
    """What several trainers have to do with the rows of a plan."""

    users: NDArray[Any]
    """For each row of the batch a bit mask of the trainers that use it."""
    next_users: NDArray[Any]
    """For each row those of its next use, as far as the oracle sees and was asked for it; 0: none is known."""
    later_users: NDArray[Any]
    """Those of the use after that."""
    before: Int32s
    """For each row its index among those of its table in the batch before; -1: that does not use it."""
    homes: NDArray[np.int8]
    """For each row to fetch the trainer that uses it most while it will be in the cache; for rows that are brought
    along any."""
    cuts: Int64s
    """[f, r]: where trainer r's ids of feature f begin; one more for the end."""
    inverse: Int32s
    """The plan's, all features end to end."""


@dataclass(frozen=True, slots=True, eq=False)
class Plan:
    """What iteration `iteration` needs and does; a pure function of the data order and the oracle's settings."""

    iteration: int
    rows: RowList
    """The unique rows of the batch; those of a table in order of first occurrence."""
    inverse: tuple[Int32s, ...]
    """For each feature and id occurrence, the index into its table's part of `rows`."""
    fetch: Fetch
    evict: RowList
    """Rows whose stay ends here: copied out once this iteration is updated, then written back."""
    victims: Victims
    """Written back under this iteration's number too, which is acknowledged when both are in the store."""
    lookahead: int
    """Rows used again in fewer than this many iterations stay in the cache; 1: nothing had to."""
    hits: int
    """Rows of the batch that were in the cache already when it was planned."""
    sharing: Sharing | None = None
    """Of a plan for several trainers that is not divided among them yet."""
    sync: Sync | None = None
    """Of one trainer's part of a plan."""
    capacity: tuple[int, ...] = ()
    """The places of each group from here on, where they are divided anew: the plan before has evicted all rows."""
    guests: tuple[int, ...] = ()
    """With these, of a plan that is not divided yet: as in `Places`."""

    def check(self, shape: PlanShape, iteration: int, batches: Sequence[BatchSize]) -> None:
        """WireError unless this can be the plan of this iteration, for batches of these sizes (I8).

        What passes names slots, rows and tables that exist, and waits only for iterations before its own.
        """
        name = f"the plan of iteration {iteration}"
        if self.iteration != iteration:
            raise WireError(f"the plan of iteration {self.iteration} came where {iteration} was due")
        if not 1 <= len(batches) <= shape.accumulate:
            raise WireError(f"{name} has {len(batches)} batches: 1 to {shape.accumulate} are allowed")
        if self.lookahead < 1 or self.hits < 0 or self.sharing is not None or self.guests:
            raise WireError(f"{name} has lookahead {self.lookahead} and {self.hits} hits, or what no trainer is told")
        if (self.sync is None) != (shape.division is None):
            raise WireError(
                f"{name} is {'whole' if self.sync is None else 'divided'}, and was described as the opposite"
            )
        shape = shape.divided_anew(self.capacity, name)
        for what, rows in (
            ("rows", self.rows), ("fetch", self.fetch), ("evict", self.evict), ("victims", self.victims)
        ):  # fmt: skip
            rows.check(f"{name}, {what}", shape)
        self._check_waits(name)
        self._check_places(shape, name, batches)
        if self.sync is not None:
            samples = [batch.num_samples for batch in batches]
            self.sync.check(name, shape, iteration, self.rows, samples)
        self._check_whole(shape, name)

    def _check_waits(self, name: str) -> None:
        fetch = self.fetch
        if not -1 <= self.victims.evict_after < self.iteration:
            raise WireError(f"{name} has evict_after {self.victims.evict_after}: an earlier iteration is allowed")
        for what, last in (("after", fetch.after), ("slot_after", fetch.slot_after)):
            if last.shape != fetch.ids.shape:
                raise WireError(f"{name}, {what}: shape {last.shape} for {len(fetch)} rows to fetch")
            check_range(f"{name}, {what}", last, -1, self.iteration)

    def _check_whole(self, shape: PlanShape, name: str) -> None:
        fetch = self.fetch
        flagged = shape.division is not None and RULES[shape.division.design].users_read
        if (fetch.whole is not None) != flagged or (fetch.whole is not None and fetch.whole.shape != fetch.ids.shape):
            count = "no" if fetch.whole is None else len(fetch.whole)
            raise WireError(
                f"{name}, rows to fetch whole: {count} flags for {len(fetch)} rows to fetch, where there must be "
                f"{'one a row' if flagged else 'none'}"
            )

    def _check_places(self, shape: PlanShape, name: str, batches: Sequence[BatchSize]) -> None:
        """Each id of the batches has a row."""
        due = [sum(lengths) for lengths in zip(*(batch.num_ids for batch in batches), strict=False)]
        found = [places.size for places in self.inverse]
        if any(len(batch.num_ids) != len(shape.features) for batch in batches) or found != due:
            raise WireError(f"{name}, places of ids: {found[:8]} by feature, where batches have {due[:8]} ids")
        ends = np.diff(self.rows.bounds)
        for (feature, table), places in zip(shape.features, self.inverse, strict=True):
            # without a sign, one that is negative is greater than the end
            if places.ndim != 1 or (len(places) and np.maximum.reduce(places.view(np.uint32)) >= ends[table]):
                first = first_outside(places.reshape(-1), np.array([0, places.size]), ends[table : table + 1])
                raise WireError(
                    f"{name}, places of feature {feature!r}: {places.reshape(-1)[first]} is there, 0 to "
                    f"{ends[table] - 1} are allowed"
                )
