"""All trainers have passed what the last of them has passed, and who is behind is known by name."""

from __future__ import annotations

import itertools
import threading

import pytest

from bagpipe.store.watermark import Watermark
from bagpipe.waits import Waits


def test_all_have_passed_exactly_what_the_last_one_has() -> None:
    for steps in itertools.product([(0, 0), (0, 2), (1, 0), (1, 1), (1, 2)], repeat=4):
        watermark, passed = Watermark(2), [-1, -1]
        for trainer, iteration in steps:
            before = min(passed)
            passed[trainer] = max(passed[trainer], iteration)
            assert watermark.advance(trainer, iteration) == (min(passed) > before), "whether somebody can go on"
            assert watermark.reached == min(passed)


def test_before_everything_nobody_is_behind() -> None:
    assert Watermark(3).reached == -1
    assert Watermark(3).behind(-1) == ""
    assert Watermark().reached == -1


def test_passing_an_earlier_iteration_takes_nothing_back() -> None:
    watermark = Watermark(1)
    assert watermark.advance(0, 5)
    assert not watermark.advance(0, -1)
    assert watermark.reached == 5


def test_who_is_behind_is_named_with_how_far_it_is() -> None:
    watermark = Watermark(3)
    watermark.advance(1, 9)
    watermark.advance(2, 3)
    assert watermark.behind(4) == "0 (at none), 2 (at 3)"
    assert watermark.behind(3) == "0 (at none)"


def test_trainers_that_stay_keep_what_they_have_passed() -> None:
    watermark = Watermark(2)
    watermark.advance(0, 7)
    watermark.advance(1, 4)
    watermark.keep_for(1)
    assert watermark.reached == 7
    assert not watermark.advance(1, 9), "it is gone"
    assert watermark.reached == 7
    watermark.keep_for(2)
    assert (watermark.reached, watermark.behind(7)) == (-1, "1 (at none)")


def test_when_iterations_are_counted_anew_nobody_has_passed_any() -> None:
    watermark = Watermark(2)
    for trainer in range(2):
        watermark.advance(trainer, 7)
    watermark.begin_anew()
    assert (watermark.reached, watermark.behind(0)) == (-1, "0 (at none), 1 (at none)")


@pytest.mark.parametrize("trainers", [1, 4])
def test_trainers_that_pass_iterations_at_once_wake_whoever_waits_for_the_last_of_them(trainers) -> None:
    watermark, waits = Watermark(trainers), Waits()

    def train(trainer: int) -> None:
        for iteration in range(300):
            if watermark.advance(trainer, iteration):
                waits.changed()

    threads = [threading.Thread(target=train, args=(trainer,)) for trainer in range(trainers)]
    for thread in threads:
        thread.start()
    for after in range(300):
        waits.until(f"iteration {after}", lambda after=after: watermark.reached >= after, 60)
    for thread in threads:
        thread.join()
    assert watermark.reached == 299
