"""Divides plans among trainers: who fetches, updates, sends and writes back each row (paper, section 3.3). Pure.

Slots are numbered alike on all trainers, but a trainer holds only the rows that it needs. A row that iterations x and
x + 1 both use is exchanged between them; one that x + 1 does not use is updated beside x + 1, and sent beside the
iteration before its next use. So every use of a row finds its newest value, and nothing is sent that nobody uses (I3).

Designs:
  owned        one trainer owns a row while it is in the cache: the one that uses it most, as far as the oracle sees;
  partitioned  the slot decides who owns a row, and the owner alone reads it from the store;
  replicated   all trainers fetch and update all rows;
  lrpp         as replicated, but a row that one trainer uses and that then leaves is that trainer's alone.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import pairwise
from typing import Any, Literal, TypeVar

import numpy as np
from numpy.typing import NDArray

from bagpipe.errors import ConfigError
from bagpipe.kernels import partition as kernels
from bagpipe.kernels.partition import AFTERWARDS, FETCHED, LATER, NEXT, NOW, SHARED, WORDS
from bagpipe.oracle.lookahead import mask_type
from bagpipe.oracle.plan import Fetch, Plan, Sharing, Victims
from bagpipe.oracle.row_list import RowList
from bagpipe.oracle.sync_plan import Gradients, Lists, Sync, Values
from bagpipe.oracle.tables import OracleTable

Design = Literal["owned", "partitioned", "replicated", "lrpp"]
DESIGNS: tuple[Design, ...] = ("owned", "partitioned", "replicated", "lrpp")
Int32s = NDArray[np.int32]
Int64s = NDArray[np.int64]
Ranks = NDArray[np.int8]
Masks = NDArray[Any]
Payload = TypeVar("Payload")

NOTHING = -1
"""No flow: rows of this kind are not sent."""
AHEAD = 2
"""Plans that must be known behind one before it can be divided: what it exchanges depends on who uses its rows next."""


class Partition:
    """Takes plans in order; remembers the owner and the last use of what is in the cache."""

    def __init__(
        self,
        trainers: int,
        tables: Sequence[OracleTable],
        capacity: Sequence[int],
        *,
        design: Design = "owned",
        delayed: bool = True,
    ) -> None:
        """`capacity` has the size of each slot space."""
        masks = mask_type(trainers)
        if design not in DESIGNS:
            raise ConfigError(f"sync.design is {design!r}: give one of {', '.join(DESIGNS)}")
        self.trainers, self.design, self.delayed = trainers, design, delayed
        ends = np.cumsum([0, *capacity])
        self._bases: Int64s = ends[[table.group for table in tables]].astype(np.int64)
        self._features: Int64s = np.repeat(np.arange(len(tables)), [len(table.features) for table in tables])
        self._state: Int32s = np.zeros(int(ends[-1]) * WORDS, np.int32)
        self._bits: Masks = masks(1) << np.arange(trainers, dtype=masks)
        self._everyone: Masks = self._bits.sum(keepdims=True, dtype=masks)
        self._flows: Int64s = np.full(3, NOTHING, np.int64)
        self._flows[NEXT], self._flows[LATER] = NEXT, LATER if delayed else NEXT
        if design == "partitioned":
            self._flows[FETCHED] = FETCHED
        self._no_values = _Flow.empty(trainers, len(tables))
        self._waiting: deque[_Noted] = deque()

    @property
    def nbytes(self) -> int:
        """Memory in use once every slot was."""
        return self._state.nbytes

    def plans(self, plans: Iterable[tuple[Plan, Payload]]) -> Iterator[tuple[Division, Payload]]:
        """Each plan with what its trainers make of it, two plans behind."""
        payloads: deque[Payload] = deque()
        error: Exception | None = None
        source = iter(plans)
        while error is None:
            try:
                plan, payload = next(source)
            except StopIteration:
                break
            except Exception as failure:
                error = failure
                break
            self._note(plan)
            payloads.append(payload)
            if len(self._waiting) > AHEAD:
                yield self._divide(), payloads.popleft()
        while self._waiting:
            yield self._divide(), payloads.popleft()
        if error is not None:
            raise error

    def _note(self, plan: Plan) -> None:
        """Follow a plan through the slots."""
        sharing, bases, state = plan.sharing, self._bases, self._state
        assert sharing is not None, "plans for one trainer are not divided"
        rows, fetch, evict, num_rows = plan.rows, plan.fetch, plan.evict, len(plan.rows)
        victims_by = self._writers(plan.victims)  # before others take their slots
        kernels.enter(fetch.bounds, fetch.slots, fetch.slot_after, self._homes(fetch, sharing), bases, state)
        owners, kinds = np.empty((2, num_rows), np.int8)
        freed = np.empty(num_rows, np.int32)
        phases_before = self._waiting[-1].phases if self._waiting else np.empty(0, np.int8)
        kernels.use(plan.iteration, rows.bounds, rows.slots, bases, state, owners, kinds, freed, phases_before)
        if self.design == "lrpp":
            kernels.find_exclusive(plan.iteration, evict.bounds, evict.slots, bases, state, sharing.users, owners)
        takers = np.empty(len(fetch), self._bits.dtype)
        kernels.find_takers(
            plan.iteration, fetch.bounds, fetch.slots, bases, state, sharing.users, self.design == "partitioned",
            self._bits, self._everyone, takers,
        )  # fmt: skip
        evict_by, flush_by = self._writers(evict), self._writers(plan.flush)
        phases = np.full(num_rows, AFTERWARDS if self.delayed else NOW, np.int8)
        flows = self._send(plan, sharing.users, owners, kinds, freed)
        self._waiting.append(
            _Noted(plan, sharing, owners, kinds, phases, flows, takers, evict_by, victims_by, flush_by)
        )

    def _homes(self, fetch: Fetch, sharing: Sharing) -> Ranks:
        if self.design == "owned":
            return sharing.homes
        if self.design == "partitioned":
            return (fetch.slots % self.trainers).astype(np.int8)
        return np.full(len(fetch), SHARED, np.int8)

    def _writers(self, rows: RowList) -> Ranks:
        writers = np.empty(len(rows), np.int8)
        if len(rows):
            kernels.writers_of(rows.bounds, rows.slots, self._bases, self._state, self.trainers, writers)
        return writers

    def _send(self, plan: Plan, users: Masks, owners: Ranks, kinds: Ranks, freed: Int32s) -> list[_Flow]:
        """The vectors that owners send to other users of a plan's rows, by how those come to them."""
        if self.design in ("replicated", "lrpp"):
            return [self._no_values] * 3
        rows, trainers, tables = plan.rows, self.trainers, len(plan.rows.bounds) - 1
        pairs = np.zeros((3, trainers, trainers), np.int64)
        kernels.count_values(users, owners, kinds, self._flows, pairs)
        send, receive = _Flat.of(pairs, tables), _Flat.of(pairs.transpose(0, 2, 1), tables)
        after = np.full((3, trainers), -1, np.int32)
        kernels.fill_values(
            rows.bounds, rows.slots, users, owners, kinds, freed, self._flows, trainers,
            send.bounds, send.items, receive.bounds, receive.items, after,
        )  # fmt: skip
        return [_Flow(kind * trainers, trainers, send, receive, after[kind]) for kind in range(3)]

    def _divide(self) -> Division:
        noted = self._waiting.popleft()
        flows = [after.flows for after in self._waiting] + [[self._no_values] * 3] * AHEAD
        plan = noted.plan
        return Division(
            plan, self.trainers, self._features, self._shares(noted), noted.flows[FETCHED], flows[0][NEXT],
            flows[1][LATER], noted.takers, noted.kinds, noted.evict_by, noted.victims_by, noted.flush_by,
            self.design in ("replicated", "lrpp"),
        )  # fmt: skip

    def _shares(self, noted: _Noted) -> _Shares:
        users, trainers, bounds = noted.sharing.users, self.trainers, noted.plan.rows.bounds
        owned, pairs = np.zeros((2, trainers + 1), np.int64), np.zeros((2, trainers + 1, trainers), np.int64)
        kernels.count_shares(users, noted.owners, noted.phases, owned, pairs)
        shares = _Shares(trainers, *(
            _Flat.of(counts, len(bounds) - 1) for counts in (pairs.sum((0, 1)), owned, pairs.transpose(0, 2, 1), pairs)
        ))  # fmt: skip
        kernels.fill_shares(
            bounds, users, noted.owners, noted.phases, trainers, shares.used.bounds, shares.used.items,
            shares.owned.bounds, shares.owned.items, shares.sources.bounds, shares.sources.items,
            shares.targets.bounds, shares.targets.items,
        )  # fmt: skip
        return shares


@dataclass(frozen=True, slots=True, eq=False)
class _Noted:
    """A plan, and what was found out about its rows."""

    plan: Plan
    sharing: Sharing
    owners: Ranks
    kinds: Ranks
    phases: Ranks
    """When each row is updated; set when the next plan is noted."""
    flows: list[_Flow]
    takers: Masks
    evict_by: Ranks
    victims_by: Ranks
    flush_by: Ranks


@dataclass(frozen=True, slots=True, eq=False)
class _Flat:
    """Lists of all trainers (and pairs of them) end to end, each table by table."""

    items: Int32s
    bounds: Int64s
    """[k, t]: where table t of list k begins; one more for its end."""

    @classmethod
    def of(cls, counts: Int64s, tables: int) -> _Flat:
        """Room for lists of these lengths; where their tables begin is not known yet."""
        bounds = np.empty((counts.size, tables + 1), np.int64)
        ends = np.cumsum(counts)
        bounds[0, 0], bounds[1:, 0] = 0, ends[:-1]
        return cls(np.empty(ends[-1], np.int32), bounds)

    def lists(self, first: int, count: int = 1) -> Lists:
        """Some of the lists."""
        bounds = self.bounds[first : first + count]
        return Lists(self.items[bounds[0, 0] : bounds[-1, -1]], bounds - bounds[0, 0])


@dataclass(frozen=True, slots=True, eq=False)
class _Flow:
    """The slots of vectors that go from trainer to trainer at one time."""

    first: int
    """How many trainers' lists come before."""
    trainers: int
    send: _Flat
    receive: _Flat
    after: Int32s

    @classmethod
    def empty(cls, trainers: int, tables: int) -> _Flow:
        """Nothing is sent."""
        nothing = _Flat(np.empty(0, np.int32), np.zeros((trainers * trainers, tables + 1), np.int64))
        return cls(0, trainers, nothing, nothing, np.full(trainers, -1, np.int32))

    def of(self, rank: int) -> Values:
        first = (self.first + rank) * self.trainers
        send, receive = self.send.lists(first, self.trainers), self.receive.lists(first, self.trainers)
        return Values(send, receive, int(self.after[rank]))


@dataclass(frozen=True, slots=True, eq=False)
class _Shares:
    """The lists that `fill_shares` writes."""

    trainers: int
    used: _Flat
    owned: _Flat
    sources: _Flat
    targets: _Flat

    def gradients(self, phase: int, rank: int, rows: RowList) -> Gradients:
        """What one trainer exchanges, and updates, in a phase."""
        trainers = self.trainers
        all_trainers = phase * (trainers + 1)
        owner = all_trainers + rank + 1
        sent = (phase * trainers + rank) * (trainers + 1)
        return Gradients(
            chosen(rows, self.owned.lists(owner)),
            self.sources.lists(sent + 1, trainers),
            self.targets.lists(owner * trainers, trainers),
            chosen(rows, self.owned.lists(all_trainers)),
            self.sources.lists(sent),
            self.targets.lists(all_trainers * trainers + rank).items,
        )


@dataclass(frozen=True, slots=True, eq=False)
class Division:
    """A plan, and how it is divided."""

    plan: Plan
    trainers: int
    _features: Int64s
    _shares: _Shares
    _fetched: _Flow
    _values: _Flow
    _later_values: _Flow
    _takers: Masks
    _kinds: Ranks
    _evict_by: Ranks
    _victims_by: Ranks
    _flush_by: Ranks
    _replicas: bool

    def part(self, rank: int, *samples: tuple[int, ...]) -> Plan:
        """What one trainer does; of each micro-batch the samples of each trainer are given."""
        plan, shares = self.plan, self._shares
        mine = shares.used.lists(rank)
        sync = Sync(
            rank,
            samples,
            self._fetched.of(rank),
            shares.gradients(NOW, rank, plan.rows),
            self._values.of(rank),
            shares.gradients(AFTERWARDS, rank, plan.rows),
            self._later_values.of(rank),
            self._dropped(plan.evict, self._evict_by, rank),
            self._dropped(plan.victims, self._victims_by, rank),
        )
        victims = flagged(plan.victims, self._victims_by == rank)
        return replace(
            plan,
            rows=chosen(plan.rows, mine),
            inverse=self._inverse(rank, mine),
            fetch=self._fetch(rank),
            evict=flagged(plan.evict, self._evict_by == rank),
            victims=Victims(victims.ids, victims.slots, victims.bounds, plan.victims.evict_after),
            flush=flagged(plan.flush, self._flush_by == rank),
            hits=int(np.count_nonzero(self._kinds.take(mine.items) != FETCHED)),
            sharing=None,
            sync=sync,
        )

    def _dropped(self, leaving: RowList, writers: Ranks, rank: int) -> RowList:
        return flagged(leaving, (writers != rank) & self._replicas)

    def _fetch(self, rank: int) -> Fetch:
        fetch = self.plan.fetch
        mine = flags_to_list(self._takers & self._takers.dtype.type(1 << rank) != 0, fetch.bounds)
        own = chosen(fetch, mine)
        return Fetch(own.ids, own.slots, own.bounds, fetch.after[mine.items], fetch.slot_after[mine.items])

    def _inverse(self, rank: int, mine: Lists) -> tuple[Int32s, ...]:
        """The trainer's ids as indices into its own rows."""
        plan, sharing = self.plan, self.plan.sharing
        assert sharing is not None
        cuts, bounds = sharing.cuts, plan.rows.bounds
        index = np.empty(len(plan.rows), np.int32)
        ends = np.cumsum(cuts[:, rank + 1] - cuts[:, rank]).tolist()
        own = np.empty(ends[-1], np.int32)
        kernels.localise(sharing.inverse, cuts, rank, self._features, bounds, mine.items, mine.bounds[0], index, own)
        return tuple([own[begin:end] for begin, end in pairwise([0, *ends])])


def chosen(rows: RowList, lists: Lists) -> RowList:
    """The rows that a single list names."""
    ids, slots = np.empty(len(lists), np.int64), np.empty(len(lists), np.int32)
    kernels.gather_rows(rows.ids, rows.slots, lists.items, ids, slots)
    return RowList(ids, slots, lists.bounds[0])


def flagged(rows: RowList, flags: NDArray[np.bool_]) -> RowList:
    """The rows whose flag is set."""
    return chosen(rows, flags_to_list(flags, rows.bounds))


def flags_to_list(flags: NDArray[np.bool_], bounds: Int64s) -> Lists:
    """A single list of the rows whose flag is set."""
    items = np.flatnonzero(flags).astype(np.int32)
    return Lists(items, np.searchsorted(items, bounds)[None])
