"""The one way to wait for what another thread does: until it is so, with a deadline (I7), waking nobody else."""

from __future__ import annotations

import threading
from collections.abc import Callable
from contextlib import suppress

from bagpipe.errors import DeadlineError


class Waits:
    """Threads that wait, each until its own condition holds.

    Whoever changes what a condition depends on calls `changed` afterwards: it evaluates the condition of everyone who
    waits and wakes those who can go on, and nobody else. Who begins to wait does the same, so a thread that changes
    something and then waits need not call it.

    No wake-up is lost: who waits is listed before its condition is evaluated, and who changes something evaluates
    conditions after the change. So either the change came before that evaluation, or the listing before this one.

    There is no lock, and so no order of locks: `changed` may be called from anywhere (under a lock, in a signal
    handler, by the garbage collector, by a condition), and a condition may be evaluated by several threads at once. So
    it should be cheap, change nothing and take no lock.
    """

    def __init__(self, who: str = "") -> None:
        """`who` waits here, for messages."""
        self._who = f"{who} " if who else ""
        self._parked: dict[_Parked, None] = {}

    def until(self, what: str | Callable[[], str], ready: Callable[[], bool], deadline_s: float) -> None:
        """Return when `ready` was true; what it raises, whoever evaluates it, is raised here.

        DeadlineError if it takes longer than `deadline_s`, which may be `math.inf` where another wait is bounded that
        depends on the same. `what` names the condition in it; a function where that is only known then.
        """
        parked = _Parked(ready)
        try:
            self._parked[parked] = None
            self.changed()
            can_go_on = parked.baton.acquire(blocking=False) or self._sleep(parked, deadline_s)
            if not can_go_on and not ready():
                named = what if isinstance(what, str) else what()
                raise DeadlineError(f"{self._who}waited {deadline_s:g} s for {named}")
        finally:
            self._parked.pop(parked, None)
        if parked.error is not None:
            raise parked.error

    def changed(self) -> None:
        """Wake those whose condition holds now."""
        for parked in list(self._parked):
            try:
                can_go_on = parked.ready()
            except Exception as error:  # whose condition fails is told, and not who has changed something
                parked.error, can_go_on = error, True
            if can_go_on:
                parked.wake()  # before it is forgotten: Ctrl-C may come between the two
                self._parked.pop(parked, None)

    def _sleep(self, parked: _Parked, deadline_s: float) -> bool:
        """Whether it was woken in time."""
        return parked.baton.acquire(timeout=min(max(0.0, deadline_s), threading.TIMEOUT_MAX))


class _Parked:
    """A thread that waits. Equal only to itself."""

    __slots__ = ("baton", "error", "ready")

    def __init__(self, ready: Callable[[], bool]) -> None:
        self.ready = ready
        self.error: Exception | None = None
        self.baton = threading.Lock()
        self.baton.acquire()

    def wake(self) -> None:
        """Let it go on; others may have done so already."""
        with suppress(RuntimeError):
            self.baton.release()
