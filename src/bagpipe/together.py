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
from typing import Any, Generic, TypeVar

import torch
from torch import nn

from bagpipe.checker import Ledger
from bagpipe.config import Config, cache_size
from bagpipe.errors import DeadlineError
from bagpipe.layers import Binding
from bagpipe.layout import RowLayout
from bagpipe.oracle.assign import Assigner
from bagpipe.oracle.capacity import make_oracle
from bagpipe.oracle.design import RULES
from bagpipe.oracle.partition import Partition, uses_ahead
from bagpipe.store import Store
from bagpipe.trainer.checkpointer import Checkpointer
from bagpipe.trainer.collective import Groups, memory_groups
from bagpipe.trainer.divided import Divided, SharedPlans
from bagpipe.trainer.joint_update import Peers
from bagpipe.trainer.loop import TrainLoop
from bagpipe.trainer.pipeline import DEPTH
from bagpipe.trainer.source import Opened
from bagpipe.trainer.stages import DEADLINE_S, Driver, Threads
from bagpipe.types import Batch

Made = tuple[nn.Module, Binding, list[RowLayout]]
"""A model, which features feed which of its layers, and the layout of its rows."""
OpenStores = Callable[[Sequence[RowLayout], Sequence[Callable[[], None]]], Sequence[Store]]
"""Opens the rows for each trainer; the functions wake the trainers when something was written."""
Run = Callable[[Sequence[Callable[[], Any]]], list[Any]]
Result = TypeVar("Result")


class Trainers:
    """N copies of a model, each with a loop of its own over its part of the batches."""

    def __init__(
        self,
        config: Config,
        made: Sequence[Made],
        loader: Iterable[Batch],
        open_stores: OpenStores,
        *,
        accumulate: int = 1,
        drivers: Sequence[Driver] | None = None,
        run: Run | None = None,
        checkpointer: Callable[[Store, int], Checkpointer | None] = lambda _store, _rank: None,
    ) -> None:
        """`made` are equal models, one a trainer; `drivers` and `run` are a scheduler's, for tests.

        `checkpointer` makes what saves the loop of a trainer, for its view of the rows and its rank.
        """
        trainers = len(made)
        self._drivers = drivers or [Threads() for _ in made]
        self._run = run
        groups = [memory_groups(trainers, self._notify if drivers is None else lambda: None) for _ in range(3)]
        self._groups = [Groups(*ends) for ends in zip(*groups, strict=True)]
        binding, layouts = made[0][1:]
        assigner = Assigner(config.assign, trainers, config.seed, [table.features for table in binding.tables])
        source = Divided(loader, divide_by(assigner), accumulate=accumulate, first_needed=assigner.first_needed)
        source.tables = binding.tables
        source.adapter.require(source.features)
        sync, widths = config.sync, [layout.width for layout in layouts]
        costs = [layout.move_cost for layout in layouts if sync.moving and sync.design == "owned"]
        oracle = make_oracle(
            binding.tables, widths, cache_size(config.cache), source.first_ids(), source.other_ids(),
            lookahead=config.lookahead,
            policy=config.policy, options=config.policy_options.build(), trainers=trainers,
            uses_ahead=uses_ahead(costs), design=sync.design,
        )  # fmt: skip
        partition = Partition(
            trainers, oracle.tables, oracle.places.capacity, oracle.places.guests, design=sync.design,
            delayed=sync.delayed, move_costs=costs,
        )  # fmt: skip
        plans = SharedPlans(source, oracle, partition)
        stores = open_stores(layouts, [driver.notify for driver in self._drivers])
        ledger = Ledger(trainers, owned=not RULES[sync.design].copies) if config.check else None
        peers = [Peers(groups, sync.design, sync.delayed, sync.moving, ledger) for groups in self._groups]
        self.loops = [
            TrainLoop(
                model, own, row_layouts[0].optimizer, row_layouts,
                Opened(plans.of(rank), oracle.places.capacity, peers[rank]), stores[rank], self._drivers[rank],
                depth=DEPTH, threads=torch.get_num_threads(), check=config.check,
                checkpointer=checkpointer(stores[rank], rank),
            )
            for rank, (model, own, row_layouts) in enumerate(made)
        ]  # fmt: skip

    def run(self, train: Callable[[int, TrainLoop], Result]) -> list[Result]:
        """Call `train` for each trainer at the same time; their results. What one raises ends all, and is raised."""

        def loop(rank: int) -> Callable[[], Result]:
            return lambda: train(rank, self.loops[rank])

        loops = [loop(rank) for rank in range(len(self.loops))]
        try:
            return self._run(loops) if self._run else run_threads(loops, abort=self._abort)
        finally:
            for groups in self._groups:
                groups.close()
            for each in self.loops:
                each.store.close()

    def _notify(self) -> None:
        for driver in self._drivers:
            driver.notify()

    def _abort(self, error: BaseException) -> None:
        with suppress(IndexError):
            self._groups[0].abort(error)
        for driver in self._drivers:
            if isinstance(driver, Threads):
                driver.abort(error)


def divide_by(assigner: Assigner) -> Callable[[Batch], Sequence[tuple[Batch, int]]]:
    """Each trainer's part of a batch."""
    return lambda batch: [(part, len(part)) for part in assigner(batch).parts(batch)]


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
