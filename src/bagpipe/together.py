"""Several trainers as threads of this process, with one oracle and one store: `trainers = N` without a cluster.

Everything is as between processes, but that exchanges go through memory: the same plans, the same stages, the same bits
(I1). For the speed of several machines there is `bagpipe launch`.
"""

from __future__ import annotations

import queue
import threading
import time
from collections.abc import Callable, Iterable, Sequence
from contextlib import suppress
from functools import partial
from typing import Any, Generic, TypeVar

import torch

from bagpipe.build import Spec
from bagpipe.checker import Ledger
from bagpipe.checkpointing import Checkpointing, Saving, find_point, plan_saving
from bagpipe.config import Config, cache_size
from bagpipe.errors import DeadlineError
from bagpipe.oracle.assign import Assigner
from bagpipe.oracle.capacity import make_oracle
from bagpipe.oracle.design import RULES
from bagpipe.oracle.partition import Partition, uses_ahead
from bagpipe.store import Store
from bagpipe.store.views import shared_views
from bagpipe.trainer.checkpointer import Checkpointer
from bagpipe.trainer.collective import Groups, memory_groups
from bagpipe.trainer.divided import Divided, SharedPlans
from bagpipe.trainer.joint_update import Peers
from bagpipe.trainer.loop import TrainLoop
from bagpipe.trainer.source import Opened, Source
from bagpipe.trainer.stages import DEADLINE_S, Driver, Threads
from bagpipe.types import Batch
from bagpipe.world import World, open_local_rows

OpenStores = Callable[[Spec, Saving | None, Sequence[Callable[[], None]]], Sequence[Store]]
"""Opens the rows for each trainer; the functions wake the trainers when something was written."""
Run = Callable[[Sequence[Callable[[], Any]]], list[Any]]
Result = TypeVar("Result")


class TrainerThreads:
    """N trainers of this process: a world for each, to build its loop in, one after the other.

    What they share is opened by the first one: who reads the data, the oracle, the rows.
    """

    def __init__(
        self,
        config: Config,
        *,
        open_stores: OpenStores | None = None,
        drivers: Sequence[Driver] | None = None,
        run: Run | None = None,
    ) -> None:
        """`drivers` and `run` are a scheduler's, for tests."""
        self.trainers = config.trainers
        self.drivers = drivers or [Threads() for _ in range(self.trainers)]
        self.works_beside = drivers is None
        self._config, self._run, self._open_stores = config, run, open_stores or self._share_store
        ends = [memory_groups(self.trainers, self._notify if drivers is None else lambda: None) for _ in range(3)]
        self._groups = [Groups(*of_rank) for of_rank in zip(*ends, strict=True)]
        sync = config.sync
        ledger = Ledger(self.trainers, owned=not RULES[sync.design].copies) if config.check else None
        self._peers = [Peers(groups, sync.design, sync.delayed, sync.moving, ledger) for groups in self._groups]
        self._source: Divided | None = None
        self._assigner: Assigner | None = None
        self._plans: SharedPlans | None = None
        self._stores: Sequence[Store] = ()
        self._saving: Saving | None = None
        self.worlds = [ThreadWorld(self, rank) for rank in range(self.trainers)]

    def open_source(self, loader: Iterable[Any], accumulate: int) -> Divided:
        """What reads the data for all."""
        if self._source is None:
            self._source = Divided(loader, self._divide, accumulate, self._first_needed)
        return self._source

    def open_plans(self, spec: Spec, rank: int) -> Opened:
        """One trainer's plans."""
        if self._plans is None:
            self._plans = self._make_plans(spec)
        return Opened(self._plans.of(rank), self._plans.oracle.places.capacity, self._peers[rank])

    def open_rows(self, spec: Spec, saving: Saving | None, rank: int) -> Store:
        """The rows, as one trainer sees them."""
        if not self._stores:
            self._stores = self._open_stores(spec, saving, [driver.notify for driver in self.drivers])
        return self._stores[rank]

    def plan_saving(self, spec: Spec, checkpoint: Checkpointing | None) -> Saving | None:
        """How their loops are saved: all of them write the same checkpoints."""
        if self._saving is None and checkpoint is not None:
            self._saving = plan_saving(spec, checkpoint, find_point(checkpoint), trainers=self.trainers)
        return self._saving

    def run(self, loops: Sequence[TrainLoop], train: Callable[[int, TrainLoop], Result]) -> list[Result]:
        """Call `train` for each trainer at the same time; their results. What one raises ends all, and is raised."""
        functions = [partial(train, rank, loop) for rank, loop in enumerate(loops)]
        try:
            return self._run(functions) if self._run else run_threads(functions, abort=self._abort)
        finally:
            for groups in self._groups:
                groups.close()
            for loop in loops:
                loop.store.close()

    def _make_plans(self, spec: Spec) -> SharedPlans:
        config, sync, source = self._config, self._config.sync, self._source
        assert source is not None, "open_source comes first"
        features = [table.features for table in spec.binding.tables]
        self._assigner = Assigner(config.assign, self.trainers, config.seed, features)
        costs = [layout.move_cost for layout in spec.layouts if sync.moving and sync.design == "owned"]
        oracle = make_oracle(
            spec.binding.tables, [layout.width for layout in spec.layouts], cache_size(spec.plans.cache),
            source.first_ids(), source.other_ids(),
            lookahead=spec.plans.lookahead, policy=spec.plans.policy, options=spec.plans.options,
            trainers=self.trainers, uses_ahead=uses_ahead(costs), design=sync.design,
        )  # fmt: skip
        partition = Partition(
            self.trainers, oracle.tables, oracle.places.capacity, oracle.places.guests, design=sync.design,
            delayed=sync.delayed, move_costs=costs,
        )  # fmt: skip
        return SharedPlans(source, oracle, partition)

    def _share_store(self, spec: Spec, saving: Saving | None, notify: Sequence[Callable[[], None]]) -> Sequence[Store]:
        store = open_local_rows(spec.store, spec.layouts, spec.resident_bytes_max)
        return shared_views(store if saving is None else saving.with_marks(store), self.trainers, notify)

    def _divide(self, batch: Batch) -> Sequence[tuple[Batch, int]]:
        assert self._assigner is not None, "open_plans comes first"
        return divide_by(self._assigner)(batch)

    def _first_needed(self, number: int) -> int:
        assert self._assigner is not None, "open_plans comes first"
        return self._assigner.first_needed(number)

    def _notify(self) -> None:
        for driver in self.drivers:
            driver.notify()

    def _abort(self, error: BaseException) -> None:
        with suppress(IndexError):
            self._groups[0].abort(error)
        for driver in self.drivers:
            if isinstance(driver, Threads):
                driver.abort(error)


def divide_by(assigner: Assigner) -> Callable[[Batch], Sequence[tuple[Batch, int]]]:
    """Each trainer's part of a batch."""
    return lambda batch: [(part, len(part)) for part in assigner(batch).parts(batch)]


class ThreadWorld(World):
    """The world of one of several trainers that are threads of this process."""

    def __init__(self, threads: TrainerThreads, rank: int) -> None:
        self.trainer, self.trainers, self._threads = rank, threads.trainers, threads
        self.works_beside = threads.works_beside

    def driver(self) -> Driver:
        """Its own."""
        return self._threads.drivers[self.trainer]

    def open_source(self, loader: Iterable[Any], accumulate: int) -> Source:
        """The one that all share."""
        return self._threads.open_source(loader, accumulate)

    def open_plans(self, spec: Spec, saving: Saving | None, driver: Driver) -> Opened:  # noqa: ARG002
        """This trainer's part of the plans that all share."""
        return self._threads.open_plans(spec, self.trainer)

    def open_rows(self, spec: Spec, saving: Saving | None) -> Store:
        """This trainer's view of the rows that all share."""
        return self._threads.open_rows(spec, saving, self.trainer)

    def plan_saving(self, spec: Spec, checkpoint: Checkpointing | None) -> Saving | None:
        """The same for all."""
        return self._threads.plan_saving(spec, checkpoint)

    def checkpointer(self, saving: Saving, store: Store) -> Checkpointer | None:
        """What saves the loop of this one."""
        return saving.checkpointer(store, self.trainer, shares_process=True, threads=self.works_beside)


class LoopThread(Generic[Result]):
    """A training loop in a thread of its own, with as many threads for PyTorch as the caller has."""

    def __init__(self, rank: int, function: Callable[[], Result]) -> None:
        self.rank = rank
        self.started = self.ended = False
        self.error: BaseException | None = None
        self.result: Result
        self.thread = threading.Thread(target=self._run, name=f"bagpipe-trainer-{rank}", daemon=True)
        self._function = function

    def start(self, begin: Callable[[Any], bool], finished: Callable[[Any], None]) -> None:
        """Start the thread, which calls `begin` first, goes on if that is True, and calls `finished` last."""
        self._begin, self._finished = begin, finished
        # A new thread takes the number that any thread was given last, not that of the thread that starts it.
        self._torch_threads = torch.get_num_threads()
        self.thread.start()
        self.started = True

    def _run(self) -> None:
        try:
            if self._begin(self):
                torch.set_num_threads(self._torch_threads)
                self.result = self._function()
        except BaseException as error:
            self.error = error
        finally:
            self.ended = True
            self._finished(self)


def run_threads(
    functions: Sequence[Callable[[], Result]],
    deadline_s: float = DEADLINE_S,
    abort: Callable[[BaseException], None] = lambda _: None,
) -> list[Result]:
    """Run each function in a thread, with as many threads for PyTorch as the caller has; their results, by rank.

    What one raises first is raised here, after `abort` was called with it, which is to make the waits of the others
    raise (`Threads.abort`, a closed collective), and after all have ended, for which they have `deadline_s`.
    """
    ended: queue.SimpleQueue[LoopThread[Result]] = queue.SimpleQueue()
    loops = [LoopThread(rank, function) for rank, function in enumerate(functions)]
    try:
        for loop in loops:
            loop.start(lambda _: True, ended.put)
        for _ in loops:
            loop = ended.get()
            if loop.error is not None:
                raise loop.error
    except BaseException as error:
        try:
            abort(error)
        finally:
            join_loops(loops, deadline_s, error)
        raise
    join_loops(loops, deadline_s, None)
    return [loop.result for loop in loops]


def join_loops(loops: Sequence[LoopThread[Any]], deadline_s: float, cause: BaseException | None) -> None:
    """Wait until all have ended; DeadlineError if one does not."""
    until = time.monotonic() + deadline_s
    for loop in loops:
        if loop.started:
            loop.thread.join(max(0.0, until - time.monotonic()))
    if stuck := [str(loop.rank) for loop in loops if loop.thread.is_alive()]:
        raise DeadlineError(
            f"trainers {', '.join(stuck)} did not end within {deadline_s:g} s after {type(cause).__name__}: {cause}"
        ) from cause
