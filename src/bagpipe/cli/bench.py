"""`bagpipe bench`."""

from __future__ import annotations

import importlib
import sys
from pathlib import Path
from typing import Annotated, Any

import typer

import bagpipe
from bagpipe.cli.output import AsJson, errors, print_json, print_rows
from bagpipe.errors import ConfigError

Name = Annotated[str | None, typer.Argument(help="Which one; `all` runs them one after another.")]
List = Annotated[bool, typer.Option("--list", help="Name the benchmarks.")]
Against = Annotated[
    Path | None, typer.Option(help="Another checkout, measured in turn with this one; not every benchmark can do it.")
]
Quick = Annotated[bool, typer.Option(help="Small enough to try out; the figures then say little.")]


def bench(
    name: Name = None,
    list_all: List = False,
    quick: Quick = False,
    against: Against = None,
    as_json: AsJson = False,
) -> None:
    """Measure one part of the system on this machine."""
    benchmarks = _load()
    if list_all:
        rows = [{"name": each, "measures": benchmarks.load(each).summary} for each in benchmarks.MODULES]
        print_json(rows) if as_json else print_rows("benchmarks", rows)
        return
    if name is None:
        raise ConfigError(f"name a benchmark: one of {', '.join(benchmarks.MODULES)}, or all")
    names = benchmarks.MODULES if name == "all" else (name,)
    reports = [_run(benchmarks, each, quick, against) for each in names]
    if as_json:
        print_json(reports[0] if name != "all" else reports)
        return
    for report in reports:
        print_rows(report["name"], report["results"])


def _load() -> Any:
    """The folder of benchmarks, which lies beside the package in a checkout and is not installed with it."""
    root = Path(bagpipe.__file__).resolve().parents[2]
    if not (root / "benchmarks" / "__init__.py").is_file():
        raise ConfigError(
            "the benchmarks are not installed with the package: they are in the folder benchmarks of the source tree; "
            "run `make install` and `.venv/bin/bagpipe bench` there"
        )
    if str(root) not in sys.path:
        sys.path.append(str(root))
    return importlib.import_module("benchmarks")


def _run(benchmarks: Any, name: str, quick: bool, against: Path | None) -> dict[str, Any]:
    benchmark = benchmarks.load(name)
    if against is not None and benchmark.run_against is None:
        able = [each for each in benchmarks.MODULES if benchmarks.load(each).run_against is not None]
        raise ConfigError(f"benchmark {name!r} can't be run against {against}: give --against to {', '.join(able)}")
    errors.print(f"{name}: {benchmark.summary}")
    results = benchmark.run(quick) if against is None else benchmark.run_against(quick, against)
    return {"name": name, "machine": benchmarks.machine(), "results": results}
