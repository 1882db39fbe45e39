"""How the background stages of a pipeline run: each in a thread.

A stage is a generator that yields what it waits for, so tests can also run it step by step, under a seeded schedule.
The training loop's waits have deadlines and say what they waited for (I7).
"""

from __future__ import annotations

import math
import threading
import time
import weakref
from collections.abc import Callable, Generator, Mapping
from typing import NamedTuple, Protocol

from bagpipe.errors import BagpipeError, DeadlineError, PipelineError
from bagpipe.waits import Waits

DEADLINE_S = 600.0
LOADER_S = 30.0
"""How long the end of training waits for a loader that is in the middle of a batch."""
EXIT_S = 10.0
"""How long the end of the interpreter waits for stages that nobody has joined."""


class Wait(NamedTuple):
    """What a stage can't go on without."""

    what: str
    ready: Callable[[], bool]


Stage = Generator[Wait, None, None]


class Driver(Protocol):
    """Runs stages beside the training loop."""

    def start(self, stages: Mapping[str, Stage]) -> None:
        """Begin to run the stages."""

    def wait(self, wait: Wait) -> None:
        """Called by the training loop: return when `wait` is ready; a stage's failure is raised here."""

    def notify(self) -> None:
        """Called by the training loop when it has changed something that a stage may wait for."""

    def join(self) -> None:
        """Wait until every stage has ended; a failure is raised."""


class Threads:
    """Each stage in a thread of its own."""

    def __init__(self, deadline_s: float = DEADLINE_S) -> None:
        self.deadline_s = deadline_s
        self._waits = Waits()
        self._doing: dict[str, str] = {}
        """What each stage waits for."""
        self._threads: list[threading.Thread] = []
        self._failures: list[tuple[str, BaseException]] = []
        self._joined = False

    def start(self, stages: Mapping[str, Stage]) -> None:
        """Begin to run the stages; when those before have been joined, these are others."""
        if self._joined:
            self._threads, self._failures, self._joined = [], [], False
        for name, stage in stages.items():
            thread = threading.Thread(target=self._run, args=(name, stage), name=f"bagpipe-{name}", daemon=True)
            self._threads.append(thread)
            _running.add(thread)
            thread.start()

    def wait(self, wait: Wait) -> None:
        """Return when `wait` is ready."""
        self._waits.until(
            lambda: f"{wait.what}; the stages wait for: {self._stages()}", self._or_failed(wait), self.deadline_s
        )
        self._raise()

    def notify(self) -> None:
        """Wake the stages that can go on."""
        self._waits.changed()

    def abort(self, error: BaseException) -> None:
        """End the stages and let the training loop's waits raise: another trainer has failed with this error."""
        ended = PipelineError(f"another trainer failed: {type(error).__name__}: {error}")
        ended.__cause__ = error
        self._failures.append(("other", ended))
        self._waits.changed()

    def join(self) -> None:
        """Wait until every stage has ended; the first one may be held up by a loader, which gets less time."""
        begin = time.monotonic()
        self._joined = True
        for thread in reversed(self._threads):
            limit_s = LOADER_S if thread is self._threads[0] else self.deadline_s
            thread.join(max(0.0, begin + limit_s - time.monotonic()))
            if thread.is_alive():
                raise DeadlineError(
                    f"{thread.name} did not end within {limit_s:.0f} s; the stages wait for: {self._stages()}: "
                    "does the loader block?"
                )
        self._raise()

    def _run(self, name: str, stage: Stage) -> None:
        try:
            for wait in stage:
                self._doing[name] = wait.what
                # A training loop may rest for hours, in a debugger say, and its stages with it; its own waits end.
                self._waits.until(wait.what, self._or_failed(wait), math.inf)
                self._doing[name] = "nothing, it is running"
                if self._failures:
                    return
        except BaseException as error:
            self._failures.append((name, error))
        finally:
            self._doing.pop(name, None)
            self._waits.changed()

    def _or_failed(self, wait: Wait) -> Callable[[], bool]:
        return lambda: bool(self._failures) or wait.ready()

    def _stages(self) -> str:
        return ", ".join(f"{name}: {what}" for name, what in self._doing.copy().items()) or "nothing"

    def _raise(self) -> None:
        if not self._failures:
            return
        name, error = self._failures[0]
        if isinstance(error, BagpipeError):
            raise error
        raise PipelineError(f"the {name} thread failed: {type(error).__name__}: {error}") from error


_running: weakref.WeakSet[threading.Thread] = weakref.WeakSet()


def _join_at_exit() -> None:
    """A thread that the interpreter ends in the middle of a call of native code would abort the process."""
    until = time.monotonic() + EXIT_S
    for thread in list(_running):
        thread.join(max(0.0, until - time.monotonic()))


# At exit the finalisers that were made last run first: loops that nobody closed are abandoned by then.
weakref.finalize(Threads, _join_at_exit)
