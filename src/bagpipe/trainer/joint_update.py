"""How an iteration is updated by several trainers, who must agree on it and share their gradients."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from bagpipe.cache import RowCache
from bagpipe.checker import Checker, Ledger
from bagpipe.errors import GradientError, PipelineError
from bagpipe.layout import RowLayout
from bagpipe.optim import Scalars
from bagpipe.oracle.design import RULES, Design, Rules
from bagpipe.oracle.plan import Plan
from bagpipe.oracle.sync_plan import Sync
from bagpipe.row_parameter import dense_parameters_of
from bagpipe.trainer.collective import Groups
from bagpipe.trainer.dense_sync import DenseSync
from bagpipe.trainer.pipeline import Pipeline
from bagpipe.trainer.row_sync import RowSync
from bagpipe.trainer.stages import Driver
from bagpipe.trainer.update import OwnUpdate, RowUpdate, Views


@dataclass(frozen=True)
class Peers:
    """How this process takes part in training with others."""

    groups: Groups
    design: Design = "owned"
    delayed: bool = True
    moving: bool = True
    ledger: Ledger | None = None
    """What the checkers of trainers in one process share; None: rows are not checked."""

    @property
    def rules(self) -> Rules:
        """What the design says."""
        return RULES[self.design]

    @property
    def rank(self) -> int:
        """Which of the trainers this one is."""
        return self.groups.critical.rank

    @property
    def trainers(self) -> int:
        """How many there are."""
        return self.groups.critical.size

    def updates(
        self,
        update: RowUpdate,
        cache: RowCache,
        pipeline: Pipeline[Any],
        model: nn.Module,
        layouts: Sequence[RowLayout],
        driver: Driver,
        checker: Checker | None,
    ) -> JointUpdate:
        """What updates this trainer's rows."""
        return JointUpdate(update, cache, pipeline, model, layouts, driver, self, checker)

    def checker(self, layouts: Sequence[RowLayout], cache: RowCache) -> Checker | None:
        """What checks this trainer's rows; None where the other trainers are elsewhere."""
        if self.ledger is None:
            return None
        names, dims = [layout.table.name for layout in layouts], [layout.dim for layout in layouts]
        return Checker(names, dims, cache, self.ledger, self.rank)

    def leave(self, _: object, error: BaseException | None, __: object) -> None:
        """Let go of the connections; the other trainers are told if this one can't go on."""
        if error is not None:
            self.groups.abort(error)
        self.groups.close()


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
        checker: Checker | None = None,
    ) -> None:
        super().__init__(update, cache, pipeline)
        points, self._groups = pipeline.points, peers.groups
        self.rank, self.trainers = peers.rank, peers.trainers
        if peers.rules.copies:
            cache.share(peers.rank, peers.trainers)
        self.sync = RowSync(peers, layouts, cache, driver, pipeline.updated, lambda: points.copied_out, checker)
        pipeline.add_stage("sync", self.sync.stage())
        self._dense = DenseSync(dense_parameters_of(model), peers.groups.dense, driver)
        self._agreed = self._aborted = False
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
        """One that goes on with a backward pass is told that this one does not; all are, if this one's has failed."""
        interruption = self._dense.interruption
        if interruption is not None:
            self.abort(interruption)
        if self._aborted:
            self._dense.close()
        else:
            self._dense.leave()

    def skip(self, plan: Plan) -> None:
        """Others are told, and rows still go to who uses them next."""
        if not self._aborted:
            if not self._agreed:
                self.sync.agree(plan, None, has_gradient=False, problem=None)
            self.sync.synchronise(plan, None, [])

    def leave(self, plan: Plan) -> None:
        """It counts as updated when its delayed part is over too."""
        self._left = plan.iteration
        if not self._aborted:
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
            if not early or self._aborted:
                raise
            raise PipelineError(
                f"trainer {self.rank} left the training loop after iteration {self._left} and did not meet the others "
                f"there: {error}: let all trainers leave it at the same iteration"
            ) from error

    def release(self) -> None:
        """Let go of the connections; what was sent still arrives."""
        self._groups.close()

    def abort(self, reason: BaseException) -> bool:
        """Let others know why, so that they end too."""
        if not self._aborted:
            self._aborted = True
            self._groups.abort(reason)
            self._pipeline.abandon()
        return True


def _sync(plan: Plan) -> Sync:
    assert plan.sync is not None, "a plan for several trainers was not divided"
    return plan.sync
