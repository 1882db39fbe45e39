"""Learning rates that change with the iteration: small frozen callables from the 0-based iteration to a number.

Any callable will do in their place. Everything is computed in float64; optimizers round once, to float32.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import MISSING, dataclass, fields
from typing import Any

import numpy as np

from bagpipe.errors import ConfigError

Schedule = Callable[[int], float]

FLOAT32_MAX = float(np.finfo(np.float32).max)


def check_number(
    owner: str, name: str, value: object, low: float = 0.0, high: float = FLOAT32_MAX, *, above: bool = False
) -> float:
    """The value as a float if it is a number in [low, high] (in (low, high] with `above`), else ConfigError."""
    if isinstance(value, (int, float, np.integer, np.floating)) and not isinstance(value, bool):
        number = float(value)
        if low <= number <= high and not (above and number == low):
            return number
    bounds = f"a number {'above' if above else 'of at least'} {low:g}"
    bounds += "" if high == FLOAT32_MAX else f" and at most {high:g}"
    raise ConfigError(f"{owner}: {name} is {value!r}: give {bounds}")


def check_count(owner: str, name: str, value: object) -> int:
    """The value as an int if it is a whole number of at least 1, else ConfigError."""
    if isinstance(value, (int, np.integer)) and not isinstance(value, bool) and value >= 1:
        return int(value)
    raise ConfigError(f"{owner}: {name} is {value!r}: give a whole number of at least 1")


_COUNTS = ("every", "iterations")
_BOUNDS: dict[str, dict[str, Any]] = {"factor": {"high": 1.0}, "power": {"above": True}}
"""Of settings that are no counts; 0 and more where nothing is said."""


class _Schedule:
    __slots__ = ()

    def __post_init__(self) -> None:
        for field in fields(self):  # type: ignore[arg-type]
            owner, name, value = type(self).__name__, field.name, getattr(self, field.name)
            if name in _COUNTS:
                check_count(owner, name, value)
            elif not (name == "then" and callable(value)):
                check_number(owner, name, value, **_BOUNDS.get(name, {}))

    def __call__(self, iteration: int) -> float:
        """The learning rate of this iteration."""
        return float(self._at(iteration))

    def _at(self, iteration: int) -> float:
        raise NotImplementedError


@dataclass(frozen=True, slots=True)
class Constant(_Schedule):
    """The same learning rate at all iterations."""

    lr: float

    def _at(self, iteration: int) -> float:  # noqa: ARG002
        return self.lr


@dataclass(frozen=True, slots=True)
class Warmup(_Schedule):
    """Rises in a line from `start` to the first value of `then`, over so many iterations; `then` follows from its 0."""

    then: float | Schedule
    iterations: int
    start: float = 0.0

    def _at(self, iteration: int) -> float:
        after = max(0, iteration - self.iterations)
        then = float(self.then(after)) if callable(self.then) else float(self.then)
        if iteration >= self.iterations:
            return then
        return self.start + (then - self.start) * (iteration / self.iterations)


@dataclass(frozen=True, slots=True)
class StepDecay(_Schedule):
    """Multiplied by `factor` after every so many iterations."""

    lr: float
    every: int
    factor: float = 0.1

    def _at(self, iteration: int) -> float:
        return float(self.lr * self.factor ** (iteration // self.every))


@dataclass(frozen=True, slots=True)
class ExponentialDecay(_Schedule):
    """Multiplied by `factor` after every iteration."""

    lr: float
    factor: float

    def _at(self, iteration: int) -> float:
        return float(self.lr * self.factor**iteration)


@dataclass(frozen=True, slots=True)
class Cosine(_Schedule):
    """Falls from `lr` to `end` along half a cosine, over so many iterations, and stays there."""

    lr: float
    iterations: int
    end: float = 0.0

    def _at(self, iteration: int) -> float:
        share = min(iteration / self.iterations, 1.0)
        return self.end + (self.lr - self.end) * 0.5 * (1.0 + math.cos(math.pi * share))


@dataclass(frozen=True, slots=True)
class Polynomial(_Schedule):
    """Falls from `lr` to `end` as a power of the iterations left, over so many iterations, and stays there."""

    lr: float
    iterations: int
    power: float = 1.0
    end: float = 0.0

    def _at(self, iteration: int) -> float:
        left = 1.0 - min(iteration / self.iterations, 1.0)
        return float(self.end + (self.lr - self.end) * left**self.power)


NAMES: dict[str, type[Any]] = {
    "constant": Constant,
    "warmup": Warmup,
    "step": StepDecay,
    "exponential": ExponentialDecay,
    "cosine": Cosine,
    "polynomial": Polynomial,
}
"""The names that configuration files use."""


def build(name: str, **settings: Any) -> Schedule:
    """The schedule of this name; `warmup`'s `then` may itself be a mapping with a name."""
    if name not in NAMES:
        raise ConfigError(f"there is no learning rate schedule {name!r}: choose one of {', '.join(NAMES)}")
    known = {field.name: field.default for field in fields(NAMES[name])}
    check_settings(f"schedule {name!r}", settings, list(known))
    missing = [key for key, default in known.items() if default is MISSING and key not in settings]
    if "then" in settings:
        settings["then"] = from_config(settings["then"])
    if missing:
        raise ConfigError(f"schedule {name!r} needs {' and '.join(missing)}: give a value for each")
    schedule: Schedule = NAMES[name](**settings)
    return schedule


def from_config(lr: Any) -> Any:
    """A learning rate as configuration writes it: a number, or a mapping of a schedule's name and settings."""
    if not isinstance(lr, Mapping):
        return lr
    if "name" not in lr:
        raise ConfigError(f"lr is {dict(lr)!r}, without a name: choose one of {', '.join(NAMES)}")
    return build(**lr)


def check_settings(owner: str, settings: dict[str, Any], known: list[str]) -> None:
    """ConfigError for a setting that the owner does not have."""
    for name, value in settings.items():
        if name not in known:
            raise ConfigError(f"{owner} has no setting {name!r} (given as {value!r}): it has {', '.join(known)}")


def describe(lr: float | Schedule) -> Any:
    """A learning rate as plain data, for run summaries."""
    if not callable(lr):
        return lr
    for name, kind in NAMES.items():
        if isinstance(lr, kind):
            return {"name": name} | {field.name: describe(getattr(lr, field.name)) for field in fields(kind)}
    return getattr(lr, "__qualname__", type(lr).__qualname__)
