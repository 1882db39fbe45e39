"""How the background stages of a pipeline run: each in a thread.

A stage is a generator that yields what it waits for, so tests can also run it step by step, under a seeded schedule.
The training loop's waits have deadlines and say what they waited for (I7).
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Generator, Mapping
from typing import NamedTuple, Protocol

from bagpipe.errors import BagpipeError, DeadlineError, PipelineError

DEADLINE_S = 600.0
LOADER_S = 30.0
"""How long the end of training waits for a loader that is in the middle of a batch."""


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
        self._changed = threading.Condition()
        self._waiting: dict[str, str] = {}
        self._threads: list[threading.Thread] = []
        self._failure: tuple[str, BaseException] | None = None

    def start(self, stages: Mapping[str, Stage]) -> None:
        """Begin to run the stages."""
        for name, stage in stages.items():
            thread = threading.Thread(target=self._run, args=(name, stage), name=f"bagpipe-{name}", daemon=True)
            self._threads.append(thread)
            thread.start()

    def wait(self, wait: Wait) -> None:
        """Return when `wait` is ready."""
        if not wait.ready():
            self._wait_until(wait, time.monotonic() + self.deadline_s)
        self._raise()

    def notify(self) -> None:
        """Let the stages look again at what they wait for."""
        with self._changed:
            self._changed.notify_all()

    def abort(self, error: BaseException) -> None:
        """End the stages and let the training loop's waits raise: another trainer has failed with this error."""
        ended = PipelineError(f"another trainer failed: {type(error).__name__}: {error}")
        ended.__cause__ = error
        with self._changed:
            self._failure = self._failure or ("other", ended)
            self._changed.notify_all()

    def join(self) -> None:
        """Wait until every stage has ended; the first one may be held up by a loader, which gets less time."""
        begin = time.monotonic()
        for thread in reversed(self._threads):
            limit_s = LOADER_S if thread is self._threads[0] else self.deadline_s
            thread.join(max(0.0, begin + limit_s - time.monotonic()))
            if thread.is_alive():
                raise DeadlineError(
                    f"{thread.name} did not end within {limit_s:.0f} s; stages: {self._waiting}: does the loader block?"
                )
        self._raise()

    def _run(self, name: str, stage: Stage) -> None:
        try:
            for wait in stage:
                with self._changed:
                    self._waiting[name] = wait.what
                    self._changed.notify_all()
                    while not wait.ready() and self._failure is None:
                        self._changed.wait()
                    self._waiting[name] = "running"
                    if self._failure is not None:
                        return
        except BaseException as error:
            with self._changed:
                self._failure = self._failure or (name, error)
        finally:
            with self._changed:
                self._waiting.pop(name, None)
                self._changed.notify_all()

    def _wait_until(self, wait: Wait, until: float) -> None:
        with self._changed:
            while not wait.ready() and self._failure is None:
                if not self._changed.wait(until - time.monotonic()) and not wait.ready():
                    stages = ", ".join(f"{name}: {what}" for name, what in self._waiting.items())
                    raise DeadlineError(
                        f"waited {self.deadline_s:.0f} s for {wait.what}; the stages wait for: {stages or 'nothing'}"
                    )

    def _raise(self) -> None:
        if self._failure is None:
            return
        name, error = self._failure
        if isinstance(error, BagpipeError):
            raise error
        raise PipelineError(f"the {name} thread failed: {type(error).__name__}: {error}") from error
