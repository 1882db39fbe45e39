"""Work beside the training loop that is done once in a while: one piece at a time, none lost, none silent.

What a piece raises is raised in the loop, at the next look. Every wait for it has a deadline, which counts from where
the piece was last seen to move (I7): a large checkpoint takes its time.
"""

from __future__ import annotations

import contextvars
import queue
import threading
import time
import weakref
from collections.abc import Callable
from contextlib import suppress
from functools import partial

from bagpipe.errors import DeadlineError

DEADLINE_S = 3600.0
"""Without progress; for all of a piece that does not tell its progress."""
LOOK_S = 10.0
"""From one look at a piece that is waited for to the next."""

Work = Callable[[], None]
Progress = Callable[[], object]
"""Something that changes while a piece moves on."""


class Worker:
    """A thread that does one piece of work after the other, until `close` or until nobody holds this object.

    It is there before the first piece: a new thread keeps the interpreter from who starts it, for milliseconds.
    """

    def __init__(self, name: str) -> None:
        self._given: queue.SimpleQueue[Work | None] = queue.SimpleQueue()
        self._over = threading.Event()
        self._thread = threading.Thread(target=_serve, args=(self._given, self._over), name=name, daemon=True)
        self._thread.start()
        weakref.finalize(self, self._given.put, None)

    def give(self, work: Work) -> None:
        """Begin a piece, which raises nothing; the one before is over."""
        self._over.clear()
        self._given.put(work)

    def is_over(self, within_s: float) -> bool:
        """Whether the last piece was over within so many seconds."""
        return self._over.wait(within_s)

    def close(self, within_s: float) -> None:
        """End the thread, once its piece is over."""
        self._given.put(None)
        self._thread.join(within_s)


def _serve(given: queue.SimpleQueue[Work | None], over: threading.Event) -> None:
    while (work := given.get()) is not None:
        work()
        del work  # it may hold, by what it works on, the object whose end is the end of this thread
        over.set()


class Background:
    """Runs pieces of work in a thread of its own; the next one waits until the one before is over."""

    def __init__(
        self, name: str, *, threads: bool = True, deadline_s: float = DEADLINE_S, look_s: float = LOOK_S
    ) -> None:
        """Without `threads` a piece is done at once, by whoever gives it."""
        self._name, self._threads, self._deadline_s, self._look_s = name, threads, deadline_s, look_s
        self._worker: Worker | None = None
        self._looking: threading.Thread | None = None
        self._under_way = False
        self._what = ""
        self._error: BaseException | None = None
        self._progress: Progress = lambda: None
        self._seen: object = None
        self._moved: float | None = None
        """When its progress was last seen to change, or else first looked at."""

    def open(self) -> None:
        """Have the thread, so that the first piece finds it."""
        if self._threads and self._worker is None:
            self._worker = Worker(self._name)

    def start(self, what: str, work: Work, progress: Progress = lambda: None) -> None:
        """Begin a piece, once the one before is over; `what` it is, for messages; `progress` tells whether it moves."""
        self.wait()
        self._what, self._progress, self._seen, self._moved = what, progress, None, None
        self.open()
        if self._worker is None:
            work()
            return
        self._under_way = True
        self._worker.give(partial(contextvars.copy_context().run, self._run, work))

    def check(self) -> None:
        """Raise what a piece has raised, once."""
        if self._error is not None:
            error, self._error = self._error, None
            raise error

    def wait(self) -> None:
        """Return when nothing is under way; what the last piece has raised is raised."""
        while self.is_busy(min(self._look_s, self._deadline_s)):
            pass

    def is_busy(self, within_s: float) -> bool:
        """Whether a piece is still under way after so many seconds; what it has raised is raised."""
        if self._under_way:
            assert self._worker is not None
            if not self._worker.is_over(within_s):
                self._check_moving()
                return True
            self._under_way = False
        self.check()
        return False

    def close(self) -> None:
        """End the thread: now, or once the piece that hangs there is over."""
        worker, self._worker = self._worker, None
        if worker is not None:
            worker.close(0.0 if self._under_way else self._look_s)
        self._under_way = False

    def _check_moving(self) -> None:
        if self._moved is None:
            self._moved = time.monotonic()
        if self._looking is None or not self._looking.is_alive():
            # In a thread of its own: a disk that hangs would hold up this one too.
            self._looking = threading.Thread(target=self._look, name=f"{self._name}-progress", daemon=True)
            self._looking.start()
        self._looking.join(self._look_s)
        if time.monotonic() - self._moved > self._deadline_s:
            raise DeadlineError(f"{self._what} made no progress for {self._deadline_s:g} s: see what holds it up")

    def _look(self) -> None:
        with suppress(OSError):
            seen = self._progress()
            if seen != self._seen:
                self._seen, self._moved = seen, time.monotonic()

    def _run(self, work: Work) -> None:
        try:
            work()
        except BaseException as error:
            self._error = error
