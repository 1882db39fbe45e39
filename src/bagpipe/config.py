"""One typed configuration a run, read from TOML and `--set a.b=c`.

All checking of settings happens here and nowhere else (I8): an unknown key, a bad value or two settings that contradict
each other end in a ConfigError that names the field, its value and what is allowed, before anything is opened.
"""

from __future__ import annotations

import logging
import os
import re
import tomllib
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any, Literal

import numpy as np
from pydantic import AfterValidator, BaseModel, BeforeValidator, ConfigDict, Field, ValidationError, model_validator

from bagpipe import optim
from bagpipe.bounded import DEPTH_MAX, check_settings, first_lines, parse_toml, read_toml, shown
from bagpipe.errors import ConfigError
from bagpipe.optim import RowOptimizer
from bagpipe.policy_options import WAYS_MAX, PolicyOptions
from bagpipe.store.mapped import RESIDENT_BYTES_MIN
from bagpipe.table import Table

DEFAULT_PRESET = "criteo-kaggle-like"
DEFAULT_SAMPLES = 400_000
AWARE_TRAINERS_MAX = 64
"""A set of trainers is one 64-bit word there."""
GONE = {
    "sync.deterministic": "gradients are always added in the order of trainers, leave it out",
    "checkpoint.full_every": "all rows are written again once changes take as much room, leave it out",
    "checkpoint.compress": "rows are nearly random numbers, which hardly shrink, leave it out",
}
"""Settings of earlier releases, and what to do instead."""

Positive = Annotated[int, Field(ge=1)]
Fraction = Annotated[float, Field(gt=0, lt=1)]
Rate = Annotated[float, Field(gt=0, allow_inf_nan=False)]


class Section(BaseModel):
    """A group of settings: no unknown keys, nothing taken for another type, no change after reading."""

    model_config = ConfigDict(extra="forbid", frozen=True, strict=True, use_attribute_docstrings=True)


class ModelConfig(Section):
    """What is trained."""

    name: Literal["dlrm", "wide_deep", "deep_cross", "deepfm"] = "dlrm"
    """The architecture; docs/models.md describes each."""
    dim: Positive = 48
    """Length of an embedding vector."""


class RowOptimizerConfig(Section):
    """The optimizer of the embedding rows. Hyperparameters that are left out have the optimizer's own default."""

    name: Literal["sgd", "momentum", "adagrad", "rowwise_adagrad", "adam", "adamw"] = "adagrad"
    """Its name; docs/optimizers.md gives the formulas and which hyperparameters each has."""
    lr: float | dict[str, Any] = 0.05
    """Learning rate: a number, or a schedule as a table, such as {name = "cosine", lr = 0.1, iterations = 1000}."""
    momentum: float | None = None
    """How much of the last step is kept (momentum)."""
    nesterov: bool | None = None
    """Look ahead by one step (momentum)."""
    lr_decay: float | None = None
    """Learning rate falls as 1 / (1 + lr_decay * iteration) (adagrad)."""
    initial_accumulator_value: float | None = None
    """The sum of squares that a row begins with (adagrad, rowwise_adagrad)."""
    eps: float | None = None
    """Added to the root in the denominator (adagrad, rowwise_adagrad, adam, adamw)."""
    betas: Annotated[tuple[float, float] | None, Field(strict=False)] = None
    """Decay of the mean and of the mean of squares (adam, adamw)."""
    weight_decay: float | None = None
    """Share of the weight that a touched row loses, times the learning rate (adamw)."""

    @model_validator(mode="after")
    def _can_be_built(self) -> RowOptimizerConfig:
        self.build()
        return self

    def build(self) -> RowOptimizer:
        """The optimizer itself."""
        given = self.model_dump(exclude_none=True)
        return optim.build(given.pop("name"), **given)


class DenseOptimizerConfig(Section):
    """The torch optimizer of all other parameters."""

    name: Literal["sgd", "momentum", "adagrad", "adam", "adamw"] = "adagrad"
    """Its name; momentum is SGD with momentum 0.9."""
    lr: Rate = 0.01
    """Learning rate."""


class DataConfig(Section):
    """What is trained on: shards on disk, or generated data that is never written."""

    path: Annotated[Path | None, Field(strict=False)] = None
    """Directory of shards, as `bagpipe data generate` writes them."""
    preset: str | None = None
    """Generated data of this kind instead; `bagpipe data presets` lists them."""
    samples: Positive | None = None
    """How many samples to generate (presets only); 400,000 at most if not given."""
    shuffle: bool = False
    """Another order each epoch, fixed by `seed`; off: the order of the file."""
    held_out: Fraction = 0.1
    """Share of the samples, the last ones, that is kept for evaluation; unless the data has a part `validation`."""
    workers: Positive = 1
    """Threads that read batches; the order of batches does not depend on it."""
    processes: Annotated[int, Field(ge=0)] = 0
    """Processes that read batches instead of threads; the order does not depend on it either."""

    @model_validator(mode="after")
    def _one_source(self) -> DataConfig:
        if self.path is not None and self.preset is not None:
            raise ValueError(f"path ({self.path}) and preset ({self.preset}) contradict each other: give one of them")
        if self.path is not None and self.samples is not None:
            raise ValueError("samples goes with preset; shards have the samples that they have: leave it out")
        return self


class WireConfig(Section):
    """How trainers and embedding servers talk."""

    security: Literal["tls", "none"] = "tls"
    """Between machines: tls encrypts and proves who both sides are, none sends plain bytes. What stays on this
    machine is always plain."""
    shared_memory: bool | Literal["auto"] = "auto"
    """Whether rows go through memory that trainer and server share; auto: wherever both are on one host."""
    deadline_s: Rate = 60.0
    """After this many seconds without an answer a server counts as lost, and the run ends."""


class SyncConfig(Section):
    """How several trainers keep the rows that they share equal. No setting changes the result."""

    design: Literal["owned", "lrpp", "replicated", "partitioned"] = "owned"
    """Who updates a row while it is in the cache: owned, one of its users, and another one later if that sends less;
    partitioned, the one that will use it most; replicated, all trainers, each its own copy; lrpp, the same but for rows
    that a single trainer uses once."""
    delayed: bool = True
    """Updates that the next iteration does not need may arrive while it trains; off: all arrive before it."""
    moving: bool = True
    """A row of design owned may change its owner while it is in the cache, and its optimizer state goes with it, where
    its next two uses save more than that sends; off: who owns it when it is fetched keeps it."""


_SECONDS = re.compile(r"[1-9][0-9]{0,6}(\.[0-9]+)?s|0\.[0-9]*[1-9][0-9]*s")


def _check_period(every: int | str) -> int | str:
    if isinstance(every, str) and every != "auto" and not _SECONDS.fullmatch(every):
        raise ValueError('give iterations such as 100, seconds such as "30s", or "auto"')
    return every


class CheckpointConfig(Section):
    """Files that a run can go on from, in `checkpoints` of its directory. No setting changes the result."""

    every: Positive | None = None
    """Iterations from one checkpoint that is retained to the next; not given: there is only the one at the end."""
    final: bool = True
    """Write one at the end, which has the weights of the run; off, and without `every`: the run leaves none."""
    keep: Positive = 3
    """How many of the last ones stay."""

    @property
    def retained(self) -> bool:
        """Whether there will be any that stay."""
        return self.final or self.every is not None


class RecoveryConfig(Section):
    """How `bagpipe launch` goes on after a process was lost. No setting changes the result."""

    every: Annotated[Positive | str, AfterValidator(_check_period)] = "auto"
    """Iterations (100) or seconds ("30s") from one checkpoint for recovery to the next; what came after the last one is
    trained again. auto: as often as keeps their cost under 2 % of training, and at least every 30 s."""
    restarts_max: Annotated[int, Field(ge=0)] = 3
    """How often each process is started again; 0: a lost one ends the run."""
    history: str = "1GB"
    """Memory that each server may take to go back to the last checkpoint without its files; beyond it they are read."""
    spare: bool = True
    """Keep a process ready for whoever is lost, on a Ray of its own; off: about 300 MB less, and seconds more."""


class PolicyOptionsConfig(Section):
    """Settings of policies; docs/policies.md tells which policy uses which."""

    sample: Annotated[int, Field(ge=0)] = 64
    """Batches that are looked at before the first iteration, to learn how often rows are used, spread over all data if
    it can be read twice, else the first ones; 0: all data (static, frequency)."""
    replacement: Literal["lru", "lfu", "random"] = "lru"
    """Which row leaves first of those that are not held (scratchpipe)."""
    pipelined: bool = True
    """Off: each iteration's rows are fetched after the iteration before has been written back (every policy)."""
    threads: Annotated[int, Field(ge=0)] = 0
    """Threads that share the oracle's work, which changes no plan; 0: a quarter of the cores, 4 at most (every
    policy)."""
    oracles: Annotated[int, Field(ge=1)] = 1
    """Oracles that divide the tables among them, each with its part of the cache; costs fetched rows, and no bit (every
    policy)."""
    ways: Annotated[int, Field(ge=1, le=WAYS_MAX)] = 16
    """Places in the cache that a row of a large table can be in (windowed)."""
    preload: bool = False
    """Fetch the rows of a window all with its first batch, instead of each with the first batch that uses it
    (windowed)."""
    windows: Annotated[str, BeforeValidator(lambda given: str(given) if type(given) is int else given)] = ""
    """Empty: windows have `lookahead` batches. "measured": as many as the times of planning, fetching and training ask
    for, and more when training stalls; the summary has the list. Such a list, "16,48:24": the same again (windowed)."""
    mode: Literal["strict", "stale"] = "strict"
    """stale, as published: rows are read a window ahead without waiting for their last write-back, so that updates can
    be lost and the result is not that of plain training (windowed)."""
    seed: Annotated[int, Field(ge=0, lt=2**63)] = 0
    """Fixes what is drawn at random (scratchpipe with replacement random, windowed)."""

    @model_validator(mode="after")
    def _can_be_built(self) -> PolicyOptionsConfig:
        self.build()
        return self

    def build(self) -> PolicyOptions:
        """The options themselves."""
        return PolicyOptions(**self.model_dump())


@dataclass(frozen=True, slots=True)
class Size:
    """A number of bytes."""

    num_bytes: int


@dataclass(frozen=True, slots=True)
class Share:
    """A share of the rows of all tables."""

    per_cent: float

    def num_rows(self, tables: Iterable[Table]) -> int:
        """So many rows; ConfigError if a table has no known size."""
        total = 0
        for table in tables:
            if table.rows is None:
                raise ConfigError(
                    f"cache is {self.per_cent:g}%, and table {table.name!r} has no known size: give rows or bytes "
                    "such as '2GB'"
                )
            total += table.rows
        return max(1, round(self.per_cent / 100 * total))


def cache_size(value: int | str) -> int | Size | Share:
    """A number of rows, bytes from a text such as "2GB" (decimal units), or a share of all rows such as "1.5%"."""
    if isinstance(value, int | np.integer) and not isinstance(value, bool):
        if value < 1:
            raise ConfigError(f"cache is {value!r}: give at least 1 row, or bytes such as '2GB'")
        return int(value)
    share = re.fullmatch(r"\s*([0-9]+(?:\.[0-9]+)?)\s*%\s*", str(value))
    if share is not None:
        if not 0 < float(share[1]) <= 100:
            raise ConfigError(f"cache is {value!r}: give a share of the rows above 0% and up to 100%, such as '1.5%'")
        return Share(float(share[1]))
    size = _bytes_in(value)
    if size is None:
        raise ConfigError(f"cache is {value!r}: give a number of rows, bytes such as '500MB' or '2GB', or '1.5%'")
    return Size(size)


def check_store(value: str) -> str:
    """Where rows live: "memory", "mapped", or the path of a directory, which has a slash."""
    if value not in ("memory", "mapped") and os.sep not in value:
        raise ConfigError(
            f"store={value!r}: give 'memory', 'mapped', or the path of a directory for the files, such as './rows'"
        )
    return value


def store_memory_bytes(value: str, store: str | Path, name: str = "store_memory") -> int:
    """How much of a store on disk may be in memory, from a text such as "2GB"; `name` is what the user calls it."""
    if store == "memory":
        raise ConfigError(f"{name} ({value!r}) goes with rows on disk, but store is 'memory': leave it out")
    size = _bytes_in(value)
    if size is None or size < RESIDENT_BYTES_MIN:
        raise ConfigError(f"{name} is {value!r}: give bytes such as '500MB' or '2GB', at least '5MB'")
    return size


def memory_bytes(name: str, value: str) -> int:
    """A number of bytes from a text such as "8GB"; `name` is what the user calls it."""
    size = _bytes_in(value)
    if not size:
        raise ConfigError(f"{name} is {value!r}: give bytes such as '500MB' or '8GB'")
    return size


def _bytes_in(text: object) -> int | None:
    """The number in a text such as "1.5 GB"; None if it is not of that form."""
    match = re.fullmatch(r"\s*([0-9]+(?:\.[0-9]+)?)\s*([KMGT]?)B\s*", str(text), re.IGNORECASE)
    return None if match is None else int(float(match[1]) * 1000 ** " KMGT".index(match[2].upper() or " "))


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
    lookahead: Positive | Literal["auto"] = "auto"
    """How many batches the oracle reads ahead, the current one included; auto fills the cache."""
    cache: int | str = "256MB"
    """Size of a trainer's cache: rows, bytes such as "2GB", optimizer state included, or a share of all rows such as
    "1.5%", where every table has a known size."""
    policy: Literal[
        "lookahead",
        "belady",
        "scratchpipe",
        "windowed",
        "frequency",
        "static",
        "lfu",
        "lru",
        "nocache",
        "ideal",
    ] = "lookahead"
    """What the oracle keeps in the cache; docs/policies.md describes each."""
    policy_options: PolicyOptionsConfig = PolicyOptionsConfig()
    store: str = "memory"
    """Where all rows live: "memory", "mapped" (files in the run directory), or a directory for the files, such as
    "/scratch/rows". They are for this process only: rows outlive it in checkpoints."""
    store_memory: str | None = None
    """Memory that the files of rows may take, such as "4GB"; 1 GiB if not given."""
    servers: Annotated[int, Field(ge=0, le=256)] = 0
    """How many embedding servers hold the rows, each a process of its own; 0: the trainer's process holds them."""
    wire: WireConfig = WireConfig()
    checkpoint: CheckpointConfig = CheckpointConfig()
    recovery: RecoveryConfig = RecoveryConfig()
    init_from: Annotated[Path | None, Field(strict=False)] = None
    """A checkpoint of another run, a directory of them, or a run: rows, dense part and optimizer states begin as they
    are there. `--init-from` is short for it."""
    check: bool = False
    """Follow every row and stop at the first wrong value; slow. Several trainers only as threads of one process:
    `bagpipe launch` refuses it."""
    seed: Annotated[int, Field(ge=0, lt=2**63)] = 0
    """Fixes initial parameters, generated data and shuffling."""
    trainers: Positive = 1
    """How many trainers share each batch."""
    assign: Literal["contiguous", "round_robin", "aware"] = "contiguous"
    """Which trainer gets which sample: parts of the batch as they come, one sample after the other in turn, or each
    where most of its rows were used before; parts of equal size always. The result depends on it, by rounding."""
    sync: SyncConfig = SyncConfig()
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
        if self.policy == "nocache" and self.lookahead not in ("auto", 1):
            raise ValueError(
                f"policy 'nocache' keeps nothing, so lookahead ({self.lookahead}) has no effect: leave it out"
            )
        if self.policy == "windowed" and self.policy_options.mode == "stale":
            if self.check:
                raise ValueError(
                    "policy_options.mode 'stale' reads old rows on purpose, and check stops there: drop one"
                )
            if self.trainers > 1:
                raise ValueError(f"policy_options.mode 'stale' is for one trainer, not {self.trainers}: use 'strict'")
        if self.assign == "aware" and self.trainers > AWARE_TRAINERS_MAX:
            raise ValueError(
                f"assign 'aware' is for at most {AWARE_TRAINERS_MAX} trainers, not {self.trainers}: use 'round_robin'"
            )
        cache_size(self.cache)
        check_store(self.store)
        memory_bytes("recovery.history", self.recovery.history)
        if self.store_memory is not None:
            store_memory_bytes(self.store_memory, self.store)
        return self

    def rows_directory(self, run_dir: Path | None) -> Path | None:
        """Where files of rows go, those of a mapped store in the run directory; None: nowhere, they are in memory."""
        return {"memory": None, "mapped": run_dir}.get(self.store, Path(self.store))


def warn_of_idle_rows(design: str, trainers: int, policy: str) -> None:
    """Say that `lrpp` exchanges what `replicated` does where a row does not leave right after its last use."""
    if design == "lrpp" and trainers > 1 and policy not in ("lookahead", "nocache"):
        logging.getLogger("bagpipe").warning(
            "sync.design = 'lrpp' exchanges the same rows as 'replicated' while the cache has room: with policy = %r "
            "rows stay after their last use, and lrpp saves only rows that leave. Set policy=lookahead, or "
            "sync.design=owned, which needs no such rows",
            policy,
        )


def load_config(path: Path | None = None, overrides: Iterable[str] = ()) -> Config:
    """The configuration in a TOML file (none: the defaults) with `a.b=c` overrides laid over it."""
    settings: dict[str, Any] = {}
    if path is not None:
        settings = read_toml(path, "configuration")
    for override in overrides:
        lay_over(settings, override)
    return parse_config(settings)


def parse_config(settings: dict[str, Any]) -> Config:
    """The configuration of nested settings, checked."""
    check_settings(settings, "the configuration", ConfigError)
    try:
        return Config.model_validate(settings)
    except ValidationError as error:
        raise ConfigError(first_lines(_explain_all(error.errors()))) from None


def lay_over(settings: dict[str, Any], override: str) -> None:
    """Set one setting of nested ones as `a.b=c` says."""
    key, equals, text = override.partition("=")
    names = key.strip().split(".")
    if not equals or not all(names) or len(names) > DEPTH_MAX:
        raise ConfigError(f"--set {shown(override)} is not of the form a.b=c, for example --set model.name=deepfm")
    try:
        value = parse_toml(f"value = {text}", f"--set {names[0]}")["value"]
    except ConfigError as error:
        if not isinstance(error.__cause__, tomllib.TOMLDecodeError):
            raise
        value = text.strip()  # an unquoted string, as people type it in a shell
    for depth, name in enumerate(names[:-1]):
        settings = settings.setdefault(name, {})
        if not isinstance(settings, dict):
            raise ConfigError(f"--set {shown(override)}: {'.'.join(names[: depth + 1])} is a value, not a section")
    settings[names[-1]] = value


_TYPES = {
    "int_type": "a whole number", "float_type": "a number", "bool_type": "true or false", "string_type": "a text",
    "literal_error": "{expected}", "model_type": "the settings in it, such as {first}",
    "dict_type": "a table of settings", "tuple_type": "a list", "path_type": "a path",
    "greater_than_equal": "at least {least}",
}  # fmt: skip
"""What to give where the type is wrong, by pydantic's name of the mistake."""


def _explain_all(details: list[Any]) -> list[str]:
    """A line for each field that is wrong; one that takes several types has a finding for each of them."""
    lines: dict[str, str] = {}
    given: dict[str, list[str]] = {}
    for detail in details:
        field = ".".join(_fields(detail["loc"]))
        if detail["type"] in _TYPES:
            if detail["type"] == "string_type" and field in given:
                continue  # of the types that it may have, no text was meant
            allowed = detail.get("ctx", {}).get("expected", "")
            least = detail.get("ctx", {}).get("ge", "")
            first = next(iter(getattr(_section(detail["loc"]), "model_fields", [""])))
            given.setdefault(field, []).append(
                _TYPES[detail["type"]].format(expected=allowed, first=f"{field}.{first}", least=least)
            )
            lines[field] = f"{field}: give {' or '.join(given[field])} (it is {shown(detail['input'])})"
        else:
            lines[field] = _explain(detail)
    return list(lines.values())


def _explain(detail: Any) -> str:
    """One line for one of pydantic's findings: field, what is wrong, its value, what is allowed."""
    field = ".".join(_fields(detail["loc"]))
    if detail["type"] == "extra_forbidden":
        if field in GONE:
            return f"{field}: there is no such setting any more; {GONE[field]}"
        return f"{field}: there is no such setting; {_siblings(detail['loc'])}"
    message = str(detail["msg"]).removeprefix("Value error, ")
    value = detail["input"]
    given = "" if isinstance(value, dict | Section) else f" (it is {shown(value)})"
    return f"{field}: {message}{given}" if field else message


def _fields(location: tuple[str | int, ...]) -> list[str]:
    """The names of settings in a location; pydantic adds the alternatives of a field that takes several types."""
    section: Any = Config
    path = []
    for name in map(str, location):
        path.append(name)
        field = getattr(section, "model_fields", {}).get(name)
        if field is None:
            break
        section = field.annotation
        if not hasattr(section, "model_fields"):
            break
    return path


def _siblings(location: tuple[str | int, ...]) -> str:
    return "known here: " + ", ".join(_section(location[:-1]).model_fields)


def _section(location: tuple[str | int, ...]) -> Any:
    """What is at a location; None beyond a setting."""
    section: Any = Config
    for name in location:
        field = getattr(section, "model_fields", {}).get(str(name))
        section = None if field is None else field.annotation
    return section
