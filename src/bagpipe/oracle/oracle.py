"""The oracle: reads batches ahead and turns the order of the data into plans, one an iteration (paper, Algorithm 1).

A pure function of data order and settings. It remembers the window and where each row is, nothing else; the cache can't
overflow because slots are only handed out while they are free (I5).

`plans` is the loop of Algorithm 1, `read` its lines 5 to 10, `emit` its lines 11 to 24.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Iterator, Sequence
from functools import partial
from itertools import pairwise
from typing import NamedTuple, TypeVar

import numpy as np
from numpy.typing import NDArray

from bagpipe.errors import CapacityError, ConfigError
from bagpipe.kernels import oracle as kernels
from bagpipe.kernels.oracle import KEEP, Rows
from bagpipe.kernels.sharing import UserRings, choose_owners, find_before, note_users
from bagpipe.kernels.victims import count_absent, note_next_uses
from bagpipe.oracle.plan import Fetch, Plan, Sharing, Victims
from bagpipe.oracle.reader import CutIds, Reader
from bagpipe.oracle.row_list import RowList
from bagpipe.oracle.sample import TableSample, take_sample
from bagpipe.oracle.shard import BYTES_DIRECT_MAX, ROWS_DIRECT_MAX, MaskType, Shard, make_shards
from bagpipe.oracle.slots import Group, IdleQueue
from bagpipe.oracle.tables import OracleTable, described
from bagpipe.oracle.tenants import Tenants
from bagpipe.oracle.warm_up import warm_up
from bagpipe.policies import make_policy
from bagpipe.policies.base import Demand, Lookahead
from bagpipe.policy_options import DEFAULTS, PolicyOptions

Int32s = NDArray[np.int32]
Int64s = NDArray[np.int64]
NextUses = NDArray[np.uint16]
Ids = Sequence[NDArray[np.integer]] | CutIds
Payload = TypeVar("Payload")
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


class Oracle:
    """From batches of ids to plans. One thread at a time may call it; `threads` share the work of each batch."""

    def __init__(
        self,
        tables: Sequence[OracleTable],
        capacity: Sequence[int],
        lookahead: Lookahead = 200,
        policy: str = "lookahead",
        options: PolicyOptions = DEFAULTS,
        *,
        threads: int = 1,
        ahead: int = 2,
        trainers: int = 1,
        uses_ahead: int = 0,
        keep_lone: bool = True,
        rows_direct_max: int = ROWS_DIRECT_MAX,
        bytes_direct_max: int = BYTES_DIRECT_MAX,
    ) -> None:
        """Take the slots of each group, and how many plans may be prefetched ahead of the one that trains.

        Tables beyond the direct limits cost memory only for rows in use, and some speed. With several trainers batches
        are `CutIds`, and plans tell who uses each row the next `uses_ahead` times, 2 at most. Without `keep_lone` a row
        that one of them uses, and no batch of the window needs, leaves at once instead of being idle.
        """
        _check_settings(tables, capacity, threads, ahead)
        self.trainers, self._uses_ahead, self._keep_lone = trainers, uses_ahead, keep_lone
        self.tables = tuple(tables)
        members = [[t for t, table in enumerate(tables) if table.group == g] for g in range(len(capacity))]
        self.groups = tuple(
            Group(g, own, size, described([tables[t] for t in own]), [tables[t].rows for t in own])
            for g, (own, size) in enumerate(zip(members, capacity, strict=True))
        )
        self.policy = make_policy(policy, options)
        self.policy.bind(self.groups, lookahead, ahead)
        masks = mask_type(trainers) if trainers > 1 else None
        self._bits = None if masks is None else masks(1) << np.arange(trainers, dtype=masks)
        self._shards = make_shards(
            tables, self.policy.target_max, masks,
            threads=threads, rows_direct_max=rows_direct_max, bytes_direct_max=bytes_direct_max,
        )  # fmt: skip
        self._reader = Reader(tables, self._shards, self.policy.target_max, threads)
        self._window: deque[ReadBatch] = deque()
        self._first = 0
        """Iteration of the oldest batch in the window."""
        self._tenants = Tenants(tables, capacity, self._shards)
        self._idle_since: Int32s = np.full(sum(capacity) if self.policy.idles else 0, -1, np.int32)
        """Of all slots, group by group, as `IdleQueue.since`."""
        parts = np.split(self._idle_since, np.cumsum(capacity)[:-1])
        self._idle = [IdleQueue(len(part), part) for part in parts] if self.policy.idles else []
        self._learns = self.policy.samples
        self._nothing = _room_for(np.zeros(len(tables), np.int64))

    @property
    def capacity(self) -> list[int]:
        """The slots of each group."""
        return [group.slots.capacity for group in self.groups]

    @property
    def scans(self) -> bool:
        """Whether it must `know` all data before the first plan."""
        return self.policy.scans

    def know(self, counts: Sequence[TableSample]) -> None:
        """How often all data uses each row of each table."""
        self.policy.know(counts)

    def plans(self, batches: Iterable[tuple[Ids, Payload]]) -> Iterator[tuple[Plan, Payload]]:
        """A plan for each batch, with the payload that came with its ids (one array a feature, in order of tables).

        A batch that can't be used ends the data: all batches before it get their plans, then its error is raised.
        """
        source = iter(batches)
        payloads: deque[Payload] = deque()
        error: Exception | None = None
        ended = False
        while True:
            while not ended and len(self._window) < self.policy.target:
                try:
                    ids, payload = next(source)
                    self.read(ids)
                    payloads.append(payload)
                except StopIteration:
                    ended = True
                except Exception as unusable:
                    error, ended = unusable, True
            if not payloads:
                break
            yield self.emit(last=ended and len(payloads) == 1, ended=ended), payloads.popleft()
        if error is not None:
            raise error

    def read(self, ids: Ids) -> None:
        """Look at one more batch: find its unique rows, and note at their previous uses in the window how long to stay.

        An error changes nothing.
        """
        length, policy = len(self._window), self.policy
        assert length < policy.target_max, f"the window is full with {length} batches: emit a plan first"
        assert isinstance(ids, CutIds) == (self._bits is not None), "several trainers need batches that are cut"
        iteration, first = self._first + length, self._first
        cuts = ids.cuts if isinstance(ids, CutIds) else None
        keep = KEEP if policy.keeps else 0
        given = ids.ids if isinstance(ids, CutIds) else ids
        batch = self._reader.read(given, iteration, length, keep, first - policy.horizon)
        try:
            fitting = cuts is None or np.array_equal(cuts[:, -1], np.diff(batch.positions))
            assert fitting, "the cuts of a batch do not fit its ids"
            self._check_capacity(iteration, batch.counts)
            if self._idle:
                self._reader.on_all(lambda shard: kernels.find_idle(
                    shard.state, shard.rings, batch, shard.previous, iteration, length, shard.idle_slots
                ))  # fmt: skip
            all_stay = policy.admit(iteration, length, batch.counts, batch.gaps)
        except BaseException:
            self._reader.unread(iteration, length, keep)
            raise

        def note(shard: Shard) -> None:
            if not all_stay:
                kernels.refuse(shard.rings, shard.previous, iteration, length, keep, batch.gaps)
            if self._idle:
                quotas = batch.gaps[:, length + 1]
                kernels.grant_idle(
                    shard.rings, iteration, shard.idle_slots, quotas, self._tenants.begins, self._idle_since
                )
            if cuts is not None and self._bits is not None:
                note_users(
                    shard.rings, shard.users, batch, shard.previous, cuts, self._bits, iteration, first,
                    self._uses_ahead,
                )  # fmt: skip
            if policy.next_uses is not None:
                note_next_uses(
                    shard.state, shard.rings, shard.previous, iteration, first, self._tenants.begins, policy.next_uses
                )
            shard.entered(iteration)

        self._reader.on_all(note)
        for group, idle in zip(self.groups, self._idle, strict=False):
            idle.granted(int(batch.gaps[group.tables, length + 1].sum()))
        at = batch.positions.tolist()
        features = tuple([batch.inverse[a:b] for a, b in pairwise(at)])
        self._window.append(ReadBatch(_bounds(batch.counts), batch.inverse, features, cuts))

    def emit(self, *, last: bool = False, ended: bool = False) -> Plan:
        """The plan of the oldest batch read. `last`: no batch follows; `ended`: none follows those that were read."""
        iteration, length, policy = self._first, len(self._window), self.policy
        assert length, f"no batch was read for iteration {iteration}"
        learns, self._learns = self._learns, False
        if learns:
            policy.learn(
                take_sample(self._shards, [batch.features for batch in self._window], iteration, self._reader.features)
            )
        bounds = self._window[0].bounds
        rows = RowList(np.empty(bounds[-1], np.int64), np.empty(bounds[-1], np.int32), bounds)
        found = Rows(rows.ids, rows.slots, bounds)
        next_use: NextUses = np.empty(len(rows), np.uint16)
        absent: Int32s = np.empty(len(rows), np.int32)
        num_absent, num_leaving = np.zeros((2, len(self.tables)), np.int64)
        self._reader.on_all(lambda shard: kernels.look_up(
            shard.state, shard.rings, iteration, found, next_use, absent, num_absent, num_leaving
        ))  # fmt: skip
        users = self._users(iteration, bounds)
        if self._idle and not ended:
            idle = next_use == 0
            if self._bits is not None and not self._keep_lone:
                idle &= (users.users & (users.users - 1)) != 0
            next_use[idle] = KEEP
            num_leaving = _count_leaving(next_use, bounds)
        fetch = _fetch_of(num_absent)
        victims, passing = self._assign_slots(iteration, rows, fetch, absent)
        if passing is not None:
            next_use[passing] = 0
            num_leaving = _count_leaving(next_use, bounds)
        fetched, evict = Rows(fetch.ids, fetch.slots, fetch.bounds), _room_for(num_leaving)
        sharing = self._sharing(iteration, found, next_use, absent, fetched, users)
        leaving, acknowledged = Rows(evict.ids, evict.slots, evict.bounds), max(-1, iteration - 1 - policy.horizon)
        self._reader.on_all(lambda shard: kernels.settle(
            shard.state, shard.rings, iteration, acknowledged, found, next_use, absent, fetched, fetch.after, leaving,
            self._tenants.begins, self._tenants.codes,
        ))  # fmt: skip
        if not policy.exact:
            fetch.after.fill(-1)
        hits = len(rows) - len(fetch)
        if learns and not last and self.trainers == 1:
            fetch = warm_up(policy, self.groups, self._tenants, iteration, fetch)
        if self._idle:
            evict = evict.joined(self._let_idle(iteration, rows, next_use, length - 1, ended))
        if policy.keeps:
            for group in self.groups:
                policy.planned(iteration, group, group.collect(rows.slots, bounds), group.collect(next_use, bounds))
            evict = evict.joined(self._tenants.evict_all(iteration) if last else self._leave(iteration))
        for group in self.groups:
            group.slots.free(group.collect(evict.slots, evict.bounds), iteration)
        lookahead = policy.lookahead_at(iteration, length)
        policy.advance()
        batch = self._window.popleft()
        self._first += 1
        return Plan(iteration, rows, batch.features, fetch, evict, victims, lookahead, hits, sharing)

    def close(self) -> None:
        """Let the oracle's threads go."""
        self._reader.close()

    def _users(self, iteration: int, bounds: Int64s) -> UserRings:
        """What is known of who uses the rows of the oldest batch, table by table; nothing if there is one trainer."""
        size = 0 if self._bits is None else int(bounds[-1])
        users, after, later = np.zeros((3, size), np.uint8 if self._bits is None else self._bits.dtype)
        previous = np.empty(size, np.int64)
        for shard in self._shards if self._bits is not None else ():
            begins = shard.rings.begins[:, iteration & (shard.rings.begins.shape[1] - 1)]
            for k, t in enumerate(shard.tables.tolist()):
                to, own = slice(bounds[t], bounds[t + 1]), slice(begins[k], begins[k + 1])
                users[to], previous[to] = shard.users.users[own], shard.users.previous[own]
                if self._uses_ahead > 0:
                    after[to] = shard.users.next[own]
                if self._uses_ahead > 1:
                    later[to] = shard.users.later[own]
        return UserRings(users, previous, after, later)

    def _sharing(
        self, iteration: int, rows: Rows, next_use: NextUses, absent: Int32s, fetch: Rows, users: UserRings
    ) -> Sharing | None:
        """What trainers have to do with the rows of the oldest batch."""
        batch = self._window[0]
        if batch.cuts is None:
            return None
        homes = np.empty(len(fetch.ids), np.int8)
        self._reader.on_all(lambda shard: choose_owners(
            shard.state, shard.rings, shard.users, iteration, self.trainers, rows, next_use, absent, fetch, homes
        ))  # fmt: skip
        stays, before = next_use != 0, find_before(users.previous, iteration)
        return Sharing(users.users, users.next * stays, users.later * stays, before, homes, batch.cuts, batch.inverse)

    def _check_capacity(self, iteration: int, counts: Int64s) -> None:
        for group in self.groups:
            needed = int(counts[group.tables].sum())
            if needed > group.slots.capacity:
                raise CapacityError(
                    f"iteration {iteration} needs {needed:,} rows of {group.label} at once, and the cache has places "
                    f"for {group.slots.capacity:,}: raise `cache` to at least {needed:,} rows of this width, or lower "
                    "the batch size"
                )

    def _let_idle(self, iteration: int, rows: RowList, next_use: NextUses, left: int, ended: bool) -> RowList:
        """Rows without a stay are idle from now on; those that leave since the next plans need their slots.

        At the end of the data, with `left` plans to follow, idle rows leave evenly.
        """
        leaving = []
        for group, idle in zip(self.groups, self._idle, strict=True):
            idle.settle(group.collect(rows.slots, rows.bounds), group.collect(next_use, rows.bounds), iteration)
            excess = len(idle) - self.policy.room(iteration, left + 1, group)
            evenly = -(-len(idle) // (left + 1)) if ended else 0
            leaving.append(idle.pop(max(0, excess, evenly))[0])
        return self._tenants.evict(leaving, iteration) if any(map(len, leaving)) else self._nothing

    def _leave(self, iteration: int) -> RowList:
        """The rows that the policy lets go with a plan, beside those of its batch."""
        end = self._first + len(self._window) - 1

        def absent(group: Group, last: int) -> int:
            return sum(
                count_absent(shard.state, shard.rings, shard.members(group.tables), iteration + 1, min(last, end))
                for shard in self._shards
            )

        leaving = [self.policy.leaving(iteration, group, partial(absent, group)) for group in self.groups]
        return self._tenants.evict(leaving, iteration) if any(map(len, leaving)) else self._nothing

    def _assign_slots(
        self, iteration: int, rows: RowList, fetch: Fetch, absent: Int32s
    ) -> tuple[Victims, Int32s | None]:
        """Let the policy choose slots for the rows to fetch; of those that leave right after the batch the positions.

        `absent` has the positions of the rows to fetch, of table t from its first row's on.
        """
        leaving, evict_after = [], -1
        missing = np.concatenate([
            absent[begin : begin + count] for begin, count in zip(rows.bounds, np.diff(fetch.bounds), strict=False)
        ])  # fmt: skip
        all_passing = np.zeros(len(fetch), np.bool_)
        for group in self.groups:
            slots = group.collect(rows.slots, rows.bounds) if self.policy.keeps else rows.slots[:0]
            num_misses = int(np.diff(fetch.bounds)[group.tables].sum())
            misses = partial(self._missing, group, rows, fetch, missing)
            new, slot_after = np.empty((2, num_misses), np.int32)
            passing = np.zeros(num_misses, np.bool_)
            demand = Demand(iteration, group, slots[slots >= 0], num_misses, misses, passing)
            victims, last_use = self.policy.assign(demand, new, slot_after)
            group.spread(new, fetch.slots, fetch.bounds)
            group.spread(slot_after, fetch.slot_after, fetch.bounds)
            group.spread(passing, all_passing, fetch.bounds)
            leaving.append(victims)
            evict_after = max(evict_after, last_use)
        out = self._tenants.evict(leaving, iteration) if evict_after >= 0 else self._nothing
        return Victims(out.ids, out.slots, out.bounds, evict_after), missing[all_passing] if all_passing.any() else None

    @staticmethod
    def _missing(group: Group, rows: RowList, fetch: Fetch, missing: Int32s) -> tuple[Int64s, Int64s]:
        """Table and id of each row of the group that has no slot yet."""
        return (
            np.repeat(group.tables, np.diff(fetch.bounds)[group.tables]),
            rows.ids[group.collect(missing, fetch.bounds)],
        )


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


def _count_leaving(next_use: NextUses, bounds: Int64s) -> Int64s:
    """How many rows of each table leave after their batch."""
    return np.diff(np.concatenate([[0], np.cumsum(next_use == 0)])[bounds])


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
