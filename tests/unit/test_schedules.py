"""Learning rate schedules."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch

from bagpipe import schedules
from bagpipe.errors import ConfigError
from bagpipe.schedules import Constant, Cosine, ExponentialDecay, Polynomial, Schedule, StepDecay, Warmup


def rates(schedule: Schedule, iterations: int) -> list[float]:
    return [schedule(iteration) for iteration in range(iterations)]


def torch_rates(make: Any, iterations: int) -> list[float]:
    optimizer = torch.optim.SGD([torch.nn.Parameter(torch.zeros(1))], lr=0.5)
    scheduler, seen = make(optimizer), []
    for _ in range(iterations):
        seen.append(optimizer.param_groups[0]["lr"])
        optimizer.step()
        scheduler.step()
    return seen


@pytest.mark.parametrize(
    ("ours", "theirs"),
    [
        (StepDecay(0.5, 3, 0.1), lambda o: torch.optim.lr_scheduler.StepLR(o, 3, 0.1)),
        (ExponentialDecay(0.5, 0.9), lambda o: torch.optim.lr_scheduler.ExponentialLR(o, 0.9)),
        (Polynomial(0.5, 7, power=2.0), lambda o: torch.optim.lr_scheduler.PolynomialLR(o, 7, 2.0)),
        (Constant(0.5), lambda o: torch.optim.lr_scheduler.ConstantLR(o, 1.0)),
    ],
)
def test_schedules_are_those_of_torch(ours: Schedule, theirs: Any) -> None:
    assert rates(ours, 12) == pytest.approx(torch_rates(theirs, 12))


def test_cosine_falls_by_half_a_wave_and_stays_at_its_end() -> None:
    schedule = Cosine(0.5, 10, end=0.1)
    theirs = torch_rates(lambda o: torch.optim.lr_scheduler.CosineAnnealingLR(o, 10, 0.1), 11)
    assert rates(schedule, 11) == pytest.approx(theirs)
    assert schedule(10) == schedule(10**9) == pytest.approx(0.1)


def test_warm_up_rises_to_the_first_value_of_what_follows() -> None:
    schedule = Warmup(StepDecay(0.8, 2, 0.5), iterations=4, start=0.4)
    assert rates(schedule, 8) == pytest.approx([0.4, 0.5, 0.6, 0.7, 0.8, 0.8, 0.4, 0.4])
    assert rates(Warmup(1.0, 2), 4) == [0.0, 0.5, 1.0, 1.0]


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: Constant(-1), r"Constant: lr is -1: give a number of at least 0"),
        (lambda: Warmup(1.0, 0), r"Warmup: iterations is 0: give a whole number of at least 1"),
        (lambda: Warmup("1", 5), r"Warmup: then is '1'"),
        (lambda: StepDecay(1.0, 2.5), r"StepDecay: every is 2\.5: give a whole number"),  # type: ignore[arg-type]
        (lambda: ExponentialDecay(1.0, 1.1), r"ExponentialDecay: factor is 1\.1: .* at most 1"),
        (lambda: Cosine(1.0, True), r"Cosine: iterations is True"),
        (lambda: Polynomial(1.0, 5, power=0), r"Polynomial: power is 0: give a number above 0"),
        (lambda: Polynomial(math.nan, 5), r"Polynomial: lr is nan"),
        (lambda: schedules.build("linear", lr=1.0), r"no learning rate schedule 'linear': choose one of constant"),
        (lambda: schedules.build("cosine", lr=1.0), r"schedule 'cosine' needs iterations"),
        (lambda: schedules.build("cosine", speed=1), r"schedule 'cosine' has no setting 'speed' \(given as 1\)"),
    ],
)
def test_a_setting_out_of_range_is_refused(make: Any, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        make()


def test_schedules_are_described_as_the_data_they_can_be_built_from() -> None:
    schedule = Warmup(Polynomial(1.0, 9), 3)
    described = schedules.describe(schedule)
    assert described == {
        "name": "warmup",
        "then": {"name": "polynomial", "lr": 1.0, "iterations": 9, "power": 1.0, "end": 0.0},
        "iterations": 3,
        "start": 0.0,
    }
    assert schedules.from_config(described) == schedule
    assert schedules.describe(0.5) == schedules.from_config(0.5) == 0.5
    assert schedules.describe(math.sqrt) == "sqrt"
