"""`bagpipe data`."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any

import typer

from bagpipe.cli.output import AsJson, console, print_json, print_pairs, print_rows, progress

app = typer.Typer(help="Make and inspect data.", no_args_is_help=True)

Preset = Annotated[str, typer.Argument(help="Kind of data; `bagpipe data presets` lists them.")]
Destination = Annotated[Path, typer.Argument(help="Directory for the shards; must be new or empty.")]
Samples = Annotated[int | None, typer.Option(min=1, help="How many samples; as many as the original if not given.")]
Seed = Annotated[int, typer.Option(min=0, help="Fixes every sample.")]
TopShare = Annotated[
    float | None, typer.Option(help="Share of accesses that the top 1 % of rows take (0.01: no skew).")
]
Zipf = Annotated[float | None, typer.Option(help="Exponent of the popularity of rows, instead of --top-share.")]
Drift = Annotated[float | None, typer.Option(help="Share of the rows whose popularity moves to others each day.")]
Burst = Annotated[float, typer.Option(help="Chance that an id repeats one of the last batches.")]
Workers = Annotated[int, typer.Option(min=1, help="Threads that generate; the samples do not depend on it.")]


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
            "summary": preset.summary,
        }
        for preset in PRESETS.values()
    ]
    if as_json:
        print_json(rows)
        return
    print_rows("presets", [{key: value for key, value in row.items() if key != "summary"} for row in rows])
    for row in rows:
        console.print(f"{row['preset']}: {row['summary']}", highlight=False)


@app.command("generate")
def generate(
    preset: Preset,
    destination: Destination,
    samples: Samples = None,
    seed: Seed = 0,
    top_share: TopShare = None,
    zipf: Zipf = None,
    drift: Drift = None,
    burst: Burst = 0.0,
    workers: Workers = 2,
    as_json: AsJson = False,
) -> None:
    """Write calibrated synthetic data as shards."""
    from bagpipe.data import generated, write

    dials: dict[str, Any] = {"top_share": top_share, "zipf": zipf, "drift": drift, "burst": burst}
    data = generated(preset, samples, seed, **dials)
    with progress(data.num_samples, f"generating {preset}") as report:
        manifest = write(data, destination, workers=workers, progress=lambda done, _: report(done))
    made = {"samples": manifest.samples, "shards": len(manifest.shards), "tables": len(data.tables)}
    if as_json:
        print_json(made)
    else:
        print_pairs(str(destination), made)
