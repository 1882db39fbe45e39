"""One typed configuration a run, read from TOML and `--set a.b=c`.

All checking of settings happens here and nowhere else (I8): an unknown key, a bad value or two settings that contradict
each other end in a ConfigError that names the field, its value and what is allowed, before anything is opened.
"""

from __future__ import annotations

import re
import sys
from collections.abc import Iterable
from pathlib import Path
from typing import Annotated, Any, Literal

from pydantic import BaseModel, BeforeValidator, ConfigDict, Field, ValidationError, model_validator

from bagpipe.errors import ConfigError

if sys.version_info >= (3, 11):
    import tomllib
else:  # pragma: no cover
    import tomli as tomllib

DEFAULT_PRESET = "criteo-kaggle-like"
DEFAULT_SAMPLES = 400_000

Positive = Annotated[int, Field(ge=1)]
Fraction = Annotated[float, Field(gt=0, lt=1)]
Rate = Annotated[float, Field(gt=0, allow_inf_nan=False)]


class Section(BaseModel):
    """A group of settings: no unknown keys, no change after reading."""

    model_config = ConfigDict(extra="forbid", frozen=True, use_attribute_docstrings=True)


class ModelConfig(Section):
    """What is trained."""

    name: Literal["dlrm", "wide_deep", "deep_cross", "deepfm"] = "dlrm"
    """The architecture; docs/models.md describes each."""
    dim: Positive = 48
    """Length of an embedding vector."""


class ScheduleConfig(Section):
    """How a learning rate changes with the iteration; one that is left out stays constant."""

    name: Literal["constant", "warmup", "step", "exponential", "cosine", "polynomial"] = "constant"
    """The shape of the curve; docs/optimizers.md gives the formulas."""
    warmup_iterations: Annotated[int, Field(ge=0)] | None = None
    """Iterations in which the rate rises linearly to its full value."""
    iterations: Positive | None = None
    """Iterations over which the rate falls (cosine, polynomial), or between two steps (step)."""
    factor: Rate | None = None
    """What the rate is multiplied with at each step (step) or iteration (exponential)."""
    power: Rate | None = None
    """Exponent of the polynomial."""


class RowOptimizerConfig(Section):
    """The optimizer of the embedding rows. Hyperparameters that are left out have the optimizer's own default."""

    name: Literal["sgd", "momentum", "adagrad", "rowwise_adagrad", "adam", "adamw"] = "adagrad"
    """Its name."""
    lr: Rate = 0.05
    """Learning rate."""
    momentum: Fraction | None = None
    """momentum only: how much of the last step is kept."""
    eps: Rate | None = None
    """Adagrad and Adam: added to the root in the denominator."""
    initial_accumulator: Annotated[float, Field(ge=0, allow_inf_nan=False)] | None = None
    """Adagrad only: the sum of squares that a row begins with."""
    beta1: Fraction | None = None
    """Adam only: decay of the mean."""
    beta2: Fraction | None = None
    """Adam only: decay of the mean of squares."""
    weight_decay: Annotated[float, Field(ge=0, allow_inf_nan=False)] | None = None
    """adamw only: share of the weight that a touched row loses, times the learning rate."""
    schedule: ScheduleConfig = ScheduleConfig()
    """How the learning rate changes with the iteration."""


class DenseOptimizerConfig(Section):
    """The torch optimizer of all other parameters."""

    name: Literal["sgd", "momentum", "adagrad", "adam", "adamw"] = "adagrad"
    """Its name; momentum is SGD with momentum 0.9."""
    lr: Rate = 0.01
    """Learning rate."""


class DataConfig(Section):
    """What is trained on: shards on disk, or generated data that is never written."""

    path: Path | None = None
    """Directory of shards, as `bagpipe data generate` writes them."""
    preset: str | None = None
    """Generated data of this kind instead; `bagpipe data presets` lists them."""
    samples: Positive | None = None
    """How many samples to generate (presets only)."""
    shuffle: bool = False
    """Another order each epoch, fixed by `seed`; off: the order of the file."""
    held_out: Fraction = 0.1
    """Share of the samples, the last ones, that is kept for evaluation."""
    workers: Positive = 1
    """Threads that read batches; the order of batches does not depend on it."""

    @model_validator(mode="after")
    def _one_source(self) -> DataConfig:
        if self.path is not None and self.preset is not None:
            raise ValueError(f"path ({self.path}) and preset ({self.preset}) contradict each other: give one of them")
        if self.path is not None and self.samples is not None:
            raise ValueError("samples goes with preset; shards have the samples that they have: leave it out")
        return self


def _bytes_or_rows(value: object) -> object:
    """Rows as a number; bytes as "2GB" (decimal units) become a negative number so that both fit one integer."""
    if not isinstance(value, str) or value.strip().isdigit():
        return value
    match = re.fullmatch(r"\s*([0-9.]+)\s*([KMGT]?)B\s*", value, re.IGNORECASE)
    if not match:
        raise ValueError(f"{value!r} is neither a number of rows nor a size such as '2GB' or '500MB'")
    return -int(float(match[1]) * 1000 ** " KMGT".index(match[2].upper() or " "))


class Config(Section):
    """A training run."""

    model: ModelConfig = ModelConfig()
    row_optimizer: RowOptimizerConfig = RowOptimizerConfig()
    dense_optimizer: DenseOptimizerConfig = DenseOptimizerConfig()
    data: DataConfig = DataConfig()
    batch_size: Positive = 2048
    """Samples an iteration, over all trainers."""
    iterations: Positive | None = None
    """Where to stop; several epochs are run if the data is shorter."""
    epochs: Positive | None = None
    """How often to go through the data; 1 if `iterations` is not given either."""
    seed: Annotated[int, Field(ge=0, lt=2**63)] = 0
    """Fixes initial parameters, generated data and shuffling."""
    trainers: Positive = 1
    """How many trainers share each batch."""
    threads: Positive | None = None
    """Threads a trainer; all cores if not given. Bits can depend on it, as torch's matrix products do."""

    @model_validator(mode="after")
    def _consistent(self) -> Config:
        if self.iterations is not None and self.epochs is not None:
            raise ValueError(
                f"iterations ({self.iterations}) and epochs ({self.epochs}) contradict each other: give one of them"
            )
        if self.batch_size < self.trainers:
            raise ValueError(f"batch_size ({self.batch_size}) is smaller than trainers ({self.trainers}): raise it")
        return self


CacheSize = Annotated[int, BeforeValidator(_bytes_or_rows)]


def load_config(path: Path | None = None, overrides: Iterable[str] = ()) -> Config:
    """The configuration in a TOML file (none: the defaults) with `a.b=c` overrides laid over it."""
    settings: dict[str, Any] = {}
    if path is not None:
        try:
            settings = tomllib.loads(path.read_text(encoding="utf-8"))
        except OSError as error:
            raise ConfigError(f"can't read the configuration {path}: {error.strerror}: check the path") from error
        except (tomllib.TOMLDecodeError, UnicodeDecodeError) as error:
            raise ConfigError(f"{path} is not TOML: {error}") from error
    for override in overrides:
        _lay_over(settings, override)
    return parse_config(settings)


def parse_config(settings: dict[str, Any]) -> Config:
    """The configuration of nested settings, checked."""
    try:
        return Config.model_validate(settings)
    except ValidationError as error:
        raise ConfigError("\n".join(_explain(detail) for detail in error.errors())) from None


def _lay_over(settings: dict[str, Any], override: str) -> None:
    key, equals, text = override.partition("=")
    names = key.strip().split(".")
    if not equals or not all(names):
        raise ConfigError(f"--set {override!r} is not of the form a.b=c, for example --set model.name=deepfm")
    try:
        value = tomllib.loads(f"value = {text}")["value"]
    except tomllib.TOMLDecodeError:
        value = text.strip()  # an unquoted string, as people type it in a shell
    for depth, name in enumerate(names[:-1]):
        settings = settings.setdefault(name, {})
        if not isinstance(settings, dict):
            raise ConfigError(f"--set {override!r}: {'.'.join(names[: depth + 1])} is a value, not a section")
    settings[names[-1]] = value


def _explain(detail: Any) -> str:
    """One line for one of pydantic's findings: field, what is wrong, its value, what is allowed."""
    field = ".".join(str(part) for part in detail["loc"]) or "configuration"
    if detail["type"] == "extra_forbidden":
        return f"{field}: there is no such setting; {_siblings(detail['loc'])}"
    message = str(detail["msg"]).removeprefix("Value error, ")
    value = detail["input"]
    shown = "" if isinstance(value, dict | Section) else f" (it is {value!r})"
    return f"{field}: {message}{shown}"


def _siblings(location: tuple[str | int, ...]) -> str:
    section: Any = Config
    for name in location[:-1]:
        section = section.model_fields[name].annotation
    return "known here: " + ", ".join(section.model_fields)
