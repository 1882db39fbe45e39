"""Work beside the training loop that is done once in a while: one piece at a time, none lost, none silent.

What a piece raises is raised in the loop, at the next look. Every wait for it has a deadline, which counts from where
the piece was last seen to move (I7): a large checkpoint takes its time.
"""

from __future__ import annotations

import contextvars
import threading
import time
from collections.abc import Callable
from contextlib import suppress

from bagpipe.errors import DeadlineError

DEADLINE_S = 3600.0
"""Without progress; for all of a piece that does not tell its progress."""
LOOK_S = 10.0
"""From one look at a piece that is waited for to the next."""

Work = Callable[[], None]
Progress = Callable[[], object]
"""Something that changes while a piece moves on."""


class Background:
    """Runs pieces of work in a thread each; the next one waits until the one before is over."""

    def __init__(
        self, name: str, *, threads: bool = True, deadline_s: float = DEADLINE_S, look_s: float = LOOK_S
    ) -> None:
        """Without `threads` a piece is done at once, by whoever gives it."""
        self._name, self._threads, self._deadline_s, self._look_s = name, threads, deadline_s, look_s
        self._thread: threading.Thread | None = None
        self._looking: threading.Thread | None = None
        self._what = ""
        self._error: BaseException | None = None
        self._progress: Progress = lambda: None
        self._seen: object = None
        self._moved: float | None = None
        """When its progress was last seen to change, or else first looked at."""

    def start(self, what: str, work: Work, progress: Progress = lambda: None) -> None:
        """Begin a piece, once the one before is over; `what` it is, for messages; `progress` tells whether it moves."""
        self.wait()
        self._what, self._progress, self._seen, self._moved = what, progress, None, None
        if not self._threads:
            work()
            return
        context = contextvars.copy_context()
        thread = threading.Thread(target=context.run, args=(self._run, work), name=self._name, daemon=True)
        self._thread = thread
        thread.start()

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
        thread = self._thread
        if thread is not None:
            thread.join(within_s)
            if thread.is_alive():
                self._check_moving()
                return True
            self._thread = None
        self.check()
        return False

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
