"""Work on several threads, results in order: bounded ahead, nothing left behind when the consumer stops (I5)."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Generator, Iterable
from concurrent.futures import Future, ThreadPoolExecutor
from typing import TypeVar

from bagpipe.errors import BagpipeError, PipelineError

Item = TypeVar("Item")
Result = TypeVar("Result")


def ordered_map(
    work: Callable[[Item], Result], items: Iterable[Item], workers: int, what: str
) -> Generator[Result, None, None]:
    """Yield work(item) for each item, in order, made by `workers` threads up to two items each ahead of the consumer.

    An error of the work is raised where its result would have been: one of Bagpipe's own as it is, another as a
    PipelineError that has it as its cause.
    """
    pool = ThreadPoolExecutor(workers, thread_name_prefix=f"bagpipe-{what}")
    ahead: deque[Future[Result]] = deque()
    try:
        for item in items:
            ahead.append(pool.submit(work, item))
            if len(ahead) == 2 * workers:
                yield _result(ahead, what)
        while ahead:
            yield _result(ahead, what)
    finally:
        pool.shutdown(wait=True, cancel_futures=True)


def _result(ahead: deque[Future[Result]], what: str) -> Result:
    try:
        return ahead.popleft().result()
    except BagpipeError:
        raise
    except Exception as error:
        raise PipelineError(f"a {what} thread failed: {type(error).__name__}: {error}") from error
