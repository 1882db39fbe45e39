"""A signal whose handler raises, wherever it arrives: dense parameters, rows and all states have the values of before a
step or of after it, and training goes on with the bits of a run that was broken off there.
"""

from __future__ import annotations

import signal
import sys
import threading
from collections import Counter
from contextlib import contextmanager

import pytest
import torch

import bagpipe
from bagpipe.errors import GradientError
from bagpipe.failpoints import armed
from bagpipe.signals import uninterrupted
from harness.plain import loss_of, make_batches, make_net, nothing_left, threads_left  # noqa: F401

pytestmark = [
    pytest.mark.usefixtures("nothing_left"),
    # What a handler raises where Python collects a generator is lost: also without us.
    pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning"),
]
NUM_BATCHES = 6
SIGNALS = (signal.SIGINT, signal.SIGTERM)


class Arrived(BaseException):
    """What the handler raises."""


def translated(model):
    return torch.optim.Adagrad(model.parameters(), lr=0.1), None


def given(model):
    return torch.optim.Adam(model.parameters(), lr=0.02), bagpipe.optim.Adam(0.05)


OPTIMIZERS = {"Adagrad": translated, "Adam, rows=": given}
IN_A_STEP = ("trainer.step.begun", "trainer.step.updated")
BETWEEN_STEPS = (
    "trainer.plan.received", "trainer.fetch.read", "trainer.fetch.inserted", "trainer.evict.copied",
    "trainer.evict.written", "trainer.batch.given",
)  # fmt: skip
OF_CHECKPOINTS = (
    "mark.flushed", "mark.met", "mark.asked", "mark.over", "checkpoint.begun", "checkpoint.rows.written",
    "checkpoint.blobs.written", "checkpoint.manifest.written", "checkpoint.confirmed", "checkpoint.renamed",
    "checkpoint.complete", "checkpoint.saved", "checkpoint.pruned", "layer.merged",
)  # fmt: skip


class Script:
    """Two epochs, of which the first may be interrupted."""

    def __init__(self, optimizer="Adagrad", directory=None):
        model = make_net()
        made, rows = OPTIMIZERS[optimizer](model)
        checkpoint = None if directory is None else bagpipe.Checkpointing(directory, every=2, keep=1)
        self.model, self.optimizer, self.loader = bagpipe.prepare(
            model, made, make_batches(NUM_BATCHES), rows=rows, cache=bagpipe.Cache(40, lookahead=2),
            checkpoint=checkpoint, options=bagpipe.Options(check=True),
        )  # fmt: skip
        self.loader.register_for_checkpointing()
        self.begun = self.stepped = 0
        """Steps that were begun, and that have returned."""

    def epoch(self, stop=None, before_step=None):
        if stop == 0:
            return
        for number, batch in enumerate(self.loader, 1):
            self.optimizer.zero_grad()
            loss_of(self.model, batch).backward()
            if before_step is not None:
                before_step()
            self.begun += 1
            self.optimizer.step()
            self.stepped += 1
            if number == stop:
                break

    def state(self):
        """The bits of all parameters, rows and states."""
        states = self.optimizer.state_dict()["state"]
        parts = {str(key): state for key, state in states.items()} | {"model": self.model.state_dict()}
        return {
            f"{name} {part}": torch.as_tensor(value).numpy().tobytes()
            for name, several in parts.items()
            for part, value in several.items()
        }

    def end(self):
        self.loader.close()
        self.loader.loop.store.close()


@pytest.fixture(scope="module")
def expected():
    """By optimizer and number of steps: the state then, and after one more epoch."""
    found = {}

    def of(optimizer, steps):
        if (optimizer, steps) not in found:
            script = Script(optimizer)
            script.epoch(steps)
            then = script.state()
            script.epoch()
            found[optimizer, steps] = then, script.state()
            script.end()
        return found[optimizer, steps]

    return of


@contextmanager
def handled(number):
    """The handler of a signal raises."""

    def handler(*_):
        raise Arrived

    former = signal.signal(number, handler)
    try:
        yield
    finally:
        assert signal.getsignal(number) is handler, "the handler is the user's own again"
        signal.signal(number, former)


class Raise:
    """A plan of failpoints: the signal is raised where one is reached for the n-th time, in whatever thread."""

    def __init__(self, name=None, at=0, number=signal.SIGINT):
        self.name, self.at, self.number, self.raised = name, at, number, False
        self.reaches, self.counting = Counter(), threading.Lock()

    def reached(self, name):
        with self.counting:
            self.reaches[name] += 1
            due = name == self.name and self.reaches[name] == self.at
        if due:
            self.raised = True
            signal.raise_signal(self.number)


def interrupted(script, arrange, epoch=lambda script: script.epoch()):
    """Whether an epoch was interrupted."""
    try:
        with arrange:
            epoch(script)
    except Arrived:
        return True
    return False


def assert_both_or_neither(script, optimizer, expected, where):
    """The state is that before or after a step, and training goes on from it and ends."""
    found = script.state()
    steps = [number for number in (script.stepped, script.begun) if found == expected(optimizer, number)[0]]
    assert steps, f"{where}: {script.stepped} steps have returned of {script.begun}, and the state is that of none"
    script.epoch()
    assert threads_left() == [], where
    assert script.state() == expected(optimizer, steps[0])[1], f"{where}: training goes on differently"
    script.end()


def test_every_point_that_an_epoch_of_one_trainer_reaches_is_tried_below(tmp_path):
    for directory, names in ((None, ()), (tmp_path, OF_CHECKPOINTS)):
        script, plan = Script(directory=directory), Raise()
        with armed(plan):
            script.epoch()
        script.end()
        assert set(plan.reaches) == {*IN_A_STEP, *BETWEEN_STEPS, *names}


@pytest.mark.parametrize("number", SIGNALS)
@pytest.mark.parametrize("name", [*IN_A_STEP, *BETWEEN_STEPS])
@pytest.mark.parametrize("optimizer", OPTIMIZERS)
def test_a_signal_at_any_point_leaves_all_as_before_or_as_after_a_step(expected, optimizer, name, number):
    for at in (1, 3, NUM_BATCHES):
        script, plan = Script(optimizer), Raise(name, at, number)
        with handled(number):
            interrupted(script, armed(plan))
            assert_both_or_neither(script, optimizer, expected, f"{name}, {at}")
        assert plan.raised


@pytest.mark.parametrize("name", [*IN_A_STEP, *BETWEEN_STEPS, *OF_CHECKPOINTS])
def test_a_signal_at_any_point_of_a_loop_that_is_saved_does_so_too(expected, name, tmp_path):
    for at in (1, 2):
        script, plan = Script("Adagrad", tmp_path / str(at)), Raise(name, at, signal.SIGTERM)
        with handled(signal.SIGTERM):
            interrupted(script, armed(plan))
            assert_both_or_neither(script, "Adagrad", expected, f"{name}, {at}")
        assert plan.raised or at > 1


# At any call of an epoch, and of its end


def raise_each(numbers):
    try:
        for number in numbers[:1]:
            signal.raise_signal(number)
    finally:
        if numbers[1:]:
            raise_each(numbers[1:])


class Call:
    """Raises signals at the n-th place within bagpipe or torch's optimizers at which Python looks for some: where a
    function is called, and where one in C has returned."""

    def __init__(self, at, *numbers, within=("/bagpipe/", "/torch/optim/")):
        self.at, self.numbers, self.within, self.calls, self.where = at, numbers, within, 0, None

    def __enter__(self):
        sys.setprofile(self.profile)

    def __exit__(self, *_):
        sys.setprofile(None)

    def profile(self, frame, event, _):
        if event in ("call", "c_return") and any(part in frame.f_code.co_filename for part in self.within):
            self.calls += 1
            if self.calls == self.at:
                self.where = f"{event} in {frame.f_code.co_filename}:{frame.f_lineno} {frame.f_code.co_name}"
                raise_each(self.numbers)


def whole(script):
    script.epoch()


def broken_off(script):
    script.epoch(3)


def ended(script):
    script.epoch(3)
    script.loader.close()


def ended_by_the_next(script):
    batches = iter(script.loader)
    for _ in range(2):
        script.optimizer.zero_grad()
        loss_of(script.model, next(batches)).backward()
        script.begun += 1
        script.optimizer.step()
        script.stepped += 1
    iter(script.loader).close()


EPOCHS = {each.__name__: each for each in (whole, broken_off, ended, ended_by_the_next)}


def calls_of(optimizer, epoch):
    script, calls = Script(optimizer), Call(0)
    with calls:
        epoch(script)
    script.end()
    return calls.calls


def interrupt_calls(optimizer, epoch, expected, chosen):
    """Interrupt an epoch at each of these calls."""
    for at in chosen:
        script, calls = Script(optimizer), Call(at, signal.SIGINT)
        with handled(signal.SIGINT):
            try:
                interrupted(script, calls, epoch)
                script.state()
            except Arrived:  # kept while a break ended the epoch, and raised by the next use, once
                pass
            assert_both_or_neither(script, optimizer, expected, f"call {at}, {calls.where}")


@pytest.mark.parametrize("epoch", EPOCHS)
@pytest.mark.parametrize("optimizer", OPTIMIZERS)
def test_a_signal_at_any_call_leaves_all_as_before_or_as_after_a_step(expected, optimizer, epoch):
    """Some of them, and more of the last ones, with which the epoch ends."""
    calls = calls_of(optimizer, EPOCHS[epoch])
    chosen = [*range(7, calls, calls // 12), *range(calls - 600, calls, 60)]
    interrupt_calls(optimizer, EPOCHS[epoch], expected, chosen)


@pytest.mark.long
@pytest.mark.parametrize("part", range(8))
@pytest.mark.parametrize("epoch", EPOCHS)
def test_a_signal_at_more_calls_leaves_all_as_before_or_as_after_a_step(expected, epoch, part):
    calls = calls_of("Adagrad", EPOCHS[epoch])
    chosen = [*range(1 + part, calls, 97), *range(calls - 900 + part, calls, 8)]
    interrupt_calls("Adagrad", EPOCHS[epoch], expected, chosen)


# A block in which signals are held back


def count(at, block):
    """What happens if two signals arrive at a call of a block that holds them back; None: there is no such call."""
    handled, raised, done = [], [], []
    before = {number: signal.getsignal(number) for number in SIGNALS}

    def handler(number, frame):
        handled.append(number)
        raise Arrived(number)

    for number in SIGNALS:
        signal.signal(number, handler)
    calls = Call(at, *SIGNALS, within=("/bagpipe/signals.py", "contextlib.py", __file__))
    try:
        with calls:
            block(done)
    except Arrived as error:
        raised.append(error)
    finally:
        left = [number for number in SIGNALS if signal.getsignal(number) is not handler]
        for number in SIGNALS:
            signal.signal(number, before[number])
    if calls.where is None:
        return None
    assert left == [], f"{calls.where}: a signal is held back for good"
    assert sorted(handled) == sorted(SIGNALS), f"{calls.where}: each signal comes to its handler, once"
    assert len(raised) == 1
    return done


def held_back(done):
    with uninterrupted():
        done.append("begun")
        with uninterrupted():
            max(1, 2)
        done.append("done")


def test_what_is_held_back_is_neither_lost_nor_in_the_middle_and_handlers_come_back():
    seen, at = set(), 1
    while (done := count(at, held_back)) is not None:
        seen.add(tuple(done))
        at += 1
    assert seen == {(), ("begun", "done")}
    assert at > 200


# In the user's own hooks, and beside a gradient that is not finite


@pytest.mark.parametrize("number", SIGNALS)
@pytest.mark.parametrize("hook", ["gradient", "before the step", "after the step"])
@pytest.mark.parametrize("optimizer", OPTIMIZERS)
def test_a_signal_in_a_hook_leaves_all_as_before_or_as_after_a_step(expected, optimizer, hook, number):
    script = Script(optimizer)

    def arrive(*_):
        if script.begun == 3 - (hook == "gradient"):
            signal.raise_signal(number)

    with handled(number):
        if hook == "gradient":
            handle = script.model.top[2].bias.register_hook(arrive)
        elif hook == "before the step":
            handle = script.optimizer.register_step_pre_hook(arrive)
        else:
            handle = script.optimizer.register_step_post_hook(arrive)
        assert interrupted(script, handle)
    assert script.stepped == 2
    assert (script.state() == expected(optimizer, 3)[0]) == (hook == "after the step")
    assert_both_or_neither(script, optimizer, expected, hook)


@pytest.mark.parametrize("wrong", ["rows", "dense"])
@pytest.mark.parametrize("optimizer", OPTIMIZERS)
def test_a_step_without_finite_gradients_is_no_step_and_training_goes_on(expected, optimizer, wrong):
    script = Script(optimizer)

    def spoil():
        if script.begun == 3:
            (script.model.user.weight if wrong == "rows" else script.model.top[0].bias).grad.fill_(float("nan"))

    with pytest.raises(GradientError, match="not finite"):
        script.epoch(before_step=spoil)
    assert script.state() == expected(optimizer, 3)[0]
    assert_both_or_neither(script, optimizer, expected, wrong)
