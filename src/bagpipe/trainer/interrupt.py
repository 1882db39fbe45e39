"""Signals wait while rows change: half of an update is worse than none (I4)."""

from __future__ import annotations

import signal
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

SIGNALS = tuple(sorted(signal.valid_signals() - {signal.SIGKILL, signal.SIGSTOP}))


@contextmanager
def uninterrupted() -> Iterator[None]:
    """Hold back what a signal handler of Python would raise, such as KeyboardInterrupt, until the block is done."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    handlers = {int(number): handler for number in SIGNALS if callable(handler := signal.getsignal(number))}
    arrived: list[tuple[int, Any]] = []
    for number in handlers:
        signal.signal(number, lambda number, frame: arrived.append((number, frame)))
    try:
        yield
    finally:
        for number, handler in handlers.items():
            signal.signal(number, handler)
        for number, frame in arrived:
            handlers[number](number, frame)
