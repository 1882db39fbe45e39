"""Divides plans among trainers: who fetches, updates, sends and writes back each row (paper, section 3.3). Pure.

The oracle plans with slots, trainers have places (`places.py`): what a trainer's part of a plan calls slots are its own
places. Each row in a cache has *updaters*, each use of it *users*: users send their gradients to all updaters, and an
updater sends the new vector to those of the next users that do not update it themselves. What iterations x and x + 1
both use is exchanged between them; what x + 1 does not use is updated beside x + 1, and sent beside the iteration
before its next use. So every use of a row finds its newest value, and nothing is sent that nobody uses (I3).
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import NamedTuple, TypeVar

import numpy as np
from numpy.typing import NDArray

from bagpipe.arrays import Int32s, Int64s, Masks, Ranks
from bagpipe.errors import ConfigError
from bagpipe.kernels import partition as kernels
from bagpipe.kernels.oracle import HALF
from bagpipe.kernels.partition import AFTERWARDS, ALL, FETCHED, LATER, NEXT, NOW, Found, Homes, Slots, Taken, Used
from bagpipe.oracle.design import DESIGNS, RULES, Design, Rules
from bagpipe.oracle.oracle import mask_type
from bagpipe.oracle.places import TURNS, num_homes
from bagpipe.oracle.plan import Fetch, Plan, Sharing, Victims
from bagpipe.oracle.row_list import RowList
from bagpipe.oracle.sync_plan import Exchange, Routes, Sync
from bagpipe.oracle.tables import OracleTable

Payload = TypeVar("Payload")

AHEAD = 2
"""Plans that must be known behind one before it can be divided: what it exchanges depends on who uses its rows next."""


class Partition:
    """Takes plans in order; remembers who owns what is in the caches, and where it is there."""

    def __init__(
        self,
        trainers: int,
        tables: Sequence[OracleTable],
        capacity: Sequence[int],
        guests: Sequence[int] = (),
        *,
        design: Design = "owned",
        delayed: bool = True,
        move_costs: Sequence[float] = (),
    ) -> None:
        """`capacity` and `guests` are those of the `Places` of each group; without guests places are numbered alike.

        `move_costs` tells of each table what a row sends more when it changes its owner, in vectors: that of its state,
        since its vector is sent anyway. None: rows keep their owners.
        """
        masks = mask_type(trainers)
        if design not in DESIGNS:
            raise ConfigError(f"sync.design is {design!r}: give one of {', '.join(DESIGNS)}")
        self.trainers, self.delayed, self._rules = trainers, delayed, RULES[design]
        assert not (self._rules.copies and any(guests)), "who has copies has them in the same place everywhere"
        assert len(move_costs) in (0, len(tables)), "of each table, or of none"
        self._costs = np.full(len(tables), kernels.NEVER)
        if self._rules.moves and move_costs:
            self._costs[:] = move_costs
        bits = masks(1) << np.arange(trainers, dtype=masks)
        self._bits: Masks = np.append(bits, bits.sum(dtype=masks))
        self._groups = [table.group for table in tables]
        self._vacate(capacity, guests, -1)
        self._features: Int64s = np.repeat(np.arange(len(tables)), [len(table.features) for table in tables])
        sent_at = [-1 if self._rules.users_read else FETCHED, NEXT, LATER if delayed else NEXT]
        self._sent_at: Ranks = np.array([-1] * 3 if self._rules.copies else sent_at, np.int8)
        self._waiting: deque[Uses] = deque()

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
            self._follow(plan)
            payloads.append(payload)
            if len(self._waiting) > AHEAD:
                yield self._divide(), payloads.popleft()
        while self._waiting:
            yield self._divide(), payloads.popleft()
        if error is not None:
            raise error

    def _vacate(self, capacity: Sequence[int], guests: Sequence[int], freed_by: int) -> None:
        """Nobody is in any slot; all places were freed by this plan."""
        guests, trainers, group = guests or [0] * len(capacity), self.trainers, np.array(self._groups)
        homes = [num_homes(places, most) if most else 0 for places, most in zip(capacity, guests, strict=True)]
        own = np.array(guests) > 0
        lists = np.where(own, trainers * (np.cumsum(own) - 1), kernels.ALIKE)
        sizes = np.repeat(np.array(homes, np.int64)[own], trainers)
        free = _numbered(sizes)
        self._homes = Homes(
            lists[group], np.concatenate([[0], np.cumsum(sizes)]), np.zeros_like(sizes), sizes.copy(), free,
            np.full_like(free, freed_by),
        )  # fmt: skip
        self._guests, self._first_guests = np.array(guests)[group], np.array(homes)[group]
        num_slots = np.where(own, trainers * np.array(homes), capacity)
        bases = np.cumsum([0, *num_slots])[group]
        state = np.full(num_slots.sum(), freed_by << HALF, np.int64)
        self._slots = Slots(bases, state, _numbered(num_slots), self._bits, self._costs)

    def _follow(self, plan: Plan) -> None:
        """Follow a plan through the slots: victims leave, fetched rows move in, rows are used, others leave."""
        if plan.capacity:
            self._vacate(plan.capacity, plan.guests, plan.iteration - 1)
        fetch, sharing, known, homes = plan.fetch, plan.sharing, self._slots, self._homes
        assert sharing is not None, "plans for one trainer are not divided"
        victims, evict = plan.victims, plan.evict
        victims_at = Leaving(*kernels.move_out(
            victims.bounds, victims.slots, known, homes, kernels.as_victim(plan.iteration)
        ))  # fmt: skip
        if self._rules.lone:
            kernels.mark_leaving(evict.bounds, evict.slots, known)
        owners = np.full(len(fetch), ALL, np.int8) if self._rules.copies else sharing.homes.copy()
        places, indices = np.empty((2, len(fetch)), np.int32)
        readers: Masks = np.empty(len(fetch), known.bits.dtype)
        taken = Taken(fetch.bounds, fetch.slots, fetch.slot_after.copy(), owners, places, indices, readers)
        has_room = kernels.move_in(taken, known, homes)
        assert has_room, f"plan {plan.iteration} fetches more rows than there are places"
        found = self._track(plan, sharing, taken)
        evict_at = Leaving(*kernels.move_out(evict.bounds, evict.slots, known, homes, plan.iteration))
        first_guests = self._first_guests + plan.iteration % TURNS * self._guests
        self._waiting.append(
            Uses(
                plan, sharing, found, taken, known.bits, self._sent_at, self._rules.moves, evict_at, victims_at,
                homes.lists, first_guests,
            )
        )  # fmt: skip

    def _track(self, plan: Plan, sharing: Sharing, taken: Taken) -> Found:
        """What becomes of the rows of a plan."""
        rows, masks, count = plan.rows, self._bits.dtype, len(plan.rows)
        phase = np.full(count, AFTERWARDS if self.delayed else NOW, np.int8)
        held, updaters = np.empty((2, count), masks)
        freed, places, moved = np.empty((3, count), np.int32)
        found = Found(held, updaters, np.empty(count, np.int8), phase, freed, places, moved)
        used = Used(rows.bounds, rows.slots, sharing.users, sharing.next_users, sharing.later_users, sharing.before)
        bounds, phases = rows.bounds, phase[:0]
        if self._waiting:
            bounds, phases = self._waiting[-1].plan.rows.bounds, self._waiting[-1].found.phase
        met = kernels.track_owners(
            plan.iteration, used, taken, self._slots, self._homes, self._rules.users_read,
            AHEAD if self.delayed else 1, TURNS, found, bounds, phases,
        )  # fmt: skip
        assert met == count - plan.hits, f"plan {plan.iteration} fetches rows of its batch in another order"
        return found

    def _divide(self) -> Division:
        uses, *after = [*self._waiting, None, None][: AHEAD + 1]
        self._waiting.popleft()
        assert uses is not None
        return Division(uses, after[0], after[1], self._features, self._rules)


class Leaving(NamedTuple):
    """Rows that leave: who writes each, and where they have it."""

    by: Ranks
    places: Int32s

    def of(self, rows: RowList, flags: NDArray[np.bool_]) -> RowList:
        """Those of the rows whose flag is set."""
        chosen = np.flatnonzero(flags)
        return RowList(rows.ids[chosen], self.places[chosen], np.searchsorted(chosen, rows.bounds))


@dataclass(eq=False)
class Uses:
    """A plan, and what was found out about its rows. Nothing changes once it is divided: any thread may cut parts."""

    plan: Plan
    sharing: Sharing
    found: Found
    taken: Taken
    """About those that are fetched."""
    bits: Masks
    sent_at: Ranks
    """When vectors of rows that arrive in each way are sent; -1: never."""
    moves: bool
    """Whether rows change their owners."""
    evict: Leaving
    victims: Leaving
    lists: Int64s
    first_guests: Int64s
    """By table, as `places_at` takes them."""

    def __post_init__(self) -> None:
        self._places: dict[int, Int32s] = {}

    def places(self, rank: int) -> Int32s:
        """Where a trainer has the rows that it uses or owns; asked for by this plan's part and by two before it."""
        if rank not in self._places:
            self._places[rank] = kernels.places_at(
                self.plan.rows.bounds, self.sharing.users, self.bits[rank], self.found, self.lists, self.first_guests
            )
        return self._places[rank]

    @cached_property
    def gradients(self) -> Routes:
        """From users to updaters, by phase."""
        return self._routes(self.sharing.users, self.found.updaters, self.found.phase, 2)

    @cached_property
    def vectors(self) -> Routes:
        """From who has them to other users, by when they are sent; a row goes whole to who updates it from then on."""
        found = self.found
        routes = self._routes(found.held, self.sharing.users & ~found.held, self.sent_at[found.arrival], 3)
        if not self.moves:
            return routes
        receivers = np.tile(self.bits[:-1], len(routes.bounds) // (len(self.bits) - 1))
        counts = routes.bounds[:, -1] - routes.bounds[:, 0]
        return replace(routes, whole=found.updaters[routes.items] == np.repeat(receivers, counts))

    @cached_property
    def vector_places(self) -> Routes:
        """The same by where senders have the rows."""
        return replace(self.vectors, items=self.found.places[self.vectors.items])

    @cached_property
    def freed(self) -> Int32s:
        """Of each list of `vectors` the last plan that freed a place for its rows; -1: none."""
        begins, ends = self.vectors.bounds[:, 0], self.vectors.bounds[:, -1]
        last: Int32s = np.full(len(begins), -1, np.int32)
        if len(self.vectors):
            some = begins < ends
            last[some] = np.maximum.reduceat(self.found.freed[self.vectors.items], begins[some])
        return last

    def _routes(self, senders: Masks, receivers: Masks, when: Ranks, times: int) -> Routes:
        return Routes(*kernels.route(self.plan.rows.bounds, senders, receivers, when, times, len(self.bits) - 1))


@dataclass(frozen=True, slots=True, eq=False)
class Division:
    """A plan, and how it is divided: what a trainer does is cut out when it is asked for."""

    uses: Uses
    next: Uses | None
    after: Uses | None
    """The two plans behind it."""
    features: Int64s
    """The table of each."""
    rules: Rules

    @property
    def plan(self) -> Plan:
        """The whole."""
        return self.uses.plan

    @property
    def trainers(self) -> int:
        """How many share it."""
        return len(self.uses.bits) - 1

    def part(self, rank: int, *samples: tuple[int, ...]) -> Plan:
        """What one trainer does; of each micro-batch the samples of each trainer are given."""
        plan, uses = self.plan, self.uses
        users, found, bit = uses.sharing.users, uses.found, uses.bits[rank]
        mine, bounds, numbers = kernels.renumber(plan.rows.bounds, users, bit, found.phase, -1)
        gradients, updated = self._gradients(rank, NOW, numbers)
        later_gradients, later_updated = self._gradients(rank, AFTERWARDS, numbers)
        values, later_values = self._vectors(self.next, NEXT, rank), self._vectors(self.after, LATER, rank)
        leaving, places = ((plan.evict, uses.evict), (plan.victims, uses.victims)), uses.places(rank)
        sync = Sync(
            rank, samples, self._vectors(uses, FETCHED, rank), gradients, updated, values, later_gradients,
            later_updated, later_values, *(at.of(rows, (at.by != rank) & self.rules.copies) for rows, at in leaving),
        )  # fmt: skip
        evict, victims = (at.of(rows, at.by == rank) for rows, at in leaving)
        return replace(
            plan,
            rows=RowList(plan.rows.ids[mine], places[mine], bounds),
            inverse=self._inverse(rank, numbers),
            fetch=self._fetch(rank),
            evict=evict,
            victims=Victims(victims.ids, victims.slots, victims.bounds, plan.victims.evict_after),
            hits=int(np.count_nonzero(found.arrival[mine] != FETCHED)),
            sharing=None,
            sync=sync,
            guests=(),
        )

    def _gradients(self, rank: int, phase: int, own: Int32s) -> tuple[Exchange, RowList]:
        """What one trainer exchanges in a phase, and the rows that it updates."""
        rows, found, uses = self.plan.rows, self.uses.found, self.uses
        mine, bounds, numbers = kernels.renumber(rows.bounds, found.updaters, uses.bits[rank], found.phase, phase)
        send, receive = map(uses.gradients.lists, _of_rank(phase, rank, self.trainers))
        exchange = Exchange(Routes(own[send.items], send.bounds), Routes(numbers[receive.items], receive.bounds))
        return exchange, RowList(rows.ids[mine], uses.places(rank)[mine], bounds)

    def _vectors(self, uses: Uses | None, when: int, rank: int) -> Exchange:
        """What one trainer sends to users of rows, and receives as one, at a time."""
        if uses is None or when not in uses.sent_at:
            none = Routes(np.empty(0, np.int32), np.zeros((self.trainers, len(self.plan.rows.bounds)), np.int64))
            return Exchange(none, none)
        sent, received = _of_rank(when, rank, self.trainers)
        rows = uses.vectors.lists(received)
        taken = rows.moved().items if self.rules.moves else slice(0)
        return Exchange(
            uses.vector_places.lists(sent), replace(rows, items=uses.places(rank)[rows.items]),
            int(uses.freed[received].max()), uses.plan.rows.ids[taken],
        )  # fmt: skip

    def _fetch(self, rank: int) -> Fetch:
        """What one trainer reads: into home places what it owns, and what it only uses into those for guests."""
        fetch, uses, taken = self.plan.fetch, self.uses, self.uses.taken
        owned = taken.homes == rank
        guest = ~owned & (taken.rows >= 0)
        rows = taken.rows[guest]
        slots, slot_after = taken.places.copy(), taken.freed.copy()
        slots[guest], slot_after[guest] = uses.places(rank)[rows], uses.found.freed[rows]
        own = replace(fetch, slots=slots, slot_after=slot_after, whole=owned if self.rules.users_read else None)
        return own.only(taken.readers & uses.bits[rank] != 0)

    def _inverse(self, rank: int, own: Int32s) -> tuple[Int32s, ...]:
        """The trainer's ids as indices into its own rows."""
        sharing, bounds = self.uses.sharing, self.plan.rows.bounds
        ids = [inverse[begin:end] for inverse, (begin, end) in zip(
            self.plan.inverse, sharing.cuts[:, rank : rank + 2].tolist(), strict=True)]  # fmt: skip
        return tuple([own[bounds[t] :][part] for t, part in zip(self.features, ids, strict=True)])


def _of_rank(when: int, rank: int, trainers: int) -> tuple[slice, slice]:
    """The lists that a trainer sends to each, and those that it receives from each."""
    first = when * trainers * trainers
    sent = slice(first + rank * trainers, first + (rank + 1) * trainers)
    return sent, slice(first + rank, first + trainers * trainers, trainers)


def _numbered(sizes: Int64s) -> Int32s:
    """For each of some spaces, end to end, its places by number."""
    return np.concatenate([np.empty(0, np.int32), *(np.arange(size, dtype=np.int32) for size in sizes)])


def uses_ahead(move_costs: Sequence[float]) -> int:
    """How many next uses of rows an oracle has to tell of, for rows whose moves cost this."""
    if not move_costs:
        return 0
    return 1 if max(move_costs) < kernels.SHORT else 2
