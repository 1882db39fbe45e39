"""`bagpipe plan`."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from bagpipe.cli.output import AsJson, console, print_json, print_rows, progress, show_bytes
from bagpipe.errors import ConfigError

if TYPE_CHECKING:
    from bagpipe.data import Dataset
    from bagpipe.replay import Forecast

Data = Annotated[str, typer.Argument(help="Directory of shards, or a preset; `bagpipe data presets` lists them.")]
BatchSize = Annotated[int, typer.Option(min=1, help="Samples an iteration.")]
Lookaheads = Annotated[str | None, typer.Option("--lookahead", metavar="N,N,...", help="Lookaheads to try.")]
Dim = Annotated[int, typer.Option(min=1, help="Length of an embedding vector, for sizes in bytes.")]
Optimizer = Annotated[str, typer.Option(help="Row optimizer, whose state lies beside each vector.")]
Iterations = Annotated[
    int | None, typer.Option(min=1, help="Batches to replay. Default: all; of a preset, twice the longest lookahead.")
]
Cache = Annotated[str | None, typer.Option(metavar="SIZE", help="The cache you have: rows, 2GB, or 1.5%.")]
Tables = Annotated[bool, typer.Option("--tables", help="Add the hit rate of each table.")]
Seed = Annotated[int, typer.Option(min=0, help="Of a preset's samples.")]


def plan(
    data: Data,
    batch_size: BatchSize = 2048,
    lookahead: Lookaheads = None,
    dim: Dim = 48,
    optimizer: Optimizer = "adagrad",
    iterations: Iterations = None,
    cache: Cache = None,
    tables: Tables = False,
    seed: Seed = 0,
    as_json: AsJson = False,
) -> None:
    """Replay the ids of a data set, without training: what each lookahead needs and saves, and which to take."""
    from bagpipe.optim import build
    from bagpipe.replay import LOOKAHEADS, advised, forecast

    row_bytes = 4 * (dim + build(optimizer, lr=0.1).state_width((dim,)))
    source, is_preset = _open(data, seed)
    capacity = None if cache is None else _rows(cache, row_bytes, source)
    batches = -(-source.num_samples // batch_size)
    lookaheads = [n for n in LOOKAHEADS if n <= batches] if lookahead is None else _numbers(lookahead)
    if iterations is not None or is_preset:
        batches = min(batches, iterations or 2 * max(lookaheads, default=1))
    with progress(batches, "replaying ids") as report:
        forecasts = forecast(source, batch_size, lookaheads, batches, report)
    best = advised(forecasts, capacity)
    rows = [_row(each, row_bytes, capacity, best) for each in forecasts]
    if as_json:
        if tables:
            rows = [row | {"tables": _tables(each)} for row, each in zip(rows, forecasts, strict=True)]
        print_json(rows)
        return
    title = f"{data}: {batches:,} batches of {batch_size:,}, {row_bytes} B a row; rows an iteration, mean"
    print_rows(title, [_shown(each, row_bytes) for each in forecasts])
    if tables:
        print_rows(f"tables with lookahead {best.lookahead}; rows an iteration, mean", _tables(best))
    for line in _advice(forecasts, best, capacity, row_bytes):
        console.print(line)


def _row(each: Forecast, row_bytes: int, capacity: int | None, best: Forecast) -> dict[str, Any]:
    row: dict[str, Any] = {
        "lookahead": each.lookahead,
        "cache_rows": each.cache_rows,
        "cache_bytes": each.cache_rows * row_bytes,
        "fetched_rows": each.fetched_rows,
        "shared_rows": each.shared_rows,
        "critical_rows": each.critical_rows,
        "steady_fetched_rows": each.steady_fetched_rows,
        "window_rows": each.window_rows,
        "hit_rate": each.hit_rate,
    }
    if capacity is not None:
        row["fits"] = each.cache_rows <= capacity
    return row | {"advised": each is best}


def _shown(each: Forecast, row_bytes: int) -> dict[str, Any]:
    return {
        "lookahead": each.lookahead,
        "cache rows": each.cache_rows,
        "size": show_bytes(each.cache_rows * row_bytes),
        "fetched": each.fetched_rows,
        "shared": each.shared_rows,
        "critical": each.critical_rows,
        "hit rate": f"{each.hit_rate:.1%}",
    }


def _tables(each: Forecast) -> list[dict[str, Any]]:
    return [
        {"table": t.table, "unique_rows": t.unique_rows, "fetched_rows": t.fetched_rows, "hit_rate": t.hit_rate}
        for t in each.tables
    ]


def _advice(forecasts: list[Forecast], best: Forecast, capacity: int | None, row_bytes: int) -> list[str]:
    """What to make of the table."""
    from bagpipe.replay import SAVING_MIN, saving

    longer = [each for each in forecasts if each.lookahead > best.lookahead]
    if capacity is not None and best.cache_rows > capacity:
        return [
            f"A cache of {capacity:,} rows is less than any of these lookaheads needs: the window will be shortened. "
            f"Give at least {best.cache_rows:,} rows ({show_bytes(best.cache_rows * row_bytes)}), or smaller batches."
        ]
    lines = [
        f"Take lookahead = {best.lookahead} and a cache of {best.cache_rows:,} rows "
        f"({show_bytes(best.cache_rows * row_bytes)}): {best.hit_rate:.1%} of a batch's rows are cached already, "
        f"{best.fetched_rows:,.0f} ({show_bytes(best.fetched_rows * row_bytes)}) are fetched, and as many written back."
    ]
    if not longer:
        if len(forecasts) > 1 and saving(forecasts[-2], best) >= SAVING_MIN:
            lines.append("Traffic still falls at the longest lookahead: try longer ones if there is memory.")
    elif capacity is not None and longer[0].cache_rows > capacity:
        lines.append(
            f"Lookahead {longer[0].lookahead} would fetch {longer[0].fetched_rows:,.0f} rows an iteration, but needs a "
            f"cache of {longer[0].cache_rows:,} rows ({show_bytes(longer[0].cache_rows * row_bytes)})."
        )
    else:
        lines.append(f"Beyond it, twice the lookahead saves less than {SAVING_MIN:.0%} of the fetches.")
    return lines


def _numbers(text: str) -> list[int]:
    try:
        return [int(part) for part in text.split(",")]
    except ValueError:
        raise ConfigError(f"--lookahead {text!r}: give whole numbers with commas between, such as 1,10,100") from None


def _rows(cache: str, row_bytes: int, source: Dataset) -> int:
    from bagpipe.config import Share, cache_size

    size = cache_size(int(cache) if cache.strip().isdigit() else cache)
    if isinstance(size, Share):
        return size.num_rows(source.tables)
    return size if isinstance(size, int) else size.num_bytes // row_bytes


def _open(data: str, seed: int) -> tuple[Dataset, bool]:
    from bagpipe.data import PRESETS, Shards, generated

    if data in PRESETS:
        return generated(data, seed=seed), True
    if not Path(data).is_dir():
        raise ConfigError(f"{data!r} is neither a directory of shards nor a preset: presets are {', '.join(PRESETS)}")
    return Shards(data), False
