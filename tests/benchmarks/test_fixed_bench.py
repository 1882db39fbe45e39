"""The fixed cost of an iteration, in small: every case is timed and counted, beside another checkout too."""

from __future__ import annotations

import pathlib
import threading

import pytest

from bagpipe.errors import ConfigError
from bagpipe.results import Clock
from bagpipe.waits import Waits
from benchmarks import fixed
from benchmarks.fixed import THREADS, Case, Meter, Phases

HERE = pathlib.Path(fixed.__file__).parents[1]


class Batch:
    def __len__(self):
        return 1


def test_what_happens_is_counted_by_iteration_once_the_timing_is_over(monkeypatch, tmp_path):
    for kind, name in ((Clock, "tick"), (threading.Condition, "wait"), (Waits, "_sleep")):
        monkeypatch.setattr(kind, name, getattr(kind, name))  # what the meter puts there goes again
    found, clock = [], Clock()
    Meter(Phases(1, 2, 4), 1, found.append, tmp_path).install()
    before = Waits._sleep

    def sleep():
        waits, woken = Waits(), []
        timer = threading.Timer(0.01, lambda: (woken.append(True), waits.changed()))
        timer.start()
        waits.until("the timer", lambda: bool(woken), 60)
        timer.join()

    for iteration in range(1, 8):
        sleep()
        assert (Waits._sleep is before) == (iteration <= 3)
        clock.tick(Batch(), lambda *_: None)
    assert len(found) == 1
    assert found[0]["wake_ups"] >= 1
    assert found[0]["collectives"] == 0
    assert found[0]["wall_ms"] > 0


def test_a_directory_that_is_no_checkout_is_refused(tmp_path):
    with pytest.raises(ConfigError, match="there is no src/bagpipe"):
        fixed.run(True, tmp_path)


@pytest.mark.long
def test_two_trainers_are_measured_beside_another_checkout(monkeypatch):
    monkeypatch.setattr(fixed, "CASES", (Case(2, THREADS),))
    (row,) = fixed.run(True, HERE)
    for side in ("", "_against"):  # a trainer may be an iteration ahead where the counting begins and ends
        assert 5 <= row[f"collectives{side}"] <= 9
        assert row[f"messages{side}"] == row[f"collectives{side}"]
    assert row["wake_ups"] > 0
    assert row["wall_ms_ratio_to_against"] > 0


@pytest.mark.long
def test_trainers_of_a_launch_are_measured(monkeypatch):
    pytest.importorskip("ray")
    monkeypatch.setattr(fixed, "CASES", (Case(2, fixed.PROCESSES),))
    (row,) = fixed.run(True)
    assert row["collectives"] >= 5
    assert row["wake_ups"] > 0
    assert row["processor_ms_a_trainer"] > 0
