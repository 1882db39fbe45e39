"""How far each trainer's write-backs are, and the reads that wait for them (I3), in a server and in one process.

A read that must follow iteration y goes on once every trainer has passed y. On a server it is parked until then: it
holds no thread and no lock, so writes never queue behind it. Parked reads are few and do not wait for ever (I5, I7).
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from threading import Lock
from typing import TypeAlias

from bagpipe.store.base import NO_ITERATION

Behind: TypeAlias = dict[int, int]
"""The trainers that a read waits for, each with the last iteration that it has passed."""


@dataclass(frozen=True, slots=True, eq=False)
class Parked:
    """A read that waits."""

    after: int
    until: float
    """When it is sent away."""
    go_on: Callable[[], None]
    send_away: Callable[[Behind], None]


class Watermark:
    """The iteration that all trainers have passed."""

    def __init__(self, trainers: int, parked_max: int = 0) -> None:
        self._passed = dict.fromkeys(range(trainers), NO_ITERATION)
        self._parked_max = parked_max
        self._parked: list[Parked] = []
        self._lock = Lock()

    @property
    def reached(self) -> int:
        """All trainers have passed it. Takes no lock: whoever drives trainers asks for it while holding another."""
        return min(self._passed.values())

    @property
    def num_parked(self) -> int:
        """Reads that wait now."""
        return len(self._parked)

    def behind(self, after: int) -> Behind:
        """The trainers that have not passed this iteration."""
        return {trainer: passed for trainer, passed in self._passed.items() if passed < after}

    def admit(self, read: Parked) -> bool:
        """Whether the read may go on at once; else it is parked, or sent away if too many are."""
        with self._lock:
            if read.after <= self.reached:
                return True
            if has_room := len(self._parked) < self._parked_max:
                self._parked.append(read)
        if not has_room:
            read.send_away(self.behind(read.after))
        return False

    def advance(self, trainer: int, iteration: int) -> list[Parked]:
        """The trainer has passed this iteration; the reads that may go on, which are no longer parked."""
        with self._lock:
            if trainer in self._passed:
                self._passed[trainer] = max(self._passed[trainer], iteration)
            return self._take(lambda read: read.after <= self.reached)

    def expire(self, now: float) -> None:
        """Send the reads away that have waited long enough."""
        with self._lock:
            expired = self._take(lambda read: read.until <= now)
        for read in expired:
            read.send_away(self.behind(read.after))

    def keep_for(self, trainers: int) -> None:
        """Go on with that many trainers, those that were there as far as they are; who waits is to ask again."""
        with self._lock:
            self._passed = {trainer: self._passed.get(trainer, NO_ITERATION) for trainer in range(trainers)}
            parked = self._take(lambda _: True)
        for read in parked:
            read.send_away({})

    def begin_anew(self) -> None:
        """No trainer has passed any iteration; who waits for that is to ask again."""
        with self._lock:
            self._passed = dict.fromkeys(self._passed, NO_ITERATION)
            parked = self._take(lambda _: True)
        for read in parked:
            read.send_away({})

    def _take(self, chosen: Callable[[Parked], bool]) -> list[Parked]:
        taken = [read for read in self._parked if chosen(read)]
        if taken:
            self._parked = [read for read in self._parked if not chosen(read)]
        return taken
