"""Every policy on the same data and model, under the same executor: what differs is only what the oracle keeps.

A run is `exact` if its parameters, rows and optimizer state are those of the reference trainer, bit for bit (I1), and
`promised` if its policy claims as much. Rows moved and hit rates are the same in every run, so policies are ranked by
those. Speeds carry the noise of the machine, and with them the slots in use at the most (`peak_rows`), since rows are
fetched ahead as far as time allows: policies take turns, and speeds that overlap are not told apart. Of several
trainers `peak_rows` and `cache_rows` are the first one's.
"""

from __future__ import annotations

import math
import shutil
from collections.abc import Callable, Iterable, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from statistics import median
from typing import Any, Literal, cast, get_args

import numpy as np

from bagpipe.config import Config, parse_config
from bagpipe.data import generated
from bagpipe.data.generator import Generated
from bagpipe.errors import CapacityError, ConfigError
from bagpipe.job import Job, without_weights
from bagpipe.policies import POLICIES
from bagpipe.training import train_configured, train_reference
from bagpipe.types import Batch, Table

KEYS = ("samples_per_second", "hit_rate", "fetched_rows", "written_rows", "stall_fraction")
SPREAD = ("samples_per_second_min", "samples_per_second_max", "as_fast_as_any")
QUALITY = ("peak_rows", "lookahead", "cache_rows", "loss", "log_loss", "auc")
WARM_UP_ITERATIONS = 8
WARM_UP_SAMPLES = 64

Report = Callable[[int, str], None]
Swept = Literal["cache", "lookahead", "batch", "skew"]
Row = dict[str, Any]


@dataclass(frozen=True)
class Sweep:
    """A setting and the values that it takes, one after the other."""

    name: Swept
    values: tuple[str, ...]


@dataclass(frozen=True)
class Point:
    """A job to compare policies on; of a sweep, what makes it differ from the others."""

    job: Job
    value: str | None = None


def chosen(policies: Iterable[str] | None = None) -> list[str]:
    """The policies of these names, each once; all that there are if none is named."""
    names = list(POLICIES) if policies is None else list(dict.fromkeys(policies))
    for name in names:
        if name not in POLICIES:
            raise ConfigError(f"there is no policy {name!r}: choose from {', '.join(POLICIES)}")
    return names


def parse_sweep(text: str) -> Sweep:
    """A sweep as people write it: "cache=1%,2%,5%", "lookahead=5,50,auto", "batch=512,2048", "skew=0.9,0.1"."""
    name, equals, values = text.partition("=")
    listed = tuple(value.strip() for value in values.split(",") if value.strip())
    if name.strip() not in get_args(Swept) or not equals or not listed:
        raise ConfigError(
            f"--sweep {text!r} is not of the form name=value,value, such as cache=1%,2%,5%: names are "
            f"{', '.join(get_args(Swept))}"
        )
    return Sweep(cast(Swept, name.strip()), listed)


def points_of(job: Job, sweep: Sweep) -> list[Point]:
    """The job once for each value; all of them train the same samples, and other batches fill up their last one."""
    turn = {"cache": _with_cache, "lookahead": _with_lookahead, "batch": _with_batch, "skew": _with_skew}[sweep.name]
    return [Point(turn(job, value), value) for value in sweep.values]


def num_iterations(points: Sequence[Point], policies: Sequence[str], repeats: int = 1) -> int:
    """How many iterations `compare` trains, those of the reference included."""
    references = {_data_key(point.job): point.job.iterations for point in points}
    return sum(references.values()) + sum(repeats * len(policies) * point.job.iterations for point in points)


def compare(job: Job, policies: Sequence[str], report: Report, repeats: int = 1) -> list[Row]:
    """Train a job with the reference, then with each policy in turn; `report` counts the iterations of all runs.

    Who fetches fewest rows comes first. A policy whose cache can't hold what it must keep comes last, with the reason
    and without figures.
    """
    return compare_over([Point(job)], policies, report, repeats)


def compare_over(
    points: Sequence[Point],
    policies: Sequence[str],
    report: Report,
    repeats: int = 1,
    tell: Callable[[Point, str, Row], None] = lambda _point, _name, _run: None,
) -> list[Row]:
    """The same for each of several jobs; the reference trains once for those that have data and batches in common.

    `tell` is told of each run of a policy as soon as it is over.
    """
    configs = [{name: _with_policy(without_weights(point.job.config), name) for name in policies} for point in points]
    expected: dict[tuple[int, int], str] = {}
    rows: list[Row] = []
    done = 0
    for point, own in zip(points, configs, strict=True):
        job, key = point.job, _data_key(point.job)
        if key not in expected:
            expected[key] = train_reference(job, _after(report, done, "reference"))[0].sha256()
            done += job.iterations
        runs: dict[str, list[Row]] = {name: [] for name in own}
        reasons: dict[str, str] = {}
        for turn in range(repeats):
            # There and back again, so that what slows the machine down for a while is not always one policy's share.
            for name in own if turn % 2 == 0 else reversed(own):
                mine = replace(job, config=own[name], run_dir=job.run_dir / name)
                try:
                    if name not in reasons:
                        runs[name].append(_run(mine, _after(report, done, name), expected[key], warm_up=turn == 0))
                        tell(point, name, runs[name][-1])
                except CapacityError as error:
                    reasons[name] = str(error)
                finally:
                    shutil.rmtree(mine.run_dir, ignore_errors=True)
                done += job.iterations
        rows += _ranked(
            {"policy": name}
            | ({} if point.value is None else {"value": point.value})
            | _joined(runs[name], reasons.get(name))
            | {"promised": POLICIES[name].is_exact(config.policy_options.build())}
            for name, config in own.items()
        )
    return rows


def _ranked(rows: Iterable[Row]) -> list[Row]:
    """By what is the same in every run; and which of them no run was fast enough to tell apart from the fastest."""
    ranked = sorted(rows, key=lambda row: ("reason" in row, row["fetched_rows"] or 0, row["written_rows"] or 0))
    ran = [row for row in ranked if "reason" not in row]
    if ran:
        fastest = max(ran, key=lambda row: row["samples_per_second"])
        for row in ran:
            overlap = row["samples_per_second_max"] >= fastest["samples_per_second_min"]
            row["as_fast_as_any"] = overlap if row["runs"] > 1 else None
    return ranked


def _joined(runs: Sequence[Row], reason: str | None) -> Row:
    """One row of all runs of a policy: what time decides is the median, slots in use are the most."""
    if reason is not None:
        return dict.fromkeys((*KEYS, "exact", *QUALITY, *SPREAD)) | {"runs": 0, "reason": reason}
    speeds = [run["samples_per_second"] for run in runs]
    return runs[0] | {
        "samples_per_second": median(speeds),
        "stall_fraction": median(run["stall_fraction"] for run in runs),
        "exact": all(run["exact"] for run in runs),
        "peak_rows": max(run["peak_rows"] for run in runs),
        **dict(zip(SPREAD, (min(speeds), max(speeds), None), strict=True)),
        "runs": len(runs),
    }


def _run(job: Job, report: Report, expected: str, warm_up: bool) -> Row:
    if warm_up:
        _warm_up(job)
    _, summary = train_configured(job, report)
    return (
        {key: summary[key] for key in KEYS}
        | {"exact": summary["parameters_sha256"] == expected}
        | {key: summary[key] for key in QUALITY}
    )


def _warm_up(job: Job) -> None:
    """A few small iterations that are not counted: kernels are compiled or loaded when they are first called.

    The cache holds the largest of their batches and no more, so that those which choose who leaves are among them.
    """
    config = job.config
    size = max(config.trainers, min(config.batch_size, WARM_UP_SAMPLES))
    reading = config.data.model_dump() | {"processes": 0}
    few = job.held_out.part(0, min(size, job.held_out.num_samples))
    short = replace(
        _changed(job, batch_size=size, data=reading),
        iterations=WARM_UP_ITERATIONS,
        held_out=few,
        run_dir=job.run_dir / "warm-up",
    )
    least = max(_num_rows(batch, job.train.tables) for batch in short.batches())
    with suppress(CapacityError):  # who must keep more than a batch was under way by then
        train_configured(_changed(short, cache=least), lambda *_: None)


def _num_rows(batch: Batch, tables: Sequence[Table]) -> int:
    """The different rows of a batch."""
    ids = ([batch.sparse[name].values.numpy().ravel() for name in table.features] for table in tables)
    return sum(len(np.unique(np.concatenate(own))) for own in ids)


def _data_key(job: Job) -> tuple[int, int]:
    """What the reference's result depends on, of what a sweep changes; its jobs are alive as long as it runs."""
    return id(job.train), job.config.batch_size


def _with_policy(config: Config, policy: str) -> Config:
    settings = config.model_dump() | {"policy": policy}
    if policy == "nocache":
        settings["lookahead"] = "auto"  # it has none, and the configuration refuses to pretend otherwise
    return parse_config(settings)


def _changed(job: Job, **settings: object) -> Job:
    return replace(job, config=parse_config(job.config.model_dump() | settings))


def _with_cache(job: Job, value: str) -> Job:
    if not value.endswith("%"):
        return _changed(job, cache=int(value) if value.isdecimal() else value)
    sizes = [table.rows for table in job.train.tables]
    share = _number("cache", value[:-1]) / 100
    if not 0 < share < math.inf:
        raise ConfigError(f"cache {value!r} in --sweep: give a share of the rows above 0%, such as 2%")
    if None in sizes:
        unsized = next(table.name for table in job.train.tables if table.rows is None)
        raise ConfigError(f"cache {value}: table {unsized!r} has no known size: give rows or bytes instead")
    return _changed(job, cache=max(1, round(share * sum(size for size in sizes if size is not None))))


def _with_lookahead(job: Job, value: str) -> Job:
    return _changed(job, lookahead=int(value) if value.isdecimal() else value)


def _with_batch(job: Job, value: str) -> Job:
    if not value.isdecimal() or not int(value):
        raise ConfigError(f"batch {value!r} in --sweep: give a number of samples, at least 1")
    size, an_epoch = int(value), job.train.num_samples
    epochs, rest = divmod(job.samples_of(job.iterations), an_epoch)
    iterations = epochs * -(-an_epoch // size) + -(-rest // size)  # batches end with their epoch
    return replace(_changed(job, batch_size=size), iterations=iterations)


def _with_skew(job: Job, value: str) -> Job:
    data = job.train if isinstance(job.train, Generated) else getattr(job.train, "whole", None)
    if not isinstance(data, Generated):
        raise ConfigError("--sweep skew turns a dial of generated data: give data.preset instead of data.path")
    turned = generated(data.preset.name, data.num_samples, data.seed, top_share=_number("skew", value))
    split = job.train.num_samples
    return replace(job, train=turned.part(0, split), held_out=turned.part(split, turned.num_samples))


def _number(name: str, value: str) -> float:
    try:
        return float(value)
    except ValueError:
        raise ConfigError(f"{name} {value!r} in --sweep is not a number") from None


def _after(report: Report, done: int, name: str) -> Report:
    return lambda own, note: report(done + own, f"{name}: {note}")
