"""The threads that share the tasks of one call."""

from __future__ import annotations

import threading
from collections.abc import Callable

import pytest

from bagpipe.errors import ConfigError, DeadlineError
from bagpipe.kernels import parallel
from bagpipe.kernels.parallel import Workers


@pytest.fixture(params=[1, 2, 4])
def workers(request: pytest.FixtureRequest):  # type: ignore[no-untyped-def]
    made = Workers(request.param)
    yield made
    made.close()


def run_numbered(workers: Workers, count: int) -> list[int]:
    done: list[int] = []
    workers.run([lambda i=i: done.append(i) for i in range(count)])  # type: ignore[misc]
    return done


def test_every_task_runs_once(workers: Workers) -> None:
    for count in (0, 1, 2, 3, 50):
        assert sorted(run_numbered(workers, count)) == list(range(count))


def test_two_tasks_run_at_the_same_time() -> None:
    workers = Workers(2)
    try:
        for _ in range(20):
            meeting = threading.Barrier(2, timeout=30)
            workers.run([lambda meeting=meeting: meeting.wait() and None] * 2)  # type: ignore[misc]
    finally:
        workers.close()


def test_the_first_task_that_fails_is_the_one_raised_and_no_further_one_begins() -> None:
    workers = Workers(2)
    meeting, begun = threading.Barrier(2, timeout=30), []

    def fail(text: str) -> Callable[[], None]:
        def task() -> None:
            meeting.wait()
            raise ValueError(text)

        return task

    try:
        with pytest.raises(ValueError, match="one"):
            workers.run([fail("one"), fail("two"), lambda: begun.append(3)])
        assert begun == []
        workers.run([lambda: begun.append(4)])
        assert begun == [4], "the threads go on after a failure"
    finally:
        workers.close()


def test_calls_from_several_threads_do_not_disturb_each_other(workers: Workers) -> None:
    totals = [0] * 4

    def call(caller: int) -> None:
        for _ in range(50):
            totals[caller] += sorted(run_numbered(workers, 7)) == list(range(7))

    callers = [threading.Thread(target=call, args=(number,)) for number in range(4)]
    for caller in callers:
        caller.start()
    for caller in callers:
        caller.join(60)
    assert totals == [50] * 4


def test_a_closed_pool_leaves_all_work_to_its_caller() -> None:
    workers = Workers(3)
    workers.close()
    threads: set[str] = set()
    workers.run([lambda: threads.add(threading.current_thread().name)] * 5)
    assert threads == {threading.current_thread().name}


def test_waiting_for_a_task_has_a_deadline(monkeypatch: pytest.MonkeyPatch) -> None:
    workers, release, begun = Workers(2), threading.Event(), threading.Event()
    monkeypatch.setattr(parallel, "WAIT_SECONDS_MAX", 0.05)
    caller = threading.current_thread()

    def task() -> None:
        if threading.current_thread() is caller:
            begun.wait(30)
        else:
            begun.set()
            release.wait(30)

    try:
        with pytest.raises(DeadlineError, match=r"1 of 2 kernel tasks still run after 0\.05 s"):
            workers.run([task, task])
    finally:
        release.set()
        workers.close()


def test_no_thread_at_all_is_refused() -> None:
    with pytest.raises(ConfigError, match="threads is 0"):
        Workers(0)
