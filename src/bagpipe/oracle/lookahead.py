"""The oracle: reads batches ahead and turns the order of the data into plans, one an iteration (paper, Algorithm 1).

A pure function of data order and settings. It remembers the window and where each row is, nothing else; the cache can't
overflow because slots are only handed out while they are free, and `stats` tells what the oracle holds (I5).

`plans` is the loop of Algorithm 1, `read` its lines 5 to 10, `emit` its lines 11 to 24.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from functools import partial
from itertools import pairwise
from typing import Any, TypeVar

import numpy as np
from numpy.typing import NDArray

from bagpipe.errors import CapacityError, ConfigError
from bagpipe.kernels.plan import KEEP, count_gaps, find_uniques, link, look_up, settle
from bagpipe.kernels.sharing import choose_owners, find_before, keep_users, mark_users
from bagpipe.kernels.victims import count_absent, note_next_uses
from bagpipe.oracle.batch import CheckedIds, CutIds, check_ids
from bagpipe.oracle.lingering import Lingering
from bagpipe.oracle.parts import Part, Workers, make_parts
from bagpipe.oracle.plan import Fetch, Plan, Sharing, Victims
from bagpipe.oracle.row_list import RowList
from bagpipe.oracle.sample import take_sample
from bagpipe.oracle.scratch import Scratch, unfilled_fetch, unfilled_list
from bagpipe.oracle.slots import Group
from bagpipe.oracle.tables import BYTES_DIRECT_MAX, ROWS_DIRECT_MAX, MappedRows, OracleTable, described
from bagpipe.oracle.tenants import Tenants
from bagpipe.oracle.warm_up import warm_up
from bagpipe.oracle.window import MaskType, Window
from bagpipe.policies import make_policy
from bagpipe.policies.base import Demand, Lookahead
from bagpipe.policy_options import DEFAULTS, PolicyOptions

Int32s = NDArray[np.int32]
Int64s = NDArray[np.int64]
Stays = NDArray[np.uint16]
Ids = Sequence[NDArray[np.integer]] | CutIds
Masks = NDArray[Any]
Payload = TypeVar("Payload")
TRAINERS_MAX = 64


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
        start: int = 0,
        trainers: int = 1,
        uses_ahead: int = 0,
        rows_direct_max: int = ROWS_DIRECT_MAX,
        bytes_direct_max: int = BYTES_DIRECT_MAX,
    ) -> None:
        """Take the slots of each group, and how many plans may be prefetched ahead of the one that trains.

        `start` is the first iteration; those before it count as acknowledged. Tables beyond the direct limits cost
        memory only for rows in use, and some speed. With several trainers batches are `CutIds`, and plans tell who uses
        each row the next `uses_ahead` times, 2 at most.
        """
        _check_settings(tables, capacity, threads, ahead, start)
        self.trainers, self._uses_ahead = trainers, uses_ahead
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
        self._window = Window(len(tables), self.policy.target_max, start, masks)
        self._parts = make_parts(tables, threads, rows_direct_max, bytes_direct_max)
        self._tenants = Tenants(tables, capacity, self._parts)
        self._lingering = (
            Lingering(self.groups, self._tenants, self._window, self._parts, ahead) if self.policy.lingers else None
        )
        self._workers = Workers(threads)
        self._scratch = Scratch(len(tables), self.policy.target_max, masks)
        self._cuts: deque[tuple[Int64s, Int32s]] = deque()
        self._half_read = False
        self._learns = self.policy.samples
        self._nothing = unfilled_list(np.zeros(len(tables), np.int64))
        features = iter(range(sum(len(table.features) for table in tables)))
        self._features = [[next(features) for _ in table.features] for table in tables]
        self._feature_bounds: Int64s = np.cumsum([0] + [len(table.features) for table in tables])

    @property
    def capacity(self) -> list[int]:
        """The slots of each group."""
        return [group.slots.capacity for group in self.groups]

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

        An error of the ids changes nothing; after any other, only plans of the batches read before can follow.
        """
        assert not self._half_read, "a batch failed half-way: only plans of the batches before it can follow"
        window, scratch = self._window, self._scratch
        iteration, length = window.first + len(window), len(window)
        assert isinstance(ids, CutIds) == (self._bits is not None), "several trainers need batches that are cut"
        cuts = ids.cuts if isinstance(ids, CutIds) else None
        batch = check_ids(self.tables, ids.ids if isinstance(ids, CutIds) else ids, iteration)
        scratch.fit(batch.num_ids)
        self._half_read = True
        counts = np.zeros(len(self.tables), np.int64)
        inverse = np.empty(batch.num_ids, np.int32)

        def find(part: Part) -> None:
            for t in part.tables.tolist():
                counts[t] = self._find_uniques(part, t, batch, iteration, inverse)
            if cuts is not None:
                self._mark_users(part, batch, counts, cuts, inverse)
            count_gaps(part.tables, batch.starts, counts, scratch.previous, iteration, length, scratch.gaps)
            if self.policy.next_uses is not None:
                note_next_uses(
                    part.tables, batch.starts, counts, scratch.entries, scratch.previous, part.rows.places, iteration,
                    window.first, self._tenants.begins, self.policy.next_uses,
                )  # fmt: skip

        self._workers.run(find, self._parts)
        self._check_capacity(iteration, counts)
        limited = not self.policy.admit(iteration, length, counts, scratch.gaps)
        window.push(counts, batch.split(inverse))
        if cuts is not None:
            self._cuts.append((cuts, inverse))

        def note_stays(part: Part) -> None:
            link(
                part.tables, batch.starts, counts, scratch.entries, scratch.previous, iteration, length, scratch.gaps,
                limited, KEEP if self.policy.keeps else 0, window.begins, window.entries, window.stays,
            )  # fmt: skip
            if cuts is not None:
                keep_users(
                    part.tables, batch.starts, counts, iteration, window.first, self._uses_ahead, window.begins,
                    scratch.users, scratch.previous, window.users, window.previous, window.next, window.later,
                )  # fmt: skip

        self._workers.run(note_stays, self._parts)
        self._half_read = False

    def emit(self, *, last: bool = False, ended: bool = False) -> Plan:
        """The plan of the oldest batch read. `last`: no batch follows; `ended`: none follows those that were read."""
        iteration, length = self._window.first, len(self._window)
        assert length, f"no batch was read for iteration {iteration}"
        learns, self._learns = self._learns, False
        if learns:
            self.policy.learn(take_sample(self._window, self._tenants.noted, self._features))
        bounds, entries, stays = self._window.oldest()
        room = [self.policy.room(iteration, length, group) for group in self.groups if self._lingering]
        if self._lingering and not ended:
            self._lingering.keep(room, bounds, stays)
        rows = RowList(np.empty(len(entries), np.int64), np.empty(len(entries), np.int32), bounds)
        misses, leaves = np.zeros((2, len(self.tables)), np.int64)

        def find_places(part: Part) -> None:
            look_up(part.tables, bounds, entries, stays, part.rows.places, rows.slots, misses, leaves)

        self._workers.run(find_places, self._parts)
        fetch = unfilled_fetch(misses)
        victims = self._assign_slots(iteration, rows, entries, fetch, stays, leaves)
        sharing = self._sharing(iteration, rows, entries, fetch)
        evict = unfilled_list(leaves)

        def settle_rows(part: Part) -> None:
            noted, tenants = part.rows, self._tenants
            settle(
                part.tables, bounds, entries, stays, noted.places, noted.bases, noted.keys,
                iteration, max(-1, iteration - 1 - self.policy.horizon), rows.ids, rows.slots,
                fetch.bounds, fetch.ids, fetch.slots, fetch.after, evict.bounds, evict.ids, evict.slots,
                tenants.begins, tenants.codes,
            )  # fmt: skip

        self._workers.run(settle_rows, self._parts)
        if not self.policy.exact:
            fetch.after.fill(-1)
        hits = len(rows) - len(fetch)
        if learns and not last and self.trainers == 1:
            fetch = warm_up(self.policy, self.groups, self._tenants, iteration, fetch)
        if self._lingering:
            evict = evict.joined(self._lingering.leave(iteration, room, rows, stays, length - 1 if ended else None))
        if self.policy.keeps:
            for group in self.groups:
                self.policy.planned(iteration, group, group.collect(rows.slots, bounds), group.collect(stays, bounds))
            evict = evict.joined(self._leave_all(iteration) if last else self._leave(iteration))
        for group in self.groups:
            group.slots.free(group.collect(evict.slots, evict.bounds), iteration)
        lookahead = self.policy.lookahead_at(iteration, length)
        self.policy.advance()
        inverse = self._window.pop()
        return Plan(iteration, rows, inverse, fetch, evict, victims, lookahead, hits, sharing)

    def close(self) -> None:
        """Let the oracle's threads go."""
        self._workers.close()

    def _find_uniques(self, part: Part, table: int, batch: CheckedIds, iteration: int, inverse: Int32s) -> int:
        """One walk over a table's ids; the number of its unique rows."""
        noted, scratch, start = part.rows, self._scratch, int(batch.starts[table])
        if isinstance(noted, MappedRows):
            oldest = self._window.first
            num_ids = int(batch.starts[table + 1]) - start
            noted.map.reserve(num_ids, keep_read=oldest, keep_plan=oldest - self.policy.horizon)
        count = 0
        for feature in self._features[table]:
            entries = noted.entries(batch.features[feature])
            count = find_uniques(
                entries, noted.bases[table], noted.words, iteration, scratch.entries, scratch.previous, start, count,
                inverse, batch.positions[feature],
            )  # fmt: skip
        return count

    def _mark_users(self, part: Part, batch: CheckedIds, counts: Int64s, cuts: Int64s, inverse: Int32s) -> None:
        """Note which trainers use the rows of some tables."""
        assert self._bits is not None
        positions, features = np.array(batch.positions), self._feature_bounds
        assert np.array_equal(cuts[:, -1], np.diff(positions)), "the cuts of a batch do not fit its ids"
        users = self._scratch.users
        mark_users(part.tables, features, batch.starts, counts, positions, inverse, cuts, self._bits, users)

    def _sharing(self, iteration: int, rows: RowList, entries: Int32s, fetch: Fetch) -> Sharing | None:
        """What trainers have to do with the rows of the oldest batch; `rows` hold places."""
        if self._bits is None:
            return None
        window, homes = self._window, np.empty(len(fetch), np.int8)
        begin = window.begins[0, iteration & window.mask]
        here = slice(begin, begin + len(rows))
        before = find_before(window.previous[here], iteration)

        def choose(part: Part) -> None:
            choose_owners(
                part.tables, rows.bounds, entries, rows.slots, iteration, len(window), part.rows.words, window.begins,
                window.stays, window.users, window.previous, self.trainers, fetch.bounds, fetch.slots, homes,
            )  # fmt: skip

        self._workers.run(choose, self._parts)
        stays = window.stays[here] != 0
        after, later = (
            part[here] * stays if self._uses_ahead > number else np.zeros_like(window.users[here])
            for number, part in enumerate((window.next, window.later))
        )
        return Sharing(window.users[here].copy(), after, later, before, homes, *self._cuts.popleft())

    def _check_capacity(self, iteration: int, counts: Int64s) -> None:
        for group in self.groups:
            needed = int(counts[group.tables].sum())
            if needed > group.slots.capacity:
                raise CapacityError(
                    f"iteration {iteration} needs {needed:,} rows of {group.label} at once, and the cache has places "
                    f"for {group.slots.capacity:,}: raise `cache` to at least {needed:,} rows of this width, or lower "
                    "the batch size"
                )

    def _leave(self, iteration: int) -> RowList:
        """The rows that the policy lets go with a plan, beside those of its batch."""
        window, end = self._window, self._window.first + len(self._window) - 1

        def absent(group: Group) -> Callable[[int], int]:
            def count(last: int) -> int:
                return sum(
                    count_absent(
                        np.intersect1d(part.tables, group.tables), window.begins, iteration + 1, min(last, end),
                        window.entries, window.stays, part.rows.places,
                    )
                    for part in self._parts
                )  # fmt: skip

            return count

        leaving = [self.policy.leaving(iteration, group, absent(group)) for group in self.groups]
        return self._tenants.evict(leaving, iteration) if any(map(len, leaving)) else self._nothing

    def _leave_all(self, iteration: int) -> RowList:
        residents = self._tenants.residents()
        self._tenants.evict_rows(residents, iteration)
        return residents

    def _assign_slots(
        self, iteration: int, rows: RowList, entries: Int32s, fetch: Fetch, stays: Stays, leaves: Int64s
    ) -> Victims:
        """Let the policy choose slots for the rows to fetch; `rows.slots` still holds places.

        Those that it lets pass leave after the batch, which changes `stays` and `leaves`.
        """
        leaving, evict_after = [], -1
        all_passing = np.zeros(len(fetch), np.bool_)
        for group in self.groups:
            places = group.collect(rows.slots, rows.bounds) if self.policy.keeps else rows.slots[:0]
            num_misses = int(np.diff(fetch.bounds)[group.tables].sum())
            misses = partial(self._missing, group, rows, entries)
            slots, slot_after = np.empty((2, num_misses), np.int32)
            passing = np.zeros(num_misses, np.bool_)
            demand = Demand(iteration, group, places[places > 0] - 1, num_misses, misses, passing)
            victims, last_use = self.policy.assign(demand, slots, slot_after)
            group.spread(slots, fetch.slots, fetch.bounds)
            group.spread(slot_after, fetch.slot_after, fetch.bounds)
            group.spread(passing, all_passing, fetch.bounds)
            leaving.append(victims)
            evict_after = max(evict_after, last_use)
        if all_passing.any():
            stays[np.flatnonzero(rows.slots <= 0)[all_passing]] = 0
            leaves[:] = [np.count_nonzero(stays[a:b] == 0) for a, b in pairwise(rows.bounds)]
        out = self._tenants.evict(leaving, iteration) if evict_after >= 0 else self._nothing
        return Victims(out.ids, out.slots, out.bounds, evict_after)

    def _missing(self, group: Group, rows: RowList, entries: Int32s) -> tuple[Int64s, Int64s]:
        """Table and id of each row of the group that has no slot yet."""
        ids = []
        for t in group.tables.tolist():
            here = slice(rows.bounds[t], rows.bounds[t + 1])
            ids.append(self._tenants.noted[t].ids(t, entries[here][rows.slots[here] <= 0].astype(np.int64)))
        return np.repeat(group.tables, [len(own) for own in ids]), np.concatenate(ids)


def mask_type(trainers: int) -> MaskType:
    """The smallest number that has a bit for each trainer."""
    if not 1 <= trainers <= TRAINERS_MAX:
        raise ConfigError(f"trainers is {trainers}: give 1 to {TRAINERS_MAX}")
    return next(kind for kind in (np.uint8, np.uint16, np.uint32, np.uint64) if trainers <= 8 * kind(0).nbytes)


def _check_settings(
    tables: Sequence[OracleTable], capacity: Sequence[int], threads: int, ahead: int, start: int
) -> None:
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
        ("start", start, 0),
    ):
        if value < least:
            raise ConfigError(f"{name} is {value}: give at least {least}")
