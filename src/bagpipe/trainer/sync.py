"""Trainers that train together: gradients to who updates a row, new vectors to who uses it next, as plans say (I1, I3).

What the next iteration needs is exchanged before its forward pass (critical). The rest runs beside that pass, as a
stage with a group of its own (delayed), with its own iteration's step count and learning rate, and is over before the
next critical part; only then does an iteration count as updated. Gradients are added in order of rank.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Generator, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, NamedTuple, TypeVar

import numpy as np
import torch
from torch import Tensor

from bagpipe import embedding_device
from bagpipe.cache import RowCache
from bagpipe.embedding_device import is_host
from bagpipe.errors import GradientError, PipelineError
from bagpipe.failpoints import reach
from bagpipe.layout import RowLayout
from bagpipe.optim import Scalars
from bagpipe.oracle.partition import RULES, Design, Rules
from bagpipe.oracle.plan import Plan
from bagpipe.oracle.row_list import RowList
from bagpipe.oracle.sync_plan import Exchange, Sync
from bagpipe.trainer.collective import Collective, name_trainers
from bagpipe.trainer.exact_sum import Bins
from bagpipe.trainer.packing import Packing
from bagpipe.trainer.stages import Driver, Stage, Wait
from bagpipe.trainer.staging import tables_of

if TYPE_CHECKING:
    from bagpipe.joint_checker import JointChecker, Ledger

Result = TypeVar("Result")


class Sum(NamedTuple):
    """Rows, and the mean gradients of each, table by table."""

    rows: RowList
    means: Tensor


@dataclass(frozen=True)
class Groups:
    """One end of each of the groups that trainers exchange over."""

    critical: Collective
    delayed: Collective
    dense: Collective

    def abort(self, reason: BaseException) -> None:
        """This trainer can't go on: those who wait for it are told."""
        for group in (self.critical, self.delayed, self.dense):
            group.abort(reason)

    def close(self) -> None:
        """Let go of all; may be called twice."""
        for group in (self.critical, self.delayed, self.dense):
            group.close()


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


@dataclass(slots=True)
class _Delayed:
    """What is left to do for an iteration beside the next one."""

    plan: Plan
    packed: list[Tensor] | None
    """Its gradients, copied so that the next backward pass may overwrite them; None: no update is left to be made."""
    scalars: Sequence[Scalars]


class RowSync:
    """The rows of one trainer and those of the others."""

    def __init__(
        self,
        peers: Peers,
        layouts: Sequence[RowLayout],
        cache: RowCache,
        driver: Driver,
        updated: Callable[[Plan], None],
        copied_out: Callable[[], int],
        observer: JointChecker | None = None,
    ) -> None:
        """`updated` is told of each iteration that is done; `copied_out` says whose evictions have left their slots."""
        self.rank, self.trainers = peers.rank, peers.trainers
        self._peers, self._groups = peers, peers.groups
        self._layouts, self._cache, self._driver = layouts, cache, driver
        self._updated, self._copied_out, self._observer = updated, copied_out, observer
        self._packing = Packing(layouts, cache)
        self._reduced: list[Sum] | None = None
        """Of the iteration in training, if someone has looked at them before the step."""
        self._tasks: deque[_Delayed] = deque()
        self._synchronised = self._left = -1
        """The last iteration that has passed its critical part, and that the loop has left."""
        self._closing = False

    def begin(self, plan: Plan) -> None:
        """An iteration is about to be trained: rows that their owners have just fetched come to their users."""
        rules = self._peers.rules
        if not rules.copies and not rules.users_read:
            what = f"rows fetched for iteration {plan.iteration}"
            self._drive(self._send(self._groups.critical, _sync(plan).fetched, what))

    def agree(self, plan: Plan, stepped: bool, has_gradient: bool, problem: str | None) -> bool:
        """Whether the iteration has an update: all trainers must make a step, and no gradient may be wrong."""
        number, samples = plan.iteration, _sync(plan).totals
        states = self._tell([float(stepped), float(has_gradient), float(problem is not None)], f"iteration {number}")
        if problem is not None:
            raise GradientError(problem)
        if wrong := [rank for rank, state in enumerate(states) if state[2]]:
            raise GradientError(
                f"iteration {number}: {name_trainers(wrong)} had a gradient that is not finite; no row was updated"
            )
        with_samples = [rank for rank in range(self.trainers) if samples[rank]]
        idle = [rank for rank in with_samples if not states[rank][0]]
        if idle and len(idle) < len(with_samples):
            raise PipelineError(
                f"iteration {number}: {name_trainers(idle)} made no rows.step(), and others did: all trainers of an "
                "iteration must make one, or none"
            )
        return not idle and any(states[rank][1] for rank in with_samples)

    def synchronise(self, plan: Plan, gradients: Mapping[int, Tensor] | None, scalars: Sequence[Scalars]) -> None:
        """The critical part of an iteration; the rest follows by itself. No gradients: no row is updated."""
        number, sync, critical = plan.iteration, _sync(plan), self._groups.critical
        self.settle()
        later = None
        if self._reduced is not None:
            self._apply(number, self._reduced if gradients is not None else [], scalars)
        elif gradients is not None:
            now = self._pack(sync, sync.gradients, gradients)
            later = self._pack(sync, sync.later_gradients, gradients)
            found = self._drive(self._sum(critical, sync, sync.gradients, sync.updated, now, _gradients_of(number)))
            self._apply(number, [found], scalars)
        self._reduced = None
        for table, ids, slots in tables_of(sync.drop):
            self._cache.drop(table, ids, slots)  # or a barrier could write what its last user has updated alone
            if self._observer is not None:
                self._observer.dropped(table, ids, slots)
        for table, ids, slots in tables_of(plan.evict):
            self._cache.keep_alone(table, ids, slots)  # or a barrier could leave them to one who has given them up
        self._drive(self._send(critical, sync.values, f"rows of iteration {number}"))
        reach("trainer.sync.critical")
        self._synchronised = number
        if self._peers.delayed:
            self._tasks.append(_Delayed(plan, later, scalars))
        self._driver.notify()

    def reduce(self, plan: Plan, gradients: Mapping[int, Tensor]) -> list[Tensor]:
        """The mean gradients that this trainer will apply, before the step, for someone who may change them.

        All trainers must ask. Everything is on the critical path then.
        """
        if self._reduced is None:
            sync, critical, what = _sync(plan), self._groups.critical, _gradients_of(plan.iteration)
            self.settle()
            self._reduced = []
            phases = (sync.gradients, sync.updated), (sync.later_gradients, sync.later_updated)
            for phase, rows in phases:
                packed = self._pack(sync, phase, gradients)
                self._reduced.append(self._drive(self._sum(critical, sync, phase, rows, packed, what)))
        return [each.means for each in self._reduced]

    def squared_norm(self, plan: Plan) -> float:
        """Sum of squares of all trainers' mean gradients, each row's counted once, after `reduce`: exact, then rounded.

        So it depends neither on who owns which rows nor on the order of rows. Of copies one counts, by who writes it.
        """
        assert self._reduced is not None, "reduce comes first"
        bins = Bins()
        for rows, means in self._reduced:
            for table, grads in self._packing.tables(rows, means):
                slots, leaving = rows.of_table(table)[1], plan.evict.of_table(table)[1]
                counts = self._cache.flushes(slots) | np.isin(slots, leaving)
                bins.add_squares(grads.cpu().numpy()[counts])
        told = [torch.empty(len(bins.packed())) for _ in range(self.trainers)]
        packed = torch.from_numpy(bins.packed())
        self._drive(self._exchange(self._groups.critical, [packed] * self.trainers, told, "the norm of gradients"))
        return Bins.total(part.numpy() for part in told)

    def gather(self, number: float, what: str) -> list[float]:
        """What each trainer says."""
        return [said[0] for said in self._tell([float(number)], what)]

    def leave(self, plan: Plan) -> None:
        """The training loop is done with an iteration."""
        self._left = plan.iteration
        if self._observer is not None:
            self._observer.left()
        if not self._peers.delayed:
            self._updated(plan)
        self._driver.notify()

    def settle(self) -> None:
        """Return when the delayed part of every iteration so far is over."""
        self._driver.wait(Wait(f"the delayed rows of iteration {self._synchronised}", lambda: not self._tasks))

    def barrier(self, what: str) -> None:
        """Return when all trainers are here."""
        self._tell([0.0], what)

    def close(self) -> None:
        """Let the stage end when nothing is left to do."""
        self._closing = True
        self._driver.notify()

    def stage(self) -> Stage:
        """The delayed parts, one by one."""
        group = self._groups.delayed
        while True:
            yield Wait("a delayed exchange", lambda: bool(self._tasks) or self._closing)
            if not self._tasks:
                return
            task = self._tasks[0]
            plan, sync, number = task.plan, _sync(task.plan), task.plan.iteration
            if task.packed is not None:
                what = f"delayed {_gradients_of(number)}"
                found = yield from self._sum(group, sync, sync.later_gradients, sync.later_updated, task.packed, what)
                self._apply(number, [found], task.scalars)
            yield from self._send(group, sync.later_values, f"delayed rows of iteration {number}")
            reach("trainer.sync.delayed")
            self._tasks.popleft()
            yield Wait(f"training to leave iteration {number}", self._has_left(number))
            if self._left < number:
                return
            self._updated(plan)

    def _has_left(self, iteration: int) -> Callable[[], bool]:
        return lambda: self._left >= iteration or self._closing

    def _pack(self, sync: Sync, phase: Exchange, gradients: Mapping[int, Tensor]) -> list[Tensor]:
        samples = sync.weight(0) if len(sync.samples) == 1 else 1.0  # gradients of several have their weights already
        return self._packing.gradients(phase.send, gradients, samples)

    def _sum(
        self, group: Collective, sync: Sync, phase: Exchange, rows: RowList, packed: list[Tensor], what: str
    ) -> Generator[Wait, None, Sum]:
        """The mean gradients over all trainers of the rows that this one updates."""
        room = self._packing.room_for_gradients(phase.receive)
        yield from self._exchange(group, packed, room, what)
        return Sum(rows, self._packing.sums(rows, phase.receive, room, sync.divisor))

    def _send(self, group: Collective, values: Exchange, what: str) -> Stage:
        """Vectors of rows to those who use them next, from who has them."""
        if self._peers.rules.copies:
            return
        packing, give, take = self._packing, values.send.moved(), values.receive.moved()
        room, vectors = packing.room_for_vectors(values.receive, take), packing.vectors(values.send, give)
        packing.give(give, vectors)
        if self._observer is not None:
            self._observer.sent(values.send, what)
            self._observer.gave(give)
        yield from self._exchange(group, vectors, room, what)
        freed = values.slot_after
        yield Wait(f"evictions of iteration {freed} to leave", lambda: self._copied_out() >= freed)  # wait 2
        packing.put_vectors(values.receive, room)
        packing.take(take, values.ids, room)
        if self._observer is not None:
            for sender in range(self.trainers):
                self._observer.received(values.receive, sender, what)
            self._observer.took(take, values.ids)

    def _exchange(self, group: Collective, send: Sequence[Tensor], receive: Sequence[Tensor], what: str) -> Stage:
        pending = group.exchange(send, receive, what)
        yield Wait(what, pending.ready)
        pending.wait()

    def _tell(self, numbers: list[float], what: str) -> list[list[float]]:
        """What each trainer says."""
        heard = [torch.empty(len(numbers)) for _ in range(self.trainers)]
        said = torch.tensor(numbers, dtype=torch.float32)
        self._drive(self._exchange(self._groups.critical, [said] * self.trainers, heard, what))
        return [part.tolist() for part in heard]

    def _apply(self, iteration: int, sums: Sequence[Sum], scalars: Sequence[Scalars]) -> None:
        """Update rows in their slots; in this thread, since waking others for it takes as long as they save."""
        for rows, means in sums:
            for table, grads in self._packing.tables(rows, means):
                layout, (ids, slots) = self._layouts[table], rows.of_table(table)
                cached = self._cache.data[self._cache.group[table]]
                if is_host(self._cache.device):
                    layout.optimizer.apply_in_cache(cached.numpy(), slots, grads.numpy(), layout.dims, scalars[table])
                else:
                    embedding_device.apply(layout, cached, slots, grads, scalars[table])
                self._cache.mark_updated(table, slots)
                if self._observer is not None:
                    self._observer.applied(iteration, table, ids, slots)

    def _drive(self, stage: Generator[Wait, None, Result]) -> Result:
        """Run a stage in the training loop; what it returns."""
        while True:
            try:
                wait = next(stage)
            except StopIteration as end:
                result: Result = end.value
                return result
            self._driver.wait(wait)


def _sync(plan: Plan) -> Sync:
    assert plan.sync is not None, "a plan for several trainers was not divided"
    return plan.sync


def _gradients_of(iteration: int) -> str:
    return f"gradients of iteration {iteration}"
