"""The pipeline: rows are planned, fetched, inserted, trained and written back, overlapped, as the plans' waits allow.

An iteration passes four points: trained, updated, copied out, acknowledged. The whole of consistency is three waits
(I3, I4), each marked where it stands:
  1. copy-out of an eviction waits until the iteration of the row's last update is updated;
  2. an insertion waits until the slot's last tenant is copied out;
  3. a fetch waits until all iterations up to its `after` are acknowledged.
Queues are bounded by `depth` plans, and rows on their way by STAGED_ROWS each way (I5), unless they are read further
ahead than they would have to be.

The training loop calls `wait`, `take` and `updated` for each plan. Beside it run stages, here in the order in which an
iteration meets them: plan, fetch (READERS of them), insert, write-back.
"""

from __future__ import annotations

import math
import time
from collections import deque
from collections.abc import Callable, Generator, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, Generic, Protocol, TypeVar

import numpy as np

from bagpipe.arrays import Int32s, Int64s
from bagpipe.cache import RowCache, TableRows
from bagpipe.failpoints import reach
from bagpipe.oracle.plan import Fetch, Plan
from bagpipe.oracle.row_list import RowList
from bagpipe.store.base import NO_ITERATION, Store
from bagpipe.trainer.stages import Driver, Stage, Wait

Payload = TypeVar("Payload")
Part = tuple[int, Int64s, Int32s, int]
"""Table, ids, slots and columns of rows to read."""
Rows = list[tuple[TableRows, Int32s]]
"""Rows that were read, and the slots that they will take."""

DEPTH = 8
READERS = 2
"""Plans whose rows are read at once: between a request and its answer a link has nothing to carry, and while rows take
their slots neither; with a second request under way it has."""
STAGED_ROWS = 1 << 17
"""Rows that are on their way to their slots at once, and as many on their way to the store: what is larger moves in
blocks."""


@dataclass(slots=True)
class Progress:
    """How far training is: all iterations up to each number have passed that point."""

    updated: int = -1
    copied_out: int = -1
    acknowledged: int = -1
    closing: bool = False
    """Nothing is fetched any more."""
    before: int = 0
    """Iterations of earlier plans over the same rows. All trainers have passed them, so without counting on from there
    a read that must follow another trainer's write would not wait for it (I3)."""

    @property
    def total(self) -> int:
        """Iterations that are updated, of earlier plans too."""
        return self.before + self.updated + 1

    def in_store(self, iteration: int) -> int:
        """The number of an iteration of these plans as the store knows it."""
        return iteration if iteration == NO_ITERATION else self.before + iteration


@dataclass(slots=True)
class Counters:
    """What a trainer's pipeline has moved since the first plan, and how long training waited for it."""

    fetched_rows: int = 0
    fetched_bytes: int = 0
    """Of values; less than whole rows where another trainer has the optimizer state."""
    written_rows: int = 0
    unique_rows: int = 0
    hit_rows: int = 0
    stall_s: float = 0.0
    plan_s: float = 0.0
    """Spent on making plans, or waiting for them; the loader included."""
    fetch_s: float = 0.0
    """Spent on reading rows from the store, by all readers."""
    iterations: int = 0
    lookahead_sum: int = 0
    peak_rows: int = 0
    """Slots in use at the most: by rows that plans keep, rows fetched ahead and rows that have not left yet, so it
    depends on how far apart the stages were. Of one among several trainers: by the rows that it updates, which are its
    share where rows have owners; copies of rows that others update are not counted."""
    windows: str = ""
    """The lengths of windows that were chosen, if a policy chooses them."""

    def seconds(self) -> float:
        """Now, since any moment."""
        return time.perf_counter()

    @property
    def lookahead(self) -> float:
        """Effective lookahead, mean over iterations."""
        return self.lookahead_sum / max(1, self.iterations)

    def summary(self) -> dict[str, Any]:
        """For people."""
        return {
            "iterations": self.iterations,
            "hit_rate": self.hit_rows / self.unique_rows if self.unique_rows else math.nan,
            "fetched_rows": self.fetched_rows,
            "fetched_bytes": self.fetched_bytes,
            "written_rows": self.written_rows,
            "stall_seconds": self.stall_s,
            "lookahead": self.lookahead,
            "peak_rows": self.peak_rows,
        } | ({"windows": self.windows} if self.windows else {})


class Observer(Protocol):
    """Is told of every movement of rows; the checker is one."""

    def fetched(self, plan: Plan, rows: TableRows) -> None:
        """Rows were read from the store for this plan."""

    def inserted(self, plan: Plan, table: int, ids: Int64s, slots: Int32s) -> None:
        """Rows are about to take their slots."""

    def copied_out(self, table: int, ids: Int64s, slots: Int32s, rows: TableRows) -> None:
        """Rows left their slots; `rows` are those of them that must be written."""

    def copied(self, rows: TableRows) -> None:
        """Updated rows were copied from their slots, where they stay; they will be written."""

    def flushed(self) -> None:
        """Nothing that this trainer has to write is left in the cache."""

    def dropped(self, table: int, ids: Int64s, slots: Int32s) -> None:
        """These rows left their slots, if they were there, and another trainer writes them."""

    def written(self, rows: TableRows) -> None:
        """The store has these rows."""


@dataclass(slots=True)
class Prefetch(Generic[Payload]):
    """A plan whose rows were read, or the first block of them."""

    plan: Plan
    payload: Payload
    rows: Rows
    after: int
    """The last iteration that must be in the store before they are read."""
    others: list[list[Part]]
    """Further blocks, still to be read."""


class Pipeline(Generic[Payload]):
    """Plans in, batches out whose rows are in the cache."""

    def __init__(
        self,
        cache: RowCache,
        store: Store,
        driver: Driver,
        depth: int = DEPTH,
        observer: Observer | None = None,
        dims: Sequence[int] | None = None,
        ahead: int = READERS,
        points: Progress | None = None,
    ) -> None:
        """`dims` are the columns that the vectors of each table's rows have; needed by plans with rows not whole.

        The rows of up to `ahead` plans may be on their way to the cache. `points` are those of an earlier pipeline
        that this one goes on from.
        """
        self.points, self.traffic = points or Progress(), Counters()
        self._plans: Generator[tuple[Plan, Payload], None, None] | None = None
        self._cache, self._store, self._driver = cache, store, driver
        self._depth, self._observer, self._dims, self._ahead = depth, observer, dims, max(READERS, ahead)
        self._started = False
        self._other_stages: dict[str, Stage] = {}
        # What one stage leaves to the next, in the order of plans.
        self._planned: deque[tuple[Plan, Payload]] = deque()
        self._all_planned = False
        self._num_taken = self._num_inserted = 0
        """Plans that readers have taken, and whose rows are in their slots."""
        self._fetched: dict[int, Prefetch[Payload]] = {}
        """By the number of their plan."""
        self._reader_ended = [False] * READERS
        self._ready: deque[tuple[Plan, Payload]] = deque()
        self._all_ready = False
        self._in_training = 0
        """Plans that were taken and are not updated yet."""
        self._trained: deque[Plan] = deque()
        self._victims: deque[tuple[int, list[TableRows]]] = deque()
        """With the iteration whose plan they made room for."""
        self._flush_wanted = self._flush_done = 0
        self.source_error: BaseException | None = None
        """What ended the plans, if it was not the end of the data."""

    def add_stage(self, name: str, stage: Stage) -> None:
        """Run another stage beside those that move rows; before the first plan. It must end once `close` was called."""
        self._other_stages[name] = stage

    # What the training loop calls

    def begin(self, plans: Generator[tuple[Plan, Payload], None, None]) -> None:
        """These plans are to be executed, from the first `wait` on."""
        self._plans = plans

    def wait(self) -> bool:
        """Return when the next plan's rows are in their slots; False after the last one.

        An error of the source or the oracle is raised here, after all batches before it have been trained.
        """
        if not self._started:
            self._started = True
            readers = {f"fetch-{reader}": self._fetch(reader) for reader in range(READERS)}
            stages = {"plan": self._plan(), **readers, "insert": self._insert(), "write-back": self._write_back()}
            self._driver.start(stages | self._other_stages)
        start = time.perf_counter()
        self._driver.wait(Wait("the rows of the next batch", lambda: bool(self._ready) or self._all_ready))
        self.traffic.stall_s += time.perf_counter() - start
        if not self._ready and self.source_error is not None:
            raise self.source_error
        return bool(self._ready)

    def take(self) -> tuple[Plan, Payload]:
        """The plan that `wait` has waited for."""
        plan, payload = self._ready.popleft()
        self._in_training += 1
        self._driver.notify()
        return plan, payload

    def updated(self, plan: Plan) -> None:
        """The training loop is done with this plan: its rows are as they will be read by later iterations."""
        self._trained.append(plan)
        self._in_training -= 1
        self.points.updated = plan.iteration
        self.traffic.iterations += 1
        self.traffic.unique_rows += len(plan.rows.ids)
        self.traffic.hit_rows += plan.hits
        self.traffic.lookahead_sum += plan.lookahead
        self.traffic.peak_rows = self._cache.peak_rows  # rows come from other trainers too
        self._driver.notify()

    def flush(self) -> None:
        """Barrier: return when the store has every update so far. Rows stay cached."""
        if not self._started:
            return
        self._flush_wanted += 1
        wanted = self._flush_wanted
        self._driver.notify()
        self._driver.wait(Wait("the store to take all updated rows", lambda: self._flush_done >= wanted))

    def close(self) -> None:
        """Write back everything and end the stages, then let go of the plans and what they are made of."""
        self.points.closing = True
        self._driver.notify()
        if self._started:
            self._driver.join()
        if self._plans is not None:
            self._plans.close()

    def abandon(self) -> None:
        """Let the stages end by themselves: nobody waits for them, and what is in training stays undone."""
        self.points.closing = True
        self._in_training = 0
        self._driver.notify()

    def _until(self, what: str, ready: Callable[[], bool]) -> Wait:
        """What a stage waits for, unless the loop is being left."""
        return Wait(what, lambda: ready() or self.points.closing)

    def _until_reached(self, point: str, iteration: int, what: str) -> Wait:
        return self._until(what, lambda: bool(getattr(self.points, point) >= iteration))

    # Plan

    def _plan(self) -> Stage:
        while True:
            yield self._until("room for another plan", lambda: len(self._planned) < self._depth)
            begin = time.perf_counter()
            try:
                item = None if self.points.closing or self._plans is None else next(self._plans, None)
            except Exception as error:
                self.source_error = error
                item = None
            self.traffic.plan_s += time.perf_counter() - begin
            if item is None:
                break
            reach("trainer.plan.received")
            self._planned.append(item)
        self._all_planned = True

    # Fetch: plans are the readers' in turn, and handed on in their order

    def _fetch(self, reader: int) -> Stage:
        while True:
            yield Wait("a plan", lambda: self._is_turn_of(reader) or self._no_more_plans())
            if self._no_more_plans():
                break
            plan, payload = self._planned.popleft()
            number = self._num_taken
            self._num_taken += 1
            yield Wait("its turn", lambda: True)  # the next plan is another reader's, who may wait for it
            early, late = self._read_early(plan)
            after = int(plan.fetch.after.max(initial=-1))
            yield self._until(f"iteration {after} to be in the store", self._is_in_store(after))  # wait 3
            if self.points.closing:
                break
            first, *others = self._blocks(late)
            rows = early + self._read(plan, first, after)  # while the victims of the plan may still be in use
            reach("trainer.fetch.read")
            self._fetched[number] = Prefetch(plan, payload, rows, after, others)
            del early, rows  # whoever inserts them lets go of them
            yield self._until("rows to take their slots", self._may_fetch(number + READERS))
        self._reader_ended[reader] = True

    def _is_turn_of(self, reader: int) -> bool:
        return bool(self._planned) and self._num_taken % READERS == reader

    def _no_more_plans(self) -> bool:
        return self.points.closing or (self._all_planned and not self._planned)

    def _is_in_store(self, after: int) -> Callable[[], bool]:
        named = self.points.in_store(after)
        return lambda: self.points.acknowledged >= after and self._store.reached(named)

    def _may_fetch(self, number: int) -> Callable[[], bool]:
        return lambda: number < self._num_inserted + self._ahead

    def _read_early(self, plan: Plan) -> tuple[Rows, Fetch]:
        """Rows that the store has already, read while others of the plan are still to be written back; and these."""
        fetch, late = plan.fetch, plan.fetch.after > self.points.acknowledged
        if not late.any() or late.all() or len(fetch) > self._rows_at_once():
            return [], fetch
        early = fetch.only(~late)
        after = int(early.after.max())
        if not self._store.reached(self.points.in_store(after)):
            return [], fetch
        (parts,) = self._blocks(early)
        return self._read(plan, parts, after), fetch.only(late)

    def _read(self, plan: Plan, parts: Sequence[Part], after: int) -> Rows:
        """Rows that the plan fetches, once the store has iteration `after`."""
        fetched: Rows = []
        for table, ids, slots, columns in parts:
            values = np.empty((len(ids), columns), np.float32)
            fetched.append((TableRows(table, ids, values), slots))
        begin = time.perf_counter()
        if fetched:
            self._store.read_many([rows for rows, _ in fetched], self.points.in_store(after))
        self.traffic.fetch_s += time.perf_counter() - begin
        if self._observer:
            for rows, _ in fetched:
                self._observer.fetched(plan, rows)
        return fetched

    def _blocks(self, fetch: Fetch) -> list[list[Part]]:
        """What a plan fetches, in blocks of bounded size; at least one."""
        found: list[list[Part]] = [[]]
        room = self._rows_at_once()
        for table, ids, slots, columns in self._parts(fetch):
            while len(ids):
                found[-1].append((table, ids[:room], slots[:room], columns))
                ids, slots, room = ids[room:], slots[room:], room - min(room, len(ids))
                if not room:
                    found.append([])
                    room = self._rows_at_once()
        return found if found[-1] else found[:-1] or found

    def _parts(self, fetch: Fetch) -> Iterator[Part]:
        """Table, ids, slots and columns to read: of a table's rows those that are whole, then those that are not."""
        for table, ids, slots in fetch.by_table():
            width = self._cache.widths[self._cache.group[table]]
            if fetch.whole is None or self._dims is None or self._dims[table] == width:
                yield table, ids, slots, width
                continue
            whole = fetch.whole[fetch.bounds[table] : fetch.bounds[table + 1]]
            for chosen, columns in ((whole, width), (~whole, self._dims[table])):
                if chosen.any():
                    yield table, ids[chosen], slots[chosen], columns

    def _rows_at_once(self) -> int:
        """So many of a plan may be on their way."""
        return max(1, STAGED_ROWS * self._ahead // READERS**2)

    # Insert

    def _insert(self) -> Stage:
        while True:
            yield self._until("rows of the next plan", self._is_next_fetched)
            fetched = None if self.points.closing else self._fetched.get(self._num_inserted)
            if fetched is None:
                break
            plan = fetched.plan
            if plan.capacity:
                last = plan.iteration - 1  # has evicted all rows
                yield self._until_reached("copied_out", last, f"iteration {last} to leave")
                if self.points.closing:
                    break
                self._cache.divide(plan.capacity)
            if plan.victims.evict_after >= 0:  # also if another trainer writes them: their slots are about to be taken
                yield from self._make_room(plan)
            freed = int(plan.fetch.slot_after.max(initial=-1))
            yield self._until_reached("copied_out", freed, f"evictions of iteration {freed} to leave")  # wait 2
            if self.points.closing:
                break
            self._cache.expect(len(plan.fetch) if plan.fetch.whole is None else int(plan.fetch.whole.sum()))
            self._take_slots(plan, fetched.rows)
            for block in fetched.others:
                fetched.rows = []  # before the next one: no more than one block of a plan is on its way
                fetched.rows = self._read(plan, block, fetched.after)
                self._take_slots(plan, fetched.rows)
            reach("trainer.fetch.inserted")
            payload = fetched.payload
            del fetched, self._fetched[self._num_inserted]
            self._num_inserted += 1  # now its reader may go on: its rows are on their way no more (I5)
            yield self._until("training to take a batch", lambda: len(self._ready) < self._depth)
            self._ready.append((plan, payload))
        self._all_ready = True

    def _is_next_fetched(self) -> bool:
        return self._num_inserted in self._fetched or all(self._reader_ended)

    def _make_room(self, plan: Plan) -> Stage:
        """The victims of a plan leave; when there are many, the next ones once the last are in the store."""
        last, room = plan.victims.evict_after, self._depth
        yield self._until_reached("updated", last, f"iteration {last} to be updated")  # wait 1
        blocks = plan.victims.blocks(STAGED_ROWS)
        while blocks:
            yield self._until("victims to be in the store", self._has_room(room))
            if self.points.closing:
                return
            with self._cache.moving:
                self._victims.append((plan.iteration, self._copy_out(blocks.pop(0))))
                if not blocks:
                    self._drop(None if plan.sync is None else plan.sync.drop_victims)
            room = 1

    def _has_room(self, blocks: int) -> Callable[[], bool]:
        return lambda: len(self._victims) < blocks

    def _take_slots(self, plan: Plan, fetched: Rows) -> None:
        """Rows that were read take their slots."""
        with self._cache.moving:
            for rows, slots in fetched:
                if self._observer:
                    self._observer.inserted(plan, rows.table, rows.ids, slots)
                self._cache.insert(rows.table, rows.ids, slots, rows.values)
        self.traffic.fetched_rows += sum(len(slots) for _, slots in fetched)
        self.traffic.fetched_bytes += sum(rows.values.nbytes for rows, _ in fetched)
        self.traffic.peak_rows = self._cache.peak_rows

    # Write-back: what was updated, what makes room, and what a barrier asks for

    def _write_back(self) -> Stage:
        while True:
            yield Wait("an update", self._has_work)
            if self._victims_first():
                yield from self._write_victims()
            elif self._trained:
                yield from self._retire(self._trained.popleft())
            elif self._flush_wanted > self._flush_done:
                wanted = self._flush_wanted
                yield from self._flush()
                self._flush_done = wanted
            else:
                yield from self._flush()
                return

    def _has_work(self) -> bool:
        # only then nothing is added any more; fewer than none where some were abandoned and then updated all the same
        last = self.points.closing and self._all_ready and self._in_training <= 0
        return bool(self._victims or self._trained) or self._flush_wanted > self._flush_done or last

    def _victims_first(self) -> bool:
        """An iteration is acknowledged after the victims of its plan, and before those of later ones: fetches wait."""
        return bool(self._victims) and not (self._trained and self._trained[0].iteration < self._victims[0][0])

    def _retire(self, plan: Plan) -> Stage:
        """Rows leave whose stay ends with a plan, and are written."""
        *first, last = plan.evict.blocks(STAGED_ROWS)
        for block in first:
            yield from self._write(self._copy_out(block))  # wait 1: only updated plans come here
        leaving = self._copy_out(last)
        self._drop(None if plan.sync is None else plan.sync.drop)
        self.points.copied_out = plan.iteration
        reach("trainer.evict.copied")
        yield from self._write(leaving, plan.iteration)
        reach("trainer.evict.written")
        self.points.acknowledged = plan.iteration

    def _write_victims(self) -> Stage:
        """Those that wait longest; they count as waiting until the store has them."""
        yield from self._write(self._victims[0][1])
        self._victims.popleft()

    def _flush(self) -> Stage:
        yield Wait("its turn", lambda: True)
        blocks = self._cache.take_dirty(STAGED_ROWS)
        block: list[TableRows] | None = []
        while block is not None:
            with self._cache.moving:  # victims that left since the last look are updates so far as well
                num_victims = len(self._victims)
                block = next(blocks, None)
                if self._observer:
                    for rows in block or []:
                        self._observer.copied(rows)
                    if block is None:
                        self._observer.flushed()
            for _ in range(num_victims):
                yield from self._write_victims()
            if block is not None:
                yield from self._write(block)

    def _copy_out(self, leaving: RowList) -> list[TableRows]:
        copied = []
        for table, ids, slots in leaving.by_table():
            rows = self._cache.copy_out(table, ids, slots)
            if self._observer:
                self._observer.copied_out(table, ids, slots, rows)
            copied.append(rows)
        return copied

    def _drop(self, leaving: RowList | None) -> None:
        """Forget rows that another trainer writes back."""
        for table, ids, slots in () if leaving is None else leaving.by_table():
            self._cache.drop(table, ids, slots)
            if self._observer:
                self._observer.dropped(table, ids, slots)

    def _write(self, leaving: list[TableRows], passed: int = NO_ITERATION) -> Stage:
        """Write rows of tables that differ, after which all up to iteration `passed` are written."""
        yield Wait("its turn", lambda: True)
        leaving = [rows for rows in leaving if len(rows.ids)]
        self.traffic.written_rows += sum(len(rows.ids) for rows in leaving)
        if self._observer:
            self._store.write_many(leaving)
            for rows in leaving:
                self._observer.written(rows)
            leaving = []  # and only then may other trainers read them
        self._store.write_many(leaving, self.points.in_store(passed))
