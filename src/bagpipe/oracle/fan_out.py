"""One generator of lists, an item for each rank, as one generator for each rank.

Whoever asks first advances the source; the others find their items in a queue. So N trainers of one process share one
oracle, each reads its parts at its own pace, and how far they may drift apart has a limit (I5).
"""

from __future__ import annotations

from collections import deque
from collections.abc import Generator, Sequence
from threading import Lock
from types import TracebackType
from typing import Any, Generic, TypeVar

from bagpipe.errors import ConfigError, PipelineError

T = TypeVar("T")

AHEAD_MAX = 64
"""A pipeline plans at most two depths and a few ahead of training, and trainers are an iteration apart: about 20."""


def fan_out(
    items: Generator[Sequence[T], None, None],
    ranks: int,
    *,
    ahead_max: int = AHEAD_MAX,
) -> list[Generator[T, None, None]]:
    """One generator for each rank, of its items.

    What the source raises reaches every rank, after the items before it. A rank that asks for an item more than
    `ahead_max` before the slowest one gets an error: to wait here would hold up a scheduler that runs one trainer at a
    time, and trainers that exchange gradients never drift that far apart. The source is closed with the last rank's
    generator.
    """
    if ranks < 1 or ahead_max < 1:
        raise ConfigError(f"can't fan out to {ranks} ranks, at most {ahead_max} items apart: give at least 1 of each")
    shared = _Shared(items, ranks, ahead_max)
    return [_OfRank(shared, rank) for rank in range(ranks)]


class _Shared(Generic[T]):
    """The source, and what each rank has not asked for yet."""

    def __init__(self, items: Generator[Sequence[T], None, None], ranks: int, ahead_max: int) -> None:
        self._items, self._ahead_max = items, ahead_max
        self._queues: dict[int, deque[T]] = {rank: deque() for rank in range(ranks)}
        """Of the ranks that are not closed."""
        self._num_ranks = ranks
        # Held while the source makes an item, which is no point where a scheduler changes trainers.
        self._advancing = Lock()
        self._unwanted = False
        self._ended = False
        self._error: BaseException | None = None
        self._trace: TracebackType | None = None

    def take(self, rank: int) -> T:
        """The rank's next item; StopIteration or what the source raised when there is none."""
        queue = self._queues[rank]
        while True:
            if queue:
                return queue.popleft()
            with self._advancing:
                if not queue and not self._over(rank):
                    self._check_ahead(rank)
                    self._advance()
            self._close_unwanted()
            if not queue and self._over(rank):
                raise StopIteration if self._error is None else self._error.with_traceback(self._trace)

    def close(self, rank: int) -> None:
        """The rank wants no more items."""
        if self._queues.pop(rank, None) is not None and not self._queues:
            self._unwanted = True
        self._close_unwanted()

    def _over(self, rank: int) -> bool:
        return self._ended or self._unwanted or rank not in self._queues

    def _advance(self) -> None:
        try:
            items = next(self._items, None)
            if items is not None and len(items) != self._num_ranks:
                raise PipelineError(
                    f"the source gave {len(items)} items for {self._num_ranks} ranks: give one for each"
                )
        except BaseException as error:
            self._error, self._trace, self._ended = error, error.__traceback__, True
            self._items.close()
            return
        if items is None:
            self._ended = True
            return
        for rank, queue in list(self._queues.items()):
            queue.append(items[rank])

    def _check_ahead(self, rank: int) -> None:
        """The rank that asks has an empty queue, so the longest queue is how far it is ahead."""
        waiting = {other: len(queue) for other, queue in list(self._queues.items())}
        slowest = max(waiting, key=waiting.__getitem__)
        if waiting[slowest] >= self._ahead_max:
            raise PipelineError(
                f"trainer {rank} asks for its plan {waiting[slowest] + 1} before trainer {slowest} has taken the first "
                f"of them, and {self._ahead_max} are kept: is trainer {slowest} stuck, or ahead_max too small?"
            )

    def _close_unwanted(self) -> None:
        """Close the source unless someone advances it, who then comes here after: nobody who closes waits."""
        if self._unwanted and self._advancing.acquire(blocking=False):
            try:
                if not self._ended:
                    self._ended = True
                    self._items.close()
            finally:
                self._advancing.release()


class _OfRank(Generator[T, None, None]):
    """A generator that can also be closed before it was begun, which a function with `finally` would not notice."""

    def __init__(self, shared: _Shared[T], rank: int) -> None:
        self._shared, self._rank = shared, rank
        self._finished = False

    def send(self, _: None, /) -> T:
        """The next item."""
        if self._finished:
            raise StopIteration
        try:
            return self._shared.take(self._rank)
        except BaseException:
            self.close()
            raise

    def throw(self, kind: Any, value: Any = None, trace: TracebackType | None = None, /) -> T:
        """End it with an exception, as a generator that does not catch it would."""
        self.close()
        error = kind if isinstance(kind, BaseException) else value if isinstance(value, BaseException) else kind()
        raise error.with_traceback(trace)

    def close(self) -> None:
        """Ask for no more."""
        self._finished = True
        self._shared.close(self._rank)
