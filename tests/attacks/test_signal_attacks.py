"""Signals that arrive while handlers are held back, exchanged or put back: each comes to a handler, once, and the
handlers that were there come back, though several arrive and each handler raises.
"""

from __future__ import annotations

import os
import signal
import sys
import threading
from contextlib import contextmanager, suppress

import pytest

from bagpipe import signals
from bagpipe.cluster.session import exit_codes_kept
from bagpipe.server.process import stopped_by_signals
from bagpipe.signals import handled, uninterrupted

NUMBERS = (signal.SIGINT, signal.SIGTERM)
LATER = signal.SIGUSR2
"""Arrives once more, at another place."""
WITHIN = ("/bagpipe/signals.py", "/server/process.py", "/cluster/session.py", "contextlib.py", __file__)


class Arrived(BaseException):
    """What every handler raises."""


def raise_each(numbers):
    try:
        for number in numbers[:1]:
            signal.raise_signal(number)
    finally:
        if numbers[1:]:
            raise_each(numbers[1:])


class Burst:
    """Has signals arrive at some of the places at which Python looks for them, by their numbers."""

    def __init__(self, *places):
        self.places, self.seen, self.where = dict(places), 0, []

    def __enter__(self):
        sys.setprofile(self.profile)

    def __exit__(self, *_):
        sys.setprofile(None)

    def profile(self, frame, event, _):
        if event in ("call", "c_return") and any(part in frame.f_code.co_filename for part in WITHIN):
            self.seen += 1
            if self.seen in self.places:
                self.where.append(f"{event} in {frame.f_code.co_name}:{frame.f_lineno}")
                try:
                    raise_each(self.places[self.seen])
                finally:
                    sys.setprofile(self.profile)  # Python takes it away when it raises


@contextmanager
def users():
    """Handlers of the user's own; how often each was called."""
    calls = dict.fromkeys((*NUMBERS, LATER), 0)

    def handler(number, _):
        calls[number] += 1
        raise Arrived

    before = {number: signal.signal(number, handler) for number in calls}
    try:
        yield handler, calls
    finally:
        for number, each in before.items():
            signal.signal(number, each)


def settle():
    """Until no signal waits to be handled."""
    for _ in range(5):
        with suppress(Arrived):
            os.getpid()


def holding(noted):
    with uninterrupted():
        noted.append("begun")
        with uninterrupted():
            len(noted)
        noted.append("done")


def stopping(noted):
    stop = threading.Event()
    try:
        with stopped_by_signals(stop):
            noted.append("begun")
            len(noted)
    finally:
        noted.append(stop.is_set())


def keeping(noted):
    with exit_codes_kept():
        noted.append("begun")
        len(noted)


def exchanging(noted):
    with handled({signal.SIGINT: lambda *_: noted.append("ours"), signal.SIGTERM: signal.SIG_IGN}):
        noted.append("begun")
        with handled({signal.SIGINT: lambda *_: noted.append("inner")}):
            len(noted)
        noted.append("done")


BLOCKS = {each.__name__: each for each in (holding, stopping, keeping, exchanging)}


def attempt(block, *places):
    """Run a block with signals at these places: handlers that are not back, calls of all, where, what it noted."""
    noted = []
    with users() as (handler, calls):
        burst = Burst(*places)
        with suppress(Arrived), burst:
            block(noted)
        settle()
        left = [signal.Signals(number).name for number in calls if signal.getsignal(number) is not handler]
    return left, calls, burst, noted


@pytest.mark.parametrize("name", BLOCKS)
def test_wherever_signals_arrive_the_handlers_come_back_and_none_is_lost(name):
    _, _, whole, _ = attempt(BLOCKS[name])
    assert whole.seen > 20
    for at in range(1, whole.seen + 1):
        left, calls, burst, noted = attempt(BLOCKS[name], (at, NUMBERS))
        assert left == [], f"{burst.where}: not put back"
        if name in ("holding", "keeping"):
            assert {calls[number] for number in NUMBERS} == {1}, burst.where
        if name == "exchanging":
            ours = noted.count("ours") + noted.count("inner")
            assert calls[signal.SIGINT] + ours == 1, burst.where
        if name == "stopping":
            stopped = 2 * noted[-1] if noted else 0
            assert calls[signal.SIGINT] + calls[signal.SIGTERM] + stopped >= 2, burst.where


@pytest.mark.parametrize("name", BLOCKS)
def test_those_who_are_impatient_change_nothing_of_it(name):
    """Another signal arrives while the first ones are dealt with."""
    _, _, whole, _ = attempt(BLOCKS[name])
    for first in range(1, whole.seen + 1, 7):
        for more in (1, 2, 3, 5, 9, 17, 40):
            left, calls, burst, _ = attempt(BLOCKS[name], (first, NUMBERS), (first + more, (LATER,)))
            assert left == [], f"{burst.where}: not put back"
            assert calls[LATER] == len(burst.where) - 1, burst.where


@pytest.mark.parametrize("name", BLOCKS)
@pytest.mark.parametrize("at", range(1, 12))
def test_a_signal_between_two_handlers_of_which_one_is_set(name, at, monkeypatch):
    """The other one is set all the same: single calls of C code are tried here, which no profile sees."""
    sets = [0]

    def setting(number, handler):
        before = signal.signal(number, handler)
        sets[0] += 1
        if sets[0] == at:
            raise_each(NUMBERS)
        return before

    monkeypatch.setattr(signals, "set_handler", setting)
    noted = []
    with users() as (handler, calls):
        with suppress(Arrived):
            BLOCKS[name](noted)
        settle()
        assert [number for number in calls if signal.getsignal(number) is not handler] == []
    if sets[0] >= at and name == "holding":
        assert {calls[number] for number in NUMBERS} == {1}


def test_no_handler_that_python_does_not_know_is_taken_for_none(monkeypatch):
    monkeypatch.setattr(signals, "getsignal", lambda _: None)
    with handled({signal.SIGUSR1: lambda *_: None}):
        pass
    assert signal.getsignal(signal.SIGUSR1) is signal.SIG_DFL


def test_other_threads_hold_back_and_exchange_nothing():
    before, errors = signal.getsignal(signal.SIGINT), []

    def use():
        try:
            with uninterrupted(), handled({signal.SIGINT: lambda *_: None}), stopped_by_signals(threading.Event()):
                assert signal.getsignal(signal.SIGINT) is before
        except BaseException as error:
            errors.append(error)

    thread = threading.Thread(target=use)
    thread.start()
    thread.join()
    assert errors == []


def test_signals_from_outside_are_neither_lost_nor_fatal():
    """As many as there is time for, from a thread; those that wait to be handled are one, as for any program."""
    held = []
    over = threading.Event()

    def send():
        while not over.is_set():
            os.kill(os.getpid(), signal.SIGUSR1)

    def handler(*_):
        held.append(inside[0])

    inside = [False]
    before = signal.signal(signal.SIGUSR1, handler)
    thread = threading.Thread(target=send)
    thread.start()
    try:
        for _ in range(2000):
            with uninterrupted():
                inside[0] = True
                len(held)
                inside[0] = False
        assert signal.getsignal(signal.SIGUSR1) is handler
    finally:
        over.set()
        thread.join()
        signal.signal(signal.SIGUSR1, before)
    assert held
    assert not any(held)
