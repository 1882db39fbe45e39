"""`bagpipe verify`."""

from __future__ import annotations

import tempfile
from pathlib import Path

import typer

from bagpipe.cli.output import AsJson, Settings, console, print_json, print_pairs, progress
from bagpipe.cli.train import ConfigPath, InitFrom, with_init_from


def verify(
    config: ConfigPath = None, settings: Settings = None, init_from: InitFrom = None, as_json: AsJson = False
) -> None:
    """Train twice, with the reference and with the configured system, and compare every bit."""
    from bagpipe.config import load_config

    chosen = load_config(
        config, with_init_from(settings, init_from)
    )  # before PyTorch is loaded: a wrong one is refused at once
    with progress(None, "training twice") as report, tempfile.TemporaryDirectory(prefix="bagpipe-verify-") as directory:
        report.prepares("loading PyTorch")
        from bagpipe.job import prepare
        from bagpipe.policies import POLICIES
        from bagpipe.training import verify

        report.prepares("opening the data")
        job = prepare(chosen, Path(directory) / "run")
        report.begins(2 * job.iterations)
        result = verify(job, report)
    promised = POLICIES[chosen.policy].is_exact(chosen.policy_options.build())
    result["exact"] = promised
    if as_json:
        print_json(result)
    else:
        print_pairs(f"{job.config.model.name} on {job.source}", result)
        if not promised:
            console.print(f"policy {chosen.policy!r} does not promise the reference's bits with these options")
    raise typer.Exit(0 if result["identical"] else 1)
