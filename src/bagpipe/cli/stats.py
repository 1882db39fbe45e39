"""`bagpipe data stats`."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from bagpipe.cli.output import AsJson, console, print_json, print_pairs, print_rows, progress
from bagpipe.errors import ConfigError

if TYPE_CHECKING:
    from bagpipe.data import Dataset
    from bagpipe.data.stats import DayStats, Stats, TableStats

Data = Annotated[str, typer.Argument(help="Directory of shards, or a preset; `bagpipe data presets` lists them.")]
BatchSizes = Annotated[
    str | None, typer.Option("--batch-sizes", metavar="N,N,...", help="Count the rows of batches of these sizes.")
]
Days = Annotated[
    int | None,
    typer.Option(min=1, help="Cut the samples into so many equal stretches, instead of the days that the data names."),
]
Samples = Annotated[
    int | None, typer.Option(min=1, help="Look at the first so many only. Default: all; of a preset, a million.")
]
Memory = Annotated[
    str, typer.Option(metavar="SIZE", help="For counting, such as 2GB; data that needs more is read several times.")
]
Html = Annotated[Path | None, typer.Option("--html", metavar="FILE", help="Also write a page with pictures.")]
Seed = Annotated[int, typer.Option(min=0, help="Of a preset's samples.")]
Workers = Annotated[int, typer.Option(min=1, help="Threads that read; the figures do not depend on it.")]

PRESET_SAMPLES = 1_000_000


def stats(
    data: Data,
    batch_sizes: BatchSizes = None,
    days: Days = None,
    samples: Samples = None,
    memory: Memory = "2GB",
    html: Html = None,
    seed: Seed = 0,
    workers: Workers = 1,
    as_json: AsJson = False,
) -> None:
    """Count the ids of a data set: rows in use, skew, rows of a batch, and drift from day to day."""
    from bagpipe.data.stats import BATCH_SIZES, days_of, measure
    from bagpipe.data.stats_page import stats_page

    sizes = BATCH_SIZES if batch_sizes is None else _numbers(batch_sizes)
    memory_bytes = _bytes(memory)
    source = _open(data, samples, seed)
    if samples is None or samples > source.num_samples:
        samples = source.num_samples
    stretches = days_of(source, days, samples)
    with progress(samples, f"counting {data}") as bar:
        found = measure(
            source.part(0, samples),
            batch_sizes=sizes,
            days=stretches,
            memory_bytes=memory_bytes,
            report=lambda done, total: bar(done * samples // total),
            workers=workers,
        )
    if html is not None:
        stats_page(f"Data: {data}", found).save(html, "Made by `bagpipe data stats`.")
    if as_json:
        print_json({"data": data, **found.record()})
        return
    _print(data, found)
    if html is not None:
        console.print(f"The page with pictures is {html}")


def _print(data: str, found: Stats) -> None:
    from bagpipe.data.stats import SHARES, TOP

    whole = found.whole
    print_pairs(
        data,
        {
            "samples": found.samples,
            "tables": len(found.tables),
            "ids a sample": whole.ids_per_sample,
            "different rows": whole.unique_rows,
            **{f"accesses of the top {top} of rows": _percent(whole.top_share[top]) for top in TOP},
            **{f"rows for {share} of accesses": whole.rows_for[share] for share in SHARES},
        },
    )
    tables = [*found.tables, whole]
    print_rows("tables", [_table_row(table) for table in tables])
    print_rows("different rows of a batch, by its size", [_batch_row(table) for table in tables])
    print_rows("days, all tables: overlap with the day before", [_overlap_row(day) for day in whole.days])
    print_rows("days, all tables: share of accesses covered", [_drift_row("day", day.name, day) for day in whole.days])
    if len(whole.days) > 1:
        title = f"day {whole.days[-1].name}, by table: share of accesses covered"
        print_rows(title, [_drift_row("table", table.table, table.days[-1]) for table in tables])


def _table_row(table: TableStats) -> dict[str, Any]:
    return {
        "table": table.table,
        "size": table.rows,
        "rows": table.unique_rows,
        "accesses": table.accesses,
        **{f"top {top}": _percent(share) for top, share in table.top_share.items()},
    }


def _batch_row(table: TableStats) -> dict[str, Any]:
    return {"table": table.table, **{f"{size:,}": rows for size, rows in table.rows_per_batch.items()}}


def _overlap_row(day: DayStats) -> dict[str, Any]:
    return {
        "day": day.name,
        "rows": day.unique_rows,
        "never before": day.new_rows,
        "of the day before": _percent(day.repeated_rows),
        "accesses to these": _percent(day.repeated_accesses),
    }


def _drift_row(kind: str, name: str, day: DayStats) -> dict[str, Any]:
    return {
        kind: name,
        **{f"first day's top {top}": _percent(share) for top, share in day.covered.items()},
        **{f"own top {top}": _percent(share) for top, share in day.top_share.items()},
    }


def _percent(share: float | None) -> str:
    return "-" if share is None else f"{share:.1%}"


def _numbers(text: str) -> list[int]:
    try:
        return [int(part) for part in text.split(",")]
    except ValueError:
        raise ConfigError(f"--batch-sizes {text!r}: give whole numbers with commas between, such as 256,4096") from None


def _bytes(text: str) -> int:
    from bagpipe.config import Size, cache_size

    try:
        size = cache_size(text)
    except ConfigError:
        size = 0
    if not isinstance(size, Size):
        raise ConfigError(f"--memory {text!r}: give bytes such as 500MB or 2GB")
    return size.num_bytes


def _open(data: str, samples: int | None, seed: int) -> Dataset:
    from bagpipe.data import PRESETS, Shards, find_preset, generated

    if data in PRESETS:
        return generated(data, min(find_preset(data).samples, samples or PRESET_SAMPLES), seed)
    if not Path(data).is_dir():
        raise ConfigError(f"{data!r} is neither a directory of shards nor a preset: presets are {', '.join(PRESETS)}")
    return Shards(data)
