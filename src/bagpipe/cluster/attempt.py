"""What a trainer does in one generation, and how another thread ends it: every wait of it then ends with an error."""

from __future__ import annotations

import logging
from collections.abc import Callable
from threading import Lock

_log = logging.getLogger(__name__)


class Attempt:
    """One generation's work of this process."""

    def __init__(self) -> None:
        self.reason = ""
        """Why it is over; empty while it is not."""
        self._lock = Lock()
        self._ends: list[Callable[[str], object]] = []

    def on_end(self, end: Callable[[str], object]) -> None:
        """Have this called with the reason when the attempt is over; at once if it is."""
        with self._lock:
            if not self.reason:
                self._ends.append(end)
                return
        end(self.reason)

    def abandon(self, reason: str) -> None:
        """It is over, from any thread; the first reason counts."""
        with self._lock:
            if self.reason:
                return
            self.reason = reason
            ends, self._ends = self._ends, []
        _log.warning("leaving off: %s", reason)
        for end in ends:
            try:
                end(reason)
            except Exception:
                _log.exception("what it worked with could not be told")

    def gone(self, _server: int) -> str | None:
        """Why no server is worth waiting for, if so: what a `RemoteStore` watches."""
        return f"is not waited for, since {self.reason}" if self.reason else None
