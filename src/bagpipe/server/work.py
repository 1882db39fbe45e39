"""What takes longer than an answer may: done by a thread of its own, while whoever asked for it asks how far it is."""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable

from bagpipe.errors import BagpipeError, DeadlineError, StoreError
from bagpipe.wire.messages import Failed

Background = Callable[[Callable[[], None]], None]
"""Has something done, now or later."""

STOP_S = 60.0
_log = logging.getLogger(__name__)


def in_a_thread(work: Callable[[], None]) -> None:
    """Done beside everything else."""
    threading.Thread(target=work, name="bagpipe-work", daemon=True).start()


class Stopped(BagpipeError):
    """It was told to stop."""


class Work:
    """Something that is done once; `run` by one thread, the rest by any."""

    def __init__(self, what: str, do: Callable[[Work], bytes], give_up: Callable[[], None] = lambda: None) -> None:
        """`do` is given this, to report progress to; `give_up` is called if it never came to be done."""
        self.what = what
        self.progress = 0
        """Grows as long as something happens."""
        self.result: bytes | None = None
        self.failed: Failed | None = None
        self._do, self._give_up = do, give_up
        self._stopping = threading.Event()
        self._over = threading.Event()
        self._begun = threading.Lock()

    @property
    def is_over(self) -> bool:
        """Whether it has succeeded or failed."""
        return self._over.is_set()

    def report(self, progress: int) -> None:
        """So far; raises if it is not wanted any more."""
        self.progress = max(self.progress + 1, progress)
        if self._stopping.is_set():
            raise Stopped(f"{self.what} was stopped, because rows return to an earlier mark")

    def run(self) -> None:
        """Do it. What goes wrong is told to whoever asks; a second call does nothing."""
        if not self._begun.acquire(blocking=False):
            return
        self.failed = Failed(StoreError.__name__, f"{self.what} failed inside the server: its log says how")
        try:
            try:
                self.report(0)
            except Stopped:  # by somebody who saw that it had begun
                self._give_up()
                raise
            self.result, self.failed = self._do(self), None
        except Stopped as error:
            self.failed = Failed(StoreError.__name__, str(error))
        except BagpipeError as error:
            _log.warning("%s failed: %s", self.what, error)
            self.failed = Failed.of(error)
        except MemoryError:
            self.failed = Failed(StoreError.__name__, f"{self.what} failed: there is no memory for it")
        except Exception:
            _log.exception("%s failed", self.what)
        finally:
            self._over.set()

    def stop(self) -> None:
        """Have it end soon, and return when it has."""
        self._stopping.set()
        if self._begun.acquire(blocking=False):  # nobody will run it any more
            self._give_up()
            self.failed = Failed(StoreError.__name__, f"{self.what} was never begun")
            self._over.set()
        elif not self._over.wait(STOP_S):
            raise DeadlineError(f"{self.what} did not stop within {STOP_S:g} s: see whether the disk answers")
