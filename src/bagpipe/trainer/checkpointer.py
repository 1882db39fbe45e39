"""When a training loop is saved, and how it continues: one checkpoint after the other, written beside training.

At a mark all trainers flush, meet, copy their own state while the first one has the store make the mark, meet again and
go on (I2). Files are written meanwhile: rows by whoever has them, the state of a trainer by itself, and the first one
gives the checkpoint its name when all are there; what goes wrong is raised in the loop (I6). Where the first one is not
done when the next mark is due, all meet again and again, so that nobody's wait comes to its deadline (I7).
"""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

from torch import nn

from bagpipe.checkpoint.directory import Checkpoints, PendingCheckpoint
from bagpipe.checkpoint.manifest import RunFacts
from bagpipe.checkpoint.point import START, ResumePoint
from bagpipe.checkpoint.tree import tree_parts
from bagpipe.errors import CheckpointError
from bagpipe.failpoints import reach
from bagpipe.store.base import Marked
from bagpipe.trainer.background import Background
from bagpipe.trainer.state import (
    FIRST,
    Attachable,
    Attached,
    Copies,
    Tree,
    blob_name,
    buffers_of,
    check_tensors,
    dense_parameters,
    generator_states,
    is_own,
    read_state,
    restore,
    set_generator_states,
    set_tensors,
    without_rates,
)

ROUND_S = 10.0
"""From one meeting to the next while the first trainer waits for its files: well below the deadline of an exchange."""
COST_SHARE = 0.02
"""Of training time that checkpoints for recovery may take, unless their period is given."""
PERIOD_S_MIN, PERIOD_S_MAX = 1.0, 30.0
"""From one of them to the next."""
FIRST_AFTER, GROWTH_MAX = 10, 8
"""Iterations before the first, as long as nobody knows how long one takes; and how much longer the next period is."""


class Loop(Protocol):
    """What is saved: a training loop between two iterations."""

    @property
    def model(self) -> nn.Module:
        """Whose dense part is saved."""

    @property
    def done(self) -> int:
        """Iterations of the run that are over."""

    def flush(self) -> None:
        """Return when the store has every update so far."""

    def gather(self, number: float, what: str) -> list[float]:
        """What each trainer says, once all are here; float32."""

    def progress(self) -> Tree:
        """Where the loop is: counters of row optimizers, and the position in the data."""

    def go_on(self, progress: Mapping[str, Any]) -> None:
        """Begin where another loop was; before the first batch."""


@dataclass(frozen=True, slots=True)
class Periods:
    """How often a loop is saved; all of its trainers have the same."""

    checkpoints: int | None = None
    """Iterations from one that the user wants to the next, and one at the end; None: none before that."""
    recovery: int | float | None = None
    """Iterations (int) or seconds (float) from one point that a launch recovers from to the next; 0.0: as often as
    keeps their cost low; None: there is no recovery."""
    final: bool = False
    """Whether the user wants one at the end, if there are no others."""

    @property
    def retained(self) -> bool:
        """Whether the user wants any."""
        return self.final or self.checkpoints is not None


NEVER = Periods()


class Schedule:
    """Which iteration is saved next for recovery, where the period is in seconds: the first trainer decides, by what
    the last one has cost and how long iterations take, and all are told when they meet."""

    def __init__(self, period_s: float, done: int, clock: Callable[[], float] = time.monotonic) -> None:
        """`period_s` 0: by their cost."""
        self._period_s, self._clock = period_s, clock
        self._began, self._since, self._gap = clock(), done, FIRST_AFTER
        self.due = done + FIRST_AFTER

    def gap(self, done: int, cost_s: float) -> int:
        """Iterations from this one to the next that is saved, if the last one took so much time of training."""
        now = self._clock()
        iteration_s = max((now - self._began) / max(done - self._since, 1), 1e-6)
        period_s = self._period_s or min(max(cost_s / COST_SHARE, PERIOD_S_MIN), PERIOD_S_MAX)
        self._began, self._since = now, done
        return max(1, min(round(period_s / iteration_s), self._gap * GROWTH_MAX, 1 << 23))

    def told(self, done: int, gap: int) -> None:
        """What the first trainer has decided."""
        self._gap, self.due = gap, done + gap


class Checkpointer:
    """Saves and restores one trainer's training loop."""

    def __init__(
        self,
        store: Marked,
        checkpoints: Checkpoints | None,
        facts: RunFacts,
        periods: Periods,
        *,
        rank: int = 0,
        resume: ResumePoint = START,
        shares_process: bool = False,
        threads: bool = True,
        round_s: float = ROUND_S,
    ) -> None:
        """All trainers of a run have one, with the same `checkpoints`; None: the loop is only restored.

        With `shares_process` other trainers are threads of the same process, whose generators the first one saves.
        Without `threads` what is otherwise done beside training is done at once. `round_s` is how long the first one
        lets the others wait at once for what it writes.
        """
        self._store, self._checkpoints, self._facts, self._rank = store, checkpoints, facts, rank
        self._periods = NEVER if checkpoints is None else periods
        self._saves_generators = rank == 0 or not shares_process
        self._attached, self._copies = Attached(), Copies()
        self._restored: dict[str, Any] | None = None
        """States of attached objects to be restored, while the loop has not begun."""
        self._begun = self._off = False
        self._round_s = round_s
        self._writing = Background("bagpipe-checkpoint", threads=threads)
        self._pending: PendingCheckpoint | None = None
        self._given_up = threading.Event()
        self._last = resume.done if resume.checkpoint is not None else -1
        """The last one that was begun."""
        self._initial = resume.is_initial
        self._resumed = None if resume == START else resumed_states(resume, rank)
        recovery = self._periods.recovery
        self._schedule = Schedule(recovery, resume.done) if isinstance(recovery, float) else None
        self._num_saved, self._waited_s, self._processor_s = 0, 0.0, 0.0

    @property
    def is_active(self) -> bool:
        """Whether it will save anything."""
        return self._checkpoints is not None and not self._off

    def stats(self) -> dict[str, Any]:
        """What it has come to so far: checkpoints, how long training waited for them, flushes included, and processor
        time beside it."""
        return {
            "checkpoints": self._num_saved,
            "checkpoint_wait_seconds": self._waited_s,
            "checkpoint_processor_seconds": self._processor_s,
        }

    @property
    def position(self) -> Mapping[str, Any] | None:
        """Where in the data the loop continues; None: at the beginning."""
        return None if self._resumed is None or self._initial else self._resumed[0]["loop"]["data"]

    def restore(self, loop: Loop) -> None:
        """Let a loop that has not begun continue where it was saved; what is attached to it follows."""
        if self._resumed is None:
            return
        first, own = self._resumed
        check_dense(first, loop.model)
        check_tensors("buffer", own["buffers"], buffers_of(loop.model))
        loop.go_on(first["loop"])
        set_tensors(dense_parameters(loop.model), first["parameters"])
        set_tensors(buffers_of(loop.model), own["buffers"])
        self._restored = first["attached"] | (own["own"] or {})
        self._generators = own["generators"]
        self._new_here = own["own"] is None
        self._resumed = None  # it may be large

    def attach(self, objects: Mapping[str, Attachable]) -> None:
        """Save these too; where the loop continues, they do at once."""
        if self._begun:
            raise CheckpointError(f"{', '.join(objects)}: register for checkpointing before the first batch")
        self._attached.add(objects)
        for name, thing in objects.items() if self._restored is not None else ():
            assert self._restored is not None
            begins = (self._new_here and is_own(thing)) or (self._initial and name not in self._restored)
            if not begins:
                restore(name, thing, self._restored)

    def _begin(self, loop: Loop) -> None:
        if self._restored is not None:
            begin = {name for name, thing in self._attached.objects.items() if self._initial or is_own(thing)}
            self._attached.check_names(self._restored.keys(), begin if self._new_here else set())
            if self._generators is not None and self._saves_generators:
                set_generator_states(self._generators)
            reach("resume.loaded")
        if not self._attached.asked:
            if self._periods.retained:
                raise CheckpointError(
                    "checkpoints need to know what has a state besides model, optimizers and rows: call "
                    "loader.register_for_checkpointing(scheduler, ...) before the first batch, or with nothing"
                )
            self._off = True
        self._begun, self._restored = True, None
        if not self._off and self._checkpoints is not None:
            tree_parts(self._captured(loop))  # what can't be saved is refused now rather than at the first mark
            self._writing.open()

    def between_iterations(self, loop: Loop) -> None:
        """An iteration is over and the next one has not begun, or the first: save the loop if that is due."""
        if not self._begun:
            self._begin(loop)
            return
        self._writing.check()
        done, wanted = loop.done, self._periods.checkpoints
        if self._off or not done or done == self._last:
            return
        retained = wanted is not None and done % wanted == 0
        if retained or self._is_due(done):
            self._mark(loop, retained)

    def _is_due(self, done: int) -> bool:
        if self._schedule is not None:
            return done >= self._schedule.due
        every = self._periods.recovery
        return every is not None and done % int(every) == 0

    def finish(self, loop: Loop) -> None:
        """The data has ended: begin to write a last checkpoint, unless there is one."""
        if self._periods.retained and loop.done > self._last:
            self._mark(loop, retained=True)

    @contextmanager
    def ending(self, loop: Loop) -> Iterator[None]:
        """After the block nothing is under way, on any trainer; what went wrong is raised, unless the block raises."""
        try:
            yield
        except BaseException:
            with suppress(Exception):
                self._end_writing()
            raise
        try:
            self._meet(loop, f"the checkpoint of {self._last} iterations to be written", self._writing)
        finally:
            self._end_writing()

    def _end_writing(self) -> None:
        self._given_up.set()
        try:
            self._writing.wait()
        finally:
            self._writing.close()
            self._given_up.clear()

    def _mark(self, loop: Loop, retained: bool) -> None:
        began, done = time.monotonic(), loop.done
        loop.flush()
        reach("mark.flushed")
        # Others have written their states when the first one has given a checkpoint its name.
        before = (self._writing,) if self._rank == 0 else ()
        self._meet(loop, f"all trainers to be done with {done} iterations", *before)
        reach("mark.met")
        tree, token = self._captured(loop), os.urandom(8).hex()
        if self._rank == 0:
            self._store.mark(done, token)
            reach("mark.asked")
        else:
            self._writing.start(f"the state of trainer {self._rank}", lambda: self._add(done, tree))
        schedule, cost_s = self._schedule, time.monotonic() - began
        gap = 0 if schedule is None or self._rank else schedule.gap(done, cost_s + self._writing_s())
        told = loop.gather(float(gap), f"the mark of {done} iterations")
        if schedule is not None:
            schedule.told(done, int(told[0]))
        reach("mark.over")
        self._last = done
        self._num_saved += 1
        self._waited_s += time.monotonic() - began
        if self._rank == 0:
            what = f"the checkpoint of iteration {done}"
            self._writing.start(what, lambda: self._write(done, tree, retained, token), self._progress)

    def _writing_s(self) -> float:
        """Of processor time that a checkpoint takes here on average, besides what training waits for."""
        return self._processor_s / max(self._num_saved, 1)

    def _meet(self, loop: Loop, what: str, *works: Background) -> None:
        """Return when all trainers are here and the first one is done with what it does beside training."""
        while any(loop.gather(any(work.is_busy(self._round_s) for work in works), what)):
            pass

    def _add(self, done: int, tree: Tree) -> None:
        assert self._checkpoints is not None
        with _failing(f"the state of trainer {self._rank} after {done} iterations can't be written"):
            self._checkpoints.write_state(done, blob_name(self._rank), *tree_parts(tree))
        reach("mark.written")

    def _write(self, done: int, tree: Tree, retained: bool, token: str) -> None:
        """Write the checkpoint of a mark; CheckpointError if that can't be done, which says whether it is there."""
        began = time.thread_time()
        with _failing(f"the checkpoint of iteration {done} can't be written", "the one before is still there"):
            checkpoint = self._complete(done, tree, retained, token)
        with _failing(f"the store can't let go of what came before iteration {done}", "its checkpoint is complete"):
            self._store.saved(done, checkpoint)
            reach("checkpoint.saved")
        assert self._checkpoints is not None
        self._checkpoints.tidy()
        self._processor_s += time.thread_time() - began

    def _complete(self, done: int, tree: Tree, retained: bool, token: str) -> Path:
        assert self._checkpoints is not None
        names = [table.name for table in self._facts.tables]
        pending = self._pending = self._checkpoints.begin(done, retained=retained, token=token)
        try:
            pending.add(self._store.save(done, pending.directory, names, since=pending.base))
            reach("checkpoint.rows.written")
            pending.write_blob(FIRST, *tree_parts(tree))
            pending.take_states(map(blob_name, range(1, self._facts.trainers)), self._given_up.is_set)
            return pending.commit(self._facts, self._store.confirm).directory
        except BaseException:
            pending.abandon()
            raise

    def _progress(self) -> object:
        """Changes as files of the checkpoint under way come to be."""
        pending = self._pending
        return 0 if pending is None else pending.num_files()

    def _captured(self, loop: Loop) -> Tree:
        """Everything of this trainer that the next iteration depends on; it stays as it is until the next mark."""
        self._writing.wait()  # what is being written is the last mark's, which is copied over now
        copies = self._copies
        copies.begin()
        tree: Tree = {
            "done": loop.done,
            "generators": generator_states() if self._saves_generators else None,
            "buffers": copies.copied(buffers_of(loop.model)),
            "own": self._attached.saved(copies, own=True),
        }
        if self._rank == 0:
            tree |= {
                "parameters": copies.copied(dense_parameters(loop.model)),
                "attached": self._attached.saved(copies, own=False),
                "loop": copies.copied(loop.progress()),
            }
        return tree


def resumed_states(point: ResumePoint, rank: int) -> tuple[Tree, Tree] | None:
    """The states of the first trainer and of this one at a point; None: a run begins here, with rows only.

    A trainer that was not there continues as the first one, but for generators and what each has for itself. So does
    every trainer of a run that begins, whose learning rates of rows are its own, too.
    """
    checkpoint = point.open()
    names = checkpoint.blobs()
    if FIRST not in names and point.is_initial:
        return None
    if FIRST not in names:
        raise CheckpointError(
            f"{checkpoint.directory} has no state of a trainer to continue with: use another checkpoint"
        )
    first = own = read_state(checkpoint.blob(FIRST), FIRST, checkpoint.done)
    name, is_new = blob_name(rank), point.is_initial
    if rank and name in names:
        own = read_state(checkpoint.blob(name), name, checkpoint.done)
    elif rank:
        is_new = True
    if point.is_initial:
        first["loop"]["optimizer"] = without_rates(first["loop"]["optimizer"])
    return first, own | {"generators": None, "own": None} if is_new else own


def check_resumed(point: ResumePoint, model: nn.Module, swapped: Iterable[nn.Module] = ()) -> None:
    """CheckpointError if the dense part of this model can't continue there; `swapped` are its embedding layers."""
    states = resumed_states(point, 0)
    if states is not None:
        check_dense(states[0], model, swapped)


def check_dense(first: Tree, model: nn.Module, swapped: Iterable[nn.Module] = ()) -> None:
    """CheckpointError if the dense part of this model is another; `swapped` are its embedding layers."""
    check_tensors("parameter", first["parameters"], dense_parameters(model, swapped))
    check_tensors("buffer", first["buffers"], buffers_of(model))


@contextmanager
def _failing(what: str, but: str = "the checkpoint before is still there") -> Iterator[None]:
    """Turn any error into one that says what failed, and what did not."""
    try:
        yield
    except CheckpointError:
        raise
    except Exception as error:
        raise CheckpointError(f"{what}: {type(error).__name__}: {error}; {but}") from error
