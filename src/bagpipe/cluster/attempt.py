"""What a trainer does in one generation, and how another thread ends it: every wait of it then ends with an error."""

from __future__ import annotations

import logging
from collections.abc import Callable
from threading import Lock

from bagpipe.errors import GenerationOverError, again

_log = logging.getLogger(__name__)


class Attempt:
    """One generation's work of this process."""

    def __init__(self) -> None:
        self.over: GenerationOverError | None = None
        """Once it is."""
        self._lock = Lock()
        self._ends: list[Callable[[GenerationOverError], object]] = []

    def on_end(self, end: Callable[[GenerationOverError], object]) -> None:
        """Have this called with the error of every wait when the attempt is over; at once if it is."""
        with self._lock:
            if self.over is None:
                self._ends.append(end)
                return
        end(self.over)

    def abandon(self, generation: int) -> None:
        """It is over, from any thread, with its generation; a second call does nothing."""
        with self._lock:
            if self.over is not None:
                return
            over = self.over = GenerationOverError(f"generation {generation} is over", generation)
            ends, self._ends = self._ends, []
        _log.warning("leaving off: %s", over)
        for end in ends:
            try:
                end(over)
            except Exception:
                _log.exception("what it worked with could not be told")

    def gone(self, server: int) -> None:
        """What a `RemoteStore` watches: raises where no server is worth waiting for."""
        if self.over is not None:
            raise again(self.over, f"server {server} is not waited for, since {self.over}")
