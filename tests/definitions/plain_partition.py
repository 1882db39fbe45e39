"""The division of plans once more, with dictionaries and lists: slow, short, and meant to be obviously right.

It cuts the same parts as `bagpipe.oracle.partition`, and tests compare the two field by field.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np

from bagpipe.oracle.plan import Fetch, Plan, Victims
from bagpipe.oracle.row_list import RowList
from bagpipe.oracle.sync_plan import Exchange, Routes, Sync
from bagpipe.oracle.tables import OracleTable

Place = tuple[int, int]
"""Slot space and slot."""


@dataclass
class _Use:
    """A row in a batch."""

    table: int
    index: int
    """Among the rows of the batch."""
    id: int
    slot: int
    users: set[int]
    holder: int | None
    """Who has its newest vector; None: everybody."""
    owner: int | None
    kind: str
    where: int
    """Its place at its holder."""
    moved: int
    """Its place at its owner."""
    freed: int
    """What others who use it wait for."""
    now: bool = True
    """Whether it is updated before the next iteration."""
    guests: dict[int, int] = field(default_factory=dict)
    """Its places at those who neither hold nor own it, by rank."""

    def at(self, rank: int) -> int:
        """Its place at a trainer."""
        if self.holder == rank:
            return self.where
        return self.moved if self.owner == rank else self.guests.get(rank, self.where)


@dataclass
class _Free:
    """A home place without a tenant."""

    place: int
    by: int
    """The last plan that had to do with it."""
    waits: bool = True
    """Whether its next tenant waits for that plan; not if the last one was its victim."""


class SimplePartition:
    """The twin of `Partition`, for a list of plans that is at hand as a whole."""

    def __init__(
        self,
        trainers: int,
        tables: Sequence[OracleTable],
        design: str,
        delayed: bool,
        costs: Sequence[float] = (),
        capacity: Sequence[int] = (),
        guests: Sequence[int] = (),
    ) -> None:
        self.trainers, self.tables, self.design, self.delayed = trainers, tables, design, delayed
        self.features = [t for t, table in enumerate(tables) for _ in table.features]
        self.costs = costs if design == "owned" else ()
        self.replicas = design in ("replicated", "lrpp")
        self.owner: dict[Place, int | None] = {}
        self.freed: dict[Place, int] = {}
        self.last_use: dict[Place, int] = {}
        self.place: dict[Place, int] = {}
        self.vacate(capacity, guests, -1)

    def vacate(self, capacity: Sequence[int], guests: Sequence[int], by: int) -> None:
        """All home places are free."""
        self.freed.clear()
        self.guests = list(guests) or [0] * (1 + max(table.group for table in self.tables))
        self.homes = [places - 3 * most for places, most in zip(capacity, self.guests, strict=False)]
        self.free = {
            (group, rank): [_Free(place, by) for place in range(self.homes[group])]
            for group, most in enumerate(self.guests)
            for rank in range(self.trainers)
            if most
        }

    def parts(self, plans: Sequence[Plan], samples: Sequence[tuple[int, ...]]) -> list[list[Plan]]:
        """For each plan the part of each trainer."""
        followed = [self.follow(plan) for plan in plans]
        uses = [of_plan for of_plan, _ in followed]
        for x, of_plan in enumerate(uses):
            again = {(u.table, u.slot) for u in (uses[x + 1] if x + 1 < len(uses) else []) if u.kind == "next"}
            for use in of_plan:
                use.now = not self.delayed or (use.table, use.slot) in again
        uses += [[], []]
        return [
            [self.part(plan, uses[x : x + 3], followed[x][1], rank, samples[x]) for rank in range(self.trainers)]
            for x, plan in enumerate(plans)
        ]

    def follow(self, plan: Plan) -> tuple[list[_Use], dict[str, list[Any]]]:
        """How each row comes to its users; and who reads and evicts."""
        assert plan.sharing is not None
        if plan.capacity:
            self.vacate(plan.capacity, plan.guests, plan.iteration - 1)
        who: dict[str, list[Any]] = {"victims": self.writers(plan.victims, plan.iteration, waits=False)}
        who["places"] = self.move_in(plan)
        leaving = {(t, slot) for t, slot, _ in self.listed(plan.evict, plan.evict.slots)}
        uses = []
        for index, (t, slot, row) in enumerate(self.listed(plan.rows, plan.rows.ids)):
            place, users = (self.tables[t].group, slot), self.users(plan, t, index)
            last = self.last_use.get(place)
            kind = "fetched" if last is None else "next" if last == plan.iteration - 1 else "later"
            if self.design == "lrpp" and (t, slot) in leaving and len(users) == 1:
                (self.owner[place],) = users
            self.last_use[place] = plan.iteration
            use = _Use(
                t, index, row, slot, users, self.owner[place], self.owner[place], kind, self.place[place],
                self.place[place], self.freed[place],
            )  # fmt: skip
            uses.append(use)
            own = self.guests[place[0]] > 0
            if own:
                use.freed = max(-1, plan.iteration - 3) if kind == "fetched" and self.design == "owned" else -1
            if self.costs and kind != "fetched":
                self.move(plan, use, own)
        self.place_guests(plan, uses)
        of_batch = {(use.table, use.slot): use for use in uses}
        who["owners"], who["takers"], who["uses"] = [], [], []
        for t, slot, _ in self.listed(plan.fetch, plan.fetch.slots):
            place, use = (self.tables[t].group, slot), of_batch.get((t, slot))
            if use is None:  # is brought along: its owner has it from now on, and sends it to its first users
                self.last_use[place] = plan.iteration
            who["owners"].append(self.owner[place])
            who["takers"].append(self.takers(self.owner[place], set() if use is None else use.users))
            who["uses"].append(use)
        return uses, who | {"evict": self.writers(plan.evict, plan.iteration, waits=True)}

    def move_in(self, plan: Plan) -> list[tuple[int, int]]:
        """Fetched rows get their owners and places; these places, and what they wait for."""
        assert plan.sharing is not None
        places, homes = [], plan.sharing.homes.tolist()
        for (t, slot, freed), home in zip(self.listed(plan.fetch, plan.fetch.slot_after), homes, strict=True):
            group = self.tables[t].group
            where, owner = slot, None if self.replicas else home
            if self.guests[group]:
                if not self.free[group, home]:
                    owner = max(range(self.trainers), key=lambda rank: len(self.free[group, rank]))
                free = self.free[group, owner].pop(0)
                where, freed = free.place, free.by if free.waits else -1
            else:  # of a tenant before a victim too: who had to write it may be late
                freed = max(freed, self.freed.get((group, slot), -1))
            self.owner[group, slot], self.freed[group, slot], self.place[group, slot] = owner, freed, where
            self.last_use.pop((group, slot), None)
            places.append((where, freed))
        return places

    def move(self, plan: Plan, use: _Use, own: bool) -> None:
        """The row of a use goes to a better owner, if there is one, and if that has a place which is free when the row
        is sent: right after the iteration before, or after the one before that."""
        group = self.tables[use.table].group
        owner = self.better_owner(plan, use.table, use.index, use.slot, use.users, use.holder)
        if own and owner != use.holder:
            sent = plan.iteration - (1 if use.kind == "next" or not self.delayed else 2)
            free = self.free[group, owner]
            if not free or free[0].by >= sent:
                return
            taken = free.pop(0)
            use.moved = taken.place
            use.freed = taken.by if taken.waits else -1
            self.free[group, use.holder].append(_Free(use.where, plan.iteration))
            self.place[group, use.slot] = use.moved
        use.owner = self.owner[group, use.slot] = owner

    def place_guests(self, plan: Plan, uses: list[_Use]) -> None:
        """Who uses a row and does not own it has it in one of the places that are this plan's turn."""
        for group, most in enumerate(self.guests):
            for rank in range(self.trainers) if most else ():
                elsewhere = [
                    use
                    for use in uses
                    if self.tables[use.table].group == group
                    and rank in use.users
                    and rank not in (use.holder, use.owner)
                ]
                assert len(elsewhere) <= most
                for number, use in enumerate(elsewhere):
                    use.guests[rank] = self.homes[group] + plan.iteration % 3 * most + number

    def better_owner(self, plan: Plan, table: int, index: int, slot: int, users: set[int], holder: int | None) -> Any:
        """The user for whom the next uses speak more than for the owner, by more than a move costs; or the owner."""
        assert plan.sharing is not None
        cost, uses = self.costs[table], (plan.sharing.next_users[index], plan.sharing.later_users[index])

        def worth(rank: Any) -> int:
            return (rank in users) + 2 * sum(int(mask) >> rank & 1 for mask in (uses[:1] if cost < 0.5 else uses))

        best = [rank for rank in sorted(users) if worth(rank) - worth(holder) > cost]
        best = [rank for rank in best if worth(rank) == max(map(worth, best))]
        return best[slot % len(best)] if best else holder

    def users(self, plan: Plan, table: int, index: int) -> set[int]:
        """The trainers one of whose ids is the row."""
        assert plan.sharing is not None
        return {
            rank
            for f, inverse in enumerate(plan.inverse)
            for rank in range(self.trainers)
            if self.features[f] == table
            and index - plan.rows.bounds[table] in inverse[slice(*plan.sharing.cuts[f, rank : rank + 2])]
        }

    def takers(self, owner: int | None, users: set[int]) -> set[int]:
        """Who reads a row from the store."""
        if owner is None:
            return set(range(self.trainers))
        return {owner} if self.design == "partitioned" else {owner} | users

    def writers(self, rows: RowList, iteration: int, waits: bool) -> list[tuple[int, int]]:
        """Who writes a row to the store, and from where; its place is free then."""
        found = []
        for t, slot, _ in self.listed(rows, rows.slots):
            group = self.tables[t].group
            owner, place = self.owner[group, slot], self.place[group, slot]
            found.append((slot % self.trainers if owner is None else owner, place))
            if self.guests[group]:
                self.free[group, owner].append(_Free(place, iteration, waits))
        return found

    def listed(self, rows: RowList, values: Any) -> list[tuple[int, int, int]]:
        """Table, slot and one more number of each row."""
        tables = np.repeat(np.arange(len(self.tables)), np.diff(rows.bounds))
        return list(zip(tables.tolist(), rows.slots.tolist(), values.tolist(), strict=True))

    def part(self, plan: Plan, uses: list[list[_Use]], who: dict[str, list[Any]], rank: int, samples: Any) -> Plan:
        """What one trainer does; `uses` of the plan, and of the next two."""
        mine = [use for use in uses[0] if rank in use.users]
        delayed_kinds = ("next",) if self.delayed else ("next", "later")
        places = {name: [place for _, place in who[name]] for name in ("evict", "victims")}
        writes = {name: [by == rank for by, _ in who[name]] for name in ("evict", "victims")}
        drops = {name: [self.replicas and not own for own in writes[name]] for name in writes}
        sync = Sync(
            rank, (samples,), self.values(uses[0], rank, ("fetched",) if self.design == "partitioned" else ()),
            *self.gradients(plan, uses[0], rank, True), self.values(uses[1], rank, delayed_kinds),
            *self.gradients(plan, uses[0], rank, False), self.values(uses[2] if self.delayed else [], rank, ("later",)),
            self.rows(plan.evict, drops["evict"], places["evict"]),
            self.rows(plan.victims, drops["victims"], places["victims"]),
        )  # fmt: skip
        whole = np.array([owner == rank for owner in who["owners"]], bool)
        taken = [rank in takers for takers in who["takers"]]
        homes = zip(who["uses"], who["owners"], who["places"], strict=True)
        fetched = [at if use is None or owner == rank else (use.at(rank), use.freed) if taken[n] else (0, 0)
                   for n, (use, owner, at) in enumerate(homes)]  # fmt: skip
        fetch = self.rows(plan.fetch, taken, [place for place, _ in fetched])
        slot_after = np.array([freed for _, freed in fetched], np.int32)[taken]
        victims = self.rows(plan.victims, writes["victims"], places["victims"])
        return replace(
            plan, rows=self.used(plan, uses[0], rank, mine),
            inverse=self.inverse(plan, rank, mine),
            fetch=Fetch(
                fetch.ids, fetch.slots, fetch.bounds, plan.fetch.after[taken], slot_after,
                whole[taken] if self.design == "owned" else None,
            ),
            evict=self.rows(plan.evict, writes["evict"], places["evict"]),
            victims=Victims(victims.ids, victims.slots, victims.bounds, plan.victims.evict_after),
            hits=sum(use.kind != "fetched" for use in mine), sharing=None, sync=sync, guests=(),
        )  # fmt: skip

    def inverse(self, plan: Plan, rank: int, mine: list[_Use]) -> tuple[np.ndarray, ...]:
        """The trainer's ids as indices into its rows of their table."""
        assert plan.sharing is not None
        own = []
        for f, inverse in enumerate(plan.inverse):
            t, cuts = self.features[f], plan.sharing.cuts[f]
            numbers = [use.index - plan.rows.bounds[t] for use in mine if use.table == t]
            own.append(np.array([numbers.index(i) for i in inverse[cuts[rank] : cuts[rank + 1]]], np.int32))
        return tuple(own)

    def gradients(self, plan: Plan, uses: list[_Use], rank: int, now: bool) -> tuple[Exchange, RowList]:
        """Who adds what to what, in a phase."""
        mine = [use for use in uses if rank in use.users]
        updated = [use for use in uses if use.now == now and use.owner in (rank, None)]

        def positions(among: list[_Use], chosen: Callable[[_Use], bool]) -> list[tuple[int, int]]:
            """Table, and index among those of the table, of some of the rows."""
            of_table = {use.index: [o.index for o in among if o.table == use.table] for use in among}
            return [(use.table, of_table[use.index].index(use.index)) for use in among if chosen(use)]

        ranks = range(self.trainers)
        exchange = Exchange(
            self.lists(
                [positions(mine, lambda use, o=owner: use.now == now and use.owner in (o, None)) for owner in ranks]
            ),
            self.lists([positions(updated, lambda use, sender=sender: sender in use.users) for sender in ranks]),
        )
        return exchange, self.used(plan, uses, rank, updated)

    def values(self, uses: list[_Use], rank: int, kinds: tuple[str, ...]) -> Exchange:
        """Vectors of rows that come to their users in these ways."""

        def sent(holder: int, user: int) -> list[_Use]:
            return [u for u in uses if u.kind in kinds and u.holder == holder != user and user in u.users]

        def listed(pairs: list[tuple[int, int]]) -> Routes:
            found = [[(use, use.owner == user) for use in sent(holder, user)] for holder, user in pairs]
            routes = self.lists([[(use.table, use.at(rank)) for use, _ in uses] for uses in found])
            whole = np.array([moves for uses in found for _, moves in uses], bool)
            return replace(routes, whole=whole if whole.any() else None)

        ranks = range(self.trainers)
        received = [use for holder in ranks for use in sent(holder, rank)]
        return Exchange(
            listed([(rank, user) for user in ranks]), listed([(holder, rank) for holder in ranks]),
            max([use.freed for use in received], default=-1),
            np.array([use.id for use in received if use.owner == rank], np.int64),
        )  # fmt: skip

    def used(self, plan: Plan, uses: list[_Use], rank: int, chosen: list[_Use]) -> RowList:
        """Some of the rows of a plan, where a trainer has them."""
        flags = [use in chosen for use in uses]
        return self.rows(plan.rows, flags, [use.at(rank) if use in chosen else 0 for use in uses])

    def rows(self, rows: RowList, flags: list[bool], places: list[int]) -> RowList:
        """Those whose flag is set, in their places."""
        chosen = np.array(flags, bool)
        bounds = [int(chosen[:bound].sum()) for bound in rows.bounds]
        return RowList(rows.ids[chosen], np.array(places, np.int32)[chosen], np.array(bounds, np.int64))

    def lists(self, lists: list[list[tuple[int, int]]]) -> Routes:
        """Lists of (table, item), end to end."""
        bounds, end = [], 0
        for items in lists:
            bounds.append([end + sum(table < t for table, _ in items) for t in range(len(self.tables) + 1)])
            end += len(items)
        flat = [item for items in lists for _, item in items]
        return Routes(np.array(flat, np.int32), np.array(bounds, np.int64))
