"""The division of plans once more, with dictionaries and lists: slow, short, and meant to be obviously right.

It cuts the same parts as `bagpipe.oracle.partition`, and tests compare the two field by field.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
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
    freed: int
    now: bool = True
    """Whether it is updated before the next iteration."""


class SimplePartition:
    """The twin of `Partition`, for a list of plans that is at hand as a whole."""

    def __init__(
        self, trainers: int, tables: Sequence[OracleTable], design: str, delayed: bool, costs: Sequence[float] = ()
    ) -> None:
        self.trainers, self.tables, self.design, self.delayed = trainers, tables, design, delayed
        self.features = [t for t, table in enumerate(tables) for _ in table.features]
        self.costs = costs if design == "owned" else ()
        self.replicas = design in ("replicated", "lrpp")
        self.owner: dict[Place, int | None] = {}
        self.freed: dict[Place, int] = {}
        self.last_use: dict[Place, int] = {}

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
        homes = plan.sharing.homes.tolist()
        who: dict[str, list[Any]] = {"victims": self.writers(plan.victims)}
        for (t, slot, freed), home in zip(self.listed(plan.fetch, plan.fetch.slot_after), homes, strict=True):
            place = (self.tables[t].group, slot)
            self.owner[place] = None if self.replicas else home
            self.freed[place] = freed
            self.last_use.pop(place, None)
        leaving = {(t, slot) for t, slot, _ in self.listed(plan.evict, plan.evict.slots)}
        uses = []
        for index, (t, slot, row) in enumerate(self.listed(plan.rows, plan.rows.ids)):
            place, users = (self.tables[t].group, slot), self.users(plan, t, index)
            last = self.last_use.get(place)
            kind = "fetched" if last is None else "next" if last == plan.iteration - 1 else "later"
            if self.design == "lrpp" and (t, slot) in leaving and len(users) == 1:
                (self.owner[place],) = users
            self.last_use[place] = plan.iteration
            holder = self.owner[place]
            if self.costs and kind != "fetched":
                self.owner[place] = self.better_owner(plan, t, index, slot, users, holder)
            uses.append(_Use(t, index, row, slot, users, holder, self.owner[place], kind, self.freed[place]))
        of_batch = {(use.table, use.slot): use for use in uses}
        who["owners"], who["takers"] = [], []
        for t, slot, _ in self.listed(plan.fetch, plan.fetch.slots):
            place, use = (self.tables[t].group, slot), of_batch.get((t, slot))
            if use is None:  # is brought along: its owner has it from now on, and sends it to its first users
                self.last_use[place] = plan.iteration
            who["owners"].append(self.owner[place])
            who["takers"].append(self.takers(self.owner[place], set() if use is None else use.users))
        return uses, who | {"evict": self.writers(plan.evict)}

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

    def writers(self, rows: RowList) -> list[int]:
        """Who writes a row to the store."""
        owners = [(self.owner[self.tables[t].group, slot], slot) for t, slot, _ in self.listed(rows, rows.slots)]
        return [slot % self.trainers if owner is None else owner for owner, slot in owners]

    def listed(self, rows: RowList, values: Any) -> list[tuple[int, int, int]]:
        """Table, slot and one more number of each row."""
        tables = np.repeat(np.arange(len(self.tables)), np.diff(rows.bounds))
        return list(zip(tables.tolist(), rows.slots.tolist(), values.tolist(), strict=True))

    def part(self, plan: Plan, uses: list[list[_Use]], who: dict[str, list[Any]], rank: int, samples: Any) -> Plan:
        """What one trainer does; `uses` of the plan, and of the next two."""
        mine = [use for use in uses[0] if rank in use.users]
        delayed_kinds = ("next",) if self.delayed else ("next", "later")
        drops = {name: [self.replicas and by != rank for by in who[name]] for name in ("evict", "victims")}
        sync = Sync(
            rank, (samples,), self.values(uses[0], rank, ("fetched",) if self.design == "partitioned" else ()),
            *self.gradients(plan, uses[0], rank, True), self.values(uses[1], rank, delayed_kinds),
            *self.gradients(plan, uses[0], rank, False), self.values(uses[2] if self.delayed else [], rank, ("later",)),
            self.rows(plan.evict, drops["evict"]), self.rows(plan.victims, drops["victims"]),
        )  # fmt: skip
        whole = np.array([owner == rank for owner in who["owners"]], bool)
        taken = [rank in takers for takers in who["takers"]]
        fetch, victims = self.rows(plan.fetch, taken), self.rows(plan.victims, [by == rank for by in who["victims"]])
        return replace(
            plan, rows=self.rows(plan.rows, [rank in use.users for use in uses[0]]),
            inverse=self.inverse(plan, rank, mine),
            fetch=Fetch(
                fetch.ids, fetch.slots, fetch.bounds, plan.fetch.after[taken], plan.fetch.slot_after[taken],
                whole[taken] if self.design == "owned" else None,
            ),
            evict=self.rows(plan.evict, [by == rank for by in who["evict"]]),
            victims=Victims(victims.ids, victims.slots, victims.bounds, plan.victims.evict_after),
            hits=sum(use.kind != "fetched" for use in mine), sharing=None, sync=sync,
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
        return exchange, self.rows(plan.rows, [use in updated for use in uses])

    def values(self, uses: list[_Use], rank: int, kinds: tuple[str, ...]) -> Exchange:
        """Vectors of rows that come to their users in these ways."""

        def sent(holder: int, user: int) -> list[_Use]:
            return [u for u in uses if u.kind in kinds and u.holder == holder != user and user in u.users]

        def listed(pairs: list[tuple[int, int]]) -> Routes:
            found = [[(use, use.owner == user) for use in sent(holder, user)] for holder, user in pairs]
            routes = self.lists([[(use.table, use.slot) for use, _ in uses] for uses in found])
            whole = np.array([moves for uses in found for _, moves in uses], bool)
            return replace(routes, whole=whole if whole.any() else None)

        ranks = range(self.trainers)
        received = [use for holder in ranks for use in sent(holder, rank)]
        return Exchange(
            listed([(rank, user) for user in ranks]), listed([(holder, rank) for holder in ranks]),
            max([use.freed for use in received], default=-1),
            np.array([use.id for use in received if use.owner == rank], np.int64),
        )  # fmt: skip

    def rows(self, rows: RowList, flags: list[bool]) -> RowList:
        """Those whose flag is set."""
        chosen = np.array(flags, bool)
        bounds = [int(chosen[:bound].sum()) for bound in rows.bounds]
        return RowList(rows.ids[chosen], rows.slots[chosen], np.array(bounds, np.int64))

    def lists(self, lists: list[list[tuple[int, int]]]) -> Routes:
        """Lists of (table, item), end to end."""
        bounds, end = [], 0
        for items in lists:
            bounds.append([end + sum(table < t for table, _ in items) for t in range(len(self.tables) + 1)])
            end += len(items)
        flat = [item for items in lists for _, item in items]
        return Routes(np.array(flat, np.int32), np.array(bounds, np.int64))
