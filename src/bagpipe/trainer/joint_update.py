"""How an iteration is updated: by a trainer on its own, or by several who must agree on it and share their gradients.

`OwnUpdate` and `JointUpdate` answer the same calls, so that the training loop reads the same with one trainer and many.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any

import torch
from torch import Tensor, nn

from bagpipe.cache import RowCache
from bagpipe.embedding import TableView
from bagpipe.errors import GradientError, PipelineError
from bagpipe.joint_checker import JointChecker
from bagpipe.layout import RowLayout
from bagpipe.optim import Scalars
from bagpipe.oracle.plan import Plan
from bagpipe.oracle.sync_plan import Sync
from bagpipe.row_parameter import dense_parameters_of
from bagpipe.trainer.dense_sync import DenseSync
from bagpipe.trainer.pipeline import Pipeline
from bagpipe.trainer.row_sync import Peers, RowSync
from bagpipe.trainer.stages import Driver
from bagpipe.trainer.update import RowUpdate, squared_norm

Views = Sequence[TableView]


class OwnUpdate:
    """The updates of the only trainer."""

    rank, trainers = 0, 1
    sync: RowSync | None = None

    def __init__(self, update: RowUpdate, cache: RowCache, pipeline: Pipeline[Any]) -> None:
        self._update, self._cache, self._pipeline = update, cache, pipeline

    def begin(self, plan: Plan) -> None:
        """An iteration begins: its rows are in the cache."""

    def begin_batch(self, plan: Plan, left: int) -> None:
        """A batch of it begins, after which `left` more come."""

    def is_idle(self) -> bool:
        """Whether there can't be anything to update."""
        return not self._update.any_gradient()

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

    def pass_over(self, plan: Plan) -> None:
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

    def give_up(self, reason: BaseException) -> bool:  # noqa: ARG002
        """This trainer can't go on; whether its stages will leave undone what waits for others."""
        return False


class JointUpdate(OwnUpdate):
    """The updates of one of several trainers, who make the same calls in the same order."""

    sync: RowSync

    def __init__(
        self,
        update: RowUpdate,
        cache: RowCache,
        pipeline: Pipeline[Any],
        model: nn.Module,
        layouts: Sequence[RowLayout],
        driver: Driver,
        peers: Peers,
        checker: JointChecker | None = None,
    ) -> None:
        super().__init__(update, cache, pipeline)
        points, self._groups = pipeline.points, peers.groups
        self.rank, self.trainers = peers.rank, peers.trainers
        if peers.rules.copies:
            cache.share(peers.rank, peers.trainers)
        self.sync = RowSync(peers, layouts, cache, driver, pipeline.updated, lambda: points.copied_out, checker)
        pipeline.add_stage("sync", self.sync.stage())
        self._dense = DenseSync(dense_parameters_of(model), peers.groups.dense, driver)
        self._agreed = self._given_up = False
        self._left = -1

    def begin(self, plan: Plan) -> None:
        """Rows that others have just fetched for this trainer come."""
        self._agreed = False
        self.sync.begin(plan)

    def begin_batch(self, plan: Plan, left: int) -> None:
        """Its gradients of dense parameters count as much as it has samples."""
        sync = _sync(plan)
        samples = sync.samples[-1 - left]
        self._dense.begin(samples[self.rank], sum(samples), last=not left)
        several = len(sync.samples) > 1
        self._update.weigh(sync.weight(len(sync.samples) - 1 - left) if several else 1.0)

    def is_idle(self) -> bool:
        """Never: others may have gradients."""
        return False

    def agree(self, plan: Plan, views: Views, problem: str | None = None) -> bool:
        """Whether all make the update, and one of them has a gradient."""
        gradients = self._update.collect(views)
        has_gradient = _sync(plan).totals[self.rank] > 0 and self._update.any_gradient()
        try:
            if has_gradient:
                self._update.check(views, plan.iteration)
        except GradientError as error:
            problem = str(error)
        self._agreed = True
        return self.sync.agree(plan, gradients, has_gradient, problem)

    def exchange(self, plan: Plan, views: Views, scalars: Sequence[Scalars]) -> None:
        """What the next iteration needs; the rest follows by itself."""
        self.sync.synchronise(plan, self._update.collect(views), scalars)

    def apply(self, views: Views, scalars: Sequence[Scalars]) -> list[int]:  # noqa: ARG002
        """Nothing is left: rows were updated as gradients came."""
        return self._update.tables

    def withdraw(self) -> None:
        """One that goes on with a backward pass is told that this one does not."""
        if self._given_up:
            self._dense.close()
        else:
            self._dense.leave()

    def pass_over(self, plan: Plan) -> None:
        """Others are told, and rows still go to who uses them next."""
        if not self._given_up:
            if not self._agreed:
                self.sync.agree(plan, None, has_gradient=False, problem=None)
            self.sync.synchronise(plan, None, [])

    def leave(self, plan: Plan) -> None:
        """It counts as updated when its delayed part is over too."""
        self._left = plan.iteration
        if not self._given_up:
            self.sync.leave(plan)

    def gradients(self, plan: Plan, views: Views) -> list[Tensor]:
        """The means over all trainers, of the rows that this one updates."""
        self._update.open(views)
        return self.sync.reduce(plan, self._update.collect(views))

    def judged(self, plan: Plan, views: Views) -> list[Tensor]:
        """One more if those of another trainer are not finite, so that all come to the same decision."""
        means = self.gradients(plan, views)
        finite = all(bool(torch.isfinite(grads).all()) for grads in means)
        if any(self.sync.gather(not finite, "whether gradients are finite")) and finite:
            means.append(torch.full((1,), math.inf))
        return means

    def squared_norm(self, plan: Plan, views: Views) -> float:
        """Of the means over all trainers, each row once."""
        self.sync.reduce(plan, self._update.collect(views))
        return self.sync.squared_norm(plan)

    def settle(self) -> None:
        """Return when delayed updates are over."""
        self.sync.settle()

    def barrier(self, what: str) -> None:
        """Return when all trainers are here."""
        self.sync.barrier(what)

    def stop(self) -> None:
        """Let the exchanges end with what was trained."""
        self.sync.close()

    def end(self) -> None:
        """Return when all trainers are here."""
        self.sync.barrier("the end of training")

    @contextmanager
    def leaving(self, early: bool) -> Iterator[None]:
        """Say of a failure that this trainer has left the loop before the others, if that may be why."""
        try:
            yield
        except PipelineError as error:
            if not early or self._given_up:
                raise
            raise PipelineError(
                f"trainer {self.rank} left the training loop after iteration {self._left} and did not meet the others "
                f"there: {error}: let all trainers leave it at the same iteration"
            ) from error

    def release(self) -> None:
        """Let go of the connections; what was sent still arrives."""
        self._groups.close()

    def give_up(self, reason: BaseException) -> bool:
        """Let others know why, so that they end too."""
        if not self._given_up:
            self._given_up = True
            self._groups.abort(reason)
            self._pipeline.abandon()
        return True


def _sync(plan: Plan) -> Sync:
    assert plan.sync is not None, "a plan for several trainers was not divided"
    return plan.sync
