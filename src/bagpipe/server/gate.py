"""Requests that are being worked on, and a way to wait until none is: rows are replaced only when nobody uses them."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from threading import Condition

from bagpipe.errors import DeadlineError

DEADLINE_S = 60.0


class Gate:
    """Open to any number of threads; closed, it lets nobody in."""

    def __init__(self) -> None:
        self._inside = 0
        self._closed_for: set[str] = set()
        self._changed = Condition()

    @contextmanager
    def entered(self) -> Iterator[bool]:
        """Whether the gate is open; it isn't closed meanwhile if so."""
        with self._changed:
            enters = not self._closed_for
            self._inside += enters
        try:
            yield enters
        finally:
            if enters:
                with self._changed:
                    self._inside -= 1
                    if self._closed_for and not self._inside:
                        self._changed.notify_all()

    def close(self, why: str, deadline_s: float = DEADLINE_S) -> None:
        """Let nobody in any more, and return when nobody is inside."""
        with self._changed:
            self._closed_for.add(why)
            if not self._changed.wait_for(lambda: not self._inside, deadline_s):
                raise DeadlineError(
                    f"{self._inside} requests are still being worked on after {deadline_s:g} s: "
                    "see whether the disk of the server answers"
                )

    def open(self, why: str) -> None:
        """Let everybody in, unless it is closed for another reason too."""
        with self._changed:
            self._closed_for.discard(why)
