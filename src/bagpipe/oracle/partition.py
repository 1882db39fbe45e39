"""Divides plans among trainers: who fetches, updates, sends and writes back each row (paper, section 3.3). Pure.

Slots are numbered alike on all trainers, but a trainer holds only the rows that it needs. Each row in the cache has
*updaters*, each use of it *users*: users send their gradients to all updaters, and an updater sends the new vector to
those of the next users that do not update it themselves. What iterations x and x + 1 both use is exchanged between
them; what x + 1 does not use is updated beside x + 1, and sent beside the iteration before its next use. So every use
of a row finds its newest value, and nothing is sent that nobody uses (I3).
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Literal, NamedTuple, TypeVar

import numpy as np
from numpy.typing import NDArray

from bagpipe.arrays import Int32s, Int64s, Masks, Ranks
from bagpipe.errors import ConfigError
from bagpipe.kernels import partition as kernels
from bagpipe.kernels.partition import AFTERWARDS, ALL, FETCHED, LATER, NEXT, NOW, Found, Slots, Taken, Used
from bagpipe.oracle.oracle import mask_type
from bagpipe.oracle.plan import Fetch, Plan, Sharing, Victims
from bagpipe.oracle.row_list import RowList
from bagpipe.oracle.sync_plan import Exchange, Routes, Sync
from bagpipe.oracle.tables import OracleTable

Design = Literal["owned", "partitioned", "replicated", "lrpp"]
Payload = TypeVar("Payload")

AHEAD = 2
"""Plans that must be known behind one before it can be divided: what it exchanges depends on who uses its rows next."""


class Rules(NamedTuple):
    """What makes a design."""

    copies: bool = False
    """All trainers update all rows, each its copy. Otherwise a row has one owner at a time: by the votes of its uses,
    as `assign=aware` finds homes; when it is fetched, who will use it most while it is cached, as far as is seen."""
    users_read: bool = False
    """A row's first users read its vector from the store; otherwise its owner sends it to them."""
    lone: bool = False
    """A row that one trainer uses and that then leaves is that trainer's alone, even where all have copies."""
    moves: bool = False
    """A row may go, with its state, to a user whose next two uses save more than that."""


RULES: dict[Design, Rules] = {
    "owned": Rules(users_read=True, moves=True),
    "partitioned": Rules(),
    "replicated": Rules(copies=True),
    "lrpp": Rules(copies=True, lone=True),
}
DESIGNS: tuple[Design, ...] = tuple(RULES)


class Partition:
    """Takes plans in order; remembers who owns what is in the cache."""

    def __init__(
        self,
        trainers: int,
        tables: Sequence[OracleTable],
        capacity: Sequence[int],
        *,
        design: Design = "owned",
        delayed: bool = True,
        move_costs: Sequence[float] = (),
    ) -> None:
        """`capacity` has the size of each slot space.

        `move_costs` tells of each table what a row sends more when it changes its owner, in vectors: that of its state,
        since its vector is sent anyway. None: rows keep their owners.
        """
        masks = mask_type(trainers)
        if design not in DESIGNS:
            raise ConfigError(f"sync.design is {design!r}: give one of {', '.join(DESIGNS)}")
        self.trainers, self.delayed, self._rules = trainers, delayed, RULES[design]
        assert len(move_costs) in (0, len(tables)), "of each table, or of none"
        self._costs = np.full(len(tables), kernels.NEVER)
        if self._rules.moves and move_costs:
            self._costs[:] = move_costs
        bits = masks(1) << np.arange(trainers, dtype=masks)
        self._bits: Masks = np.append(bits, bits.sum(dtype=masks))
        self._groups = [table.group for table in tables]
        self._slots = self._vacant(capacity)
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

    def _vacant(self, capacity: Sequence[int]) -> Slots:
        ends = np.cumsum([0, *capacity])
        return Slots(ends[self._groups].astype(np.int64), np.zeros(ends[-1], np.int64), self._bits, self._costs)

    def _follow(self, plan: Plan) -> None:
        """Follow a plan through the slots."""
        if plan.capacity:
            self._slots = self._vacant(plan.capacity)
        rows, fetch, sharing, known = plan.rows, plan.fetch, plan.sharing, self._slots
        assert sharing is not None, "plans for one trainer are not divided"
        victims_by = kernels.writers_of(
            plan.victims.bounds, plan.victims.slots, known
        )  # before others take their slots
        if self._rules.lone:
            kernels.mark_leaving(plan.evict.bounds, plan.evict.slots, known)
        count, masks = len(rows), known.bits.dtype
        phase = np.full(count, AFTERWARDS if self.delayed else NOW, np.int8)
        found = Found(
            np.empty(count, masks), np.empty(count, masks), np.empty(count, np.int8), phase, np.empty(count, np.int32)
        )
        used = Used(rows.bounds, rows.slots, sharing.users, sharing.next_users, sharing.later_users, sharing.before)
        readers: Masks = np.empty(len(fetch), masks)
        homes = np.full(len(fetch), ALL, np.int8) if self._rules.copies else sharing.homes
        taken = Taken(fetch.bounds, fetch.slots, fetch.slot_after, homes, readers)
        bounds, phases = rows.bounds, phase[:0]
        if self._waiting:
            bounds, phases = self._waiting[-1].plan.rows.bounds, self._waiting[-1].found.phase
        met = kernels.track_owners(plan.iteration, used, taken, known, self._rules.users_read, found, bounds, phases)
        assert met == len(rows) - plan.hits, f"plan {plan.iteration} fetches rows of its batch in another order"
        evict_by = kernels.writers_of(plan.evict.bounds, plan.evict.slots, known)
        self._waiting.append(
            Uses(plan, sharing, found, known.bits, self._sent_at, self._rules.moves, readers, evict_by, victims_by)
        )

    def _divide(self) -> Division:
        uses, *after = [*self._waiting, None, None][: AHEAD + 1]
        self._waiting.popleft()
        assert uses is not None
        return Division(uses, after[0], after[1], self._features, self._rules)


@dataclass(eq=False)
class Uses:
    """A plan, and what was found out about its rows. Nothing changes once it is divided: any thread may cut parts."""

    plan: Plan
    sharing: Sharing
    found: Found
    bits: Masks
    sent_at: Ranks
    """When vectors of rows that arrive in each way are sent; -1: never."""
    moves: bool
    """Whether rows change their owners."""
    readers: Masks
    evict_by: Ranks
    victims_by: Ranks
    """Who reads the rows that are fetched, and who writes those that leave."""

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
    def vector_slots(self) -> Routes:
        """The same by the slots of the rows."""
        return replace(self.vectors, items=self.plan.rows.slots[self.vectors.items])

    @cached_property
    def freed(self) -> Int32s:
        """Of each list of `vectors` the last plan that freed a slot of its rows; -1: none."""
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
        leaving = (plan.evict, uses.evict_by), (plan.victims, uses.victims_by)
        sync = Sync(
            rank, samples, self._vectors(uses, FETCHED, rank), gradients, updated, values, later_gradients,
            later_updated, later_values, *(_flagged(rows, (by != rank) & self.rules.copies) for rows, by in leaving),
        )  # fmt: skip
        evict, victims = (_flagged(rows, by == rank) for rows, by in leaving)
        return replace(
            plan,
            rows=RowList(plan.rows.ids[mine], plan.rows.slots[mine], bounds),
            inverse=self._inverse(rank, numbers),
            fetch=self._fetch(rank),
            evict=evict,
            victims=Victims(victims.ids, victims.slots, victims.bounds, plan.victims.evict_after),
            hits=int(np.count_nonzero(found.arrival[mine] != FETCHED)),
            sharing=None,
            sync=sync,
        )

    def _gradients(self, rank: int, phase: int, own: Int32s) -> tuple[Exchange, RowList]:
        """What one trainer exchanges in a phase, and the rows that it updates."""
        rows, found, uses = self.plan.rows, self.uses.found, self.uses
        mine, bounds, numbers = kernels.renumber(rows.bounds, found.updaters, uses.bits[rank], found.phase, phase)
        send, receive = map(uses.gradients.lists, _of_rank(phase, rank, self.trainers))
        exchange = Exchange(Routes(own[send.items], send.bounds), Routes(numbers[receive.items], receive.bounds))
        return exchange, RowList(rows.ids[mine], rows.slots[mine], bounds)

    def _vectors(self, uses: Uses | None, when: int, rank: int) -> Exchange:
        """What one trainer sends to users of rows, and receives as one, at a time."""
        if uses is None or when not in uses.sent_at:
            none = Routes(np.empty(0, np.int32), np.zeros((self.trainers, len(self.plan.rows.bounds)), np.int64))
            return Exchange(none, none)
        sent, received = _of_rank(when, rank, self.trainers)
        taken = uses.vectors.lists(received).moved().items if self.rules.moves else slice(0)
        return Exchange(
            uses.vector_slots.lists(sent), uses.vector_slots.lists(received), int(uses.freed[received].max()),
            uses.plan.rows.ids[taken],
        )  # fmt: skip

    def _fetch(self, rank: int) -> Fetch:
        fetch, uses = self.plan.fetch, self.uses
        whole = uses.sharing.homes == rank if self.rules.users_read else None
        return replace(fetch, whole=whole).only(uses.readers & uses.bits[rank] != 0)

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


def _flagged(rows: RowList, flags: NDArray[np.bool_]) -> RowList:
    chosen = np.flatnonzero(flags)
    return RowList(rows.ids[chosen], rows.slots[chosen], np.searchsorted(chosen, rows.bounds))


def uses_ahead(move_costs: Sequence[float]) -> int:
    """How many next uses of rows an oracle has to tell of, for rows whose moves cost this."""
    if not move_costs:
        return 0
    return 1 if max(move_costs) < kernels.SHORT else 2
