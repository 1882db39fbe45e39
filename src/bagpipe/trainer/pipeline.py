"""Executes plans: rows are prefetched, trained and written back, overlapped, in the order that the plans' waits allow.

An iteration passes four points: trained, updated, copied out, acknowledged. The whole of consistency is three waits
(I3, I4), each marked below:
  1. copy-out of an eviction waits until the iteration of the row's last update is updated;
  2. an insertion waits until the slot's last tenant is copied out;
  3. a fetch waits until all iterations up to its `after` are acknowledged.
Queues are bounded by `depth` plans, and rows on their way by blocks of STAGED_ROWS (I5).
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable, Generator, Iterator, Sequence
from dataclasses import dataclass
from typing import Generic, TypeVar

import numpy as np
import numpy.typing as npt

from bagpipe.cache import RowCache, TableRows
from bagpipe.failpoints import reach
from bagpipe.oracle.plan import Fetch, Plan
from bagpipe.oracle.row_list import RowList
from bagpipe.store.base import NO_ITERATION, Store
from bagpipe.trainer.observer import Observer
from bagpipe.trainer.stages import Driver, Stage, Wait
from bagpipe.trainer.traffic import Traffic

Payload = TypeVar("Payload")
Ids = npt.NDArray[np.int64]
Slots = npt.NDArray[np.int32]
Part = tuple[int, Ids, Slots, int]
"""Table, ids, slots and columns of rows to read."""

DEPTH = 8
STAGED_ROWS = 1 << 17
"""Rows that are on their way between the store and their slots at once: what is larger comes in blocks of so many."""


@dataclass(slots=True)
class Points:
    """How far training is: all iterations up to each number have passed that point."""

    updated: int = -1
    copied_out: int = -1
    acknowledged: int = -1


class Pipeline(Generic[Payload]):
    """Plans in, batches out whose rows are in the cache."""

    def __init__(
        self,
        plans: Generator[tuple[Plan, Payload], None, None],
        cache: RowCache,
        store: Store,
        driver: Driver,
        depth: int = DEPTH,
        observer: Observer | None = None,
        dims: Sequence[int] | None = None,
    ) -> None:
        """`dims` are the columns that the vectors of each table's rows have; needed by plans with rows not whole."""
        self.points, self.traffic = Points(), Traffic()
        self._plans, self._cache, self._store, self._driver = plans, cache, store, driver
        self._depth, self._observer, self._dims = depth, observer, dims
        self._started = False
        self._planned: deque[tuple[Plan, Payload]] = deque()
        self._ready: deque[tuple[Plan, Payload]] = deque()
        self._trained: deque[Plan] = deque()
        self._victims: deque[tuple[int, list[TableRows]]] = deque()
        """With the iteration whose plan they made room for."""
        self._exhausted = self._all_ready = self._closing = False
        self._flush_wanted = self._flush_done = 0
        self._in_training = 0
        """Plans that were taken and are not updated yet."""
        self._other_stages: dict[str, Stage] = {}
        self._barrier = -1
        """The plan in training, if it flushes: the next one may not change rows before the store has them."""
        self.source_error: BaseException | None = None
        """What ended the plans, if it was not the end of the data."""

    def add_stage(self, name: str, stage: Stage) -> None:
        """Run another stage beside those that move rows; before the first plan. It must end once `close` was called."""
        self._other_stages[name] = stage

    def wait(self) -> bool:
        """Return when the next plan's rows are in their slots; False after the last one.

        An error of the source or the oracle is raised here, after all batches before it have been trained.
        """
        if not self._started:
            self._started = True
            stages = {"plan": self._plan(), "prefetch": self._prefetch(), "write-back": self._write_back()}
            self._driver.start(stages | self._other_stages)
        start = time.perf_counter()
        self._driver.wait(Wait("the rows of the next batch", self._has_next))
        self.traffic.stall_s += time.perf_counter() - start
        if not self._ready and self.source_error is not None:
            raise self.source_error
        return bool(self._ready)

    def take(self) -> tuple[Plan, Payload]:
        """The plan that `wait` has waited for."""
        plan, payload = self._ready.popleft()
        self._barrier = plan.iteration if len(plan.flush) else -1
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
        self._closing = True
        self._driver.notify()
        if self._started:
            self._driver.join()
        self._plans.close()

    def abandon(self) -> None:
        """Let the stages end by themselves: nobody waits for them, and what is in training stays undone."""
        self._closing = True
        self._in_training = 0
        self._driver.notify()

    def _plan(self) -> Stage:
        while True:
            yield Wait("room for another plan", lambda: len(self._planned) < self._depth or self._closing)
            try:
                item = None if self._closing else next(self._plans, None)
            except Exception as error:
                self.source_error = error
                item = None
            if item is None:
                break
            reach("trainer.plan.received")
            self._planned.append(item)
        self._exhausted = True

    def _prefetch(self) -> Stage:
        barrier = -1
        while True:
            yield Wait("a plan", lambda: bool(self._planned) or self._exhausted or self._closing)
            if self._ended() or not self._planned:
                break
            plan, payload = self._planned.popleft()
            early, late = self._read_early(plan)
            after = int(plan.fetch.after.max(initial=-1))
            yield self._until(f"iteration {after} to be in the store", self._in_store(after))  # wait 3
            if self._ended():
                break
            staged, *others = self._blocks(late)
            fetched = early + self._read(plan, staged, after)  # while the victims may still be in use
            reach("trainer.fetch.read")
            if plan.victims.evict_after >= 0:  # also if another trainer writes them: their slots are about to be taken
                yield from self._make_room(plan, barrier)
            freed = int(plan.fetch.slot_after.max(initial=-1))
            yield self._until(f"evictions of iteration {freed} to leave", self._reached("copied_out", freed))  # wait 2
            if self._ended():
                break
            self._cache.expect(len(plan.fetch) if plan.fetch.whole is None else int(plan.fetch.whole.sum()))
            self._insert(plan, fetched)
            for block in others:
                fetched = []  # before the next one: no more than one block of rows is on its way
                fetched = self._read(plan, block, after)
                self._insert(plan, fetched)
            reach("trainer.fetch.inserted")
            yield self._until("training to take a batch", lambda: len(self._ready) < self._depth)
            barrier = plan.iteration if len(plan.flush) else barrier
            self._ready.append((plan, payload))
        self._all_ready = True

    def _make_room(self, plan: Plan, barrier: int) -> Stage:
        """The victims of a plan leave; when there are many, the next ones once the last are in the store."""
        last, room = plan.victims.evict_after, self._depth
        yield self._until(f"iteration {last} to be updated", self._reached("updated", last))  # wait 1
        yield self._until(f"the flush of iteration {barrier}", self._reached("acknowledged", barrier))
        blocks = blocks_of(plan.victims)
        while blocks:
            yield self._until("victims to be in the store", self._has_room(room))
            if self._ended():
                return
            with self._cache.moving:
                self._victims.append((plan.iteration, self._copy_out(blocks.pop(0))))
                if not blocks:
                    self._drop(None if plan.sync is None else plan.sync.drop_victims)
            room = 1

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

    def _retire(self, plan: Plan) -> Stage:
        """Rows leave whose stay ends with a plan, and those that it flushes are copied: all of them are written."""
        *first, last = blocks_of(plan.evict)
        for block in first:
            yield from self._write(self._copy_out(block))  # wait 1: only updated plans come here
        leaving = self._copy_out(last)
        self._drop(None if plan.sync is None else plan.sync.drop)
        *first, last = blocks_of(plan.flush)
        for block in first:
            yield from self._write(self._copy_kept(block))
        kept = self._copy_kept(last)
        self.points.copied_out = plan.iteration
        reach("trainer.evict.copied")
        if kept:
            yield from self._write(kept)
        yield from self._write(leaving, plan.iteration)
        reach("trainer.evict.written")
        self.points.acknowledged = plan.iteration

    def _has_next(self) -> bool:
        return (bool(self._ready) or self._all_ready) and self.points.acknowledged >= self._barrier

    def _has_work(self) -> bool:
        # only then nothing is added any more; fewer than none where some were abandoned and then updated all the same
        last = self._closing and self._all_ready and self._in_training <= 0
        return bool(self._victims or self._trained) or self._flush_wanted > self._flush_done or last

    def _victims_first(self) -> bool:
        """An iteration is acknowledged after the victims of its plan, and before those of later ones: fetches wait."""
        return bool(self._victims) and not (self._trained and self._trained[0].iteration < self._victims[0][0])

    def _has_room(self, blocks: int) -> Callable[[], bool]:
        return lambda: len(self._victims) < blocks

    def _ended(self) -> bool:
        return self._closing

    def _until(self, what: str, ready: Callable[[], bool]) -> Wait:
        return Wait(what, lambda: ready() or self._closing)

    def _reached(self, point: str, iteration: int) -> Callable[[], bool]:
        return lambda: bool(getattr(self.points, point) >= iteration)

    def _in_store(self, after: int) -> Callable[[], bool]:
        return lambda: self.points.acknowledged >= after and self._store.reached(after)

    def _blocks(self, fetch: Fetch) -> list[list[Part]]:
        """What a plan fetches, in blocks of at most STAGED_ROWS rows; at least one."""
        blocks: list[list[Part]] = [[]]
        room = STAGED_ROWS
        for table, ids, slots, columns in self._parts(fetch):
            while len(ids):
                blocks[-1].append((table, ids[:room], slots[:room], columns))
                ids, slots, room = ids[room:], slots[room:], room - min(room, len(ids))
                if not room:
                    blocks.append([])
                    room = STAGED_ROWS
        return blocks if blocks[-1] else blocks[:-1] or blocks

    def _read_early(self, plan: Plan) -> tuple[list[tuple[TableRows, Slots]], Fetch]:
        """Rows that the store has already, read while others of the plan are still to be written back; and these."""
        fetch, late = plan.fetch, plan.fetch.after > self.points.acknowledged
        if not late.any() or late.all() or len(fetch) > STAGED_ROWS:
            return [], fetch
        early = fetch.only(~late)
        after = int(early.after.max())
        if not self._store.reached(after):
            return [], fetch
        (parts,) = self._blocks(early)
        return self._read(plan, parts, after), fetch.only(late)

    def _read(self, plan: Plan, parts: Sequence[Part], after: int) -> list[tuple[TableRows, Slots]]:
        """Rows that the plan fetches, and their slots."""
        fetched = []
        for table, ids, slots, columns in parts:
            values = np.empty((len(ids), columns), np.float32)
            fetched.append((TableRows(table, ids, values), slots))
        if fetched:
            self._store.read_many([rows for rows, _ in fetched], after)
        if self._observer:
            for rows, _ in fetched:
                self._observer.fetched(plan, rows)
        return fetched

    def _insert(self, plan: Plan, fetched: Sequence[tuple[TableRows, Slots]]) -> None:
        """Rows that were read take their slots."""
        with self._cache.moving:
            for rows, slots in fetched:
                if self._observer:
                    self._observer.inserted(plan, rows.table, rows.ids, slots)
                self._cache.insert(rows.table, rows.ids, slots, rows.values)
        self.traffic.fetched_rows += sum(len(slots) for _, slots in fetched)
        self.traffic.fetched_bytes += sum(rows.values.nbytes for rows, _ in fetched)
        self.traffic.peak_rows = self._cache.peak_rows

    def _parts(self, fetch: Fetch) -> Iterator[Part]:
        """Table, ids, slots and columns to read: of a table's rows those that are whole, then those that are not."""
        for table, ids, slots in tables_of(fetch):
            width = self._cache.widths[self._cache.group[table]]
            if fetch.whole is None or self._dims is None or self._dims[table] == width:
                yield table, ids, slots, width
                continue
            whole = fetch.whole[fetch.bounds[table] : fetch.bounds[table + 1]]
            for chosen, columns in ((whole, width), (~whole, self._dims[table])):
                if chosen.any():
                    yield table, ids[chosen], slots[chosen], columns

    def _copy_out(self, leaving: RowList) -> list[TableRows]:
        copied = []
        for table, ids, slots in tables_of(leaving):
            rows = self._cache.copy_out(table, ids, slots)
            if self._observer:
                self._observer.copied_out(table, ids, slots, rows)
            copied.append(rows)
        return copied

    def _drop(self, leaving: RowList | None) -> None:
        """Forget rows that another trainer writes back."""
        for table, ids, slots in () if leaving is None else tables_of(leaving):
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
        self._store.write_many(leaving, passed)

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
                self._observe(block or [])
                if block is None and self._observer:
                    self._observer.flushed()
            for _ in range(num_victims):
                yield from self._write_victims()
            if block is not None:
                yield from self._write(block)

    def _copy_kept(self, staying: RowList) -> list[TableRows]:
        return self._observe([self._cache.copy_kept(*part) for part in tables_of(staying)])

    def _observe(self, copied: list[TableRows]) -> list[TableRows]:
        """Rows that will be written and stay."""
        if self._observer:
            for part in copied:
                self._observer.copied(part)
        return copied


def blocks_of(rows: RowList) -> list[RowList]:
    """A list in blocks of at most STAGED_ROWS rows; at least one."""
    if len(rows) <= STAGED_ROWS:
        return [rows]
    blocks = []
    for first in range(0, len(rows), STAGED_ROWS):
        part = slice(first, first + STAGED_ROWS)
        blocks.append(RowList(rows.ids[part], rows.slots[part], np.clip(rows.bounds - first, 0, STAGED_ROWS)))
    return blocks


def tables_of(rows: RowList) -> Iterator[tuple[int, Ids, Slots]]:
    """The parts of a list that are not empty: table, ids, slots."""
    for table in np.flatnonzero(np.diff(rows.bounds)).tolist():
        part = slice(int(rows.bounds[table]), int(rows.bounds[table + 1]))
        yield table, rows.ids[part], rows.slots[part]
