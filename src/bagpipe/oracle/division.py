"""One plan, divided: what each trainer does in its iteration is cut out when it is asked for.

The first part that is asked for pays for the lists of all; what a plan's users are sent is found once, and used by the
two plans before it. Nothing changes once it is made, so that parts may be cut in any thread.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import cached_property
from itertools import pairwise
from typing import Any

import numpy as np
from numpy.typing import NDArray

from bagpipe.kernels import shares as kernels
from bagpipe.kernels.partition import AFTERWARDS, FETCHED, NOW
from bagpipe.oracle.plan import Fetch, Plan, Sharing, Victims
from bagpipe.oracle.row_list import RowList
from bagpipe.oracle.sync_plan import Gradients, Lists, Sync, Values

Int32s = NDArray[np.int32]
Int64s = NDArray[np.int64]
Ranks = NDArray[np.int8]
Masks = NDArray[Any]
Vectors = Callable[[int], Values]
"""What a trainer sends and receives at one time."""


class Uses:
    """A plan, and what was found out about its rows."""

    def __init__(
        self,
        plan: Plan,
        sharing: Sharing,
        trainers: int,
        flows: Int64s,
        holders: Ranks,
        owners: Ranks,
        kinds: Ranks,
        freed: Int32s,
        phases: Ranks,
        homes: Ranks,
        takers: Masks,
        evict_by: Ranks,
        victims_by: Ranks,
    ) -> None:
        self.plan, self.sharing, self.trainers, self._flows = plan, sharing, trainers, flows
        self.holders, self.owners, self.kinds, self.freed = holders, owners, kinds, freed
        """Of each row: who has its newest vector, who updates it, how it comes to users, which plan freed its slot."""
        self.phases = phases
        """When each row is updated; known when the next plan is followed."""
        self.homes = homes
        """The owners of the rows that are fetched."""
        self.takers, self.evict_by, self.victims_by = takers, evict_by, victims_by
        """Who reads and who writes the rows that are fetched and that leave."""

    def vectors(self, kind: int) -> Vectors:
        """The vectors that owners send to other users of rows that come to them in this way."""

        def of(rank: int) -> Values:
            rows, (send, receive, after), (give, take) = self.plan.rows, self._sent, self._moved
            first = (kind * self.trainers + rank) * self.trainers
            sent, received, given, taken = (each.lists(first, self.trainers) for each in (send, receive, give, take))
            gives, takes = (Lists(rows.slots[lists.items], lists.bounds) for lists in (given, taken))
            return Values(sent, received, int(after[kind, rank]), gives, takes, rows.ids[taken.items])

        return of

    @cached_property
    def _sent(self) -> tuple[_Flat, _Flat, Int32s]:
        """By kind, sender and receiver; by kind, receiver and sender; and which plan freed the last slot."""
        rows = self.plan.rows
        return self._flowing(rows, self.sharing.users, self.holders, self.kinds, self.freed)

    @cached_property
    def _moved(self) -> tuple[_Flat, _Flat]:
        """Of the rows (by index) that change their owner: by kind, old and new; by kind, new and old."""
        rows, holders, kinds, users = self.plan.rows, self.holders, self.kinds, self.sharing.users
        moved = np.flatnonzero((self.owners != holders) & (kinds != FETCHED)).astype(np.int32)
        bits = users.dtype.type(1) << self.owners[moved].astype(users.dtype)
        some = RowList(rows.ids[:0], moved, np.searchsorted(moved, rows.bounds))
        return self._flowing(some, bits, holders[moved], kinds[moved], self.freed[moved])[:2]

    def _flowing(
        self, rows: RowList, users: Masks, holders: Ranks, kinds: Ranks, freed: Int32s
    ) -> tuple[_Flat, _Flat, Int32s]:
        trainers = self.trainers
        pairs, after = np.zeros((3, trainers, trainers), np.int64), np.full((3, trainers), -1, np.int32)
        kernels.count_values(users, holders, kinds, self._flows, pairs)
        send, receive = (_Flat.of(counts, rows) for counts in (pairs, pairs.transpose(0, 2, 1)))
        kernels.fill_values(
            rows.bounds, rows.slots, users, holders, kinds, freed, self._flows, trainers,
            send.bounds, send.items, receive.bounds, receive.items, after,
        )  # fmt: skip
        return send, receive, after

    @cached_property
    def shares(self) -> Shares:
        """Who uses and updates which rows."""
        rows, users, trainers = self.plan.rows, self.sharing.users, self.trainers
        owned, pairs = np.zeros((2, trainers + 1), np.int64), np.zeros((2, trainers + 1, trainers), np.int64)
        kernels.count_shares(users, self.owners, self.phases, owned, pairs)
        counted = pairs.sum((0, 1)), owned, pairs.transpose(0, 2, 1), pairs
        used, updated, sources, targets = (_Flat.of(counts, rows) for counts in counted)
        kernels.fill_shares(
            rows.bounds, users, self.owners, self.phases, trainers, used.bounds, used.items,
            updated.bounds, updated.items, sources.bounds, sources.items, targets.bounds, targets.items,
        )  # fmt: skip
        return Shares(rows, trainers, used, updated, sources, targets)


@dataclass(frozen=True, slots=True, eq=False)
class _Flat:
    """Lists of all trainers (and pairs of them) end to end, each table by table."""

    items: Int32s
    bounds: Int64s
    """[k, t]: where table t of list k begins; one more for its end."""

    @classmethod
    def of(cls, counts: Int64s, rows: RowList) -> _Flat:
        """Room for lists of these lengths; where their tables begin is not known yet."""
        bounds = np.empty((counts.size, len(rows.bounds)), np.int64)
        ends = np.cumsum(counts)
        bounds[0, 0], bounds[1:, 0] = 0, ends[:-1]
        return cls(np.empty(ends[-1], np.int32), bounds)

    def lists(self, first: int, count: int = 1) -> Lists:
        """Some of the lists."""
        bounds = self.bounds[first : first + count]
        return Lists(self.items[bounds[0, 0] : bounds[-1, -1]], bounds - bounds[0, 0])


@dataclass(frozen=True, slots=True, eq=False)
class Shares:
    """The lists that `fill_shares` writes."""

    rows: RowList
    trainers: int
    used: _Flat
    updated: _Flat
    sources: _Flat
    targets: _Flat

    def gradients(self, phase: int, rank: int) -> Gradients:
        """What one trainer exchanges, and updates, in a phase."""
        trainers = self.trainers
        everyone = phase * (trainers + 1)
        owner = everyone + rank + 1
        sent = (phase * trainers + rank) * (trainers + 1)
        return Gradients(
            chosen(self.rows, self.updated.lists(owner)),
            self.sources.lists(sent + 1, trainers),
            self.targets.lists(owner * trainers, trainers),
            chosen(self.rows, self.updated.lists(everyone)),
            self.sources.lists(sent),
            self.targets.lists(everyone * trainers + rank).items,
        )


@dataclass(frozen=True, slots=True, eq=False)
class Division:
    """A plan, and how it is divided."""

    uses: Uses
    features: Int64s
    """The table of each."""
    replicas: bool
    """Whether all trainers have copies of the rows that nobody owns alone."""
    read_by_users: bool
    """Whether a row's first users read it beside its owner, who alone needs its optimizer state."""
    fetched: Vectors
    values: Vectors
    later_values: Vectors

    @property
    def plan(self) -> Plan:
        """The whole."""
        return self.uses.plan

    @property
    def trainers(self) -> int:
        """How many share it."""
        return self.uses.trainers

    def part(self, rank: int, *samples: tuple[int, ...]) -> Plan:
        """What one trainer does; of each micro-batch the samples of each trainer are given."""
        plan, uses, shares = self.plan, self.uses, self.uses.shares
        mine = shares.used.lists(rank)
        sync = Sync(
            rank,
            samples,
            self.fetched(rank),
            shares.gradients(NOW, rank),
            self.values(rank),
            shares.gradients(AFTERWARDS, rank),
            self.later_values(rank),
            self._dropped(plan.evict, uses.evict_by, rank),
            self._dropped(plan.victims, uses.victims_by, rank),
        )
        victims = flagged(plan.victims, uses.victims_by == rank)
        return replace(
            plan,
            rows=chosen(plan.rows, mine),
            inverse=self._inverse(rank, mine),
            fetch=self._fetch(rank),
            evict=flagged(plan.evict, uses.evict_by == rank),
            victims=Victims(victims.ids, victims.slots, victims.bounds, plan.victims.evict_after),
            hits=int(np.count_nonzero(uses.kinds.take(mine.items) != FETCHED)),
            sharing=None,
            sync=sync,
        )

    def _dropped(self, leaving: RowList, writers: Ranks, rank: int) -> RowList:
        if not self.replicas:
            return RowList(leaving.ids[:0], leaving.slots[:0], np.zeros_like(leaving.bounds))
        return flagged(leaving, writers != rank)

    def _fetch(self, rank: int) -> Fetch:
        fetch, takers = self.plan.fetch, self.uses.takers
        mine = _listed(takers & takers.dtype.type(1 << rank) != 0, fetch.bounds)
        own = chosen(fetch, mine)
        whole = self.uses.homes[mine.items] == rank if self.read_by_users else None
        return Fetch(own.ids, own.slots, own.bounds, fetch.after[mine.items], fetch.slot_after[mine.items], whole)

    def _inverse(self, rank: int, mine: Lists) -> tuple[Int32s, ...]:
        """The trainer's ids as indices into its own rows."""
        sharing, bounds = self.uses.sharing, self.plan.rows.bounds
        own = kernels.localise(sharing.inverse, sharing.cuts, rank, self.features, bounds, mine.items, mine.bounds[0])
        ends = np.cumsum(sharing.cuts[:, rank + 1] - sharing.cuts[:, rank]).tolist()
        return tuple([own[begin:end] for begin, end in pairwise([0, *ends])])


def chosen(rows: RowList, lists: Lists) -> RowList:
    """The rows that a single list names."""
    return RowList(rows.ids[lists.items], rows.slots[lists.items], lists.bounds[0])


def flagged(rows: RowList, flags: NDArray[np.bool_]) -> RowList:
    """The rows whose flag is set."""
    return chosen(rows, _listed(flags, rows.bounds))


def _listed(flags: NDArray[np.bool_], bounds: Int64s) -> Lists:
    """A single list of the rows whose flag is set."""
    items = np.flatnonzero(flags).astype(np.int32)
    return Lists(items, np.searchsorted(items, bounds)[None])


def no_vectors(trainers: int, tables: int) -> Vectors:
    """Nobody sends anything."""
    nothing = Lists(np.empty(0, np.int32), np.zeros((trainers, tables + 1), np.int64))
    return lambda _: Values(nothing, nothing, -1, nothing, nothing, np.empty(0, np.int64))
