"""A plan: everything that one iteration does to the cache, as data. Pure records, in memory as they would travel.

Exactness rests on three waits that the plan names (I3): an eviction is copied out after the iteration that last updated
its rows, an insertion happens after the slot's last tenant is copied out, and a fetch after the write-backs that it
must see are acknowledged. An executor that keeps these waits reads no stale row, in whatever order and on however many
threads it works.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from bagpipe.arrays import Int32s, Int64s
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
