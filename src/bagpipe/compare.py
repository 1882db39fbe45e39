"""Every policy on the same data and model, under the same executor: what differs is only what the oracle keeps.

A run is `exact` if its parameters, rows and optimizer state are those of the reference trainer, bit for bit (I1). Runs
come one after another, so speeds carry the noise of the machine; rows moved and hit rates do not.
"""

from __future__ import annotations

import shutil
from collections.abc import Callable, Iterable, Sequence
from dataclasses import replace
from typing import Any

from bagpipe.config import Config, parse_config
from bagpipe.errors import CapacityError, ConfigError
from bagpipe.job import Job
from bagpipe.policies import POLICIES
from bagpipe.training import train_accelerated, train_reference

KEYS = ("samples_per_second", "hit_rate", "fetched_rows", "written_rows", "stall_fraction")
QUALITY = ("lookahead", "cache_rows", "loss", "log_loss", "auc")
WARM_UP_ITERATIONS = 2

Report = Callable[[int, str], None]


def chosen(policies: Iterable[str] | None = None) -> list[str]:
    """The policies of these names, each once; all that there are if none is named."""
    names = list(POLICIES) if policies is None else list(dict.fromkeys(policies))
    for name in names:
        if name not in POLICIES:
            raise ConfigError(f"there is no policy {name!r}: choose from {', '.join(POLICIES)}")
    return names


def compare(job: Job, policies: Sequence[str], report: Report) -> list[dict[str, Any]]:
    """Train a job with the reference, then once with each policy; `report` counts the iterations of all runs.

    A policy whose cache can't hold what it must keep is listed with the reason, and without figures.
    """
    configs = {name: _with_policy(job.config, name) for name in policies}
    expected = train_reference(job, _after(report, 0, "reference"))[0].sha256()
    rows = []
    for position, (name, config) in enumerate(configs.items(), start=1):
        mine = replace(job, config=config, run_dir=job.run_dir / name)
        try:
            row = _run(mine, _after(report, position * job.iterations, name), expected)
        except CapacityError as error:
            row = dict.fromkeys((*KEYS, "exact", *QUALITY)) | {"reason": str(error)}
        finally:
            shutil.rmtree(mine.run_dir, ignore_errors=True)
        rows.append({"policy": name} | row)
    return rows


def _run(job: Job, report: Report, expected: str) -> dict[str, Any]:
    _warm_up(job)
    state, summary = train_accelerated(job, report)
    return (
        {key: summary[key] for key in KEYS}
        | {"exact": state.sha256() == expected}
        | {key: summary[key] for key in QUALITY}
    )


def _warm_up(job: Job) -> None:
    """Two iterations that are not counted: kernels are compiled or loaded when they are first called."""
    few = min(job.config.batch_size, job.held_out.num_samples)
    iterations = min(WARM_UP_ITERATIONS, job.iterations)
    short = replace(job, iterations=iterations, held_out=job.held_out.part(0, few), run_dir=job.run_dir / "warm-up")
    train_accelerated(short, lambda *_: None)


def _with_policy(config: Config, policy: str) -> Config:
    settings = config.model_dump() | {"policy": policy}
    if policy == "nocache":
        settings["lookahead"] = "auto"  # it has none, and the configuration refuses to pretend otherwise
    return parse_config(settings)


def _after(report: Report, done: int, name: str) -> Report:
    return lambda own, note: report(done + own, f"{name}: {note}")
