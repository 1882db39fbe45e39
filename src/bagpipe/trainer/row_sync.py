"""Trainers that train together: gradients to who updates a row, new vectors to who uses it next, as plans say (I1, I3).

What the next iteration needs is exchanged before its forward pass (critical). The rest runs beside that pass, as a
stage with a group of its own (delayed), with its own iteration's step count and learning rate, and is over before the
next critical part; only then does an iteration count as updated. Gradients are added in order of rank.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Generator, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from fractions import Fraction
from typing import TYPE_CHECKING, NamedTuple, TypeVar

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from bagpipe.arrays import Int32s, Int64s
from bagpipe.cache import RowCache
from bagpipe.errors import GradientError, PipelineError
from bagpipe.failpoints import reach
from bagpipe.layout import RowLayout
from bagpipe.optim import Frozen, Scalars
from bagpipe.oracle.plan import Plan
from bagpipe.oracle.row_list import RowList
from bagpipe.oracle.sync_plan import Exchange, Routes, Sync
from bagpipe.trainer.collective import Collective, name_trainers
from bagpipe.trainer.stages import Driver, Stage, Wait

if TYPE_CHECKING:
    from bagpipe.checker import Checker
    from bagpipe.trainer.joint_update import Peers

Result = TypeVar("Result")
FLAGS = 3
"""Numbers in front of the critical gradients: whether a trainer made a step, has a gradient, and one that is wrong."""

_DIGITS = 53
_HALF = 27
_LEAST = -1074
"""Powers of two from the least that a float64 can have."""
_POWERS = 2100


class Sum(NamedTuple):
    """Rows, and the mean gradients of each, table by table."""

    rows: RowList
    means: Tensor


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
        observer: Checker | None = None,
    ) -> None:
        """`updated` is told of each iteration that is done; `copied_out` says whose evictions have left their slots."""
        self.rank, self.trainers = peers.rank, peers.trainers
        self._peers, self._groups = peers, peers.groups
        self._layouts, self._cache, self._driver = layouts, cache, driver
        self._updated, self._copied_out, self._observer = updated, copied_out, observer
        self._buffers = RowBuffers(layouts, cache)
        self._reduced: list[Sum] | None = None
        """Of the iteration in training, if someone has looked at them before the step."""
        self._received: list[Tensor] = []
        """Its critical gradients, once all have agreed to update it."""
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

    def agree(
        self, plan: Plan, gradients: Mapping[int, Tensor] | None, has_gradient: bool, problem: str | None
    ) -> bool:
        """Whether the iteration has an update: all trainers must make a step, and no gradient may be wrong.

        The critical gradients travel along, unless `reduce` has exchanged them. None: this trainer made no step.
        """
        number, sync = plan.iteration, _sync(plan)
        samples, flags = sync.totals, [float(gradients is not None), float(has_gradient), float(problem is not None)]
        if self._reduced is None:
            said = self._pack(sync, sync.gradients, gradients, flags)
            heard = self._buffers.room_for_gradients(sync.gradients.receive, FLAGS)
            self._drive(self._exchange(self._groups.critical, said, heard, _gradients_of(number)))
            self._received = [part[FLAGS:] for part in heard]
            states = [part[:FLAGS].tolist() for part in heard]
        else:
            states = self._tell(flags, f"iteration {number}")
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
                f"iteration {number}: {name_trainers(idle)} made no optimizer.step(), and others did: all trainers of "
                "an iteration must make one, or none"
            )
        return not idle and any(states[rank][1] for rank in with_samples)

    def synchronise(self, plan: Plan, gradients: Mapping[int, Tensor] | None, scalars: Sequence[Scalars]) -> None:
        """The critical part of an iteration that all have agreed on; the rest follows by itself.

        No gradients: no row is updated.
        """
        number, sync = plan.iteration, _sync(plan)
        self.settle()
        later = None
        if self._reduced is not None:
            self._apply(number, self._reduced if gradients is not None else [], scalars)
        elif gradients is not None:
            later = self._pack(sync, sync.later_gradients, gradients)
            self._apply(number, [self._add_up(sync, sync.gradients, sync.updated, self._received)], scalars)
        self._reduced, self._received = None, []
        for table, ids, slots in sync.drop.by_table():
            self._cache.drop(table, ids, slots)  # or a barrier could write what its last user has updated alone
            if self._observer is not None:
                self._observer.dropped(table, ids, slots)
        for table, ids, slots in plan.evict.by_table():
            self._cache.keep_alone(table, ids, slots)  # or a barrier could leave them to one who has given them up
        self._drive(self._send(self._groups.critical, sync.values, f"rows of iteration {number}"))
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
            sync, critical = _sync(plan), self._groups.critical
            what = f"{_gradients_of(plan.iteration)} before the step"
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
        squares = ExactSum()
        for rows, means in self._reduced:
            for table, grads in self._buffers.tables(rows, means):
                slots, leaving = rows.of_table(table)[1], plan.evict.of_table(table)[1]
                counts = self._cache.flushes(slots) | np.isin(slots, leaving)
                squares.add_squares(grads.cpu().numpy()[counts])
        told = [torch.empty(len(squares.packed())) for _ in range(self.trainers)]
        packed = torch.from_numpy(squares.packed())
        self._drive(self._exchange(self._groups.critical, [packed] * self.trainers, told, "the norm of gradients"))
        return ExactSum.total(part.numpy() for part in told)

    def gather(self, number: float, what: str) -> list[float]:
        """What each trainer says."""
        return [said[0] for said in self._tell([float(number)], what)]

    def leave(self, plan: Plan) -> None:
        """The training loop is done with an iteration."""
        if self._observer is not None:
            self._observer.left()  # first: as soon as the next line is done, its slots may have other rows
        self._left = plan.iteration
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

    def _pack(
        self, sync: Sync, phase: Exchange, gradients: Mapping[int, Tensor] | None, flags: Sequence[float] = ()
    ) -> list[Tensor]:
        samples = sync.weight(0) if len(sync.samples) == 1 else 1.0  # gradients of several have their weights already
        return self._buffers.gradients(phase.send, gradients, samples, flags)

    def _add_up(self, sync: Sync, phase: Exchange, rows: RowList, received: Sequence[Tensor]) -> Sum:
        """The mean gradients over all trainers of the rows that this one updates."""
        return Sum(rows, self._buffers.sums(rows, phase.receive, received, sync.divisor))

    def _sum(
        self, group: Collective, sync: Sync, phase: Exchange, rows: RowList, packed: list[Tensor], what: str
    ) -> Generator[Wait, None, Sum]:
        room = self._buffers.room_for_gradients(phase.receive)
        yield from self._exchange(group, packed, room, what)
        return self._add_up(sync, phase, rows, room)

    def _send(self, group: Collective, values: Exchange, what: str) -> Stage:
        """Vectors of rows to those who use them next, from who has them."""
        if self._peers.rules.copies:
            return
        buffers, give, take = self._buffers, values.send.moved(), values.receive.moved()
        room, vectors = buffers.room_for_vectors(values.receive, take), buffers.vectors(values.send, give)
        buffers.give(give, vectors)
        if self._observer is not None:
            self._observer.sent(values.send, what)
            self._observer.gave(give)
        yield from self._exchange(group, vectors, room, what)
        freed = values.slot_after
        yield Wait(f"evictions of iteration {freed} to leave", lambda: self._copied_out() >= freed)  # wait 2
        buffers.put_vectors(values.receive, room)
        buffers.take(take, values.ids, room)
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
            for table, grads in self._buffers.tables(rows, means):
                layout, (ids, slots) = self._layouts[table], rows.of_table(table)
                cached = self._cache.data[self._cache.group[table]]
                self._cache.ops.apply(layout, cached, slots, grads, scalars[table])
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


class RowBuffers:
    """Rows of lists to buffers and back: what goes to one trainer is one buffer, table by table, without any index."""

    def __init__(self, layouts: Sequence[RowLayout], cache: RowCache) -> None:
        self._cache, self._ops = cache, cache.ops
        self._vectors: Int64s = np.array([layout.dim for layout in layouts], np.int64)
        frozen = np.array([isinstance(layout.optimizer, Frozen) for layout in layouts])
        self._gradients: Int64s = np.where(frozen, 0, self._vectors)
        """Rows that are not updated have none."""
        self._states: Int64s = np.array([layout.width - layout.dim for layout in layouts], np.int64)

    def room_for_gradients(self, lists: Routes, head: int = 0) -> list[Tensor]:
        """An unfilled buffer for each trainer's list, behind so many other numbers."""
        return self._empty(head + lists.counts() @ self._gradients)

    def room_for_vectors(self, lists: Routes, moved: Routes) -> list[Tensor]:
        """An unfilled buffer for each trainer's list, and behind it for what else belongs to those rows that move."""
        return self._empty(lists.counts() @ self._vectors + moved.counts() @ (self._states + 1))

    def gradients(
        self, lists: Routes, gradients: Mapping[int, Tensor] | None, samples: float, head: Sequence[float] = ()
    ) -> list[Tensor]:
        """For each trainer the gradients that its list names, times the number of samples, behind the head.

        Without gradients they are zeros: nobody will add them.
        """
        buffers = self.room_for_gradients(lists, len(head))
        for rank, buffer in enumerate(buffers):
            buffer[: len(head)] = torch.tensor(head)
            if gradients is None:
                buffer[len(head) :] = 0.0
                continue
            for table, index, part in self._parts(lists, rank, buffer[len(head) :], self._gradients):
                self._ops.multiply_at(gradients[table], index, samples, part)
        return buffers

    def sums(self, rows: RowList, lists: Routes, received: Sequence[Tensor], total: int) -> Tensor:
        """What trainers have sent for rows, added up in order of rank from +0.0, over the number of samples in all."""
        sums = torch.zeros(int(np.diff(rows.bounds) @ self._gradients), device=self._cache.device)
        tables = dict(self.tables(rows, sums))
        for rank, buffer in enumerate(received):
            for table, index, part in self._parts(lists, rank, buffer, self._gradients):
                self._ops.add_at(tables[table], index, part)
        self._ops.divide(sums, total)
        return sums

    def tables(self, rows: RowList, buffer: Tensor) -> Iterator[tuple[int, Tensor]]:
        """The parts of a buffer of gradients that are not empty: table, (rows, columns)."""
        done = 0
        for table, count in enumerate(np.diff(rows.bounds).tolist()):
            dim = int(self._gradients[table])
            if count and dim:
                yield table, buffer[done : done + count * dim].view(count, dim)
                done += count * dim

    def vectors(self, lists: Routes, moved: Routes) -> list[Tensor]:
        """For each trainer the vectors in the slots that its list names, and room for what moves to it."""
        buffers = self.room_for_vectors(lists, moved)
        for rank, buffer in enumerate(buffers):
            for table, slots, part in self._parts(lists, rank, buffer, self._vectors):
                rows = self._cache.data[self._cache.group[table]]
                self._ops.gather(rows, slots, part)
        return buffers

    def put_vectors(self, lists: Routes, buffers: Sequence[Tensor]) -> None:
        """Vectors from other trainers take their slots; the state beside them stays as it is."""
        for rank, buffer in enumerate(buffers):
            for table, slots, part in self._parts(lists, rank, buffer, self._vectors):
                rows = self._cache.data[self._cache.group[table]]
                self._ops.scatter(rows, slots, part)

    def give(self, moved: Routes, buffers: Sequence[Tensor]) -> None:
        """Rows go to other trainers with their state and whether the store has them: they are no longer this one's."""
        for table, slots, part in self._tails(moved, buffers):
            state, dim = int(self._states[table]), int(self._vectors[table])
            rows = self._cache.data[self._cache.group[table]][:, dim : dim + state]
            if state:
                self._ops.gather(rows, slots, part[:, :state])
            part[:, state] = torch.from_numpy(self._cache.give(table, slots).astype(np.float32))

    def take(self, moved: Routes, ids: Int64s, buffers: Sequence[Tensor]) -> None:
        """Rows come from other trainers, in the order of `ids`: this one updates and writes them from now on."""
        done = 0
        for table, slots, part in self._tails(moved, buffers):
            state, dim = int(self._states[table]), int(self._vectors[table])
            rows = self._cache.data[self._cache.group[table]][:, dim : dim + state]
            if state:
                self._ops.scatter(rows, slots, part[:, :state])
            dirty = part[:, state].cpu().numpy() != 0
            self._cache.take(table, ids[done : done + len(slots)], slots, dirty)
            done += len(slots)

    def _tails(self, moved: Routes, buffers: Sequence[Tensor]) -> Iterator[tuple[int, Int32s, Tensor]]:
        """What lies behind the vectors: table, slots, their state and a flag."""
        widths = self._states + 1
        for rank, size in enumerate((moved.counts() @ widths).tolist()):
            yield from self._parts(moved, rank, buffers[rank][len(buffers[rank]) - size :], widths)

    def _empty(self, sizes: Int64s) -> list[Tensor]:
        return [torch.empty(size, dtype=torch.float32, device=self._cache.device) for size in sizes.tolist()]

    def _parts(self, lists: Routes, rank: int, buffer: Tensor, dims: Int64s) -> Iterator[tuple[int, Int32s, Tensor]]:
        done = 0
        for table, items in lists.of(rank):
            dim = int(dims[table])
            if dim:
                yield table, items, buffer[done : done + len(items) * dim].view(len(items), dim)
                done += len(items) * dim


class ExactSum:
    """A sum of squares that does not depend on the order or the grouping of its terms: added exactly, rounded once.

    A float64 is a whole number times a power of two. Whole numbers of one power are added as integers, upper and lower
    halves apart, so that many can be added.
    """

    def __init__(self) -> None:
        self._sums = np.zeros((2, _POWERS), np.int64)
        self._odd = 0.0
        """What is not finite: inf, or NaN."""

    def add_squares(self, values: NDArray[np.float32]) -> None:
        """Add the square of each number; in float64 it is exact."""
        with np.errstate(invalid="ignore", over="ignore"):
            squares = np.square(values.reshape(-1), dtype=np.float64)
            finite = np.isfinite(squares)
            self._odd += float(squares[~finite].sum())
        fractions, powers = np.frexp(squares[finite])
        whole = np.ldexp(fractions, _DIGITS).astype(np.int64)
        at = powers - _LEAST
        for half, part in enumerate((whole >> _HALF, whole & ((1 << _HALF) - 1))):
            # Parts have 27 bits and a float64 carries 53: a block of 2**26 of them is added without rounding.
            for start in range(0, len(part), 1 << 26):
                block = slice(start, start + (1 << 26))
                self._sums[half] += np.bincount(at[block], part[block], _POWERS).astype(np.int64)

    def packed(self) -> NDArray[np.float32]:
        """The bits of it all, as numbers that can be exchanged."""
        return np.concatenate([self._sums.reshape(-1).view(np.float32), np.array([self._odd]).view(np.float32)])

    @staticmethod
    def total(parts: Iterable[NDArray[np.float32]]) -> float:
        """The sum of what several have packed, rounded once."""
        sums, odd = np.zeros((2, _POWERS), object), 0.0
        for part in parts:
            sums += part[:-2].copy().view(np.int64).reshape(2, _POWERS).astype(object)
            odd += float(part[-2:].copy().view(np.float64)[0])
        if not np.isfinite(odd):
            return odd
        total = Fraction(0)
        for at in np.flatnonzero(sums.any(0)).tolist():
            whole = (int(sums[0, at]) << _HALF) + int(sums[1, at])
            total += whole * Fraction(2) ** (at + _LEAST - _DIGITS)
        return float(total)


def _sync(plan: Plan) -> Sync:
    assert plan.sync is not None, "a plan for several trainers was not divided"
    return plan.sync


def _gradients_of(iteration: int) -> str:
    return f"gradients of iteration {iteration}"
