"""Reads wait for every trainer, few of them and not for ever."""

from __future__ import annotations

import itertools

from bagpipe.server.watermark import Parked, Watermark
from bagpipe.wire.messages import Waiting


def parked(after: int, until: float = 1e9) -> Parked:
    return Parked(after, until, lambda: None, lambda _: None)


def test_a_read_goes_on_exactly_when_the_last_trainer_has_passed() -> None:
    for steps in itertools.product([(0, 0), (0, 2), (1, 0), (1, 1), (1, 2)], repeat=4):
        watermark = Watermark(2, parked_max=10)
        reads = [parked(after) for after in (0, 1, 2)]
        assert [watermark.admit(read) for read in reads] == [False] * 3
        passed, gone = [-1, -1], []
        for trainer, iteration in steps:
            passed[trainer] = max(passed[trainer], iteration)
            gone += watermark.advance(trainer, iteration)
            assert watermark.reached == min(passed)
            assert [read.after for read in gone] == list(range(min(passed) + 1))
            assert watermark.num_parked == 3 - len(gone)
            assert watermark.admit(parked(min(passed))) is True


def test_a_read_before_everything_never_waits() -> None:
    assert Watermark(3, 1).admit(parked(-1)) is True


def test_passing_an_earlier_iteration_takes_nothing_back() -> None:
    watermark = Watermark(1, 1)
    watermark.advance(0, 5)
    watermark.advance(0, -1)
    assert watermark.reached == 5


def test_one_read_too_many_is_told_whom_it_waits_for() -> None:
    watermark = Watermark(3, parked_max=2)
    watermark.advance(1, 9)
    watermark.advance(2, 3)
    assert watermark.admit(parked(4)) is False
    assert watermark.admit(parked(4)) is False
    assert watermark.admit(parked(4)) == Waiting([0, 2], [-1, 3])
    assert watermark.num_parked == 2


def test_reads_that_have_waited_long_are_sent_away() -> None:
    watermark = Watermark(2, parked_max=5)
    early, late = parked(1, until=10.0), parked(1, until=20.0)
    watermark.admit(early)
    watermark.admit(late)
    assert watermark.expire(9.9) == []
    assert watermark.expire(10.0) == [(early, Waiting([0, 1], [-1, -1]))]
    assert watermark.advance(0, 1) == []
    assert watermark.advance(1, 1) == [late]


def test_trainers_that_stay_keep_what_they_have_passed() -> None:
    watermark = Watermark(2, parked_max=5)
    watermark.advance(0, 7)
    watermark.advance(1, 4)
    read = parked(6)
    watermark.admit(read)
    assert watermark.keep_for(1) == [read]
    assert watermark.reached == 7
    assert watermark.advance(1, 9) == []  # it is gone
    assert watermark.keep_for(2) == []
    assert watermark.reached == -1
