"""`bagpipe data`."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from enum import StrEnum
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich.progress import BarColumn, Progress, TaskProgressColumn, TextColumn, TimeRemainingColumn

from bagpipe.cli.output import TITLE, AsJson, console, errors, print_json, print_pairs, print_rows, progress
from bagpipe.cli.stats import stats

if TYPE_CHECKING:
    from bagpipe.data.prepare.job import Prepared

app = typer.Typer(help="Make and inspect data.", no_args_is_help=True)
app.command("stats")(stats)

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


class Kind(StrEnum):
    """What raw files hold."""

    criteo = "criteo"
    avazu = "avazu"
    movielens = "movielens"
    parquet = "parquet"
    csv = "csv"
    tsv = "tsv"


class OnError(StrEnum):
    """What to do with a line that can't be used."""

    stop = "stop"
    skip = "skip"
    quarantine = "quarantine"


Sources = Annotated[list[Path], typer.Argument(help="Raw files as downloaded, also gzip, or directories of them.")]
DataDirectory = Annotated[
    Path, typer.Argument(metavar="DESTINATION", help="Directory of the data set: new, empty, or one that was stopped.")
]
SchemaFile = Annotated[Path | None, typer.Option("--schema", help="TOML file that says what the columns are.")]
Numberings = Annotated[
    list[str] | None,
    typer.Option("--numbering", metavar="[TABLE=]KIND", help="first (default), frequency, hash:SIZE or ids."),
]
MinCounts = Annotated[
    list[str] | None,
    typer.Option("--min-count", metavar="[TABLE=]N", help="Values that occur less often share one row."),
]
Earlier = Annotated[
    Path | None, typer.Option("--vocabulary", help="Number values as this data set, prepared earlier, does.")
]
Bad = Annotated[
    OnError, typer.Option("--on-error", help="Lines that can't be used: stop, list and skip, or keep to be mended.")
]
Validation = Annotated[
    str | None, typer.Option(help="Share of the samples to validate on (0.1), or the file or day that begins them.")
]
Test = Annotated[
    str | None, typer.Option(help="Share of the samples, the last, to test on, or the file or day that begins them.")
]
Memory = Annotated[str, typer.Option(help="How much memory the process may take.")]
Threads = Annotated[int, typer.Option(min=1, help="Threads that parse and number; the result does not depend on it.")]
Limit = Annotated[int | None, typer.Option(min=1, help="Prepare only the first samples.")]
ShardSamples = Annotated[int, typer.Option(min=1, help="Samples of a shard; progress is kept after each.")]
DataSet = Annotated[Path, typer.Argument(help="Directory of shards.")]
First = Annotated[int, typer.Option("--sample", min=0, help="The first sample to show.")]
HowMany = Annotated[int, typer.Option("--count", min=1, help="How many samples.")]
FeatureName = Annotated[str | None, typer.Option("--feature", help="With --id: what an id of this feature stands for.")]
RowId = Annotated[int | None, typer.Option("--id", help="The id.")]


@app.command("prepare")
def prepare(
    kind: Annotated[Kind, typer.Argument(help="What the files hold; parquet, csv and tsv need --schema.")],
    sources: Sources,
    destination: DataDirectory,
    schema: SchemaFile = None,
    numbering: Numberings = None,
    min_count: MinCounts = None,
    vocabulary: Earlier = None,
    on_error: Bad = OnError.stop,
    validation: Validation = None,
    test: Test = None,
    memory: Memory = "2GB",
    threads: Threads = 2,
    limit: Limit = None,
    shard_samples: ShardSamples = 1 << 18,
    as_json: AsJson = False,
) -> None:
    """Turn raw files into shards; the same command goes on where it was stopped."""
    from bagpipe.data.prepare.job import prepare as run
    from bagpipe.data.prepare.options import Options
    from bagpipe.data.prepare.progress import has_progress

    options = Options(
        schema=schema,
        numbering=tuple(numbering or ()),
        min_count=tuple(min_count or ()),
        vocabulary=vocabulary,
        on_error=on_error.value,
        validation=validation,
        test=test,
        memory=memory,
        threads=threads,
        limit=limit,
        shard_samples=shard_samples,
    )
    try:
        with _bytes_bar(f"preparing {kind.value}") as report:
            prepared = run(kind.value, sources, destination, options, report)
    except BaseException:
        if has_progress(destination):
            errors.print(f"What is finished stays in {destination}: the same command goes on from there.")
        raise
    summary = _summary(prepared)
    if as_json:
        print_json(summary)
    else:
        print_pairs(str(destination), {name: _flat(value) for name, value in summary.items()})


@contextmanager
def _bytes_bar(title: str) -> Iterator[Callable[[int, int, int], None]]:
    """A progress bar over bytes that tells of samples; silent where standard error is not a terminal."""
    columns = (
        TITLE,
        BarColumn(),
        TaskProgressColumn(),
        TextColumn("{task.fields[samples]:,} samples, {task.fields[rate]:,.0f}/s"),
        TimeRemainingColumn(),
    )
    with Progress(*columns, console=errors, transient=True) as bar:
        task = bar.add_task(title, total=None, samples=0, rate=0.0)
        before: list[int] = []

        def report(done: int, total: int, samples: int) -> None:
            # A second pass begins again, a run that goes on does not begin at 0.
            if not before or samples < before[-1]:
                before[:] = [samples, samples]
                bar.reset(task, total=total, completed=done, samples=samples, rate=0.0)
            elapsed = bar.tasks[0].elapsed or 0.0
            before[-1] = samples
            rate = (samples - before[0]) / elapsed if elapsed else 0.0
            bar.update(task, total=total, completed=done, samples=samples, rate=rate)

        yield report


def _summary(prepared: Prepared) -> dict[str, Any]:
    manifest = prepared.manifest
    new = manifest.samples - prepared.samples_before
    return {
        "samples": manifest.samples,
        "shards": len(manifest.shards),
        "tables": len(manifest.tables),
        "rows": sum(table.rows or 0 for table in manifest.tables),
        "skipped": manifest.skipped,
        "skipped_files": [str(path) for path in prepared.rejected],
        "parts": {part.name: part.stop - part.start for part in manifest.parts},
        "days": len(manifest.days),
        "seconds": prepared.seconds,
        "samples_per_second": new / prepared.seconds if prepared.seconds else 0.0,
    }


def _flat(value: Any) -> Any:
    if isinstance(value, dict):
        return ", ".join(f"{name} {count:,}" for name, count in value.items()) or None
    return ", ".join(value) or None if isinstance(value, list) else value


@app.command("show")
def show(
    path: DataSet,
    sample: First = 0,
    count: HowMany = 1,
    feature: FeatureName = None,
    row: RowId = None,
    as_json: AsJson = False,
) -> None:
    """Show samples with the values that their ids stand for, or what one id stands for."""
    from bagpipe.data.prepare.show import Shown
    from bagpipe.errors import ConfigError

    if (feature is None) != (row is None):
        raise ConfigError("--feature and --id go together: give both, or none to see samples")
    shown = Shown(path)
    if feature is not None and row is not None:
        found = shown.row(feature, row)
        print_json(found) if as_json else print_pairs(str(path), found)
        return
    samples = shown.samples(sample, count)
    if as_json:
        print_json({"samples": samples})
        return
    for each in samples:
        print_rows(f"sample {each['sample']:,}: label {each['label']}", _lines(each))


def _lines(sample: dict[str, Any]) -> list[dict[str, Any]]:
    """One line for each feature of a sample, or for each id of a list."""
    lines: list[dict[str, Any]] = [
        {"feature": name, "value": f"{value:.6g}"} for name, value in sample["numeric"].items()
    ]
    for name, cell in sample["categorical"].items():
        cells = cell if isinstance(cell, list) else [cell]
        lines += [
            {
                "feature": name,
                "value": each.get("value") if each.get("is", "value") == "value" else f"({each['is']})",
                "id": str(each["id"]),
                "count": each.get("count"),
            }
            for each in cells
        ] or [{"feature": name, "value": "(empty list)"}]
    return lines


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
        console.print(f"{row['preset']}: {row['summary']}")


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
