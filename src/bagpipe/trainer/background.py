"""Work beside the training loop that is done once in a while: one piece at a time, none lost, none silent.

What a piece raises is raised in the loop, at the next look. Every wait for it has a deadline (I7).
"""

from __future__ import annotations

import contextvars
import threading
from collections.abc import Callable

from bagpipe.errors import DeadlineError

DEADLINE_S = 3600.0
"""For one piece: a checkpoint of a terabyte takes its time."""

Work = Callable[[], None]


class Background:
    """Runs pieces of work in a thread each; the next one waits until the one before is over."""

    def __init__(self, name: str, *, threads: bool = True, deadline_s: float = DEADLINE_S) -> None:
        """Without `threads` a piece is done at once, by whoever gives it."""
        self._name, self._threads, self._deadline_s = name, threads, deadline_s
        self._thread: threading.Thread | None = None
        self._what = ""
        self._error: BaseException | None = None

    def start(self, what: str, work: Work) -> None:
        """Begin a piece, once the one before is over; `what` it is, for messages."""
        self.wait()
        self._what = what
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
        thread = self._thread
        if thread is not None:
            thread.join(self._deadline_s)
            if thread.is_alive():
                raise DeadlineError(f"{self._what} was not done within {self._deadline_s:g} s: see what holds it up")
            self._thread = None
        self.check()

    def _run(self, work: Work) -> None:
        try:
            work()
        except BaseException as error:
            self._error = error
