"""`bagpipe compare`."""

from __future__ import annotations

import tempfile
from pathlib import Path
from typing import Annotated, Any

import typer

from bagpipe.cli.output import AsJson, Settings, console, print_json, print_rows, progress
from bagpipe.cli.train import ConfigPath

Policies = Annotated[str | None, typer.Option(metavar="A,B,...", help="Which policies; all of them if not given.")]

SHOWN = {
    "samples_per_second": "samples/s",
    "fetched_rows": "fetched",
    "written_rows": "written",
    "stall_fraction": "stall",
}
HIDDEN = ("lookahead", "cache_rows", "log_loss", "reason")
SHARES = ("hit_rate", "stall_fraction")


def compare(
    config: ConfigPath = None, policies: Policies = None, settings: Settings = None, as_json: AsJson = False
) -> None:
    """Train with every policy on the same data and model, and hold each to the reference, bit for bit."""
    from bagpipe.config import load_config

    configured = load_config(config, settings or ())  # before PyTorch is loaded: a wrong one is refused at once
    from bagpipe.compare import chosen, compare
    from bagpipe.job import prepare

    names = chosen(None if policies is None else [name.strip() for name in policies.split(",")])
    with tempfile.TemporaryDirectory(prefix="bagpipe-compare-") as directory:
        job = prepare(configured, Path(directory) / "run")
        with progress((1 + len(names)) * job.iterations, "training") as report:
            rows = compare(job, names, report)
    if as_json:
        print_json(rows)
    else:
        shown = [{SHOWN.get(name, name): _shown(name, row[name]) for name in row if name not in HIDDEN} for row in rows]
        print_rows(f"{job.config.model.name} on {job.source}, {job.iterations} iterations", shown)
        for row in rows:
            if "reason" in row:
                console.print(f"{row['policy']} can't run: {row['reason']}", highlight=False, markup=False)
    raise typer.Exit(1 if all("reason" in row for row in rows) else 0)


def _shown(name: str, value: Any) -> Any:
    return f"{value:.1%}" if name in SHARES and value is not None else value
