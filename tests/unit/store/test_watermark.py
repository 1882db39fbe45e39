"""Reads wait for every trainer, few of them and not for ever."""

from __future__ import annotations

import itertools

from bagpipe.store.watermark import Parked, Watermark


def parked(after: int, until: float = 1e9, told=None) -> Parked:
    return Parked(after, until, lambda: None, lambda behind: None if told is None else told.append(behind))


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
    told = []
    assert watermark.admit(parked(4, told=told)) is False
    assert (told, watermark.num_parked) == ([{0: -1, 2: 3}], 2)


def test_reads_that_have_waited_long_are_sent_away() -> None:
    watermark = Watermark(2, parked_max=5)
    told = []
    early, late = parked(1, until=10.0, told=told), parked(1, until=20.0, told=told)
    watermark.admit(early)
    watermark.admit(late)
    watermark.expire(9.9)
    assert (told, watermark.num_parked) == ([], 2)
    watermark.expire(10.0)
    assert (told, watermark.num_parked) == ([{0: -1, 1: -1}], 1)
    assert watermark.advance(0, 1) == []
    assert watermark.advance(1, 1) == [late]


def test_trainers_that_stay_keep_what_they_have_passed() -> None:
    watermark = Watermark(2, parked_max=5)
    watermark.advance(0, 7)
    watermark.advance(1, 4)
    told = []
    watermark.admit(parked(6, told=told))
    watermark.keep_for(1)
    assert (told, watermark.reached, watermark.num_parked) == ([{}], 7, 0)
    assert watermark.advance(1, 9) == []  # it is gone
    watermark.keep_for(2)
    assert watermark.reached == -1


def test_when_iterations_are_counted_anew_who_waits_is_to_ask_again() -> None:
    watermark, told = Watermark(2, parked_max=5), []
    watermark.advance(0, 7)
    watermark.admit(parked(6, told=told))
    watermark.begin_anew()
    assert (told, watermark.reached, watermark.num_parked) == ([{}], -1, 0)
