"""A few threads that share the tasks of one call; the caller is one of them.

Tasks are compiled code without the GIL, some tens of microseconds and more, so waking a thread must cost little and a
thread that is slow to wake must cost nothing: whoever is free takes the next task, and the call ends with the last
task, not with the last thread.
"""

from __future__ import annotations

import os
import queue
import threading
from collections.abc import Callable, Sequence

from bagpipe.errors import ConfigError, DeadlineError

Task = Callable[[], None]

WAIT_SECONDS_MAX = 600.0
"""How long a call waits for tasks that other threads have begun."""


CORES_A_THREAD = 4
SPARE_THREADS_MAX = 4


def spare_threads(most: int) -> int:
    """How many threads, `most` of use, work beside a trainer that has all cores: a quarter of these, or one."""
    return max(1, min(SPARE_THREADS_MAX, len(os.sched_getaffinity(0)) // CORES_A_THREAD, most))


class Workers:
    """Runs tasks on `num_threads` threads, the caller's included; may be called from several threads at once."""

    def __init__(self, num_threads: int, name: str = "bagpipe-kernels") -> None:
        if num_threads < 1:
            raise ConfigError(f"threads is {num_threads}: give at least 1")
        self.num_threads = num_threads
        self._calls: queue.SimpleQueue[_Call | None] = queue.SimpleQueue()
        self._threads = [
            threading.Thread(target=self._serve, name=f"{name}-{i}", daemon=True) for i in range(1, num_threads)
        ]
        for thread in self._threads:
            thread.start()

    def run(self, tasks: Sequence[Task]) -> None:
        """Run all tasks, in any order; give the longest first. Raises the error of the first task that failed.

        After a failure no further task is begun; those under way are waited for, so none outlives the call.
        """
        call = _Call(tasks)
        for _ in range(min(len(tasks) - 1, len(self._threads))):
            # Calls that their callers have finished alone may still lie here, so the queue needs a limit (I5).
            if self._calls.qsize() < 2 * len(self._threads):
                self._calls.put(call)
        call.work()
        call.wait()

    def close(self) -> None:
        """End the threads; a later `run` does everything in its caller."""
        threads, self._threads = self._threads, []
        for _ in threads:
            self._calls.put(None)
        for thread in threads:
            thread.join(WAIT_SECONDS_MAX)

    def _serve(self) -> None:
        while (call := self._calls.get()) is not None:
            call.work()
            del call  # or a sleeping thread would keep the last call's arrays alive


class _Call:
    def __init__(self, tasks: Sequence[Task]) -> None:
        self._tasks = list(tasks)
        self._lock = threading.Lock()
        self._next = 0
        self._running = 0
        self._errors: dict[int, BaseException] = {}
        self._done = threading.Event()

    def work(self) -> None:
        """Take tasks until there are none."""
        while (taken := self._take()) is not None:
            number, task = taken
            error: BaseException | None = None
            try:
                task()
            except BaseException as raised:
                error = raised
            self._finish(number, error)

    def wait(self) -> None:
        """Until no task is under way, then raise what went wrong."""
        if not self._done.wait(WAIT_SECONDS_MAX):
            raise DeadlineError(
                f"{self._running} of {len(self._tasks)} kernel tasks still run after {WAIT_SECONDS_MAX:g} s"
            )
        self._tasks.clear()
        if self._errors:
            raise self._errors[min(self._errors)]

    def _take(self) -> tuple[int, Task] | None:
        with self._lock:
            if self._errors or self._next >= len(self._tasks):
                if self._running == 0:
                    self._done.set()
                return None
            number = self._next
            self._next += 1
            self._running += 1
            return number, self._tasks[number]

    def _finish(self, number: int, error: BaseException | None) -> None:
        with self._lock:
            self._running -= 1
            if error is not None:
                self._errors[number] = error
