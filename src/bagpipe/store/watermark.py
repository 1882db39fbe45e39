"""How far each trainer's write-backs are: a read that must follow iteration y waits until all have passed y (I3).

Kept by a server for its clients, and by a process for its trainers.
"""

from __future__ import annotations

from threading import Lock

from bagpipe.store.base import NO_ITERATION


class Watermark:
    """The iteration that all trainers have passed."""

    def __init__(self, trainers: int = 0) -> None:
        self._passed = dict.fromkeys(range(trainers), NO_ITERATION)
        self._lock = Lock()

    @property
    def reached(self) -> int:
        """All trainers have passed it. Takes no lock: whoever drives trainers asks for it while holding another."""
        return min(self._passed.values(), default=NO_ITERATION)

    def behind(self, after: int) -> str:
        """The trainers that have not passed this iteration and how far they are, for people."""
        return ", ".join(
            f"{trainer} (at {'none' if passed == NO_ITERATION else passed})"
            for trainer, passed in sorted(self._passed.items())
            if passed < after
        )

    def advance(self, trainer: int, iteration: int) -> bool:
        """The trainer has passed this iteration; whether all have passed one more now."""
        with self._lock:
            before = self.reached
            if trainer in self._passed:
                self._passed[trainer] = max(self._passed[trainer], iteration)
            return self.reached > before

    def keep_for(self, trainers: int) -> None:
        """Go on with that many trainers, those that were there as far as they are."""
        with self._lock:
            self._passed = {trainer: self._passed.get(trainer, NO_ITERATION) for trainer in range(trainers)}

    def begin_anew(self) -> None:
        """No trainer has passed any iteration."""
        with self._lock:
            self._passed = dict.fromkeys(self._passed, NO_ITERATION)
