"""`bagpipe train`."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from bagpipe.cli.output import AsJson, Settings, print_json, print_pairs, progress

ConfigPath = Annotated[Path | None, typer.Argument(help="Configuration in TOML; without it the defaults are used.")]
RunDirectory = Annotated[
    Path | None, typer.Option(help="Where summary.json goes; must be new or empty. Default: runs/DATE-MODEL.")
]


def train(
    config: ConfigPath = None, settings: Settings = None, run_dir: RunDirectory = None, as_json: AsJson = False
) -> None:
    """Train a model. With no configuration: DLRM on generated Criteo-like data, about a minute."""
    from bagpipe.allocator import keep_freed_memory
    from bagpipe.config import load_config

    chosen = load_config(config, settings or ())  # before PyTorch is loaded: a wrong one is refused at once
    from bagpipe.job import prepare
    from bagpipe.training import train

    keep_freed_memory()
    job = prepare(chosen, run_dir)
    with progress(job.iterations, f"training {job.config.model.name}") as report:
        summary = train(job, report)
    if as_json:
        print_json(summary)
    else:
        print_pairs(f"{job.config.model.name} on {job.source}", summary)
