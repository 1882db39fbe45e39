"""`bagpipe data`."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from bagpipe.cli.output import AsJson, print_json, print_pairs, print_rows, progress

app = typer.Typer(help="Make and inspect data.", no_args_is_help=True)

Preset = Annotated[str, typer.Argument(help="Kind of data; `bagpipe data presets` lists them.")]
Destination = Annotated[Path, typer.Argument(help="Directory for the shards; must be new or empty.")]
Samples = Annotated[int | None, typer.Option(min=1, help="How many samples; as many as the original if not given.")]
Seed = Annotated[int, typer.Option(min=0, help="Fixes every sample.")]
Skew = Annotated[float | None, typer.Option(help="Share of accesses that the top 1 % of rows take, 0 to 1.")]
Zipf = Annotated[float | None, typer.Option(help="Exponent of the popularity law instead.")]
Drift = Annotated[float | None, typer.Option(help="Share of popular rows that change from day to day.")]
Burst = Annotated[float | None, typer.Option(help="Chance that an id repeats within a few batches.")]


@app.command("presets")
def presets(as_json: AsJson = False) -> None:
    """List the kinds of data that can be generated."""
    from bagpipe.data import PRESETS

    rows = [
        {
            "preset": preset.name,
            "samples": preset.samples,
            "tables": len(preset.tables),
            "rows": sum(table.rows or 0 for table in preset.tables),
            "numeric": preset.num_dense,
        }
        for preset in PRESETS.values()
    ]
    print_json(rows) if as_json else print_rows("presets", rows)
