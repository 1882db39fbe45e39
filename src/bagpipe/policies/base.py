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

from bagpipe.kernels.oracle import KEEP
from bagpipe.kernels.victims import HELD, NEVER, lowest, rank
from bagpipe.oracle.sample import TableSample
from bagpipe.oracle.slots import Group
from bagpipe.policy_options import DEFAULTS, PolicyOptions

Int32s = NDArray[np.int32]
Int64s = NDArray[np.int64]
Stays = NDArray[np.uint16]
Flags = NDArray[np.bool_]
Lookahead = int | Literal["auto"]
NONE: Int32s = np.empty(0, np.int32)


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
    passing: Flags
    """Of each of those whether it leaves right after the batch; none does, unless the policy says so here."""


class Policy:
    """Keeps nothing and reads one batch at a time; subclasses override what they do better."""

    name: ClassVar[str]
    keeps: ClassVar[bool] = False
    """False: a row stays as long as `admit` grants it. True: it stays until it is a victim or the data ends."""
    horizon: int = 64
    """Every fetch waits at least for the iteration this many before the last, so that older evictions can be forgotten:
    long enough that their write-backs were acknowledged anyway."""
    samples: ClassVar[bool] = False
    """Whether `learn` wants the batches that are read before the first plan."""
    scans: bool = False
    """Whether it must `know` how often all data uses each row, before the first plan."""
    next_uses: Int32s | None = None
    """Of the tenants of all slots, group by group: when the window needs them next, or NEVER. The oracle enters what
    later batches show of rows that were planned; None: the policy does not want to know."""
    exact: bool = True
    """False: fetches do not wait for write-backs, so that rows can be stale."""

    idles: bool = False
    """Whether rows that were not granted a stay are kept while there is `room` for them: idle rows, which leave oldest
    first."""

    options: PolicyOptions = DEFAULTS
    groups: Sequence[Group]
    target: int = 1
    """How many batches must have been read, and not be planned yet, before the next plan."""
    target_max: int = 1
    """Bound on `target`."""

    @classmethod
    def is_exact(cls, options: PolicyOptions) -> bool:  # noqa: ARG003 - for subclasses
        """Whether the result is that of synchronous training, bit for bit: whatever the options, unless it says so."""
        return True

    def bind(self, groups: Sequence[Group], lookahead: Lookahead, ahead: int) -> None:  # noqa: ARG002 - for subclasses
        """Begin a run; `ahead` is the number of plans whose rows may be on their way while an earlier one trains."""
        self.groups = groups
        if not self.options.pipelined:
            self.horizon = 0

    def know(self, counts: Sequence[TableSample]) -> None:
        """How often all data uses each row of each table, if the policy `scans`."""

    def learn(self, sample: Sequence[TableSample]) -> None:
        """The rows of the batches read before the first plan, if the policy `samples`."""

    def hottest(self, group: Group) -> tuple[Int64s, Int64s]:  # noqa: ARG002
        """Table and id of rows that the first plan brings along, as far as slots are free; if the policy `samples`."""
        return np.empty(0, np.int64), np.empty(0, np.int64)

    def warmed(self, iteration: int, group: Group, chosen: Int64s, slots: Int32s) -> None:
        """Which of those the first plan brings, by their number, and their slots."""

    def admit(self, iteration: int, window: int, counts: Int64s, gaps: Int64s) -> bool:  # noqa: ARG002
        """The batch of an iteration was read, behind `window` others without a plan; it has counts[t] rows of table t.

        gaps[t, g] of them were last used g iterations earlier (gaps[t, 0]: were never seen), and gaps[t, window + 1]
        are idle in the cache. Lower it to the number that may stay in the cache from that use to this: not more than
        there are slots for, as only a policy that `keeps` has victims to offer. Returns whether all may stay.
        """
        gaps[:, : window + 2] = 0
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
        return NONE, -1

    def planned(self, iteration: int, group: Group, slots: Int32s, stays: Stays) -> None:
        """A plan was made in which the batch's rows of this group are in these slots; if the policy `keeps`.

        `stays` has the number of iterations until the next use of each, or KEEP, if `admit` has left `gaps` alone.
        """

    def leaving(self, iteration: int, group: Group, absent: Callable[[int], int]) -> Int32s:  # noqa: ARG002
        """Slots whose rows leave with a plan that was just made, although no plan takes their slots yet; if `keeps`.

        absent(y): how many rows of this group the window's batches up to y need that are not in the cache.
        """
        return NONE

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


class SlotFacts:
    """What a policy knows of the tenants of one group's slots."""

    def __init__(self, next_uses: Int32s) -> None:
        capacity = len(next_uses)
        self.next = next_uses
        """When the window needs each tenant, or NEVER."""
        self.last: Int32s = np.full(capacity, -1, np.int32)
        """The iteration that last used each tenant; -1: the slot is free."""
        self.uses: Int32s = np.zeros(capacity, np.int32)
        """The number of batches that have used each tenant since it came."""
        self.rank: Int32s = np.zeros(capacity, np.int32)
        """How many rows are used more often than each tenant, for policies that sample."""
        self.worth: Int64s = np.empty(capacity, np.int64)
        """The keys made last."""

    def keys(self, values: Int32s, largest_first: bool = False) -> Int64s:
        """Keys by these values of slots, then by the last use; HELD for free slots. Valid until the next call."""
        rank(values, largest_first, self.last, self.worth)
        return self.worth


class RankingPolicy(KeepingPolicy):
    """Keeps everything; victims are the rows outside the batch with the smallest keys. A subclass says what those are.

    Costs a few walks over the slots for each plan that needs victims.
    """

    foresees: ClassVar[bool] = False
    """Whether keys depend on next uses."""

    def bind(self, groups: Sequence[Group], lookahead: Lookahead, ahead: int) -> None:
        """Begin a run."""
        super().bind(groups, lookahead, ahead)
        sizes = [group.slots.capacity for group in groups]
        all_next: Int32s = np.full(sum(sizes), NEVER, np.int32)
        self.facts = [SlotFacts(part) for part in np.split(all_next, np.cumsum(sizes)[:-1])]
        self.next_uses = all_next if self.foresees else None

    def admit(self, iteration: int, window: int, counts: Int64s, gaps: Int64s) -> bool:
        """Let the window tell each use when the next is, if the policy wants to know; nobody leaves for it."""
        return self.foresees or super().admit(iteration, window, counts, gaps)

    def keys(self, iteration: int, facts: SlotFacts) -> Int64s:
        """How much each slot's tenant is worth: at least 0, less than HELD unless it must stay or there is none."""
        raise NotImplementedError

    def assign(self, demand: Demand, slots: Int32s, slot_after: Int32s) -> tuple[Int32s, int]:
        """As ever; the rows that come have not been used yet."""
        result = super().assign(demand, slots, slot_after)
        self.facts[demand.group.number].uses[slots] = 0
        return result

    def make_room(self, demand: Demand, needed: int) -> tuple[Int32s, int]:
        """The slots with the smallest keys."""
        if not needed:
            return NONE, -1
        facts = self.facts[demand.group.number]
        worth = self.keys(demand.iteration, facts)
        worth[demand.hits] = HELD
        victims = np.empty(needed, np.int32)
        found = lowest(worth, needed, victims)
        assert found == needed, f"iteration {demand.iteration} lacks slots of {demand.group.label}"
        evict_after = int(facts.last[victims].max(initial=-1))
        facts.last[victims] = -1
        return victims, evict_after

    def planned(self, iteration: int, group: Group, slots: Int32s, stays: Stays) -> None:
        """Note the uses."""
        facts = self.facts[group.number]
        facts.last[slots] = np.where(stays == 0, -1, iteration)
        facts.uses[slots] += 1
        if self.foresees:
            facts.next[slots] = np.where(stays == KEEP, NEVER, iteration + stays.astype(np.int32))
