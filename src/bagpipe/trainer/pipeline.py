"""Executes plans: rows are prefetched, trained and written back, overlapped, in the order that the plans' waits allow.

An iteration passes four points: trained, updated, copied out, acknowledged. The whole of consistency is three waits
(I3, I4), each marked below:
  1. copy-out of an eviction waits until the iteration of the row's last update is updated;
  2. an insertion waits until the slot's last tenant is copied out;
  3. a fetch waits until all iterations up to its `after` are acknowledged (`fetching.py`).
Queues are bounded by `depth` plans, and rows on their way by STAGED_ROWS each way (I5), unless they are read further
ahead than they would have to be.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable, Generator, Sequence
from typing import Generic, TypeVar

from bagpipe.cache import RowCache, TableRows
from bagpipe.failpoints import reach
from bagpipe.oracle.plan import Plan
from bagpipe.oracle.row_list import RowList
from bagpipe.store.base import NO_ITERATION, Store
from bagpipe.trainer import staging
from bagpipe.trainer.fetching import READERS, Fetching, Rows
from bagpipe.trainer.observer import Observer
from bagpipe.trainer.points import Points
from bagpipe.trainer.stages import Driver, Stage, Wait
from bagpipe.trainer.staging import blocks_of, tables_of
from bagpipe.trainer.traffic import Traffic

Payload = TypeVar("Payload")

DEPTH = 8


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
        ahead: int = READERS,
        before: int = 0,
    ) -> None:
        """`dims` are the columns that the vectors of each table's rows have; needed by plans with rows not whole.

        The rows of up to `ahead` plans may be on their way to the cache. Earlier loops over the store had `before`
        iterations.
        """
        self.points, self.traffic = Points(before=before), Traffic()
        self._plans, self._cache, self._store, self._driver = plans, cache, store, driver
        self._depth, self._observer = depth, observer
        self._started = False
        self._fetching = Fetching[Payload](cache, store, self.points, observer, dims, ahead)
        self._ready: deque[tuple[Plan, Payload]] = deque()
        self._trained: deque[Plan] = deque()
        self._victims: deque[tuple[int, list[TableRows]]] = deque()
        """With the iteration whose plan they made room for."""
        self._all_ready = False
        self._flush_wanted = self._flush_done = 0
        self._in_training = 0
        """Plans that were taken and are not updated yet."""
        self._other_stages: dict[str, Stage] = {}
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
            stages = {"plan": self._plan(), **self._fetching.stages(), "insert": self._insert_fetched()}
            self._driver.start(stages | {"write-back": self._write_back()} | self._other_stages)
        start = time.perf_counter()
        self._driver.wait(Wait("the rows of the next batch", self._has_next))
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
        self._plans.close()

    def abandon(self) -> None:
        """Let the stages end by themselves: nobody waits for them, and what is in training stays undone."""
        self.points.closing = True
        self._in_training = 0
        self._driver.notify()

    def _plan(self) -> Stage:
        while True:
            yield Wait(
                "room for another plan", lambda: len(self._fetching.planned) < self._depth or self.points.closing
            )
            begin = time.perf_counter()
            try:
                item = None if self.points.closing else next(self._plans, None)
            except Exception as error:
                self.source_error = error
                item = None
            self.traffic.plan_s += time.perf_counter() - begin
            if item is None:
                break
            reach("trainer.plan.received")
            self._fetching.planned.append(item)
        self._fetching.exhausted = True

    def _insert_fetched(self) -> Stage:
        fetching = self._fetching
        while True:
            yield self._until("rows of the next plan", fetching.has_next)
            fetched = None if self._ended() else fetching.next()
            if fetched is None:
                break
            plan = fetched.plan
            if plan.capacity:
                last = plan.iteration - 1  # has evicted all rows
                yield self._until(f"iteration {last} to leave", self._reached("copied_out", last))
                if self._ended():
                    break
                self._cache.divide(plan.capacity)
            if plan.victims.evict_after >= 0:  # also if another trainer writes them: their slots are about to be taken
                yield from self._make_room(plan)
            freed = int(plan.fetch.slot_after.max(initial=-1))
            yield self._until(f"evictions of iteration {freed} to leave", self._reached("copied_out", freed))  # wait 2
            if self._ended():
                break
            self._cache.expect(len(plan.fetch) if plan.fetch.whole is None else int(plan.fetch.whole.sum()))
            self._insert(plan, fetched.rows)
            for block in fetched.others:
                fetched.rows = []  # before the next one: no more than one block of a plan is on its way
                fetched.rows = fetching.read(plan, block, fetched.after)
                self._insert(plan, fetched.rows)
            reach("trainer.fetch.inserted")
            payload = fetched.payload
            del fetched  # before its reader goes on: no more rows are on their way than STAGED_ROWS
            fetching.done()
            yield self._until("training to take a batch", lambda: len(self._ready) < self._depth)
            self._ready.append((plan, payload))
        self._all_ready = True

    def _make_room(self, plan: Plan) -> Stage:
        """The victims of a plan leave; when there are many, the next ones once the last are in the store."""
        last, room = plan.victims.evict_after, self._depth
        yield self._until(f"iteration {last} to be updated", self._reached("updated", last))  # wait 1
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
        """Rows leave whose stay ends with a plan, and are written."""
        *first, last = blocks_of(plan.evict)
        for block in first:
            yield from self._write(self._copy_out(block))  # wait 1: only updated plans come here
        leaving = self._copy_out(last)
        self._drop(None if plan.sync is None else plan.sync.drop)
        self.points.copied_out = plan.iteration
        reach("trainer.evict.copied")
        yield from self._write(leaving, plan.iteration)
        reach("trainer.evict.written")
        self.points.acknowledged = plan.iteration

    def _has_next(self) -> bool:
        return bool(self._ready) or self._all_ready

    def _has_work(self) -> bool:
        # only then nothing is added any more; fewer than none where some were abandoned and then updated all the same
        last = self.points.closing and self._all_ready and self._in_training <= 0
        return bool(self._victims or self._trained) or self._flush_wanted > self._flush_done or last

    def _victims_first(self) -> bool:
        """An iteration is acknowledged after the victims of its plan, and before those of later ones: fetches wait."""
        return bool(self._victims) and not (self._trained and self._trained[0].iteration < self._victims[0][0])

    def _has_room(self, blocks: int) -> Callable[[], bool]:
        return lambda: len(self._victims) < blocks

    def _ended(self) -> bool:
        return self.points.closing

    def _until(self, what: str, ready: Callable[[], bool]) -> Wait:
        return Wait(what, lambda: ready() or self.points.closing)

    def _reached(self, point: str, iteration: int) -> Callable[[], bool]:
        return lambda: bool(getattr(self.points, point) >= iteration)

    def _insert(self, plan: Plan, fetched: Rows) -> None:
        """Rows that were read take their slots."""
        with self._cache.moving:
            for rows, slots in fetched:
                if self._observer:
                    self._observer.inserted(plan, rows.table, rows.ids, slots)
                self._cache.insert(rows.table, rows.ids, slots, rows.values)
        self.traffic.fetch_s = self._fetching.fetch_s
        self.traffic.fetched_rows += sum(len(slots) for _, slots in fetched)
        self.traffic.fetched_bytes += sum(rows.values.nbytes for rows, _ in fetched)
        self.traffic.peak_rows = self._cache.peak_rows

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
        self._store.write_many(leaving, self.points.in_store(passed))

    def _write_victims(self) -> Stage:
        """Those that wait longest; they count as waiting until the store has them."""
        yield from self._write(self._victims[0][1])
        self._victims.popleft()

    def _flush(self) -> Stage:
        yield Wait("its turn", lambda: True)
        blocks = self._cache.take_dirty(staging.STAGED_ROWS)
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

    def _observe(self, copied: list[TableRows]) -> list[TableRows]:
        """Rows that will be written and stay."""
        if self._observer:
            for part in copied:
                self._observer.copied(part)
        return copied
