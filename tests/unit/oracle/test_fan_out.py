"""Each rank gets its items in order, whoever advances the source, and the source ends as it should."""

from __future__ import annotations

import random
import threading

import pytest

from bagpipe.errors import ConfigError, PipelineError
from bagpipe.oracle.fan_out import fan_out


class Source:
    """Items (iteration, rank) that note how far they were made, and whether they were closed."""

    def __init__(self, ranks, count=10**6, error=None):
        self.made, self.closed = 0, 0
        self.items = self._items(ranks, count, error)

    def _items(self, ranks, count, error):
        try:
            for number in range(count):
                self.made += 1
                yield [(number, rank) for rank in range(ranks)]
            if error is not None:
                raise error
        finally:
            self.closed += 1


def test_every_rank_gets_its_items_in_order_whatever_the_order_of_asking():
    for seed in range(50):
        draw = random.Random(seed)
        source = Source(3, 8)
        parts = fan_out(source.items, 3)
        found = [[] for _ in parts]
        while any(len(some) < 8 for some in found):
            rank = draw.choice([rank for rank, some in enumerate(found) if len(some) < 8])
            found[rank].append(next(parts[rank]))
            assert source.made == max(map(len, found)), "made when the first one asks, not before"
        assert found == [[(number, rank) for number in range(8)] for rank in range(3)]
        assert [next(part, None) for part in parts] == [None] * 3


def test_an_error_of_the_source_reaches_every_rank_after_the_items_before_it():
    error = KeyError("torn")
    fast, slow = fan_out(Source(2, 2, error).items, 2)
    for part in (fast, slow):
        assert [item[0] for _, item in zip(range(2), part, strict=False)] == [0, 1]
        with pytest.raises(KeyError, match="torn") as caught:
            next(part)
        assert caught.value is error
        assert next(part, "over") == "over"


def test_the_trace_of_an_error_does_not_grow_from_rank_to_rank():
    lengths = []
    for part in fan_out(Source(4, 0, ValueError("x")).items, 4):
        with pytest.raises(ValueError, match="x") as caught:
            next(part)
        lengths.append(len(caught.traceback))
    assert len(set(lengths)) == 1


def test_items_for_another_number_of_ranks_are_refused():
    source = Source(3)
    for part in fan_out(source.items, 2):
        with pytest.raises(PipelineError, match="gave 3 items for 2 ranks"):
            next(part)
    assert source.closed == 1


def test_the_source_is_closed_with_the_last_rank_also_if_some_never_began():
    source = Source(3)
    parts = fan_out(source.items, 3)
    next(parts[0])
    parts[1].close()
    parts[0].close()
    assert source.closed == 0
    assert next(parts[2]) == (0, 2)
    assert next(parts[2]) == (1, 2), "those that are closed hold nobody up and keep nothing"
    parts[2].close()
    parts[2].close()
    assert source.closed == 1
    assert [next(part, None) for part in parts] == [None] * 3


def test_a_source_that_never_began_is_closed_too():
    source = Source(2)
    parts = fan_out(source.items, 2)
    for part in parts:
        part.close()
    assert next(source.items, None) is None
    assert source.made == 0


@pytest.mark.parametrize("ahead_max", [1, 3])
def test_a_rank_too_far_ahead_of_the_slowest_gets_an_error_that_names_both(ahead_max):
    source = Source(3)
    parts = fan_out(source.items, 3, ahead_max=ahead_max)
    next(parts[1])
    for _ in range(ahead_max):
        next(parts[0])
    with pytest.raises(PipelineError, match=rf"trainer 0 .* trainer 2 .* {ahead_max} are kept"):
        next(parts[0])
    assert source.made == ahead_max
    assert [next(parts[2]) for _ in range(ahead_max)] == [(number, 2) for number in range(ahead_max)]
    assert next(parts[2]) == (ahead_max, 2), "the others go on"


def test_throwing_into_a_rank_closes_it():
    source = Source(1)
    (part,) = fan_out(source.items, 1)
    next(part)
    with pytest.raises(ZeroDivisionError):
        part.throw(ZeroDivisionError("stop"))
    assert source.closed == 1


@pytest.mark.parametrize(("ranks", "ahead_max"), [(0, 1), (1, 0)])
def test_nonsense_is_refused(ranks, ahead_max):
    with pytest.raises(ConfigError, match="at least 1"):
        fan_out(Source(1).items, ranks, ahead_max=ahead_max)


def test_threads_share_a_source():
    source = Source(4, 3000)
    found = {}

    def read(rank, part):
        found[rank] = list(part)

    threads = [threading.Thread(target=read, args=item) for item in enumerate(fan_out(source.items, 4, ahead_max=3001))]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
    assert found == {rank: [(number, rank) for number in range(3000)] for rank in range(4)}


def test_who_closes_does_not_wait_for_a_source_that_is_busy_and_it_is_closed_after():
    busy, go_on, closed = threading.Event(), threading.Event(), threading.Event()

    def slow_source():
        try:
            busy.set()
            go_on.wait(60)
            yield ["a", "b"]
        finally:
            closed.set()

    first, second = fan_out(slow_source(), 2)
    found = []
    thread = threading.Thread(target=lambda: found.append(next(first, None)))
    thread.start()
    assert busy.wait(60)
    second.close()
    first.close()
    assert not closed.is_set()
    go_on.set()
    thread.join(60)
    assert closed.is_set()
    assert len(found) == 1
