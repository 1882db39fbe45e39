"""Waiting: no wake-up is lost, nobody else is woken, and what goes wrong is told where it is waited for."""

from __future__ import annotations

import gc
import random
import sys
import threading
import time
import weakref
from contextlib import contextmanager

import pytest

from bagpipe import waits
from bagpipe.errors import DeadlineError, StoreError
from bagpipe.trainer.stages import Threads, Wait
from bagpipe.waits import Waits
from harness.strain import Strained, make_pause

PATIENT_S = 60.0


class Counted(Waits):
    """Counts who slept, and was woken."""

    def __init__(self):
        super().__init__()
        self.asleep, self.woken = threading.Semaphore(0), []

    def _sleep(self, parked, deadline_s):
        self.asleep.release()
        came = super()._sleep(parked, deadline_s)
        self.woken.append(threading.current_thread().name)
        return came


@contextmanager
def waiting(waits, **conditions):
    """A thread for each condition, which all sleep when the block begins; what each has caught is there after it."""
    caught = {}

    def wait(name, ready):
        try:
            waits.until(name, ready, PATIENT_S)
            caught[name] = None
        except Exception as error:
            caught[name] = error

    threads = [threading.Thread(target=wait, args=each, name=each[0]) for each in conditions.items()]
    for thread in threads:
        thread.start()
        assert waits.asleep.acquire(timeout=PATIENT_S)
    yield caught
    for thread in threads:
        thread.join(PATIENT_S)
        assert not thread.is_alive()


def test_only_those_are_woken_who_can_go_on():
    waits, done = Counted(), set()
    with waiting(waits, **{name: lambda name=name: name in done for name in "abc"}):
        for name in "bca":
            waits.changed()
            done.add(name)
            before = len(waits.woken)
            waits.changed()
            while len(waits.woken) == before:
                time.sleep(0)
    assert waits.woken == ["b", "c", "a"]


@pytest.mark.parametrize("evaluation", [1, 2, 3])
def test_a_change_right_after_a_condition_was_evaluated_is_not_lost(evaluation):
    """By a condition that lets it happen between its look and its answer, which is out of date then."""
    waits, state, evaluations = Waits(), {"ready": False}, []

    def ready():
        found = state["ready"]
        evaluations.append(found)
        if len(evaluations) == evaluation:
            state["ready"] = True
            waits.changed()
        return found

    other = threading.Timer(0.01, waits.changed)  # there is no second and third look without a change
    other.start()
    if evaluation == 3:
        threading.Timer(0.02, waits.changed).start()
    waits.until("the change", ready, PATIENT_S)
    assert True in evaluations
    other.join()


def test_who_waits_does_not_sleep_where_it_need_not():
    waits = Counted()
    waits.until("nothing", lambda: True, 0)
    assert waits.woken == []


def test_who_begins_to_wait_lets_others_go_on():
    waits, done = Counted(), []
    with waiting(waits, a=lambda: bool(done)):
        done.append(True)
        waits.until("nothing", lambda: True, 0)


def test_a_condition_that_raises_does_so_where_it_is_waited_for():
    waits, done, broken = Counted(), [], StoreError("the disk is full")

    def failing():
        if done:
            raise broken
        return False

    with waiting(waits, bad=failing, good=lambda: bool(done)) as caught:
        done.append(True)
        waits.changed()
    assert caught == {"bad": broken, "good": None}
    with pytest.raises(StoreError, match="the disk is full"):
        waits.until("it", failing, PATIENT_S)


def test_an_interrupted_notification_can_be_made_again():
    waits, done, interrupts = Counted(), [], [KeyboardInterrupt()]

    def interrupted():
        if done and interrupts:
            raise interrupts.pop()
        return bool(done)

    with waiting(waits, a=interrupted, b=lambda: bool(done)) as caught:
        done.append(True)
        with pytest.raises(KeyboardInterrupt):
            waits.changed()
        waits.changed()
    assert caught == {"a": None, "b": None}


def test_a_wait_ends_at_its_deadline_and_says_who_waited_for_what():
    with pytest.raises(DeadlineError, match=r"^trainer 3 waited 0.01 s for godot$"):
        Waits("trainer 3").until("godot", lambda: False, 0.01)
    with pytest.raises(DeadlineError, match=r"^waited 0 s for godot, who is late$"):
        Waits().until(lambda: "godot, who is late", lambda: False, 0)


def test_the_collector_may_tell_of_changes_anywhere():
    """A session that nobody holds ends where garbage is collected: in a condition, say."""
    waits, told = Counted(), []

    class Session:
        """Holds itself, as sessions do."""

        def __init__(self):
            self.itself = self
            weakref.finalize(self, tell)

    def tell():
        told.append(True)
        waits.changed()

    def collecting():
        if not told:
            Session()
            gc.collect()
        return bool(told)

    waits.until("the collector", collecting, PATIENT_S)
    assert told == [True]


# Under stress


@pytest.fixture
def impatient():
    """Threads that compute give way as often as they can."""
    before = sys.getswitchinterval()
    sys.setswitchinterval(1e-6)
    yield
    sys.setswitchinterval(before)


class Relay:
    """Runners who pass batons on, in orders drawn from a seed: whoever misses one hangs, and with it its relay.

    Each leg is run once the one before it was, so that nobody else's news can make up for a wake-up that was lost,
    other than those of other relays as long as these last.
    """

    def __init__(self, seed):
        self.random = random.Random(seed)
        self.pause = make_pause(seed)
        self.waits = Strained(self.pause)
        runners, relays = self.random.randint(2, 5), self.random.choice([1, 1, 2, 3])
        legs = [(relay, leg) for relay in range(relays) for leg in range(self.random.randint(1, 12))]
        self.run = [0] * relays
        """Legs of each relay."""
        self.turns = [[] for _ in range(runners)]
        for turn in sorted(legs, key=lambda turn: (turn[1], self.random.random())):
            self.random.choice(self.turns).append(turn)
        self.tells = [self.random.random() < 0.5 for _ in range(runners)]
        """Who tells of every leg; others leave it to their next wait."""
        self.waiting = {}

    def runner(self, number):
        """What one does; told what it waits for, a stage too."""
        for relay, leg in self.turns[number]:
            wait = Wait(f"leg {leg} of relay {relay}", lambda relay=relay, leg=leg: self.run[relay] >= leg)
            self.waiting[number] = wait.what
            yield wait
            self.pause()
            assert self.run[relay] == leg
            self.run[relay] += 1
            if self.tells[number]:
                self.waits.changed()
        self.waiting.pop(number, None)

    def dump(self):
        return f"legs {self.run}, who still waits: {self.waiting}, turns {self.turns}, tells {self.tells}"


def in_threads(relay, deadline_s):
    """Runners that wait for themselves; what went wrong."""
    wrong = []

    def work(number):
        try:
            for wait in relay.runner(number):
                relay.waits.until(wait.what, wait.ready, deadline_s)
            relay.waits.changed()
        except BaseException as error:
            wrong.append(error)

    threads = [threading.Thread(target=work, args=(number,), daemon=True) for number in range(len(relay.turns))]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(2 * deadline_s)
    return wrong


def in_stages(relay, deadline_s):
    """Runners that are stages, the first one the training loop; what went wrong."""
    driver = Threads(deadline_s)
    driver._waits = relay.waits
    try:
        driver.start({f"runner-{number}": relay.runner(number) for number in range(1, len(relay.turns))})
        for wait in relay.runner(0):
            driver.wait(wait)
        driver.notify()
        driver.join()
    except Exception as error:
        driver.abort(error)
        return [error]
    return []


def strain(seeds, deadline_s=PATIENT_S):
    """The first seed at which something hangs, and who waited for what."""
    for seed in seeds:
        for way in (in_threads, in_stages):
            relay = Relay(seed)
            if wrong := way(relay, deadline_s):
                return f"{way.__name__}, seed {seed}: {wrong}; {relay.dump()}"
    return None


@pytest.mark.usefixtures("impatient")
def test_no_wake_up_is_lost_under_stress():
    assert sum(len(turns) for seed in range(200) for turns in Relay(seed).turns) > 2000
    assert strain(range(200)) is None


def evaluates_first(self, what, ready, deadline_s):
    """A condition is evaluated before who waits is listed: a change in between is missed."""
    parked = waits._Parked(ready)
    can_go_on = ready()
    self.pause()
    self._parked[parked] = None
    if not can_go_on:
        self._sleep(parked, deadline_s)
    self._parked.pop(parked, None)


def tells_nobody(self):
    """A change is not told."""


def tells_one(self):
    """A change is told to who has waited longest."""
    for parked in list(self._parked)[:1]:
        if parked.ready():
            parked.wake()
            self._parked.pop(parked, None)


@pytest.mark.usefixtures("impatient")
@pytest.mark.parametrize(
    ("method", "defect"), [("until", evaluates_first), ("changed", tells_nobody), ("changed", tells_one)]
)
def test_a_wake_up_that_is_lost_is_found(monkeypatch, method, defect):
    monkeypatch.setattr(Waits, method, defect)
    monkeypatch.setattr(Strained.__init__, "__defaults__", (0.05, 1.0))
    assert "a wake-up was lost" in (strain(range(200), deadline_s=2.0) or "")


@pytest.mark.long
@pytest.mark.usefixtures("impatient")
@pytest.mark.parametrize("part", range(4))
def test_no_wake_up_is_lost_under_long_stress(part):
    assert strain(range(200 + 3000 * part, 200 + 3000 * (part + 1))) is None
