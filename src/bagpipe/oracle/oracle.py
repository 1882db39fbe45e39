"""The oracle: reads batches ahead and turns the order of the data into plans, one an iteration (paper, Algorithm 1).

A pure function of data order and settings. It remembers the window and where each row is, nothing else; the cache can't
overflow because slots are only handed out while they are free (I5).

`plans` is the loop of Algorithm 1, `read` its lines 5 to 10, `emit` its lines 11 to 24.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import nullcontext
from dataclasses import replace
from functools import partial
from itertools import pairwise
from typing import NamedTuple, TypeVar

import numpy as np
from numpy.typing import NDArray

from bagpipe.arrays import Int32s, Int64s, NextUses
from bagpipe.cache import num_bytes, told_rows
from bagpipe.errors import CapacityError, ConfigError
from bagpipe.kernels import oracle as kernels
from bagpipe.kernels.oracle import KEEP, Rows
from bagpipe.kernels.sharing import RowUsers, choose_owners, find_users, note_users, tell_users
from bagpipe.kernels.victims import find_absent, note_next_uses
from bagpipe.oracle.audit import Audit
from bagpipe.oracle.places import Places
from bagpipe.oracle.plan import Fetch, Plan, Sharing, Victims
from bagpipe.oracle.reader import CutIds, Reader
from bagpipe.oracle.row_list import RowList
from bagpipe.oracle.shard import BYTES_DIRECT_MAX, ROWS_DIRECT_MAX, MaskType, Shard, make_shards
from bagpipe.oracle.slots import NEVER, NONE, Group, IdleQueue, SlotFacts, lowest
from bagpipe.oracle.tables import OracleTable, described
from bagpipe.oracle.tenants import Tenants
from bagpipe.policies import is_own, make_policy
from bagpipe.policies.base import Demand, Extra, Lookahead, Policy, Wanted
from bagpipe.policies.sampled import FrequencyPolicy, Sample
from bagpipe.policies.windows import Times
from bagpipe.policy_options import DEFAULTS, PolicyOptions

Ids = Sequence[NDArray[np.integer]] | CutIds
Payload = TypeVar("Payload")
Divide = Callable[[Sequence[int], Sequence[int]], Places | None]
"""From rows of each table that must have room, and rows of each group that one trainer uses, to the places of each
group; None: there are not enough."""
TRAINERS_MAX = 64


class ReadBatch(NamedTuple):
    """A batch that has no plan yet; its rows are in the shards."""

    bounds: Int64s
    """Table t has unique rows bounds[t] to bounds[t + 1]."""
    inverse: Int32s
    """Of each id, all features end to end, the index of its row among those of its table."""
    features: tuple[Int32s, ...]
    """The same, feature by feature."""
    cuts: Int64s | None
    """Which ids are which trainer's, if there are several."""


class Found(NamedTuple):
    """The rows of the batch that is planned."""

    rows: RowList
    """Slots only of those that are in the cache, until they are settled."""
    next_use: NextUses
    """0: leaves after this batch; KEEP: is idle; else in so many iterations."""
    absent: Int32s
    """The positions of those that are not in the cache; of table t from its first row's on."""
    num_absent: Int64s
    num_leaving: Int64s
    """Of each table how many these are, and how many leave after the batch."""
    users: RowUsers
    """Who uses each, if there are several trainers."""


class Oracle:
    """From batches of ids to plans. One thread at a time may call it; `threads` share the work of each batch."""

    def __init__(
        self,
        tables: Sequence[OracleTable],
        capacity: Sequence[int],
        lookahead: Lookahead = 200,
        policy: str | Policy = "lookahead",
        options: PolicyOptions = DEFAULTS,
        *,
        threads: int = 1,
        ahead: int = 2,
        trainers: int = 1,
        uses_ahead: int = 0,
        keep_lone: bool = True,
        divide: Divide | None = None,
        places: Places | None = None,
        rows_direct_max: int = ROWS_DIRECT_MAX,
        bytes_direct_max: int = BYTES_DIRECT_MAX,
    ) -> None:
        """Take the slots of each group, and how many plans may be prefetched ahead of the one that trains.

        Tables beyond the direct limits cost memory only for rows in use, and some speed. With several trainers batches
        are `CutIds`, and plans tell who uses each row the next `uses_ahead` times, 2 at most. Without `keep_lone` a row
        that one of them uses, and no batch of the window needs, leaves at once instead of being idle. `divide` gives
        the slots another division where a batch has no room in theirs. `places` are those of each trainer's cache, if
        slots are not numbered alike on all.
        """
        _check_settings(tables, capacity, threads, ahead)
        self.places = places or Places.alike(capacity)
        """Those of a trainer's cache, and how they hold the slots."""
        self._divide, self._lookahead, self._ahead = divide, lookahead, ahead
        self.trainers, self._uses_ahead, self._keep_lone = trainers, uses_ahead, keep_lone
        self.tables = tuple(tables)
        self.policy = make_policy(policy, options)
        self._make_groups(capacity, -1)
        window_max = self.policy.window_max
        masks = mask_type(trainers) if trainers > 1 else None
        self._bits = None if masks is None else masks(1) << np.arange(trainers, dtype=masks)
        self._shards = make_shards(
            tables, window_max, masks,
            threads=threads, rows_direct_max=rows_direct_max, bytes_direct_max=bytes_direct_max,
        )  # fmt: skip
        self._reader = Reader(tables, self._shards, window_max, threads)
        self._window: deque[ReadBatch] = deque()
        self._first = 0
        """Iteration of the oldest batch in the window."""
        self._most: Int64s = np.zeros(len(tables), np.int64)
        """The most rows that a batch had of each table."""
        self._most_used: Int64s = np.zeros(len(capacity), np.int64)
        """The most rows of each group that one trainer used in a batch."""
        self._announced: Places | None = None
        """What the next plan has to tell of."""
        self._sample = Sample([len(table.features) for table in tables]) if self.policy.samples else None
        """How often rows are used, until the first plan; None: the policy does not want to know."""
        self._nothing = _room_for(np.zeros(len(tables), np.int64))
        self._take_slots()
        widths = [self.tables[group.tables[0]].width or 0 for group in self.groups]
        self.size = sum(self.places.capacity), num_bytes(self.places.capacity, widths)
        """Rows and bytes of the cache, which may be more than what this oracle has of it; 0 bytes: not known."""
        self.several = False
        """Whether it is one of several oracles."""

    def _make_groups(self, capacity: Sequence[int], freed_by: int) -> None:
        """Slot spaces of these sizes, vacant since the evictions of a plan, and the policy's beginning with them."""
        members = [[t for t, table in enumerate(self.tables) if table.group == g] for g in range(len(capacity))]
        self.groups = tuple(
            Group(g, own, size, described([self.tables[t] for t in own]), [self.tables[t].rows for t in own], freed_by)
            for g, (own, size) in enumerate(zip(members, capacity, strict=True))
        )
        self.policy.bind(self.groups, self._lookahead, self._ahead)

    def _take_slots(self) -> None:
        """Nobody is in any slot."""
        capacity = self.capacity
        self._audit = Audit(self.policy, self.tables, capacity) if is_own(self.policy) else None
        self._tenants = Tenants(self.tables, capacity, self._shards)
        ranks, size = type(self.policy).keys is not Policy.keys, sum(capacity)
        self._idle_since: Int32s = np.full(size if self.policy.idles and not ranks else 0, -1, np.int32)
        """Of all slots, group by group, as `IdleQueue.since`."""
        self._next_uses: Int32s = np.full(size if ranks else 0, NEVER, np.int32)
        """The same as `SlotFacts.next`."""
        for g, (begin, end) in enumerate(pairwise(np.cumsum([0, *capacity]))):
            group = self.groups[g]
            group.idle = IdleQueue(self._idle_since[begin:end]) if len(self._idle_since) else None
            group.ranked = SlotFacts(self._next_uses[begin:end]) if ranks else None
            group.rows_in, group.absent = partial(self._tenants.rows_in, g), partial(self._absent, group)

    @property
    def capacity(self) -> list[int]:
        """The slots of each group."""
        return [group.capacity for group in self.groups]

    @property
    def to_count(self) -> int | None:
        """How many batches of all data its policy wants to `count` before the first plan, 0 for all; None: not one."""
        return None if self._sample is None else self.policy.options.sample

    def count(self, ids: Sequence[NDArray[np.integer]]) -> None:
        """How often rows are used is told by such batches, and no longer by those that are read before the plan."""
        assert self._sample is not None, "the policy counts nothing"
        self._sample.whole = True
        self._sample.count(ids)

    def measure(self, times: Times) -> None:
        """Where a policy that goes by time finds what its trainer has measured."""
        self.policy.measure(times)

    def plans(self, batches: Iterable[tuple[Ids, Payload]], *, more: bool = False) -> Iterator[tuple[Plan, Payload]]:
        """A plan for each batch, with the payload that came with its ids (one array a feature, in order of tables).

        With the last plan all rows leave the cache, unless `more` batches follow: then another call goes on.

        A batch that can't be used ends the data: all batches before it get their plans, then its error is raised. One
        that has room only if the slots are divided anew ends it for a moment: the plan before it leaves nothing in the
        cache, and the one with it tells of the new division.
        """
        source = iter(batches)
        payloads: deque[Payload] = deque()
        error: Exception | None = None
        waiting: tuple[Ids, Payload] | None = None
        crowded: Places | None = None
        ended = False
        while True:
            while not ended and crowded is None and len(self._window) < self.policy.window:
                try:
                    ids, payload = waiting = waiting or next(source)
                    self.read(ids)
                    payloads.append(payload)
                    waiting = None
                except StopIteration:
                    ended = True
                except _Crowded as found:
                    crowded = found.places
                except Exception as unusable:
                    error, ended = unusable, True
            none_follows = (ended and not more) or crowded is not None
            if payloads:
                left = len(payloads) - 1
                pauses = ended and not none_follows and not left
                yield self.emit(last=none_follows and not left, ended=none_follows, pauses=pauses), payloads.popleft()
            elif crowded is not None:
                self._divide_anew(crowded)
                crowded = None
            else:
                break
        if error is not None:
            raise error

    def _divide_anew(self, places: Places) -> None:
        """Go on with other slots; the last plan has evicted all rows."""
        assert not self._window, "batches are planned with the slots that they were read for"
        assert not len(self._tenants.evict_all(self._first)), "rows are in the cache"
        self._make_groups(places.slots, self._first - 1)
        self._take_slots()
        self.places = self._announced = places
        if self._sample is None and isinstance(self.policy, FrequencyPolicy):
            self._sample = self.policy.sample  # what it knows says other things of other slots

    def read(self, ids: Ids) -> None:
        """Look at one more batch: find its unique rows, and note at their previous uses in the window how long to stay.

        An error changes nothing.
        """
        first, length, policy = self._first, len(self._window), self.policy
        assert length < policy.window_max, f"the window is full with {length} batches: emit a plan first"
        assert isinstance(ids, CutIds) == (self._bits is not None), "several trainers need batches that are cut"
        iteration = first + length
        given, cuts = (ids.ids, ids.cuts) if isinstance(ids, CutIds) else (ids, None)
        batch = self._reader.read(given, iteration, length, 0, first - policy.horizon)
        try:
            fitting = cuts is None or np.array_equal(cuts[:, -1], np.diff(batch.positions))
            assert fitting, "the cuts of a batch do not fit its ids"
            used = self._find_users(batch, cuts, iteration)
            with nullcontext() if self._audit is None else self._audit.asking(iteration):
                self._check_capacity(iteration, batch.counts, batch.gaps, used)
            if len(self._idle_since):  # idle rows that the batch needs ask for a stay too: the last column of gaps
                self._reader.on_all(lambda shard: kernels.find_idle(
                    shard.state, shard.rings, batch, shard.previous, iteration, length, shard.idle_slots
                ))  # fmt: skip
            all_granted = self._grant(iteration, length, batch)
        except BaseException:
            self._reader.unread(iteration, length, 0)
            raise

        def note(shard: Shard) -> None:  # gaps are what was granted now, of each kind of stay
            slot_begins = self._tenants.begins
            if not all_granted:
                kernels.refuse(shard.rings, shard.previous, iteration, length, 0, batch.gaps)
            elif len(self._next_uses):
                note_next_uses(shard.state, shard.rings, shard.previous, iteration, first, slot_begins, self._next_uses)
            if len(self._idle_since):
                quotas = batch.gaps[:, length + 1]  # those of idle rows
                kernels.grant_idle(shard.rings, iteration, shard.idle_slots, quotas, slot_begins, self._idle_since)
            if cuts is not None:
                note_users(shard.rings, shard.users, shard.previous, iteration, first, self._uses_ahead)
            shard.entered(iteration)

        self._reader.on_all(note)
        for group in self.groups:
            if group.idle is not None:
                group.idle.granted(int(batch.gaps[group.tables, length + 1].sum()))
        if self._sample is not None:
            self._sample.enter(given)
        self._most, self._most_used = np.maximum(self._most, batch.counts), np.maximum(self._most_used, used)
        at = batch.positions.tolist()
        features = tuple([batch.inverse[a:b] for a, b in pairwise(at)])
        self._window.append(ReadBatch(_bounds(batch.counts), batch.inverse, features, cuts))

    def _grant(self, iteration: int, length: int, batch: kernels.Batch) -> bool:
        """Whether the policy grants all stays up to a batch that was read."""
        if self._audit is None:
            return self.policy.grant(iteration, length, batch.counts, batch.gaps)
        with self._audit.asking(iteration):
            asked = batch.gaps[:, : length + 2].copy()
            granted = bool(self.policy.grant(iteration, length, batch.counts, batch.gaps))
        self._audit.check_grant(iteration, asked, batch.gaps, all_granted=granted)
        return granted

    def emit(self, *, last: bool = False, ended: bool = False, pauses: bool = False) -> Plan:
        """The plan of the oldest batch read. `last`: no batch follows; `ended`: none follows those that were read;
        `pauses`: one will follow, and nobody knows which."""
        if self._audit is None:
            return self._emit(last=last, ended=ended, pauses=pauses)
        with self._audit.asking(self._first):
            plan = self._emit(last=last, ended=ended, pauses=pauses)
        self._audit.follow(plan)
        return plan

    def _emit(self, *, last: bool, ended: bool, pauses: bool) -> Plan:
        iteration, length, policy = self._first, len(self._window), self.policy
        assert length, f"no batch was read for iteration {iteration}"
        if self._sample is not None:
            policy.learn(self._sample)
        self._sample = None
        found = self._look_up(iteration)
        fetch, victims = self._place(iteration, found, ended=ended)
        sharing = self._sharing(iteration, found, fetch)
        evict = self._settle(iteration, found, fetch)
        hits = len(found.rows) - len(fetch)
        wanted = None if last else policy.along(iteration)
        if wanted is not None:
            fetch, victims, sharing = self._bring_along(iteration, wanted, found.rows, fetch, victims, sharing)
        evict = evict.joined(self._make_room(iteration, found, length - 1, ended=ended, pauses=pauses))
        if last:
            evict = evict.joined(self._tenants.evict_all(iteration))
        for group in self.groups:
            group.slots.free(group.collect(evict.slots, evict.bounds), iteration)
        lookahead = policy.advance(iteration, length)
        batch = self._window.popleft()
        self._first += 1
        plan = Plan(iteration, found.rows, batch.features, fetch, evict, victims, lookahead, hits, sharing)
        if self._announced is not None:
            plan = replace(plan, capacity=self._announced.capacity, guests=self._announced.guests)
            self._announced = None
        return plan

    def _look_up(self, iteration: int) -> Found:
        """The rows of the oldest batch: hits and misses."""
        bounds = self._window[0].bounds
        rows = _room_for(np.diff(bounds))
        next_use, absent = np.empty(len(rows), np.uint16), np.empty(len(rows), np.int32)
        num_absent, num_leaving = np.zeros((2, len(self.tables)), np.int64)
        self._reader.on_all(lambda shard: kernels.look_up(
            shard.state, shard.rings, iteration, Rows(rows.ids, rows.slots, bounds), next_use, absent, num_absent,
            num_leaving,
        ))  # fmt: skip
        return Found(rows, next_use, absent, num_absent, num_leaving, self._users(iteration, bounds))

    def _place(self, iteration: int, found: Found, *, ended: bool) -> tuple[Fetch, Victims]:
        """Slots for the rows that are absent, and the rows that make room for them. Rows of the batch that are not
        granted a stay, and do not leave, are idle: KEEP."""
        rows, next_use, absent, num_absent, num_leaving, users = found
        fetch = _fetch_of(num_absent)
        missing = np.concatenate([
            absent[begin : begin + count] for begin, count in zip(rows.bounds, num_absent, strict=False)
        ])  # fmt: skip
        leaving, evict_after = [], -1
        for group in self.groups:
            parts = group.parts(rows.bounds)
            demand = Demand(iteration, group, rows, group.collect(missing, fetch.bounds))
            victims, last_use = group.assign(self.policy, demand)
            group.spread(demand.new, fetch.slots, fetch.bounds)
            group.spread(demand.slot_after, fetch.slot_after, fetch.bounds)
            leaving.append(victims)
            evict_after = max(evict_after, last_use)
            if self._bits is not None and not self._keep_lone:
                lone = (next_use == 0) & (users.users & (users.users - 1) == 0)
                demand.lone = np.concatenate([part.start + np.flatnonzero(lone[part]) for part in parts])
            gone = self.policy.leaves(demand, ended=ended)
            if gone is True:
                continue
            for part in parts:
                next_use[part][next_use[part] == 0] = KEEP
            num_leaving[group.tables] = 0
            if gone is not False:
                next_use[gone] = 0
                num_leaving += np.bincount(np.searchsorted(rows.bounds, gone, "right") - 1, minlength=len(num_leaving))
        out = self._tenants.evict(leaving, iteration) if evict_after >= 0 else self._nothing
        return fetch, Victims(out.ids, out.slots, out.bounds, evict_after)

    def _settle(self, iteration: int, found: Found, fetch: Fetch) -> RowList:
        """Note who lives where, and what each fetch waits for; the rows of the batch that leave right after it."""
        rows, evict, acknowledged = found.rows, _room_for(found.num_leaving), self._acknowledged(iteration)
        self._reader.on_all(lambda shard: kernels.settle(
            shard.state, shard.rings, iteration, acknowledged, Rows(rows.ids, rows.slots, rows.bounds), found.next_use,
            found.absent, Rows(fetch.ids, fetch.slots, fetch.bounds), fetch.after,
            Rows(evict.ids, evict.slots, evict.bounds), self._tenants.begins, self._tenants.codes,
        ))  # fmt: skip
        if not self.policy.exact:
            fetch.after.fill(-1)
        return evict

    def _make_room(self, iteration: int, found: Found, left: int, *, ended: bool, pauses: bool) -> RowList:
        """Note the uses of this batch, behind which `left` others are; the rows that leave now, beside those of the
        batch, since the next plans need their slots, if the policy wants them to leave early."""
        leaving = []
        for group in self.groups:
            order = group.ranked if group.idle is None else group.idle
            if order is None:
                continue
            bounds = found.rows.bounds
            order.settle(group.collect(found.rows.slots, bounds), group.collect(found.next_use, bounds), iteration)
            if not self.policy.early or pauses:
                continue
            if group.idle is not None:
                total = group.loads[1, (iteration + 1) & (group.loads.shape[1] - 1)] if left else group.capacity
                excess = len(group.idle) - max(0, group.capacity - int(total))
                evenly = -(-len(group.idle) // (left + 1)) if ended else 0  # until the end of the data
                leaving.append(group.idle.pop(max(0, excess, evenly))[0])
            else:
                leaving.append(self._make_room_by_keys(iteration, group))
        return self._tenants.evict(leaving, iteration) if any(map(len, leaving)) else self._nothing

    def _make_room_by_keys(self, iteration: int, group: Group) -> Int32s:
        """Let rows go for those of the next batch and the prefetches behind it; what these use themselves stays."""
        soon = iteration + 1 + self.policy.ahead
        needed = len(group.absent(iteration + 1, soon)[0])
        others = int(np.count_nonzero((group.facts.last >= 0) & (group.facts.next > soon)))
        count = min(needed - group.slots.num_free, others)
        if count <= 0:
            return NONE
        return group.facts.vacate(lowest(self.policy.keys(iteration, group, count), count))[0]

    def _absent(self, group: Group, first: int, last: int) -> tuple[Int64s, Int64s]:
        """Table and id of the rows that batches `first` to `last` of the window need and that are not in the cache."""
        end, parts = self._first + len(self._window) - 1, []
        for shard in self._shards:
            codes = find_absent(shard.state, shard.rings, shard.members(group.tables), first, min(last, end))
            tables = codes >> kernels.HALF
            parts.append((tables, shard.ids_of(tables, codes & kernels.LOWER)))
        tables, ids = (np.concatenate(part) for part in zip(*parts, strict=True))
        return tables, ids

    def _acknowledged(self, iteration: int) -> int:
        """What every fetch of a plan waits for."""
        return max(-1, iteration - 1 - self.policy.horizon)

    def _bring_along(
        self, iteration: int, wanted: Wanted, rows: RowList, fetch: Fetch, victims: Victims, sharing: Sharing | None
    ) -> tuple[Fetch, Victims, Sharing | None]:
        """What a plan fetches, and in each table behind it rows for later ones, as far as they find a place; who leaves
        for both, and who owns them."""
        leaving, evict_after, brought = [], victims.evict_after, []
        for group, (tables, ids) in zip(self.groups, wanted, strict=True):
            chosen, known, evicted = self._tenants.absent(tables, ids)
            settled = evicted < iteration  # others leave just now
            chosen, known, evicted = chosen[settled], known[settled], evicted[settled]
            tables, ids = tables[chosen], ids[chosen]
            demand = Extra(iteration, group, rows, np.arange(len(ids), dtype=np.int32), wanted=(tables, ids))
            gone, last_use = group.admit(self.policy, demand)
            leaving.append(gone)
            evict_after = max(evict_after, last_use)
            given = demand.new >= 0
            brought.append([part[given] for part in (tables, ids, known, demand.new, evicted, demand.slot_after)])
        out = self._tenants.evict(leaving, iteration) if any(map(len, leaving)) else self._nothing
        tables, ids, known, slots, evicted, slot_after = (np.concatenate(part) for part in zip(*brought, strict=True))
        self._tenants.move_in(tables, known, slots)
        after = np.maximum(evicted, self._acknowledged(iteration)) if self.policy.exact else np.full_like(evicted, -1)
        all_tables = np.concatenate([np.repeat(np.arange(len(self.tables)), np.diff(fetch.bounds)), tables])
        order = np.argsort(all_tables, kind="stable")
        fetch = Fetch(
            np.concatenate([fetch.ids, ids])[order],
            np.concatenate([fetch.slots, slots])[order],
            _bounds(np.bincount(all_tables, minlength=len(self.tables))),
            np.concatenate([fetch.after, after])[order],
            np.concatenate([fetch.slot_after, slot_after])[order],
        )
        if sharing is not None:
            homes = (slots % self.trainers).astype(np.int8)
            sharing = replace(sharing, homes=np.concatenate([sharing.homes, homes])[order])
        joined = victims.joined(out)
        return fetch, Victims(joined.ids, joined.slots, joined.bounds, evict_after), sharing

    def close(self) -> None:
        """Let the oracle's threads go."""
        self._reader.close()

    def _find_users(self, batch: kernels.Batch, cuts: Int64s | None, iteration: int) -> Int64s:
        """Who uses the rows of a batch just read, if there are several trainers; of each group how many rows the one
        does that uses most."""
        used = np.zeros((len(self.tables), self.trainers), np.int64)
        bits = self._bits
        if cuts is not None and bits is not None:
            self._reader.on_all(lambda shard: find_users(
                shard.rings, shard.users, batch, cuts, bits, iteration, used
            ))  # fmt: skip
        return np.array([used[group.tables].sum(0).max() for group in self.groups], np.int64)

    def _users(self, iteration: int, bounds: Int64s) -> RowUsers:
        """What is known of who uses the rows of the oldest batch, table by table; nothing if there is one trainer."""
        size, masks = (0, np.uint8) if self._bits is None else (int(bounds[-1]), self._bits.dtype)
        users, after, later = np.zeros((3, size), masks)
        told = RowUsers(users, after, later, np.empty(size, np.int32))
        if self._bits is not None:
            self._reader.on_all(lambda shard: tell_users(
                shard.rings, shard.users, iteration, self._uses_ahead, bounds, told
            ))  # fmt: skip
        return told

    def _sharing(self, iteration: int, found: Found, fetch: Fetch) -> Sharing | None:
        """What trainers have to do with the rows of the oldest batch."""
        batch, (rows, next_use, absent, _, _, users) = self._window[0], found
        if batch.cuts is None:
            return None
        homes = np.empty(len(fetch), np.int8)
        self._reader.on_all(lambda shard: choose_owners(
            shard.state, shard.rings, shard.users, iteration, self.trainers, Rows(rows.ids, rows.slots, rows.bounds),
            next_use, absent, Rows(fetch.ids, fetch.slots, fetch.bounds), homes,
        ))  # fmt: skip
        stays = next_use != 0
        return Sharing(
            users.users, users.next * stays, users.later * stays, users.before, homes, batch.cuts, batch.inverse
        )

    def _check_capacity(self, iteration: int, counts: Int64s, gaps: Int64s, used: Int64s) -> None:
        """CapacityError if a batch has no room; `_Crowded` if it has with the slots divided otherwise."""
        rows = self.policy.needs(counts, gaps)
        needs = [int(rows[group.tables].sum()) for group in self.groups]
        for group, needed, rows_used in zip(self.groups, needs, used, strict=True):
            guests, places = self.places.guests[group.number], self.places.capacity[group.number]
            if needed <= group.capacity and (not guests or rows_used <= guests):
                continue
            if self._divide is not None:
                for needed_rows, most_used in (
                    (np.maximum(self._most, counts), np.maximum(self._most_used, used)),
                    (counts, used),
                ):
                    if (divided := self._divide(needed_rows.tolist(), most_used.tolist())) is not None:
                        raise _Crowded(divided)
                raise self._too_large(iteration, needs)
            # Without another division groups grow alike, as theirs goes by what the first batch needs of each.
            least, size = (-(-total * needed // places) for total in self.size)
            held, others = "at once", "lower the batch size"
            if self.policy.keeps_all:
                held, others = f"by now, all of which policy {self.policy.name!r} keeps", "choose another policy"
            elif self.several:
                others = "let one oracle plan (policy option oracles=1), which divides the cache anew for such a batch"
            raise CapacityError(
                f"iteration {iteration} needs {needed:,} rows of {group.label} {held}, and of the cache's "
                f"{self.size[0]:,} places they have {places:,}: raise `cache` to at least {least:,} rows"
                f"{_or_bytes(size)}, or {others}"
            )

    def _too_large(self, iteration: int, needs: Sequence[int]) -> CapacityError:
        """A batch for which no division has room."""
        widths = [self.tables[group.tables[0]].width or 0 for group in self.groups]
        needs = [max(1, need) for need in needs]
        # A cache of so many rows has the bytes of its first division, which rounds down: one more of each will do.
        rounded = num_bytes([need + 1 for need in needs], widths)
        least = max(sum(needs), -(-rounded * self.size[0] // self.size[1]))
        size = num_bytes(needs, widths)
        return CapacityError(
            f"iteration {iteration} needs {told_rows(needs, widths)} at once, {sum(needs):,} rows of {size:,} bytes, "
            f"and the cache has {self.size[0]:,} rows and {self.size[1]:,} bytes: raise `cache` to at least "
            f"{least:,} rows{_or_bytes(size)}, or lower the batch size"
        )


class _Crowded(CapacityError):
    """A batch has no room in the slots of a group, and would have with this division."""

    def __init__(self, places: Places) -> None:
        super().__init__("the slots have to be divided anew, which `plans` does")
        self.places = places


def _or_bytes(size: int) -> str:
    return f", or {-(-size // 1000):,}KB" if size else ""


def _bounds(counts: Int64s) -> Int64s:
    bounds = np.zeros(len(counts) + 1, np.int64)
    np.cumsum(counts, out=bounds[1:])
    return bounds


def _room_for(counts: Int64s) -> RowList:
    """Room for so many rows of each table."""
    bounds = _bounds(counts)
    return RowList(np.empty(bounds[-1], np.int64), np.empty(bounds[-1], np.int32), bounds)


def _fetch_of(counts: Int64s) -> Fetch:
    """Room for so many rows of each table that are to be fetched."""
    bounds = _bounds(counts)
    slots, after, slot_after = np.empty((3, bounds[-1]), np.int32)
    return Fetch(np.empty(bounds[-1], np.int64), slots, bounds, after, slot_after)


def mask_type(trainers: int) -> MaskType:
    """The smallest number that has a bit for each trainer."""
    if not 1 <= trainers <= TRAINERS_MAX:
        raise ConfigError(f"trainers is {trainers}: give 1 to {TRAINERS_MAX}")
    return next(kind for kind in (np.uint8, np.uint16, np.uint32, np.uint64) if trainers <= 8 * kind(0).nbytes)


def _check_settings(tables: Sequence[OracleTable], capacity: Sequence[int], threads: int, ahead: int) -> None:
    if not tables:
        raise ConfigError("there are no tables: give at least one")
    if {table.group for table in tables} != set(range(len(capacity))):
        raise ConfigError(
            f"tables are in groups {sorted({table.group for table in tables})} and the cache has {len(capacity)} slot "
            "spaces: number the groups from 0 and give a capacity for each"
        )
    for name, value, least in (
        *((f"the capacity of group {g}", size, 1) for g, size in enumerate(capacity)),
        ("threads", threads, 1),
        ("ahead", ahead, 0),
    ):
        if value < least:
            raise ConfigError(f"{name} is {value}: give at least {least}")
