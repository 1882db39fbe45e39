"""What a policy decides: which rows stay in the cache after an iteration, and who makes room when it is full.

Everything else (unique rows, slots, fetches, write-backs and their waits) is the oracle's, the same for every policy:
a policy can cost traffic but never exactness (I1, I3).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import ClassVar, Literal

import numpy as np
from numpy.typing import NDArray

from bagpipe.oracle.slots import Group

Int32s = NDArray[np.int32]
Int64s = NDArray[np.int64]
Lookahead = int | Literal["auto"]


@dataclass(frozen=True, slots=True, eq=False)
class Demand:
    """What one plan asks of one group."""

    iteration: int
    group: Group
    hits: Int32s
    """Slots of the batch's rows that are in the cache."""
    num_misses: int
    """Its rows that are not."""
    misses: Callable[[], tuple[Int64s, Int64s]]
    """Table and id of each of those, in the order in which they get their slots."""


class Policy:
    """Keeps nothing and reads one batch at a time; subclasses override what they do better."""

    name: ClassVar[str]
    keeps: ClassVar[bool] = False
    """False: a row stays as long as `admit` grants it. True: it stays until it is a victim or the data ends."""
    horizon: ClassVar[int] = 64
    """Every fetch waits at least for the iteration this many before the last, so that older evictions can be forgotten:
    long enough that their write-backs were acknowledged anyway."""

    lingers: bool = False
    """Whether rows that may not stay may linger, as long as there is `room` for them."""

    groups: Sequence[Group]
    target: int = 1
    """How many batches must have been read, and not be planned yet, before the next plan."""
    target_max: int = 1
    """Bound on `target`."""

    def bind(self, groups: Sequence[Group], lookahead: Lookahead, ahead: int) -> None:  # noqa: ARG002 - for subclasses
        """Begin a run; `ahead` is the number of plans whose rows may be on their way while an earlier one trains."""
        self.groups = groups

    def admit(self, iteration: int, window: int, counts: Int64s, gaps: Int64s) -> bool:  # noqa: ARG002
        """The batch of an iteration was read, behind `window` others without a plan; it has counts[t] rows of table t.

        gaps[t, g] of them were last used g iterations earlier (gaps[t, 0]: were never seen). Lower it to the number
        that may stay in the cache from that use to this: not more than there are slots for, as only a policy that
        `keeps` has victims to offer. Returns whether all may stay.
        """
        gaps[:, : window + 1] = 0
        return False

    def assign(self, demand: Demand, slots: Int32s, slot_after: Int32s) -> tuple[Int32s, int]:
        """Choose the slots of the missing rows and the plans whose evictions freed them (-1: none, or victims now).

        Returns the slots of the rows that must leave for them, and the last iteration that used any of those.
        """
        free = demand.group.slots
        victims, evict_after = self.make_room(demand, max(0, demand.num_misses - free.num_free))
        free.free(victims, -1)
        free.take(slots, slot_after)
        return victims, evict_after

    def make_room(self, demand: Demand, needed: int) -> tuple[Int32s, int]:
        """The slots of so many rows that the batch does not use, and the last iteration that used any of them."""
        assert needed == 0, f"iteration {demand.iteration} lacks {needed} slots of {demand.group.label}"
        return np.empty(0, np.int32), -1

    def planned(self, iteration: int, group: Group, slots: Int32s) -> None:
        """A plan was made in which the batch's rows of this group are in these slots; if the policy `keeps`."""

    def room(self, iteration: int, window: int, group: Group) -> int:  # noqa: ARG002
        """Slots of a group that no plan will need before the next can make room; `window` batches begin with this."""
        return 0

    def lookahead_at(self, iteration: int, window: int) -> int:  # noqa: ARG002
        """Rows of this batch used again in fewer iterations than this stay; `window` batches begin with it."""
        return 1

    def advance(self) -> None:
        """A plan was emitted: set the target for the next."""


class KeepingPolicy(Policy):
    """Keeps every row until it must make room, or until the data ends."""

    keeps = True

    def bind(self, groups: Sequence[Group], lookahead: Lookahead, ahead: int) -> None:
        """Begin a run."""
        super().bind(groups, lookahead, ahead)
        self.target = self.target_max = 2  # the second batch only tells whether the first is the last one
