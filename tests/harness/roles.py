"""Roles of a run as objects of one process that can die at any point, one step at a time in the order of a seed.

Exactly one of them runs at any moment, on a network in memory with a clock of its own, so a run is a function of its
seed and its faults. Who dies stops where it is: what it would have sent, written or told others never happens.
"""

from __future__ import annotations

import heapq
import math
import threading
from contextlib import contextmanager, suppress
from contextvars import ContextVar, copy_context
from dataclasses import dataclass, field

from bagpipe.errors import DeadlineError, PipelineError
from bagpipe.failpoints import Faults, Killed, acting_as
from bagpipe.oracle.outbox import DESCRIPTION, Outbox
from bagpipe.trainer.stages import Wait
from benchmarks.simulated import SimulatedConnection, SimulatedNetwork, SimulatedPeer, Task
from harness.explorer import WRITES_BACK, _Loop, explorer


@dataclass(eq=False)
class Life:
    """One life of a role, from its start to its end."""

    role: str
    alive: bool = True
    cut_off: bool = False
    """Others hear nothing of it, and it of nobody; what it sends may still arrive one day."""
    on_death: list = field(default_factory=list)
    """What the operating system does when a process is gone: closes its files."""

    def die(self):
        """Gone, without a word."""
        if self.alive:
            self.alive = False
            while self.on_death:
                self.on_death.pop()()

    def check(self):
        """The dead do nothing."""
        if not self.alive:
            raise Killed(f"{self.role} is dead")


_life = ContextVar("life", default=None)


@contextmanager
def living(life):
    """What this thread does within the block is done by this role; not at all if it is dead."""
    token = _life.set(life)
    try:
        with acting_as(life.role):
            yield
    finally:
        _life.reset(token)


def current():
    """Whose code runs."""
    return _life.get()


_attempt = None
"""The one under way."""


def give_way():
    """Let others run, where this is a handler, or work in the background of an attempt."""
    if (task := Task.current()) is not None:
        task.pause(lambda: True, 0.0)
    elif _attempt is not None:
        _attempt.give_way()


def in_background(work):
    """As the thread of a role that does something beside its other work; at once where there is nobody else."""
    if _attempt is None:
        work()
    else:
        _attempt.spawn(current(), work)


class Thread:
    """In the place of `threading.Thread`, for work of a role in the background."""

    def __init__(self, target, args=(), name=None, daemon=None):
        self._work, self._loop = lambda: target(*args), None

    def start(self):
        assert _attempt is not None, "only who takes part in an attempt works in the background"
        self._loop = _attempt.spawn(current(), self._work)

    def join(self, timeout=None):
        if _attempt is not None:
            _attempt.wait(Wait("work in the background", lambda: self._loop.ended))

    def is_alive(self):
        return not self._loop.ended


class Worker:
    """In the place of `bagpipe.trainer.background.Worker`: each piece has a thread of its own."""

    def __init__(self, name):
        self._thread = None

    def give(self, work):
        self._thread = Thread(work)
        self._thread.start()

    def is_over(self, within_s):
        self._thread.join()
        return not self._thread.is_alive()

    def close(self, within_s):
        pass


class PatientLock:
    """In the place of `threading.Lock`, where whoever holds it may wait: who comes meanwhile lets others run."""

    def __init__(self):
        self._lock = threading.Lock()

    def __enter__(self):
        while not self._lock.acquire(blocking=False):
            self._let_others_run()
        return self

    def __exit__(self, *_):
        self._lock.release()

    def _let_others_run(self):
        wait = Wait("a lock", lambda: not self._lock.locked())
        if (task := Task.current()) is not None:
            task.pause(wait.ready, math.inf)
        elif (stage := ThreadedStage.current()) is not None:
            stage.pause(wait)
        else:
            assert _attempt is not None, "whoever holds it can't run"
            _attempt.wait(wait)


class Plot(Faults):
    """Faults that befall roles of a crew: those who reach the point, or the victims that are named for it."""

    def __init__(self, *faults, victims=None):
        """`victims` are others by the name of a point; at all other points it is who reaches it."""
        super().__init__(*faults)
        self.victims = victims or {}
        self.crew = None

    def reached(self, name):
        life = current()
        if life is not None:
            life.check()
        super().reached(name)
        if name.startswith("recovery."):
            self.crew.network.deliver_late(some=True)
        if name.startswith(("checkpoint.", "server.save.")):  # where no lock is held
            give_way()

    def happen(self, role, fault):
        victims = self.victims.get(fault.name, [role])
        if fault.action == "fail":
            super().happen(role, fault)
        for victim in victims:
            (self.crew.kill if fault.action == "kill" else self.crew.cut_off)(victim, str(fault))
        if role in victims and fault.action == "kill":
            raise Killed(f"{role}: {fault}")


class Posts(SimulatedNetwork):
    """A network whose messages are handled by the role that listens, and that takes nothing from the dead.

    A stage with a thread of its own lets others run while it waits for an answer; the clock moves for it only when
    nobody can run. Whoever else waits has the clock move at once: it may hold a lock that others need.
    """

    def __init__(self, seed, **faults):
        super().__init__(seed, **faults)
        self.owners = {}
        """Of each address."""
        self.late = []
        """What those who are cut off have sent: the end that it goes to, and the bytes."""
        self.num_late = 0
        self._alarms = []
        """When stages that wait look again by themselves."""

    def listen(self, address, handler):
        self.owners[address] = current()
        return super().listen(address, handler)

    def post(self, end, letter):
        life = current()
        if life is not None:
            life.check()
        if life is None or not life.cut_off:
            super().post(end, letter)
        elif isinstance(end, SimulatedPeer):
            self.late.append((end, letter))

    def connect(self, address, timeout_s):
        life, there = current(), self.owners.get(address)
        if (life is not None and life.cut_off) or (there is not None and there.cut_off):
            raise TimeoutError("nobody answers")
        connection = super().connect(address, timeout_s)
        if life is not None:
            life.on_death.append(connection.close)
        return connection

    def _deliver(self, delivery):
        if isinstance(delivery.end, SimulatedConnection):
            super()._deliver(delivery)
            return
        with self._listening(delivery.end.other.address) as listens:
            if listens:
                super()._deliver(delivery)

    def make_task(self, run):
        return Task(run, current())

    def run_tasks(self):
        with suppress(Killed):
            return super().run_tasks()
        return True

    def pause(self, seconds):
        give_way()
        if seconds:
            super().pause(seconds)

    def wait_for(self, connection, timeout_s):
        stage = ThreadedStage.current()
        if stage is None:
            super().wait_for(connection, timeout_s)
            return
        deadline = self.now() + timeout_s

        def may_go_on():
            return self._has_news(connection) or self._can_work(deadline) or self.now() >= deadline

        while not self._has_news(connection) and self.now() < deadline:
            if self._can_work(deadline):
                self._work_once()
                continue
            self._alarms.append(deadline)
            try:
                stage.pause(Wait("an answer", may_go_on))
            finally:
                self._alarms.remove(deadline)

    def _has_news(self, connection):
        return bool(connection.arrived) or connection.is_broken

    def _can_work(self, deadline):
        """Whether a handler can go on, or a message comes by then."""
        if any(task.is_ready(self._clock) for task in self._tasks):
            return True
        return bool(self._deliveries) and self._deliveries[0].at <= deadline

    def _work_once(self):
        if not self.run_tasks():
            self._clock = max(self._clock, self._deliveries[0].at)
            self._deliver(heapq.heappop(self._deliveries))

    def pass_time(self):
        """Nobody can run: move the clock to when somebody looks again, if anybody ever does."""
        times = [*self._alarms, *(task.until for task in self._tasks)]
        if self._alarms:
            self._clock = max(self._clock, min(times))
        return bool(self._alarms)

    def deliver_late(self, some):
        """What those who were cut off have sent arrives after all, all or some of it; nobody hears the answers."""
        for letter in [letter for letter in self.late if not some or self._random.random() < 0.3]:
            end, content = letter
            self.late.remove(letter)
            self.num_late += 1
            with self._listening(end.other.address) as listens:
                if listens:
                    self._break(end.other)
                    end.arrived.append(content)
                    self._serve(end)
        while self.run_tasks():
            pass

    @contextmanager
    def _listening(self, address):
        """Act as who listens there, if anybody does; its death ends the block."""
        life = self.owners.get(address)
        if life is None or not life.alive or life.cut_off or address not in self._listeners:
            yield False
            return
        with living(life):
            try:
                yield True
            except Killed:
                assert not life.alive

    def bury(self, life):
        """Nobody listens any more where this one did, and who was connected there is told; nothing of it goes on."""
        for address, owner in list(self.owners.items()):
            if owner is life:
                if address in self._listeners:
                    self._listeners[address].close()
                del self.owners[address]
        for task in [task for task in self._tasks if task.owner is life and task is not Task.current()]:
            self._tasks.remove(task)
            task.end(Killed(f"{life.role} is dead"))


class Attempt:
    """One try to get to the end: loops of living roles, and one that watches them and ends it after a loss.

    After a loss the others may go on for up to `grace` steps before they hear of it.
    """

    def __init__(self, seed, grace=20, eagerness=2.0, when_idle=lambda: False):
        self.together = explorer(seed, eagerness, together=True, deadline_s=60.0, when_idle=when_idle)
        self.over = False
        self.lost = {}
        self.failed = {}
        self.results = {}
        self._grace = grace
        self._loops = []
        self._waited_for = []
        self._at_steps = []
        self._spawned = set()

    def at_step(self, number, call):
        """Have something done after so many steps, or when there are no more."""
        self._at_steps.append((number, call))

    def driver(self, life):
        """The driver of a role's loop."""
        return LivingDriver(self, life, self.together.driver(self._number(life)))

    def add(self, life, function, awaited=True):
        """A loop of a role; the attempt has succeeded when all that are `awaited` have."""
        number = self._number(life)

        def loop():
            with living(life):
                try:
                    life.check()
                    self.results[life.role] = function()
                except Killed:
                    assert not life.alive
                except Exception as error:
                    if life.alive:
                        self.failed[life.role] = error
            driver = self.together.driver(number)
            driver.end_stages()
            driver.failure = None  # it led to what the loop raised, or to nothing if that was dead or too late

        self._loops[number] = (life, loop)
        if awaited:
            self._waited_for.append(life.role)

    def run(self):
        """Until all are through, or somebody is lost or has failed and all others have ended."""
        global _attempt
        watcher = self.together.driver(len(self._loops))
        _attempt = self
        try:
            self.together.run([*(loop for _, loop in self._loops), lambda: self._watch(watcher)])
        finally:
            _attempt = None
        for driver in self.together._drivers.values():
            driver.end_stages()

    def spawn(self, life, work):
        """One more loop, of work in the background of a role."""
        loops = self.together._loops

        def run():
            with living(life), suppress(Killed, PipelineError):
                self.give_way()
                work()

        loop = _Loop(len(loops), run)
        loops.append(loop)
        self.together.driver(loop.rank)
        self._spawned.add(loop.thread)
        loop.start(self.together._begin, self.together._finished)
        return loop

    def give_way(self):
        """Let others run; the end of the attempt, or of the role, ends this too."""
        if threading.current_thread() in self._spawned:
            self.wait(Wait("its turn", lambda: True))

    def wait(self, wait):
        """Called by a loop."""
        life = current()
        self.together.pause(Wait(wait.what, lambda: self.over or not life.alive or wait.ready()))
        life.check()
        if self.over:
            raise PipelineError(f"{life.role}: the attempt is over")

    @property
    def succeeded(self):
        """Whether all that are waited for have come to their end."""
        return all(role in self.results for role in self._waited_for)

    def _watch(self, driver):
        steps = self.together.steps
        for number, call in self._at_steps:
            driver.wait(Wait("its time", lambda number=number: len(steps) >= number or self._ended()))
            call()
        driver.wait(Wait("a loss, or the end", self._ended))
        if not self.succeeded:
            for _ in range(self._grace):
                driver.notify()
        self.over = True

    def _ended(self):
        return self.lost or self.failed or self.succeeded

    def _number(self, life):
        for number, (owner, _) in enumerate(self._loops):
            if owner is life:
                return number
        self._loops.append((life, None))
        return len(self._loops) - 1


class LivingDriver:
    """A driver whose waits end when the role dies, or the attempt is over."""

    def __init__(self, attempt, life, inner):
        self._attempt, self._life, self._inner = attempt, life, inner
        self.also = {}
        """For stages by name: what must be so before they go on, beside what they wait for themselves."""

    def start(self, stages):
        self.check()
        self._inner.start({name: self._living(name, self._threaded(name, stage)) for name, stage in stages.items()})

    def wait(self, wait):
        self.check()
        self._inner.wait(Wait(wait.what, lambda: self._ends() or wait.ready()))
        self.check()

    def notify(self):
        if not self._ends():
            self._inner.notify()
            self._life.check()

    def join(self):
        self.wait(Wait("its stages to end", lambda: not self._inner.stages))

    def check(self):
        """Raise where nothing may go on."""
        self._life.check()
        if self._attempt.over:
            raise PipelineError(f"{self._life.role}: the attempt is over")

    def _ends(self):
        return self._attempt.over or not self._life.alive

    def _threaded(self, name, stage):
        """Those that read and write wait for what servers have still to do."""
        return ThreadedStage(name, stage) if name.startswith(("fetch", WRITES_BACK)) else stage

    def _living(self, name, stage):
        also = self.also.get(name, lambda: True)
        try:
            while not self._ends():
                try:
                    with living(self._life):
                        wait = next(stage)
                except StopIteration:
                    return
                except Killed:
                    assert not self._life.alive
                    return
                yield Wait(wait.what, lambda wait=wait: self._ends() or (also() and wait.ready()))
        finally:  # also where the driver ends it
            stage.close()


class ThreadedStage:
    """A stage in a thread of its own, for which a wait in the midst of a call is as good as one that it yields.

    To the driver it is a generator as any stage: the thread runs only within `next` and `close`.
    """

    def __init__(self, name, stage):
        self._stage = stage
        self._thread = threading.Thread(target=self._run, name=f"bagpipe-{name}", daemon=True)
        self._go, self._came = threading.Semaphore(0), threading.Semaphore(0)
        self._wait = self._error = self._context = None
        self._closing = self._ended = False

    @staticmethod
    def current():
        """The one whose thread this is."""
        return _stages.get(threading.current_thread())

    def __next__(self):
        if self._context is None:
            self._context = copy_context()  # of the role that runs it
            _stages[self._thread] = self
            self._thread.start()
        if not self._ended:
            self._switch()
        if self._error is not None:
            error, self._error = self._error, None
            raise error
        if self._ended:
            raise StopIteration
        return self._wait

    def close(self):
        """End it where it is; no thread is left."""
        self._closing = True
        if self._context is None:
            self._stage.close()
        elif not self._ended:
            self._switch()

    def pause(self, wait):
        """Called by the stage's thread: let others run until `wait` is ready."""
        self._wait = wait
        if not self._closing:
            self._came.release()
            self._go.acquire()
        if self._closing:
            raise PipelineError("the stage is ended")

    def _switch(self):
        self._go.release()
        if not self._came.acquire(timeout=STEP_S):
            raise DeadlineError(f"{self._thread.name} has run for {STEP_S:g} s without a wait that others could use")
        if self._ended:
            self._thread.join()

    def _run(self):
        self._go.acquire()
        try:
            self._context.run(self._steps)
        except BaseException as error:
            self._error = None if self._closing else error
        finally:
            del _stages[self._thread]
            self._ended = True
            self._came.release()

    def _steps(self):
        for wait in self._stage:
            self.pause(wait)


_stages = {}
"""Of threads that are those of stages."""
STEP_S = 60.0
"""How long a stage may run from one wait to the next."""


class ScheduledOutbox(Outbox):
    """Plans of an oracle that waits for room as one of the loops of an attempt."""

    def __init__(self, trainers, room, driver, waits):
        super().__init__(trainers, room)
        self._driver, self._waits = driver, waits

    def put(self, iteration, answers):
        self._driver.wait(Wait("room for a plan", lambda: self.has_room(iteration)))
        return super().put(iteration, answers)

    def has(self, trainer, iteration=DESCRIPTION):
        """Whether a request for this plan would be answered at once."""
        with self._lock:
            return self._find(trainer, iteration) is not None


def threads():
    """Those that run now."""
    return set(threading.enumerate())
