"""The loop that users write: batches whose rows are in the cache, one update of rows an iteration, and barriers.

It owns the pipeline from the first batch to `close`, which runs at the end of the data and when the `with` block is
left, by `break` or any exception, so that every updated row is in the store and nothing is left running (I4).
"""

from __future__ import annotations

import math
import warnings
import weakref
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import nullcontext, suppress
from types import TracebackType
from typing import Any

import numpy as np
import numpy.typing as npt
from torch import Tensor, nn

from bagpipe.arrays import Floats
from bagpipe.cache import RowCache
from bagpipe.embedding import CachedLayer, Lookups, TableView, follow_requires_grad
from bagpipe.errors import BatchError, DeadlineError, ModelError
from bagpipe.failpoints import reach
from bagpipe.joint_checker import JointChecker, make_checker
from bagpipe.kernels.parallel import Workers
from bagpipe.layers import Binding, retire_weight, swap
from bagpipe.layout import RowLayout
from bagpipe.optim import PerTable, RowOptimizer
from bagpipe.oracle.plan import Plan
from bagpipe.store import Store
from bagpipe.trainer.agreement import refuse_ranks
from bagpipe.trainer.checkpointer import Checkpointer
from bagpipe.trainer.evaluation import private_batches, shown
from bagpipe.trainer.interrupt import uninterrupted
from bagpipe.trainer.joint_update import JointUpdate, OwnUpdate
from bagpipe.trainer.pipeline import Pipeline
from bagpipe.trainer.read_ahead import Held
from bagpipe.trainer.row_sync import Peers
from bagpipe.trainer.sessions import abandon, attach
from bagpipe.trainer.source import PlannedBatch, PlanSource
from bagpipe.trainer.stages import Driver
from bagpipe.trainer.state import Attachable, check_attachable, check_rows, save_rows
from bagpipe.trainer.update import RowUpdate, holder_of, views_of

Ids = npt.NDArray[np.int64]
LOST = (
    "iteration {} has row gradients but had no rows.step(), so they are dropped: to add up those of several batches "
    "pass accumulate= to bagpipe.accelerate, to drop them call batches.zero_grad()"
)


class Batches:
    """The batches of an accelerated loader: their ids name cached rows, which are on the device already."""

    def __init__(
        self,
        model: nn.Module,
        binding: Binding,
        rows: RowOptimizer | PerTable,
        layouts: Sequence[RowLayout],
        source: PlanSource,
        cache: RowCache,
        store: Store,
        driver: Driver,
        *,
        depth: int,
        threads: int,
        check: bool,
        peers: Peers | None = None,
        checkpointer: Checkpointer | None = None,
        ahead: int = 0,
        before: int = 0,
        lookups: Lookups | None = None,
    ) -> None:
        """The rows of `ahead` plans may be on their way to the cache, if that is more than the pipeline's own.

        Earlier loops over the rows had `before` iterations. With `lookups`, those of an earlier loop, the layers of the
        model are swapped already.
        """
        self.model, self.layouts, self.cache, self.store = model, layouts, cache, store
        self._before = 0
        """Iterations of the run before this loop."""
        if checkpointer is not None and checkpointer.position is not None:
            self._resume(source, checkpointer.position)  # refused while nothing has changed, if it is of other data
        self._checkpointer = checkpointer
        self.closed = False
        self._source, self._rows, self._threads = source, rows, threads
        self._lookups = lookups or Lookups(layouts, self, cache.device)
        self._lookups.reader = self
        self._update = RowUpdate(layouts, self._lookups)
        self._checker = make_checker(layouts, cache, peers) if check else None
        self._pipeline: Pipeline[list[PlannedBatch]] = Pipeline(
            source.plans(), cache, store, driver, depth, self._checker, [layout.dim for layout in layouts], ahead,
            before=before,
        )  # fmt: skip
        source.measure(self._pipeline.traffic)
        self._plan: Plan | None = None
        self._views: list[TableView] = []
        self._micro: list[PlannedBatch] = []
        self._in_hand: list[Held | None] = []
        """Of the batches of this iteration that were given already."""
        self._stepped = self._skipped = self._warned = self._unflushed = self._ended = False
        self._trained = 0
        """Iterations that are over: their step was called, or the loop went on without one."""
        self._data_wait_s = 0.0
        self._helpers: list[Workers] = []
        attach(rows, self)
        self._retired = []
        """What lets gradients pass again to the weights that layers had."""
        for layer in binding.layers:
            if lookups is None:
                swap(model, layer.name, CachedLayer(layer, self._lookups))
            self._retired.append(retire_weight(layer))
        if lookups is None:
            follow_requires_grad(model)
        self._joint = OwnUpdate(self._update, cache, self._pipeline)
        if peers is not None:
            joint_checker = self._checker if isinstance(self._checker, JointChecker) else None
            self._joint = JointUpdate(self._update, cache, self._pipeline, model, layouts, driver, peers, joint_checker)
        if checkpointer is not None:
            checkpointer.restore(self)
        # A session that nobody closes and nobody holds ends too: its threads hold the pipeline, but not the session.
        self._abandoned = weakref.finalize(self, abandon, self._pipeline, self._joint.sync, rows, self._helpers)

    def __enter__(self) -> Batches:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if error is not None:
            self._give_up(error)
        try:
            self.close()
        except Exception:
            if error is None:
                raise  # otherwise the loop's own error says more than what it led to

    def __iter__(self) -> Iterator[Any]:
        while True:
            try:
                more = self._advance()
            except Exception as error:
                self._ended = error is self._pipeline.source_error  # for all trainers, after the same iteration
                if not self._ended:
                    self._give_up(error)
                with suppress(Exception):
                    self.close()
                raise
            if not more:
                break
            planned = self._micro.pop(0)
            self._in_hand.append(planned.held)
            assert self._plan is not None
            self._joint.begin_batch(self._plan, len(self._micro))
            self._lookups.pooling.begin(planned.given)
            reach("trainer.batch.given")
            yield planned.batch
            del planned
        self.close()

    def close(self) -> None:
        """Write every updated row back and stop the background work; the model then looks rows up in the store."""
        if self.closed:
            return
        self.closed, stuck = True, False
        try:
            saved = nullcontext() if self._checkpointer is None else self._checkpointer.ending(self)
            with saved, self._joint.leaving(early=not self._ended):
                self._leave_loop()
                self.cache.release()
                if self._checker is not None:
                    self._checker.finished()
                self._joint.end()
        except Exception as error:
            stuck = isinstance(error, DeadlineError)  # a stage may still read plans
            self._joint.give_up(error)
            raise
        finally:
            if not stuck:
                self._source.close()  # not before: other trainers may still ask it for theirs
            self._joint.release()
            self._abandoned()
            self._lookups.workers = None
            for allow in self._retired:
                allow()

    def _leave_loop(self) -> None:
        """End the iteration in training, then all stages once they have written what it updated."""
        try:
            self._joint.withdraw()
            self._pass_over()
            with uninterrupted():
                self._finish_iteration()
        except Exception as error:
            if self._joint.give_up(error):
                with suppress(Exception):
                    self._end_stages()
            raise
        self._end_stages()

    def _end_stages(self) -> None:
        self._source.interrupt()
        self._joint.stop()
        self._pipeline.close()

    @property
    def rank(self) -> int:
        """Which of the trainers this is, counted from 0: a script prints and saves where it is 0."""
        return self._joint.rank

    @property
    def trainers(self) -> int:
        """How many trainers share the batches; 1 but under `bagpipe launch --trainers N`."""
        return self._joint.trainers

    @property
    def done(self) -> int:
        """How many iterations of the run are over, those before it was resumed included."""
        return self._before + self._trained

    def attach(self, **objects: Attachable) -> None:
        """Save the states of these in checkpoints, by name; where a run continues they are restored at once.

        To be called before the first batch, on all trainers alike, with all that has a state: the dense optimizer,
        schedulers, a scaler, each `torch.Generator` that the model draws from. Without checkpoints nothing happens.
        """
        if self._checkpointer is None:
            check_attachable(objects)
        else:
            self._checkpointer.attach(objects)

    @property
    def in_store(self) -> int:
        """How many iterations the store has heard of, those of earlier loops included."""
        return self._pipeline.points.before + self._pipeline.traffic.iterations

    @property
    def step_due(self) -> bool:
        """Whether the current batch is the last of its iteration, so that the optimizers' steps follow it."""
        return self._plan is not None and not self._micro

    def step(self, scaler: Any = None) -> bool:
        """Update the rows of this iteration; `rows.step()` calls it. False: there was nothing to do, or it was skipped.

        With a `torch.amp.GradScaler` the gradients are unscaled first, and the update is skipped if one is not finite.
        """
        plan = self._in_iteration("step")
        if self._micro:
            raise ModelError(
                f"step() with {len(self._micro)} batches of this iteration still to come: call it after them, when "
                "batches.step_due is true"
            )
        if self._stepped:
            raise ModelError(f"step() twice in iteration {plan.iteration}: call it once, after the backward pass")
        _refuse_overwritten(self._in_hand)
        if self._joint.is_idle():
            self._trained = plan.iteration + 1
            return False
        if scaler is not None:
            updated = bool(scaler.step(self))
            self._trained = plan.iteration + 1
            return updated
        updated = self.begin_step()
        if updated:
            self.finish_step()
        self._trained = plan.iteration + 1
        return updated

    @property
    def lookups(self) -> Lookups:
        """What the layers of the model look up; they are swapped once, whatever loops follow."""
        return self._lookups

    @property
    def is_training(self) -> bool:
        """Whether there is a batch in training."""
        return self._plan is not None

    @property
    def is_stepped(self) -> bool:
        """Whether its rows were updated."""
        return self._stepped

    def is_reached(self, table: int, column: int) -> bool:
        """Whether a backward pass has reached a look-up of this vector of a table's rows."""
        return self._update.is_reached(table, column)

    def row_gradients(self) -> dict[int, Tensor]:
        """The gradient of each row of the batch, table by table; whoever has them may change them in place."""
        return self._update.collect(self._views)

    def check_gradients(self) -> None:
        """GradientError if one of them is not finite."""
        self._update.check(self._views, self._in_iteration("step").iteration)

    def drop_gradients(self, table: int, column: int) -> None:
        """Forget those of one vector of a table's rows."""
        self._update.drop(table, column)

    def leave_gradients(self) -> None:
        """Those that had no step are known to be dropped."""
        self._skipped = True

    def begin_step(self, problem: str | None = None) -> bool:
        """See on all trainers whether there will be an update, of which nothing is made yet.

        GradientError if a gradient of rows is not finite, or with the `problem` of another kind that there is here.
        """
        plan = self._in_iteration("step")
        _refuse_overwritten(self._in_hand)
        self._skipped = True  # unless the next lines let it pass
        reach("trainer.step.begun")
        return self._joint.agree(plan, self._views, problem)

    def finish_step(self, dense_step: Callable[[], object] | None = None) -> None:
        """Make the update that all have agreed upon; with that of dense parameters signals wait until both are made."""
        plan = self._in_iteration("step")
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
                self._stepped = self._unflushed = True
                self._trained = plan.iteration + 1
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

    def zero_grad(self) -> None:
        """Drop the row gradients of this iteration: it will have no step."""
        self._in_iteration("zero_grad")
        self._update.zero()

    def grad_norm(self) -> float:
        """Euclidean norm of the row gradients of this iteration."""
        return math.sqrt(self._joint.squared_norm(self._in_iteration("grad_norm"), self._views))

    def scale_gradients(self, factor: float) -> None:
        """Multiply the row gradients of this iteration by one float32, for clipping."""
        for grads in self._joint.gradients(self._in_iteration("scale_gradients"), self._views):
            grads.mul_(float(np.float32(factor)))

    @property
    def param_groups(self) -> list[dict[str, Any]]:
        """The row gradients as a `torch.amp.GradScaler` looks for them: `scaler.unscale_(batches)` works."""
        gradients = self._joint.judged(self._in_iteration("param_groups"), self._views)
        self._skipped = True  # whoever asks may decide against a step
        return [{"params": list(map(holder_of, gradients))}]

    def evaluate(self, loader: Iterable[Any]) -> Iterator[Any]:
        """Batches of another loader, to be given to the model without training: a barrier that changes nothing."""
        tables = [layout.table for layout in self.layouts]
        batches = private_batches(loader, tables, self._read_current, self._lookups.device)
        return shown(batches, self._lookups, lambda: None if self._plan is None else self._views)

    def stats(self) -> dict[str, Any]:
        """What has moved so far, and how long training waited for it."""
        return (
            self._pipeline.traffic.summary()
            | {
                "data_wait_seconds": self._data_wait_s,
                "cache_rows": sum(self.cache.capacity),
                "cache_bytes": self.cache.num_bytes,
            }
            | ({} if self._checkpointer is None else self._checkpointer.stats())
        )

    def state_dict(self) -> dict[str, Any]:
        """Everything that training has changed besides the dense part: rows with their state, counters, data position.

        The batch in hand counts as trained once `rows.step()` was called.
        """
        self.barrier()
        return {"tables": save_rows(self.layouts, self.store)} | self.progress()

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Go on from what `state_dict` returned, with the batch after those trained; before the first batch only.

        Without its "data" the loop begins with the loader's first batch.
        """
        check_rows(self.layouts, state)
        self._refuse_while_training()
        if "data" in state:
            self._resume(self._source, state["data"])
        self.go_on(state)
        for number, layout in enumerate(self.layouts) if self.rank == 0 else ():
            part = state["tables"][layout.table.name]
            self.write_rows(number, part["ids"].numpy(), part["rows"].numpy())
        self._joint.barrier("saved rows to be in the store")

    def progress(self) -> dict[str, Any]:
        """Where training is: the counters of row optimizers, and the position in the data."""
        return {"optimizer": self._rows.state_dict(), "data": self._source.position(self._trained)}

    def go_on(self, progress: Mapping[str, Any]) -> None:
        """Take over the counters of a loop that this one goes on from."""
        self._rows.load_state_dict(progress["optimizer"])

    def _resume(self, source: PlanSource, position: Mapping[str, Any]) -> None:
        source.resume(position)
        self._before = int(position.get("iterations", 0))

    def gather(self, number: float, what: str) -> list[float]:
        """What each trainer says, once all are here; float32."""
        sync = self._joint.sync
        return [float(number)] if sync is None else sync.gather(number, what)

    def barrier(self) -> None:
        """Return when the store has every update so far."""
        if self._unflushed and not self.closed:
            self._joint.settle()
            self.cache.fence()
            self._pipeline.flush()
            self._joint.barrier("a barrier: the store to take all updated rows")
            self._unflushed = False

    def read_rows(self, table: int, ids: Ids) -> Floats:
        """Rows as the store has them: vectors and optimizer state."""
        values = np.empty((len(ids), self.layouts[table].width), np.float32)
        self.store.read(table, ids, values)
        return values

    def touched_rows(self, table: int) -> Iterator[tuple[Ids, Floats]]:
        """The rows ever written, as trained so far, some at a time as (ids, rows)."""
        self.barrier()
        return self.store.iterate(table)

    def write_rows(self, table: int, ids: Ids, values: Floats) -> None:
        """Set rows in the store; refused while rows are cached."""
        self._refuse_while_training()
        self.store.write(table, ids, values)

    def show_store(self, layer: str) -> None:
        """Return when the store has every update so far, for look-ups of one trainer alone."""
        if self.trainers > 1 and self._unflushed:
            raise ModelError(
                f"layer {layer!r} is given ids of another batch amid training, while other trainers have rows that the "
                "store does not have yet: let all trainers call flush() first, then evaluate"
            )
        self.barrier()

    def _read_current(self, table: int, ids: Ids) -> Floats:
        self.barrier()
        return self.read_rows(table, ids)

    def _refuse_while_training(self) -> None:
        if self._lookups.workers is not None:
            raise ModelError(
                "rows can't be set while training goes on: do it before the first batch, or after the last"
            )

    def _advance(self) -> bool:
        """Make sure that there is a next batch; False at the end."""
        if self.closed:
            raise ModelError("these batches have been read to their end: call bagpipe.accelerate again")
        if not self._micro:
            self._warn_of_lost_gradients()
            if self._plan is not None:
                self._trained = self._plan.iteration + 1
            self._pass_over()
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
                self._ended = True
                return False
            with uninterrupted():
                self._begin_iteration(*self._pipeline.take())
            assert self._plan is not None
            self._joint.begin(self._plan)
            if self._checker is not None:
                self._checker.training(self._plan)
        held = self._micro[0].held
        if held is not None:
            held.compare()
        _refuse_overwritten([held])
        return True

    def _wait(self) -> bool:
        """Wait for the next iteration's rows; what of it was due to the loader is counted too."""
        before = self._source.waited_s()
        try:
            return self._pipeline.wait()
        finally:
            self._data_wait_s += self._source.waited_s() - before

    def _begin_iteration(self, plan: Plan, batches: list[PlannedBatch]) -> None:
        self._plan, self._micro = plan, batches
        self._stepped = self._skipped = False
        self._views = views_of(plan, self.cache)
        self._update.discard()
        self._lookups.view, self._lookups.recording = self._views, True

    def _finish_iteration(self) -> None:
        if self._plan is None:
            return
        plan, self._plan = self._plan, None
        self._micro, self._in_hand = [], []
        self._update.discard()
        self._lookups.pooling.end()
        self._lookups.view, self._lookups.recording = None, False
        self.cache.fence()
        self._joint.leave(plan)

    def _pass_over(self) -> None:
        """Let others know of an iteration that ends without a step."""
        if self._plan is not None and not self._stepped:
            self._joint.pass_over(self._plan)

    def _give_up(self, reason: BaseException) -> None:
        """Tell other trainers that this one can't go on."""
        if not self.closed:
            self._joint.give_up(reason)

    def _in_iteration(self, what: str) -> Plan:
        if self._plan is None:
            raise ModelError(f"{what}() outside of the training loop: call it on a batch, after loss.backward()")
        return self._plan

    def _warn_of_lost_gradients(self) -> None:
        if self._plan is None or self._stepped or self._skipped or self._warned or not self._update.any_gradient():
            return
        self._warned = True
        warnings.warn(LOST.format(self._plan.iteration), stacklevel=4)


def _refuse_overwritten(batches: Sequence[Held | None]) -> None:
    """BatchError if the loader has written into a batch since it was read."""
    for batch in batches:
        if batch is not None and batch.error is not None:
            # One of its own: what the source itself raises comes to all trainers after the same iteration.
            raise BatchError(str(batch.error)) from batch.error
