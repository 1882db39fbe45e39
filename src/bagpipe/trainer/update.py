"""One update of the rows of a batch: gradients are added up row by row, checked, and applied in their slots.

Two passes over the tables, each split over the worker threads by table: nothing is updated before every gradient is
known to be finite. The order of additions is that of the forward pass, whatever the number of threads (I1).
"""

from __future__ import annotations

import operator
from collections.abc import Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from functools import partial
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from torch import Tensor

from bagpipe.arrays import Flags, Int32s
from bagpipe.cache import RowCache
from bagpipe.embedding import Call, Lookups, TableView
from bagpipe.errors import GradientError, ModelError
from bagpipe.kernels.parallel import Task, Workers
from bagpipe.layout import RowLayout
from bagpipe.optim import Frozen, Scalars
from bagpipe.oracle.plan import Plan
from bagpipe.row_ops import FINITE
from bagpipe.trainer.pipeline import Pipeline

Views = Sequence[TableView]

if TYPE_CHECKING:
    from bagpipe.trainer.row_sync import RowSync


class RowUpdate:
    """Gradients of the rows of the current batch, and their application."""

    def __init__(self, layouts: Sequence[RowLayout], lookups: Lookups) -> None:
        self._layouts, self._lookups, self._ops = layouts, lookups, lookups.ops
        self.tables = [number for number, layout in enumerate(layouts) if not isinstance(layout.optimizer, Frozen)]
        """The tables that are updated at all."""
        self._scratch = {table: torch.empty(0, layouts[table].dim) for table in self.tables}
        self._gradients: dict[int, Tensor] | None = None
        self._made_of: list[Tensor | None] = []
        self._opened = False
        self._versions: list[int] = []
        """Of the gradients when they were added up: whoever has them may change them in place."""

    def discard(self) -> None:
        """Forget the gradients: they have been used, or another batch begins."""
        self._gradients, self._made_of, self._opened = None, [], False
        self._lookups.forget()

    def weigh(self, weight: float) -> None:
        """Gradients of look-ups from now on count this much."""
        self._lookups.weight = weight

    def drop(self, table: int, column: int) -> None:
        """Forget those of one vector of a table's rows; a backward pass may follow."""
        for call in self._lookups.calls[table]:
            if call.column == column:
                call.grad = None
        if not self.any_gradient():
            self._gradients, self._made_of, self._opened = None, [], False

    def any_gradient(self) -> bool:
        """Whether a backward pass has reached a look-up of this batch."""
        return any(call.grad is not None for calls in self._lookups.calls for call in calls)

    def is_reached(self, table: int, column: int | None = None) -> bool:
        """Whether a backward pass has reached a look-up of a table, or of one vector of its rows."""
        return any(
            call.grad is not None and column in (None, call.column)
            for call in (self._lookups.calls[table] if self._lookups.calls else ())
        )

    def collect(self, views: Sequence[TableView]) -> dict[int, Tensor]:
        """The gradient of each row of each table, added up once for all backward passes so far."""
        arrived = [call.grad for calls in self._lookups.calls for call in calls]
        if self._gradients is not None and self._versions != _versions(self._gradients):
            self._opened = True
        same = len(arrived) == len(self._made_of) and all(map(operator.is_, arrived, self._made_of))
        if self._opened and not same:
            raise ModelError(
                "a backward pass after the row gradients were clipped, scaled or zeroed in place: call it before that; "
                "to drop gradients and go on, set them to None, as zero_grad() does"
            )
        if self._gradients is None or not same:
            gradients = {table: self._room(table, len(views[table].slots)) for table in self.tables}
            order = sorted(self.tables, key=lambda table: -sum(len(c.bags) for c in self._lookups.calls[table]))
            self._run([partial(self._add_up, gradients[table], self._lookups.calls[table]) for table in order])
            self._gradients, self._made_of, self._versions = gradients, arrived, _versions(gradients)
        return self._gradients

    def open(self, views: Sequence[TableView]) -> list[Tensor]:
        """The gradients of all tables, for someone who may change them."""
        gradients = self.collect(views)
        self._opened = True
        return list(gradients.values())

    def check(self, views: Sequence[TableView], iteration: int) -> None:
        """GradientError if a gradient is not finite."""
        for table, grads in self.collect(views).items():
            row = self._ops.first_not_finite(grads)
            if row != FINITE:
                raise GradientError(
                    f"iteration {iteration}: the gradient of row {views[table].ids[row]} of table "
                    f"{self._layouts[table].table.name!r} is not finite; no row was updated: "
                    "lower the learning rate, clip gradients, or use a torch.amp.GradScaler, which skips such batches"
                )

    def apply(self, views: Sequence[TableView], scalars: Sequence[Scalars]) -> list[int]:
        """Update the rows in their slots; of which tables, as those stay that no backward pass has reached."""
        tables = [table for table in self.tables if self.is_reached(table)]
        gradients = self.collect(views)

        def update(table: int) -> None:
            layout, slots, grads = self._layouts[table], views[table].slots, gradients[table]
            rows, kept = views[table].rows, []
            if not layout.optimizer.rests_at_zero:
                reached = self._reached(table, len(slots))
                some = reached.any(1)
                if not some.all():
                    slots, grads, reached = slots[some], grads[torch.from_numpy(some).to(grads.device)], reached[some]
                kept = _unreached(layout, rows, slots, reached)
            self._ops.apply(layout, rows, slots, grads, scalars[table])
            for place, values in kept:
                rows[place] = values

        self._run([partial(update, table) for table in sorted(tables, key=lambda t: -len(views[t].slots))])
        self.discard()
        return tables

    def _reached(self, table: int, num_rows: int) -> Flags:
        """Which vectors of which rows a backward pass has reached: those of the batch that their layer did not look up
        keep their momentum, also where another layer looked up another vector of the same row."""
        layout = self._layouts[table]
        reached = np.zeros((num_rows, len(layout.dims)), np.bool_)
        for call in self._lookups.calls[table]:
            if call.grad is None:
                continue
            reached[self._ops.reached(call.bags), layout.columns.index(call.column)] = True
        return reached

    def _run(self, tasks: Sequence[Task]) -> None:
        workers: Workers | None = self._lookups.workers
        if workers is not None and self._ops.in_kernels:
            workers.run(tasks)
        else:
            for task in tasks:
                task()

    def _room(self, table: int, num_rows: int) -> Tensor:
        """A buffer that is kept from batch to batch: fresh memory would be paged in every time."""
        if len(self._scratch[table]) < num_rows:
            shape = (num_rows * 5 // 4, self._layouts[table].dim)
            self._scratch[table] = torch.empty(shape, dtype=torch.float32, device=self._lookups.device)
        return self._scratch[table][:num_rows]

    def _add_up(self, grads: Tensor, calls: Sequence[Call]) -> None:
        self._ops.clear(grads)
        for call in calls:
            if call.grad is None:
                continue
            grad = call.grad if call.grad.dim() == 2 else call.grad.reshape(-1, call.grad.shape[-1])
            self._ops.accumulate(grad, call.bags, grads, call.column)


def _unreached(layout: RowLayout, rows: Tensor, slots: Int32s, reached: Flags) -> list[tuple[Any, Tensor]]:
    """Where in the slots of these rows vectors lie that were not reached, with their state, and their values."""
    found = []
    for part in np.flatnonzero(~reached.all(0)):
        those = torch.from_numpy(slots[~reached[:, part]].astype(np.int64))
        place = those[:, None].to(rows.device), torch.from_numpy(layout.columns_of(int(part))).to(rows.device)
        found.append((place, rows[place]))
    return found


def views_of(plan: Plan, cache: RowCache) -> list[TableView]:
    """The rows of an iteration, table by table, in the cache."""
    views = []
    for table, group in enumerate(cache.group):
        ids, slots = plan.rows.of_table(table)
        views.append(TableView(cache.data[group], slots, ids))
    return views


def squared_norm(gradients: Sequence[Tensor]) -> float:
    """Sum of squares in float64, the same for any number of threads."""
    return float(sum(np.square(part.cpu().numpy(), dtype=np.float64).sum() for part in gradients))


def _versions(gradients: Mapping[int, Tensor]) -> list[int]:
    return [grads._version for grads in gradients.values()]


class OwnUpdate:
    """The updates of the only trainer; where there are several, `JointUpdate` answers the same calls."""

    rank, trainers = 0, 1
    sync: RowSync | None = None

    def __init__(self, update: RowUpdate, cache: RowCache, pipeline: Pipeline[Any]) -> None:
        self._update, self._cache, self._pipeline = update, cache, pipeline

    def begin(self, plan: Plan) -> None:
        """An iteration begins: its rows are in the cache."""

    def begin_batch(self, plan: Plan, left: int) -> None:
        """A batch of it begins, after which `left` more come."""

    def agree(self, plan: Plan, views: Views, problem: str | None = None) -> bool:
        """Whether there is an update; GradientError if a gradient is not finite, or there is another problem."""
        self._update.check(views, plan.iteration)
        if problem is not None:
            raise GradientError(problem)
        return True

    def exchange(self, plan: Plan, views: Views, scalars: Sequence[Scalars]) -> None:
        """Make what part of the update others take part in."""

    def apply(self, views: Views, scalars: Sequence[Scalars]) -> list[int]:
        """Make the rest of it, which waits for nobody; the tables of which rows were updated."""
        updated = self._update.apply(views, scalars)
        for table in updated:  # also those rows that no layer looked up, whose write-back changes nothing
            self._cache.mark_updated(table, views[table].slots)
        return updated

    def withdraw(self) -> None:
        """The loop is being left; a batch may be in training."""

    def skip(self, plan: Plan) -> None:
        """The iteration ends without an update."""

    def leave(self, plan: Plan) -> None:
        """The loop is done with an iteration."""
        self._pipeline.updated(plan)

    def gradients(self, plan: Plan, views: Views) -> list[Tensor]:  # noqa: ARG002
        """What will be applied, for someone who may change it."""
        return self._update.open(views)

    def judged(self, plan: Plan, views: Views) -> list[Tensor]:
        """The same for someone who decides by them whether the update is made."""
        return self.gradients(plan, views)

    def squared_norm(self, plan: Plan, views: Views) -> float:  # noqa: ARG002
        """Sum of squares of the gradients."""
        return squared_norm(list(self._update.collect(views).values()))

    def settle(self) -> None:
        """Return when no update is under way."""

    def barrier(self, what: str) -> None:
        """Return when all trainers are here."""

    def stop(self) -> None:
        """No further iteration begins."""

    def leaving(self, early: bool) -> AbstractContextManager[None]:  # noqa: ARG002 - nobody misses it
        """Around leaving the loop; `early`: before the data ended."""
        return nullcontext()

    def end(self) -> None:
        """All that was trained is in the store."""

    def release(self) -> None:
        """Nothing is left to do."""

    def abort(self, reason: BaseException) -> bool:  # noqa: ARG002
        """This trainer can't go on; whether its stages will leave undone what waits for others."""
        return False
