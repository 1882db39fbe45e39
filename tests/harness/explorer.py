"""Schedules that a seed draws: stages and training loops run one step at a time, so that a test explores interleavings.

`Seeded` runs the stages of one training loop in its own thread. Under `Together` exactly one of N loops and their
stages runs at any moment, and every wait, notification and stage's step is a point where any other that is ready may be
next. The code that runs is the code that trains, and a seed gives the same order again. No thread stays, whatever
fails; a wait that can't end says who waits for what (I7).

Tests never write down the name of a stage: they ask for all (`stage_names`, `any_stages`) or name a role below.
"""

from __future__ import annotations

import functools
import random
import threading
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from typing import Any, TypeVar

from hypothesis import strategies as st

from bagpipe.errors import BagpipeError, DeadlineError, PipelineError
from bagpipe.together import LoopThread
from bagpipe.trainer.stages import DEADLINE_S, Driver, Stage, Wait

T = TypeVar("T")

LOOP = "loop"
"""The name of a training loop among the steps, beside those of its stages."""

Step = tuple[int, str]
"""Whose turn it was: the rank, and the name of its stage or `LOOP`."""

# Stages by what they do. A stage that is renamed changes this table alone, and test_together.py tells if it was not.
PLANS, INSERTS, WRITES_BACK, SYNCS = "plan", "insert", "write-back", "sync"
FETCHES = ("fetch-0", "fetch-1")

_NOTHING = Wait("its turn", lambda: True)
_ENDING_S = 30.0


class Together:
    """Runs N training loops and their stages one step at a time.

    `eagerness` is how many steps of stages run, on average, for one step of a loop where both could: 0 is the laziest
    schedule, a large number the most eager. `last` names stages, of all ranks or as (rank, stage) of one, that run only
    when nothing else can; (rank, LOOP) is a trainer that is as slow as can be. Loops run in threads of their own with
    as many threads for PyTorch as the caller has; stages run in the thread that called `run`.
    """

    def __init__(
        self,
        seed: int,
        eagerness: float = 2.0,
        last: frozenset[str | Step] = frozenset(),
        deadline_s: float = DEADLINE_S,
        when_idle: Callable[[], bool] = lambda: False,
    ) -> None:
        """`deadline_s` is how long a loop may run from one wait to the next, in case it hangs on something else.

        `when_idle` is called when nothing can run: whether it has changed something, as a clock that moves on.
        """
        self.steps: list[Step] = []
        self._random = random.Random(seed)
        self._eager, self._last = eagerness / (1 + eagerness), last
        self._deadline_s, self._when_idle = deadline_s, when_idle
        self._drivers: dict[int, _Driver] = {}
        self._loops: list[_Loop[Any]] = []
        self._turn = threading.Lock()
        """The scheduler sleeps on it while a loop runs."""
        self._next: Step | None = None
        self._ending: BaseException | None = None

    def driver(self, rank: int) -> Driver:
        """The driver of this rank's loop; the same at each call."""
        return self._drivers.setdefault(rank, _Driver(self, rank))

    def run(self, functions: Sequence[Callable[[], T]]) -> list[T]:
        """Run each function as a training loop; their results, by rank.

        What one raises is raised here, and the other loops are ended: their waits raise.
        """
        self._loops = loops = [_Loop(rank, function) for rank, function in enumerate(functions)]
        self._turn, self._ending, self._next = threading.Lock(), None, None
        self._turn.acquire()
        try:
            for loop in loops:
                self._drivers.setdefault(loop.rank, _Driver(self, loop.rank)).failure = None
                loop.start(self._begin, self._finished)
            while any(not loop.ended for loop in loops):
                self._step()
            for driver in self._drivers.values():
                driver.raise_failure(unseen_only=True)
        except BaseException as error:
            self._end(error)
            raise
        finally:
            self._loops = []
            for loop in loops:
                if loop.ended:
                    loop.thread.join()
        return [loop.result for loop in loops]

    @property
    def ending(self) -> BaseException | None:
        """Why all loops are to end, if they are."""
        return self._ending

    def pause(self, wait: Wait) -> bool:
        """Called by a loop's driver: return when it is ready and its turn has come; False if all loops are to end."""
        current = threading.current_thread()
        loop = next((loop for loop in self._loops if loop.thread is current), None)
        if loop is None:  # in a stage's step or outside of `run`, where nothing else can run meanwhile
            if not wait.ready():
                raise DeadlineError(f"nothing can run: who waits for {wait.what} is not a loop that `run` has started")
            return True
        if self._is_ending():
            return False
        loop.wait = wait
        pick = self._pick() if wait.ready() else None
        if pick == (loop.rank, LOOP):
            self.steps.append(pick)
            return True
        self._next = pick
        self._turn.release()
        loop.baton.acquire()
        if self._is_ending():
            return False
        wait.ready()  # where it raises, it does so in the loop that waits
        return True

    def _begin(self, loop: _Loop[Any]) -> bool:
        """In the loop's thread: whether it is to run, once it has the baton for the first time."""
        loop.baton.acquire()
        return not self._is_ending()

    def _finished(self, _: _Loop[Any]) -> None:
        if not self._is_ending():
            self._turn.release()

    def _is_ending(self) -> bool:
        return self._ending is not None

    def _step(self) -> None:
        """One step of a stage, or of a loop until it hands the baton back."""
        pick, self._next = self._next or self._pick(), None
        self.steps.append(pick)
        rank, name = pick
        if name != LOOP:
            self._drivers[rank].step(name)
            return
        loop = self._loops[rank]
        loop.baton.release()
        if not self._turn.acquire(timeout=self._deadline_s):
            raise DeadlineError(
                f"trainer {rank} has run for {self._deadline_s:g} s without a wait that others could use: "
                "does it block on something that only another trainer can give?"
            )
        if loop.error is not None:
            raise loop.error

    def _pick(self) -> Step:
        """Who is next, of those that are ready."""
        while not (ready := self._ready()):
            if not self._when_idle():
                raise DeadlineError(f"nothing can run: {'; '.join(self._waiting())}")
        if self._last:
            ready = [step for step in ready if not (step in self._last or step[1] in self._last)] or ready
        loops = [step for step in ready if step[1] == LOOP]
        stages = ready[len(loops) :]
        if not stages or (loops and self._random.random() >= self._eager):
            return loops[0] if len(loops) == 1 else self._random.choice(loops)
        return self._random.choice(stages)

    def _ready(self) -> list[Step]:
        """Loops first."""
        ready = [(loop.rank, LOOP) for loop in self._loops if not loop.ended and _ready(loop.wait)]
        for rank, driver in self._drivers.items():
            ready += [(rank, name) for name, (_, wait) in driver.stages.items() if _ready(wait)]
        return ready

    def _waiting(self) -> Iterable[str]:
        for rank, driver in self._drivers.items():
            loop = self._loops[rank] if rank < len(self._loops) else None
            does = f"waits for {loop.wait.what}" if loop is not None and not loop.ended else "has ended"
            stages = ", ".join(f"{name}: {wait.what}" for name, (_, wait) in driver.stages.items())
            yield f"trainer {rank} {does}" + (f" (its stages wait for: {stages})" if stages else "")

    def _end(self, error: BaseException) -> None:
        """End all loops, one after the other; first the one that runs, if the scheduler was interrupted."""
        self._ending = error
        running = self.steps[-1] if self.steps else None
        for loop in sorted(self._loops, key=lambda loop: (loop.rank, LOOP) != running):
            if loop.started and not loop.ended:
                if loop.baton.locked():
                    loop.baton.release()
                loop.thread.join(min(self._deadline_s, _ENDING_S))
        for driver in self._drivers.values():
            driver.end_stages()


class _Driver:
    """What one rank's loop sees of the scheduler."""

    def __init__(self, together: Together, rank: int) -> None:
        self._together, self._rank = together, rank
        self.stages: dict[str, tuple[Stage, Wait]] = {}
        self.failure: tuple[str, Exception] | None = None
        self._seen = False

    def start(self, stages: Mapping[str, Stage]) -> None:
        """Begin to run the stages."""
        for name, stage in stages.items():
            self.stages[name] = (stage, Wait("its start", lambda: True))
        self._pause(_NOTHING)

    def wait(self, wait: Wait) -> None:
        """Let others run until `wait` is ready."""
        self._pause(Wait(wait.what, lambda: self.failure is not None or wait.ready()))
        self.raise_failure()

    def notify(self) -> None:
        """An opportunity for others to run."""
        self._together.pause(_NOTHING)

    def join(self) -> None:
        """Let others run until every stage has ended."""
        self.wait(Wait("its stages to end", lambda: not self.stages))

    def step(self, name: str) -> None:
        """Run a stage until its next wait; if it fails, the others of this rank are ended, and its loop is told."""
        stage, wait = self.stages[name]
        try:
            wait.ready()  # where it raises, the stage has failed
            self.stages[name] = (stage, next(stage))
        except StopIteration:
            del self.stages[name]
        except Exception as error:
            self.failure, self._seen = (name, error), False
            self.end_stages()

    def end_stages(self) -> None:
        """Close all stages as they are."""
        while self.stages:
            _, (stage, _) = self.stages.popitem()
            stage.close()

    def raise_failure(self, unseen_only: bool = False) -> None:
        """Raise what a stage has raised."""
        if self.failure is None or (unseen_only and self._seen):
            return
        self._seen = True
        name, error = self.failure
        if isinstance(error, BagpipeError):
            raise error
        raise PipelineError(f"trainer {self._rank}: {name} failed: {type(error).__name__}: {error}") from error

    def _pause(self, wait: Wait) -> None:
        if not self._together.pause(wait):
            error = self._together.ending
            raise PipelineError(f"trainer {self._rank} is ended: {type(error).__name__}: {error}") from error


class _Loop(LoopThread[T]):
    """A loop that runs when it has the baton."""

    def __init__(self, rank: int, function: Callable[[], T]) -> None:
        super().__init__(rank, function)
        self.wait = Wait("its start", lambda: True)
        self.baton = threading.Lock()
        self.baton.acquire()


def _ready(wait: Wait) -> bool:
    """Whether the one that waits can go on, if only to raise what went wrong."""
    try:
        return wait.ready()
    except Exception:
        return True


class Seeded:
    """All stages in the caller's thread, in an order drawn from a seed.

    `eagerness` is how many steps on average run at each opportunity beyond those that the training loop needs: 0 is the
    laziest schedule, a large number the most eager. `last` names stages that run only when nothing else can: the
    adversary who delays, say, all write-backs as long as possible.
    """

    def __init__(self, seed: int, eagerness: float = 2.0, last: frozenset[str] = frozenset()) -> None:
        self._random = random.Random(seed)
        self._eagerness, self._last = eagerness, last
        self._stages: dict[str, tuple[Stage, Wait]] = {}
        self.steps: list[str] = []

    def start(self, stages: Mapping[str, Stage]) -> None:
        """Begin to run the stages."""
        for name, stage in stages.items():
            self._stages[name] = (stage, Wait("its start", lambda: True))
        self.notify()

    def wait(self, wait: Wait) -> None:
        """Run stages until `wait` is ready."""
        while not wait.ready():
            if not self._step():
                stuck = {name: waits.what for name, (_, waits) in self._stages.items()}
                raise DeadlineError(f"nothing can run: the training loop waits for {wait.what}, the stages for {stuck}")
        self.notify()

    def notify(self) -> None:
        """An opportunity for stages to run."""
        extra = self._eagerness / (1 + self._eagerness)
        while self._random.random() < extra and self._step():
            pass

    def join(self) -> None:
        """Run every stage to its end."""
        while self._stages:
            if not self._step():
                raise DeadlineError(f"stages did not end: {[waits.what for _, waits in self._stages.values()]}")

    def _step(self) -> bool:
        ready = [name for name, (_, wait) in self._stages.items() if wait.ready()]
        if not ready:
            return False
        name = self._random.choice([name for name in ready if name not in self._last] or ready)
        self.steps.append(name)
        stage, _ = self._stages[name]
        try:
            self._stages[name] = (stage, next(stage))
        except StopIteration:
            del self._stages[name]
        return True


def explorer(
    seed: int, eagerness: float = 2.0, last: Collection[Any] = (), *, together: bool = False, **more: Any
) -> Any:
    """What runs loops and stages in an order drawn from a seed: the driver of one loop, or that of several together."""
    if together:
        return Together(seed, eagerness, frozenset(last), **more)
    return Seeded(seed, eagerness, frozenset(last), **more)


@functools.cache
def stage_names(trainers: int = 1) -> tuple[str, ...]:
    """The names of all stages that such a training has, found by training a little."""
    from harness.trainers import World, run, run_alone  # which import this module
    from harness.world import make_batches

    world = World(make_batches(3), trainers=trainers)
    if trainers > 1:
        steps = {name for _, name in run(world).steps}
    else:
        driver = explorer(0)
        run_alone(world, driver)
        steps = set(driver.steps)
    return tuple(sorted(steps - {LOOP}))


def any_stage() -> st.SearchStrategy[tuple[str, ...]]:
    """What `last` of one trainer may be: no stage, or any one."""
    return st.deferred(lambda: st.sampled_from([(), *((name,) for name in stage_names())]))


def any_stages(trainers: int) -> st.SearchStrategy[set[str | Step]]:
    """The same of several: up to two stages, of all trainers or of one, or the loop of one."""

    def one() -> st.SearchStrategy[str | Step]:
        names = stage_names(trainers)
        return st.sampled_from(names) | st.tuples(st.integers(0, trainers - 1), st.sampled_from([LOOP, *names]))

    return st.sets(st.deferred(one), max_size=2)
