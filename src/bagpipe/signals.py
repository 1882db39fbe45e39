"""Handlers of signals, held back or exchanged for a while: whenever a signal arrives, and whatever its handler raises,
none is lost, and the handlers that were there come back (I4).

Python looks for signals after each call and where a function begins. The last steps here are single calls of C code in
one function, so that there is no place between them where what one handler raises would keep another from its own.
"""

from __future__ import annotations

import ctypes
import signal
import threading
from _signal import getsignal  # type: ignore[import-not-found]  # signal's own make enums, 0.3 ms a batch
from _signal import signal as set_handler
from collections import deque
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from itertools import starmap
from typing import Any, TypeAlias

Handler: TypeAlias = Callable[[int, Any], Any] | int

SIGNALS = tuple(sorted(map(int, signal.valid_signals() - {signal.SIGKILL, signal.SIGSTOP})))

_arrives = ctypes.pythonapi.PyErr_SetInterruptEx
"""Has the handler of a signal called as if it arrived; other than `raise_signal` not before it returns."""


@contextmanager
def uninterrupted(then: Mapping[int, Any] | None = None) -> Iterator[None]:
    """Hold back what a signal handler of Python would raise, such as KeyboardInterrupt, until the block is done: half
    of an update is worse than none. `then`: handlers to be there afterwards, instead of those of now."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    before = {number: handler for number in SIGNALS if callable(handler := getsignal(number))}
    after = list((before if then is None else {**before, **then}).items())
    arrived: list[int] = []

    def hold(number: int, _: object) -> None:
        arrived.append(number)

    restore, again, once_more = starmap(set_handler, after), starmap(set_handler, after), starmap(set_handler, after)
    deliver = map(_arrives, arrived)
    try:
        for number in before:
            set_handler(number, hold)
        yield
    finally:
        try:
            deque(restore, 0)
        except BaseException:  # of a handler that is there again
            try:
                deque(again, 0)
            except BaseException:  # of another one
                deque(once_more, 0)
                raise
            raise
        finally:
            try:
                deque(deliver, 0)
            finally:
                if arrived:
                    _settle(len(arrived))


def _settle(count: int) -> None:
    """Have all that has arrived handled here, whatever each handler raises, and not where that is dealt with."""
    try:
        getsignal(signal.SIGINT)
    finally:
        if count:
            _settle(count - 1)


@contextmanager
def handled(handlers: Mapping[int, Handler]) -> Iterator[None]:
    """Have these signals go to these handlers within the block; outside of the main thread nothing happens."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    # None is a handler that Python does not know, and can't set again.
    before = {number: handler for number in handlers if (handler := getsignal(number)) is not None}
    ours = {number: _as_c_knows_it(handlers[number]) for number in before}
    try:
        try:
            try:
                _exchange(ours)
                yield
            except GeneratorExit:
                # A handler raised as the block was about to begin: it is let go of later, maybe after one around it.
                before = {number: each for number, each in before.items() if getsignal(number) is ours[number]}
                raise
            finally:
                _exchange(before)
        finally:  # of what a handler has raised on the way there
            _exchange(before)
    finally:  # and another one
        _exchange(before)


def _as_c_knows_it(handler: Handler) -> Handler:
    return int(handler) if isinstance(handler, signal.Handlers) else handler


def _exchange(handlers: Mapping[int, Any]) -> None:
    with uninterrupted(handlers):
        pass
