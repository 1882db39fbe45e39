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
from typing import Any, Literal, TypeVar

import numpy as np
from numpy.typing import NDArray

from bagpipe.errors import ConfigError
from bagpipe.kernels import partition as kernels
from bagpipe.kernels.partition import FETCHED, LATER, NEXT, SHARED
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
Flags = NDArray[np.bool_]
Payload = TypeVar("Payload")

NOW, AFTERWARDS = 0, 1
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
        mask_type(trainers)
        if design not in DESIGNS:
            raise ConfigError(f"sync.design is {design!r}: give one of {', '.join(DESIGNS)}")
        self.trainers, self.design, self.delayed = trainers, design, delayed
        ends = np.cumsum([0, *capacity])
        self._bases: Int64s = ends[[table.group for table in tables]].astype(np.int64)
        self._features = tuple(number for number, table in enumerate(tables) for _ in table.features)
        self._state: Int32s = np.zeros((int(ends[-1]), 4), np.int32)
        self._everyone = np.full(1, (1 << trainers) - 1, np.uint64)
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
        victims_by = self._owners(plan.victims)  # before others take their slots
        kernels.enter(fetch.bounds, fetch.slots, fetch.slot_after, self._homes(fetch, sharing), bases, state)
        owners, kinds = np.empty((2, num_rows), np.int8)
        freed = np.empty(num_rows, np.int32)
        goes_on = self._waiting[-1].goes_on if self._waiting else np.zeros(0, np.bool_)
        kernels.use(plan.iteration, rows.bounds, rows.slots, bases, state, owners, kinds, freed, goes_on)
        if self.design == "lrpp":
            kernels.find_exclusive(plan.iteration, evict.bounds, evict.slots, bases, state, sharing.users, owners)
        takers = np.empty(len(fetch), np.uint64)
        kernels.find_takers(
            plan.iteration, fetch.bounds, fetch.slots, bases, state, sharing.users, self.design == "partitioned",
            self._everyone, takers,
        )  # fmt: skip
        evict_by, flush_by = self._owners(evict), self._owners(plan.flush)
        goes_on = np.zeros(num_rows, np.bool_)
        noted = _Noted(plan, sharing, owners, kinds, freed, goes_on, takers, evict_by, victims_by, flush_by)
        self._waiting.append(noted)

    def _homes(self, fetch: Fetch, sharing: Sharing) -> Ranks:
        if self.design == "owned":
            return sharing.homes
        if self.design == "partitioned":
            return self._by_slot(fetch.slots)
        return np.full(len(fetch), SHARED, np.int8)

    def _owners(self, rows: RowList) -> Ranks:
        owners = np.empty(len(rows), np.int8)
        kernels.owners_of(rows.bounds, rows.slots, self._bases, self._state, owners)
        return owners

    def _by_slot(self, slots: Int32s) -> Ranks:
        return (slots % self.trainers).astype(np.int8)

    def _writers(self, rows: RowList, owners: Ranks) -> Ranks:
        """Of rows that all have, one writes."""
        return np.where(owners == SHARED, self._by_slot(rows.slots), owners).astype(np.int8)

    def _divide(self) -> Division:
        noted = self._waiting.popleft()
        after = [*self._waiting][:AHEAD]
        if self.delayed:
            phases = np.where(noted.goes_on, NOW, AFTERWARDS).astype(np.int8)
            values = self._values(after[0], NEXT) if after else self._no_values(noted)
            later = self._values(after[1], LATER) if len(after) > 1 else self._no_values(noted)
        else:
            phases = np.full(len(noted.goes_on), NOW, np.int8)
            values = self._values(after[0], NEXT, LATER) if after else self._no_values(noted)
            later = self._no_values(noted)
        fetched = self._values(noted, FETCHED) if self.design == "partitioned" else self._no_values(noted)
        plan = noted.plan
        return Division(
            plan, self.trainers, self._features, self._shares(noted, phases), fetched, values, later, noted.takers,
            noted.kinds, self._writers(plan.evict, noted.evict_owners),
            self._writers(plan.victims, noted.victim_owners), self._writers(plan.flush, noted.flush_owners),
            self.design in ("replicated", "lrpp"),
        )  # fmt: skip

    def _shares(self, noted: _Noted, phases: Ranks) -> _Shares:
        bounds, users, trainers = noted.plan.rows.bounds, noted.sharing.users, self.trainers
        tables = len(bounds) - 1
        used = np.zeros((trainers, tables), np.int64)
        owned, pairs = np.zeros((2, trainers, tables), np.int64), np.zeros((2, trainers, trainers, tables), np.int64)
        shared, parts = np.zeros((2, tables), np.int64), np.zeros((2, trainers, tables), np.int64)
        counts = used, owned, pairs, shared, parts
        kernels.count_shares(bounds, users, noted.owners, phases, trainers, *counts)
        shares = _Shares(*(_Flat.of(count) for count in counts))
        kernels.fill_shares(
            bounds, users, noted.owners, phases, trainers, *shares.begins(),
            shares.used.items, shares.owned.items, shares.pairs.items, shares.pair_targets, shares.shared.items,
            shares.parts.items, shares.part_targets,
        )  # fmt: skip
        return shares

    def _values(self, noted: _Noted, *kinds: int) -> _Flow:
        rows, trainers = noted.plan.rows, self.trainers
        wanted = np.zeros(3, np.bool_)
        wanted[list(kinds)] = True
        pairs = np.zeros((trainers, trainers, len(rows.bounds) - 1), np.int64)
        after = np.full(trainers, -1, np.int32)
        users, owners = noted.sharing.users, noted.owners
        kernels.count_values(rows.bounds, users, owners, noted.kinds, wanted, trainers, pairs)
        flat = _Flat.of(pairs)
        kernels.fill_values(
            rows.bounds, rows.slots, users, owners, noted.kinds, noted.freed, wanted, trainers, flat.begins(),
            flat.items, after,
        )  # fmt: skip
        return _Flow(flat, after)

    def _no_values(self, noted: _Noted) -> _Flow:
        shape = (self.trainers, self.trainers, len(noted.plan.rows.bounds) - 1)
        return _Flow(_Flat.of(np.zeros(shape, np.int64)), np.full(self.trainers, -1, np.int32))


@dataclass(frozen=True, slots=True, eq=False)
class _Noted:
    """A plan, and what was found out about its rows."""

    plan: Plan
    sharing: Sharing
    owners: Ranks
    kinds: Ranks
    freed: Int32s
    goes_on: Flags
    """For each row whether the next plan uses it too; set when that is noted."""
    takers: NDArray[np.uint64]
    evict_owners: Ranks
    victim_owners: Ranks
    flush_owners: Ranks


@dataclass(frozen=True, slots=True, eq=False)
class _Flat:
    """Lists of all trainers (and pairs of them) end to end, each table by table."""

    items: Int32s
    counts: Int64s
    """Of each list and table; the last axis is tables."""
    bounds: Int64s
    """[..., t]: where table t of a list begins; one more for its end."""

    @classmethod
    def of(cls, counts: Int64s) -> _Flat:
        """Empty lists of these lengths."""
        ends = np.cumsum(counts.reshape(-1)).reshape(counts.shape)
        bounds = np.concatenate([(ends[..., :1] - counts[..., :1]), ends], axis=-1)
        return cls(np.empty(int(counts.sum()), np.int32), counts, bounds)

    def begins(self) -> Int64s:
        """Where each list begins, to be counted up."""
        return self.bounds[..., 0].copy()

    def lists(self, bounds: Int64s, items: Int32s | None = None) -> Lists:
        """Some of the lists, one a row of these bounds, moved together."""
        items = self.items if items is None else items
        firsts, lasts = bounds[:, 0], bounds[:, -1]
        if np.array_equal(firsts[1:], lasts[:-1]):  # they are together already
            return Lists(items[firsts[0] : lasts[-1]], bounds - firsts[0])
        moved = np.concatenate([items[first:last] for first, last in zip(firsts, lasts, strict=True)])
        begins = np.concatenate([[0], np.cumsum(lasts - firsts)[:-1]])
        return Lists(moved, bounds - (firsts - begins)[:, None])


@dataclass(frozen=True, slots=True, eq=False)
class _Flow:
    """The slots of vectors that go from trainer to trainer."""

    flat: _Flat
    after: Int32s

    def of(self, rank: int) -> Values:
        send, receive = self.flat.bounds[rank], self.flat.bounds[:, rank]
        return Values(self.flat.lists(send), self.flat.lists(receive), int(self.after[rank]))


class _Shares:
    """The lists that `fill_shares` writes."""

    def __init__(self, used: _Flat, owned: _Flat, pairs: _Flat, shared: _Flat, parts: _Flat) -> None:
        self.used, self.owned, self.pairs, self.shared, self.parts = used, owned, pairs, shared, parts
        self.pair_targets: Int32s = np.empty_like(pairs.items)
        self.part_targets: Int32s = np.empty_like(parts.items)

    def begins(self) -> tuple[Int64s, Int64s, Int64s, Int64s, Int64s]:
        """Where the lists of each kind begin."""
        flats = self.used, self.owned, self.pairs, self.shared, self.parts
        return tuple(flat.begins() for flat in flats)  # type: ignore[return-value]

    def gradients(self, phase: int, rank: int, rows: RowList) -> Gradients:
        """What one trainer exchanges, and updates, in a phase."""
        own = self.parts.lists(self.parts.bounds[phase, rank][None])
        at = self.parts.lists(self.parts.bounds[phase, rank][None], self.part_targets).items
        return Gradients(
            chosen(rows, self.owned.lists(self.owned.bounds[phase, rank][None])),
            self.pairs.lists(self.pairs.bounds[phase, rank]),
            self.pairs.lists(self.pairs.bounds[phase, :, rank], self.pair_targets),
            chosen(rows, self.shared.lists(self.shared.bounds[phase][None])),
            own,
            at,
        )


@dataclass(frozen=True, slots=True, eq=False)
class Division:
    """A plan, and how it is divided."""

    plan: Plan
    trainers: int
    _features: tuple[int, ...]
    _shares: _Shares
    _fetched: _Flow
    _values: _Flow
    _later_values: _Flow
    _takers: NDArray[np.uint64]
    _kinds: Ranks
    _evict_by: Ranks
    _victims_by: Ranks
    _flush_by: Ranks
    _replicas: bool

    def part(self, rank: int, *samples: tuple[int, ...]) -> Plan:
        """What one trainer does; of each micro-batch the samples of each trainer are given."""
        plan, shares = self.plan, self._shares
        mine = shares.used.lists(shares.used.bounds[rank][None])
        rows = chosen(plan.rows, mine)
        fetch = self._fetch(rank)
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
        victims = picked(plan.victims, self._victims_by == rank)
        return replace(
            plan,
            rows=rows,
            inverse=self._inverse(rank, mine),
            fetch=fetch,
            evict=picked(plan.evict, self._evict_by == rank),
            victims=Victims(victims.ids, victims.slots, victims.bounds, plan.victims.evict_after),
            flush=picked(plan.flush, self._flush_by == rank),
            hits=int(np.count_nonzero(self._kinds[mine.items] != FETCHED)),
            sharing=None,
            sync=sync,
        )

    def _dropped(self, leaving: RowList, writers: Ranks, rank: int) -> RowList:
        return picked(leaving, (writers != rank) & self._replicas)

    def _fetch(self, rank: int) -> Fetch:
        fetch = self.plan.fetch
        mine = (self._takers >> np.uint64(rank)) & np.uint64(1) != 0
        own = picked(fetch, mine)
        return Fetch(own.ids, own.slots, own.bounds, fetch.after[mine], fetch.slot_after[mine])

    def _inverse(self, rank: int, mine: Lists) -> tuple[Int32s, ...]:
        """The trainer's ids as indices into its own rows."""
        plan = self.plan
        assert plan.sharing is not None
        cuts, bounds = plan.sharing.cuts, plan.rows.bounds
        index = np.empty(len(plan.rows), np.int32)
        own_bounds = mine.bounds[0]
        index[mine.items] = np.arange(len(mine.items)) - np.repeat(own_bounds[:-1], np.diff(own_bounds))
        return tuple(
            localised(inverse[begin:end], int(bounds[table]), index)
            for inverse, begin, end, table in zip(
                plan.inverse, cuts[:, rank].tolist(), cuts[:, rank + 1].tolist(), self._features, strict=True
            )
        )


def chosen(rows: RowList, lists: Lists) -> RowList:
    """The rows that a single list names."""
    return RowList(rows.ids[lists.items], rows.slots[lists.items], lists.bounds[0])


def picked(rows: RowList, flags: NDArray[Any]) -> RowList:
    """The rows whose flag is set."""
    before = np.concatenate([[0], np.cumsum(flags)])
    return RowList(rows.ids[flags], rows.slots[flags], before[rows.bounds])


def localised(inverse: Int32s, begin: int, index: Int32s) -> Int32s:
    """Indices into the rows of a table, as indices into a trainer's own."""
    own = np.empty(len(inverse), np.int32)
    kernels.localise(inverse, begin, index, own)
    return own
