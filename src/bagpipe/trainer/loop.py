"""The training loop: batches whose rows are in the cache, one update an iteration, and barriers; epoch after epoch.

An epoch ends with its last batch, by `break` or any exception: then every updated row is in the store, and nothing is
left running (I4). Where it ended with its last batch, the next one finds its rows in the cache.
"""

from __future__ import annotations

import math
import weakref
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import nullcontext, suppress
from enum import Enum
from types import TracebackType
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor, nn

from bagpipe.arrays import Floats
from bagpipe.cache import RowCache
from bagpipe.checker import Checker
from bagpipe.embedding import CachedLayer, Lookups, TableView
from bagpipe.errors import BatchError, DeadlineError, ModelError
from bagpipe.failpoints import reach
from bagpipe.kernels.parallel import Workers
from bagpipe.layers import Binding, retire_weight, swap
from bagpipe.layout import RowLayout
from bagpipe.optim import PerTable, RowOptimizer
from bagpipe.oracle.plan import Plan
from bagpipe.row_ops import ops_on
from bagpipe.signals import uninterrupted
from bagpipe.store import Store
from bagpipe.trainer.pipeline import Counters, Pipeline, Progress
from bagpipe.trainer.ranks import refuse_ranks
from bagpipe.trainer.read_ahead import Held
from bagpipe.trainer.source import Opened, PlannedBatch, PlanStream
from bagpipe.trainer.stages import Driver
from bagpipe.trainer.state import Attachable, check_attachable
from bagpipe.trainer.update import OwnUpdate, RowUpdate, views_of

if TYPE_CHECKING:
    from bagpipe.trainer.checkpointer import Checkpointer
    from bagpipe.trainer.row_sync import RowSync

Ids = npt.NDArray[np.int64]


class Phase(Enum):
    """Where a training loop is."""

    OPEN = "before an epoch"
    WAITING = "between two iterations"
    TRAINING = "on a batch"
    STEPPED = "on a batch whose rows are updated"
    CLOSING = "at the end of an epoch"
    CLOSED = "after an epoch"


class TrainLoop:
    """`for batch in loop` is an epoch; between two batches `begin_step` and `finish_step` update dense parameters and
    rows. Its ids are the loader's, and their rows are in the cache."""

    def __init__(
        self,
        model: nn.Module,
        binding: Binding,
        rows: RowOptimizer | PerTable,
        layouts: Sequence[RowLayout],
        opened: Opened,
        store: Store,
        driver: Driver,
        *,
        device: torch.device | None = None,
        depth: int,
        threads: int,
        check: bool,
        checkpointer: Checkpointer | None = None,
        ahead: int = 0,
        reopen: Callable[[], Opened] | None = None,
    ) -> None:
        """The rows of `ahead` plans may be on their way to the cache, if that is more than the pipeline's own.

        `reopen` makes plans for a further epoch where those before do not go on; without it there is one epoch.
        """
        self.model, self.layouts, self.store = model, layouts, store
        self.epoch = -1
        """The number of the one under way, or of the last one."""
        self._done_before = self._trained = self._trained_before = self._first = 0
        """Iterations of the run before this loop; those of this loop that are over; of these before this epoch; and
        how many there had been when plans had number 0."""
        if checkpointer is not None and checkpointer.position is not None:
            self._resume(opened.source, checkpointer.position)  # refused while nothing has changed, if of other data
        self._checkpointer, self._binding, self._rows = checkpointer, binding, rows
        self._driver, self._depth, self._threads, self._check, self._ahead = driver, depth, threads, check, ahead
        self._reopen = reopen
        self._device = device or torch.device("cpu")
        self._lookups = Lookups(layouts, self, ops_on(self._device))
        self._update = RowUpdate(layouts, self._lookups)
        self._plan: Plan | None = None
        self._views: list[TableView] = []
        self._micro: list[PlannedBatch] = []
        self._in_hand: list[Held | None] = []
        """Of the batches of this iteration that were given already."""
        self.has_updates = False
        """Whether rows were updated since the store was last known to have every update."""
        self._complete = False
        """Whether the epoch has come to its last batch, and its cache and plans are there for the next one."""
        self._helpers: list[Workers] = []
        for layer in binding.layers:
            swap(model, layer.name, CachedLayer(layer, self._lookups))
        self._progress = Progress()
        self._kept: weakref.finalize[Any, TrainLoop] | None = None
        """Closes the plans that the next epoch would go on with, when nobody holds the loop any more."""
        self._open(opened)
        if checkpointer is not None:
            checkpointer.restore(self)

    # An epoch: opened, begun, trained, closed

    def _open(self, opened: Opened | None) -> None:
        """What an epoch needs; without plans of its own it goes on with those that there are, and with the cache."""
        if opened is not None:
            self._source, capacity, self._peers = opened
            # The store counts iterations of all epochs: else a read that must follow another trainer's write would not
            # wait for it (I3).
            self._progress, self._first = Progress(before=self._progress.total), self._trained
            self.cache = RowCache([layout.width for layout in self.layouts], capacity, self._device)
            self._checker = self._make_checker() if self._check else None
        self._progress.closing, self._data_wait_s = False, 0.0
        pipeline: Pipeline[list[PlannedBatch]] = Pipeline(
            self.cache, self.store, self._driver, self._depth, self._checker,
            [layout.dim for layout in self.layouts], self._ahead, self._progress,
        )  # fmt: skip
        self._pipeline = pipeline
        self._joint = (
            OwnUpdate(self._update, self.cache, pipeline)
            if self._peers is None
            else self._peers.updates(
                self._update, self.cache, pipeline, self.model, self.layouts, self._driver, self._checker
            )
        )
        self._retired = [retire_weight(layer) for layer in self._binding.layers]
        """What lets gradients pass again to the weights that layers had."""
        self.phase, self._complete = Phase.OPEN, False
        # A loop that nobody closes and nobody holds ends too: its threads hold the pipeline, but not the loop.
        self._abandoned = weakref.finalize(self, _abandon, pipeline, self._joint.sync, self._helpers)

    def _make_checker(self) -> Checker | None:
        if self._peers is not None:
            return self._peers.checker(self.layouts, self.cache)
        return Checker([each.table.name for each in self.layouts], [each.dim for each in self.layouts], self.cache)

    def begin(self) -> None:
        """Begin an epoch, of which nothing is read before; in the thread that will train it."""
        if self.is_under_way:
            raise ModelError("an epoch of this loop is under way: end it first")
        if self.closed:
            goes_on = self._complete and self._source.goes_on
            if not goes_on and self._reopen is None:
                raise ModelError("these batches have been read to their end: there is one epoch")
            self._open(None if goes_on or self._reopen is None else self._reopen())
        self._pipeline.begin(self._source.epoch(self._pipeline.traffic))
        self._trained_before, self.phase = self._trained, Phase.WAITING
        self.epoch += 1
        if self._kept is not None:
            self._kept.detach()

    def __enter__(self) -> TrainLoop:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if error is not None:
            self.abort(error)
        try:
            self.close()
        except Exception:
            if error is None:
                raise  # otherwise the loop's own error says more than what it led to

    def __iter__(self) -> Iterator[Any]:
        if not self.is_under_way:
            self.begin()
        while True:
            try:
                planned = self._advance()
            except BaseException as error:
                self._complete = error is self._pipeline.source_error  # for all trainers, after the same iteration
                if not self._complete:
                    self.abort(error)
                with suppress(Exception):
                    self.close()
                raise
            if planned is None:
                break
            reach("trainer.batch.given")
            yield planned.batch
            del planned
        self.close()

    def close(self) -> None:
        """End the epoch: write every updated row back and stop the background work; the model then looks rows up in
        the store. The cache stays if the epoch has ended with its last batch and another one may go on.

        A signal may arrive while it waits: then the next use goes on with it, as no row may be left behind (I4).
        """
        if self.closed:
            return
        is_stepped, self.phase = self.is_stepped, Phase.CLOSING
        try:
            saved = nullcontext() if self._checkpointer is None else self._checkpointer.ending(self)
            with saved, self._joint.leaving(early=not self._complete):
                self._leave_epoch(is_stepped)
                if self._checker is not None:
                    self._checker.finished()
                self._joint.end()
            self.has_updates = False
        except BaseException as error:
            if self._joint.abort(error) or isinstance(error, Exception):
                self._closed(kept=False, stuck=isinstance(error, DeadlineError))  # a stage may still read plans
            raise
        self._closed(kept=self._complete and self._source.goes_on and self._pipeline.source_error is None)

    def _closed(self, *, kept: bool, stuck: bool = False) -> None:
        """Nothing runs any more."""
        with uninterrupted():
            self.phase, self._complete = Phase.CLOSED, kept
            try:
                if kept:
                    self._kept = weakref.finalize(self, self._source.close)
                else:
                    self._let_go(stuck=stuck)
                self._joint.release()
            finally:
                self._abandoned()
                self._lookups.workers = None
                for allow in self._retired:
                    allow()

    def release(self) -> None:
        """Close, and let go of the cache and of where plans come from: a further epoch begins with an empty one."""
        self.close()
        if self._complete:
            self._complete = False
            self._let_go(stuck=False)

    def _let_go(self, *, stuck: bool) -> None:
        if not stuck:
            self._source.close()  # not before: other trainers may still ask it for theirs
            self.cache.release()

    def abort(self, reason: BaseException) -> None:
        """Tell other trainers that this one can't go on."""
        if not self.closed:
            self._joint.abort(reason)

    def _leave_epoch(self, is_stepped: bool) -> None:
        """End the iteration in training, then all stages once they have written what it updated."""
        try:
            self._joint.withdraw()
            self._skip(is_stepped)
            with uninterrupted():
                self._finish_iteration()
        except Exception as error:
            if self._joint.abort(error):
                with suppress(Exception):
                    self._end_stages()
            raise
        self._end_stages()

    def _end_stages(self) -> None:
        self._source.interrupt()
        self._joint.stop()
        self._pipeline.close()

    # An iteration

    def _advance(self) -> PlannedBatch | None:
        """Begin the next batch, if there is one."""
        if self.closed:
            raise ModelError("this epoch has ended: iterate over the loader again")
        if not self._micro:
            if self._plan is not None:
                self._trained = self._first + self._plan.iteration + 1
            self._skip(self.is_stepped)
            with uninterrupted():
                self._finish_iteration()
            if self._checkpointer is not None:
                self._checkpointer.between_iterations(self)
            if self.trainers == 1:
                refuse_ranks()  # again: the script may have joined others since
            if self._lookups.workers is None:
                self._lookups.workers = Workers(self._threads)
                self._helpers.append(self._lookups.workers)
            if not self._wait():
                if self._checkpointer is not None:
                    self._checkpointer.finish(self)
                self._complete = True
                return None
            with uninterrupted():
                self._begin_iteration(*self._pipeline.take())
            assert self._plan is not None
            self._joint.begin(self._plan)
            if self._checker is not None:
                self._checker.training(self._plan)
        assert self._plan is not None
        planned = self._micro.pop(0)
        if planned.held is not None:
            planned.held.compare()
        _refuse_overwritten([planned.held])
        self._in_hand.append(planned.held)
        self._joint.begin_batch(self._plan, len(self._micro))
        self._lookups.pooling.begin(planned.given)
        return planned

    def _wait(self) -> bool:
        """Wait for the next iteration's rows; what of it was due to the loader is counted too."""
        before = self._source.stats()["waited_s"]
        try:
            return self._pipeline.wait()
        finally:
            self._data_wait_s += self._source.stats()["waited_s"] - before

    def _begin_iteration(self, plan: Plan, batches: list[PlannedBatch]) -> None:
        self._plan, self._micro, self.phase = plan, batches, Phase.TRAINING
        self._views = views_of(plan, self.cache)
        self._update.discard()
        self._lookups.view, self._lookups.recording = self._views, True

    def _finish_iteration(self) -> None:
        if self._plan is None:
            return
        plan, self._plan = self._plan, None
        if self.phase is not Phase.CLOSING:
            self.phase = Phase.WAITING
        self._micro, self._in_hand = [], []
        self._update.discard()
        self._lookups.pooling.end()
        self._lookups.view, self._lookups.recording = None, False
        self.cache.fence()
        self._joint.leave(plan)

    def _skip(self, is_stepped: bool) -> None:
        """Let others know of an iteration that ends without a step."""
        if self._plan is not None and not is_stepped:
            self._joint.skip(self._plan)

    def _in_iteration(self, what: str) -> Plan:
        if self._plan is None:
            raise ModelError(f"{what} outside of the training loop: call it on a batch, after loss.backward()")
        return self._plan

    # The step

    def begin_step(self, problem: str | None = None) -> bool:
        """See on all trainers whether there will be an update, of which nothing is made yet.

        GradientError if a gradient of rows is not finite, or with the `problem` of another kind that there is here.
        """
        plan = self._in_iteration("step()")
        _refuse_overwritten(self._in_hand)
        reach("trainer.step.begun")
        return self._joint.agree(plan, self._views, problem)

    def finish_step(self, dense_step: Callable[[], object] | None = None) -> None:
        """Make the update that all have agreed upon; with that of dense parameters signals wait until both are made."""
        plan = self._in_iteration("step()")
        optimizers = {id(layout.optimizer): layout.optimizer for layout in self.layouts}
        scalars = {key: optimizer.scalars(optimizer.updates + 1) for key, optimizer in optimizers.items()}
        of_tables = [scalars[id(layout.optimizer)] for layout in self.layouts]
        idle = self._idle_optimizers()
        with nullcontext() if dense_step is None else uninterrupted():
            if dense_step is not None:
                dense_step()
            self._joint.exchange(plan, self._views, of_tables)
            with uninterrupted():
                updated = self._joint.apply(self._views, of_tables)
                for key, optimizer in optimizers.items():
                    if key not in idle:
                        optimizer.advance()
                self.phase, self.has_updates = Phase.STEPPED, True
                self._trained = self._first + plan.iteration + 1
                if self._checker is not None:
                    self._checker.updated(plan, updated)
            reach("trainer.step.updated")

    def _idle_optimizers(self) -> set[int]:
        """Of one trainer those that count no update, since no backward pass has reached a table of theirs."""
        if self.trainers > 1:
            return set()
        reached = {
            id(layout.optimizer) for number, layout in enumerate(self.layouts) if self._update.is_reached(number)
        }
        return {id(layout.optimizer) for layout in self.layouts} - reached

    def is_reached(self, table: int, column: int) -> bool:
        """Whether a backward pass has reached a look-up of this vector of a table's rows."""
        return self._update.is_reached(table, column)

    def row_gradients(self) -> dict[int, Tensor]:
        """The gradient of each row of the batch, table by table; whoever has them may change them in place."""
        return self._update.collect(self._views)

    def check_gradients(self) -> None:
        """GradientError if one of them is not finite."""
        self._update.check(self._views, self._in_iteration("step()").iteration)

    def drop_gradients(self, table: int, column: int) -> None:
        """Forget those of one vector of a table's rows."""
        self._update.drop(table, column)

    def judged_gradients(self) -> list[Tensor]:
        """Gradients of rows for someone who may change them, and decides by them whether the update is made: on all
        trainers alike."""
        return self._joint.judged(self._in_iteration("unscale_"), self._views)

    def grad_norm(self) -> float:
        """Euclidean norm of the row gradients of this iteration."""
        return math.sqrt(self._joint.squared_norm(self._in_iteration("clip_grad_norm_"), self._views))

    def scale_gradients(self, factor: float) -> None:
        """Multiply the row gradients of this iteration by one float32, for clipping."""
        for grads in self._joint.gradients(self._in_iteration("clip_grad_norm_"), self._views):
            grads.mul_(float(np.float32(factor)))

    # What is known of it

    @property
    def rank(self) -> int:
        """Which of the trainers this is, counted from 0."""
        return self._joint.rank

    @property
    def trainers(self) -> int:
        """How many trainers share the batches."""
        return self._joint.trainers

    @property
    def binding(self) -> Binding:
        """Which feature feeds which layer."""
        return self._binding

    @property
    def lookups(self) -> Lookups:
        """What the layers of the model look up."""
        return self._lookups

    @property
    def done(self) -> int:
        """How many iterations of the run are over, those before it was resumed included."""
        return self._done_before + self._trained

    @property
    def is_saved(self) -> bool:
        """Whether there will be checkpoints."""
        return self._checkpointer is not None and self._checkpointer.is_active

    @property
    def is_under_way(self) -> bool:
        """Whether an epoch has begun and not ended."""
        return self.phase not in (Phase.OPEN, Phase.CLOSED)

    @property
    def closed(self) -> bool:
        """Whether the last epoch has ended."""
        return self.phase is Phase.CLOSED

    @property
    def is_training(self) -> bool:
        """Whether there is a batch in training."""
        return self._plan is not None

    @property
    def is_stepped(self) -> bool:
        """Whether its rows were updated."""
        return self.phase is Phase.STEPPED

    @property
    def step_due(self) -> bool:
        """Whether the current batch is the last of its iteration, so that the step follows it."""
        return self._plan is not None and not self._micro

    @property
    def traffic(self) -> Counters:
        """What this epoch, or the last one, has moved so far."""
        return self._pipeline.traffic

    def stats(self) -> dict[str, Any]:
        """What this epoch, or the last one, has moved so far, and how long training waited for it."""
        return (
            self._pipeline.traffic.summary()
            | {
                "data_wait_seconds": self._data_wait_s,
                "cache_rows": sum(self.cache.capacity),
                "cache_bytes": self.cache.num_bytes,
            }
            | {name: value for name, value in self._source.stats().items() if name != "waited_s"}
            | ({} if self._checkpointer is None else self._checkpointer.stats())
        )

    # Where it goes on

    def attach(self, **objects: Attachable) -> None:
        """Save the states of these in checkpoints, by name; where a run continues they are restored at once."""
        if self._checkpointer is None:
            check_attachable(objects)
        else:
            self._checkpointer.attach(objects)

    def progress(self) -> dict[str, Any]:
        """Where training is: the counters of row optimizers, and the position in the data."""
        position = self._source.position(self._trained - self._trained_before)
        here = {"iterations": self.done, "epoch": max(0, self.epoch)}
        return {"optimizer": self._rows.state_dict(), "data": position | here}

    def go_on(self, progress: Mapping[str, Any]) -> None:
        """Take over the counters of a loop that this one goes on from."""
        self._rows.load_state_dict(progress["optimizer"])

    def _resume(self, source: PlanStream, position: Mapping[str, Any]) -> None:
        source.resume(position)
        self._done_before = int(position.get("iterations", 0))
        self.epoch = int(position.get("epoch", 0)) - 1

    # Rows, for look-ups outside of the batch

    def gather(self, number: float, what: str) -> list[float]:
        """What each trainer says, once all are here; float32."""
        sync = self._joint.sync
        return [float(number)] if sync is None else sync.gather(number, what)

    def flush(self) -> None:
        """Return when the store has every update so far."""
        if self.phase is Phase.CLOSING:  # which was interrupted
            self.close()
        if self.has_updates and not self.closed:
            self._joint.settle()
            self.cache.fence()
            self._pipeline.flush()
            self._joint.barrier("a barrier: the store to take all updated rows")
            self.has_updates = False

    def read_rows(self, table: int, ids: Ids) -> Floats:
        """Rows as the store has them: vectors and optimizer state."""
        values = np.empty((len(ids), self.layouts[table].width), np.float32)
        self.store.read(table, ids, values)
        return values

    def touched_rows(self, table: int) -> Iterator[tuple[Ids, Floats]]:
        """The rows ever written, as trained so far, some at a time as (ids, rows)."""
        self.flush()
        return self.store.iterate(table)

    def write_rows(self, table: int, ids: Ids, values: Floats) -> None:
        """Set rows in the store; refused amid an epoch. The next one begins with an empty cache."""
        if self._lookups.workers is not None:
            raise ModelError(
                "rows can't be set while training goes on: do it before the first batch, or after the last"
            )
        if self.closed:
            self.release()
        self.store.write(table, ids, values)

    def show_store(self, why: str) -> None:
        """Return when the store has every update so far, for look-ups of one trainer alone, who says `why`."""
        if self.trainers > 1 and self.has_updates:
            raise ModelError(
                f"{why} amid training, while other trainers have rows that the store does not have yet: let all "
                "trainers call flush() first, then evaluate"
            )
        self.flush()


def _abandon(pipeline: Pipeline[Any], sync: RowSync | None, helpers: list[Workers]) -> None:
    """Let go of what an epoch has started, when it is over or nobody holds the loop any more."""
    pipeline.abandon()
    if sync is not None:
        sync.close()
    while helpers:
        helpers.pop().close()


def _refuse_overwritten(batches: Sequence[Held | None]) -> None:
    """BatchError if the loader has written into a batch since it was read."""
    for batch in batches:
        if batch is not None and batch.error is not None:
            # One of its own: what the source itself raises comes to all trainers after the same iteration.
            raise BatchError(str(batch.error)) from batch.error
