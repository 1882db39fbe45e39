"""`bagpipe bench`."""

from __future__ import annotations

from typing import Annotated, Any

import typer

from bagpipe.cli.output import AsJson, errors, print_json, print_rows
from bagpipe.errors import ConfigError

Name = Annotated[str | None, typer.Argument(help="Which one; `all` runs them one after another.")]
List = Annotated[bool, typer.Option("--list", help="Name the benchmarks.")]
Quick = Annotated[bool, typer.Option(help="Small enough to try out; the figures then say little.")]


def bench(name: Name = None, list_all: List = False, quick: Quick = False, as_json: AsJson = False) -> None:
    """Measure one part of the system on this machine."""
    from bagpipe.bench import MODULES, load

    if list_all:
        rows = [{"name": each, "measures": load(each).summary} for each in MODULES]
        print_json(rows) if as_json else print_rows("benchmarks", rows)
        return
    if name is None:
        raise ConfigError(f"name a benchmark: one of {', '.join(MODULES)}, or all")
    reports = [_run(each, quick) for each in (MODULES if name == "all" else (name,))]
    if as_json:
        print_json(reports[0] if name != "all" else reports)
        return
    for report in reports:
        print_rows(report["name"], report["results"])


def _run(name: str, quick: bool) -> dict[str, Any]:
    from bagpipe.bench import load, machine

    benchmark = load(name)
    errors.print(f"{name}: {benchmark.summary}")
    return {"name": name, "machine": machine(), "results": benchmark.run(quick)}
