"""How far each trainer's write-backs are, and the reads that wait for them (I3).

A read that must follow iteration y goes on once every trainer has passed y. Until then it is parked: it holds no thread
and no lock, so writes never queue behind it. Parked reads are few and do not wait for ever (I5, I7).
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from threading import Lock

from bagpipe.wire.messages import NO_ITERATION, Waiting


@dataclass(frozen=True, slots=True, eq=False)
class Parked:
    """A read that waits."""

    after: int
    until: float
    """When it is sent away."""
    go_on: Callable[[], None]
    send_away: Callable[[Waiting], None]


class Watermark:
    """The iteration that all trainers have passed."""

    def __init__(self, trainers: int, parked_max: int) -> None:
        self._passed = dict.fromkeys(range(trainers), NO_ITERATION)
        self._parked_max = parked_max
        self._parked: list[Parked] = []
        self._lock = Lock()

    @property
    def reached(self) -> int:
        """All trainers have passed it."""
        return min(self._passed.values())

    @property
    def num_parked(self) -> int:
        """Reads that wait now."""
        return len(self._parked)

    def admit(self, read: Parked) -> Waiting | bool:
        """Whether the read may go on at once; else it is parked, or if too many are, is told whom it waits for."""
        with self._lock:
            if read.after <= self.reached:
                return True
            if len(self._parked) >= self._parked_max:
                return self._behind(read.after)
            self._parked.append(read)
            return False

    def advance(self, trainer: int, iteration: int) -> list[Parked]:
        """The trainer has passed this iteration; the reads that may go on, which are no longer parked."""
        with self._lock:
            if trainer in self._passed:
                self._passed[trainer] = max(self._passed[trainer], iteration)
            return self._take(lambda read: read.after <= self.reached)

    def expire(self, now: float) -> list[tuple[Parked, Waiting]]:
        """The reads that have waited long enough, no longer parked, and whom they waited for."""
        with self._lock:
            return [(read, self._behind(read.after)) for read in self._take(lambda read: read.until <= now)]

    def keep_for(self, trainers: int) -> list[Parked]:
        """Go on with that many trainers, those that were there as far as they are; what was parked is given back."""
        with self._lock:
            self._passed = {trainer: self._passed.get(trainer, NO_ITERATION) for trainer in range(trainers)}
            return self._take(lambda _: True)

    def begin_anew(self) -> list[Parked]:
        """No trainer has passed anything; what was parked is given back."""
        with self._lock:
            self._passed = dict.fromkeys(self._passed, NO_ITERATION)
            return self._take(lambda _: True)

    def _take(self, chosen: Callable[[Parked], bool]) -> list[Parked]:
        taken = [read for read in self._parked if chosen(read)]
        if taken:
            self._parked = [read for read in self._parked if not chosen(read)]
        return taken

    def _behind(self, after: int) -> Waiting:
        behind = {trainer: passed for trainer, passed in self._passed.items() if passed < after}
        return Waiting(list(behind), list(behind.values()))
