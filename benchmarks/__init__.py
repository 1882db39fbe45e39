"""Benchmarks by name; `bagpipe bench NAME` runs one and `--list` names them all.

They lie beside the package and not in it: they need a checkout, and only their command loads them. A benchmark is a
module of this folder that registers one function. Ratios come from runs interleaved in one process,
because machines are noisy; the JSON always has `name`, `machine` and `results`.
"""

from __future__ import annotations

import importlib
import os
import platform
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from bagpipe.errors import ConfigError

Results = list[dict[str, Any]]

# Processes that a benchmark starts run modules of this folder too, wherever they are started.
_PATH = os.environ.get("PYTHONPATH", "").split(os.pathsep)
if (_ROOT := str(Path(__file__).parents[1])) not in _PATH:
    os.environ["PYTHONPATH"] = os.pathsep.join(filter(None, (_ROOT, *_PATH)))


@dataclass(frozen=True)
class Benchmark:
    """A named measurement."""

    name: str
    summary: str
    run: Callable[[bool], Results]
    """Takes `quick`: True makes it small enough for a test; figures are then not meaningful."""
    run_against: Callable[[bool, Path], Results] | None = None
    """The same interleaved with another checkout, whose directory it takes too, where a benchmark can do that."""


MODULES = (
    "generator",
    "reader",
    "processors",
    "oracle",
    "sync",
    "caches",
    "embedding",
    "store",
    "transport",
    "servers",
    "train",
    "fixed",
    "overlap",
    "policies",
    "trainers",
    "checkpoint",
    "terabyte",
    "soak",
    "start",
    "cluster",
    "recovery",
    "prepare",
)


def load(name: str) -> Benchmark:
    """The benchmark of this name."""
    if name not in MODULES:
        raise ConfigError(f"there is no benchmark {name!r}: choose one of {', '.join(MODULES)}")
    benchmark = importlib.import_module(f"benchmarks.{name}").BENCHMARK
    assert isinstance(benchmark, Benchmark)
    return benchmark


def source_of(checkout: Path) -> Path:
    """Where the package of a checkout lies."""
    source = checkout.resolve() / "src"
    if not (source / "bagpipe" / "__init__.py").is_file():
        raise ConfigError(f"there is no src/bagpipe in {checkout}: give the directory of a checkout")
    return source


def machine() -> dict[str, Any]:
    """What the figures were measured on."""
    import torch  # here, since processes of benchmarks load this package and not all of them need it

    return {
        "cores": len(os.sched_getaffinity(0)),
        "processor": _processor(),
        "python": platform.python_version(),
        "torch": torch.__version__,
        "threads": torch.get_num_threads(),
    }


def _processor() -> str:
    try:
        with Path("/proc/cpuinfo").open(encoding="ascii", errors="replace") as lines:
            return next(line.split(":", 1)[1].strip() for line in lines if line.startswith("model name"))
    except (OSError, StopIteration):
        return platform.processor() or platform.machine()
