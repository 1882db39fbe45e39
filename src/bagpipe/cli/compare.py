"""`bagpipe compare`."""

from __future__ import annotations

import tempfile
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from bagpipe.cli.output import AsJson, Reporter, Settings, console, print_json, print_rows, progress
from bagpipe.cli.train import ConfigPath
from bagpipe.errors import ConfigError

if TYPE_CHECKING:
    from bagpipe.compare import Point, Sweep
    from bagpipe.config import Config

Policies = Annotated[str | None, typer.Option(metavar="A,B,...", help="Which policies; all of them if not given.")]
SweepOver = Annotated[
    str | None,
    typer.Option(
        "--sweep",
        metavar="NAME=V,V,...",
        help="Repeat with each value: cache=1%,2%,5% (or rows, or bytes), lookahead=5,50,auto, batch=512,2048, or "
        "skew=0.9,0.1 (share of accesses of the top 1% of rows, generated data only).",
    ),
]
Repeat = Annotated[
    int, typer.Option("--repeat", min=1, metavar="N", help="Runs of each policy, in turns: shows how far speeds vary.")
]
HtmlPath = Annotated[Path | None, typer.Option("--html", metavar="FILE", help="Write a page with charts, too.")]

SHOWN = {
    "samples_per_second": "samples/s",
    "fetched_rows": "fetched",
    "written_rows": "written",
    "stall_fraction": "stall",
    "peak_rows": "peak",
    "cache_rows": "slots",
}
HIDDEN = (
    *("lookahead", "log_loss", "reason", "promised"),
    *("runs", "samples_per_second_min", "samples_per_second_max", "as_fast_as_any"),
)
SHARES = ("hit_rate", "stall_fraction", "spread")


def compare(
    config: ConfigPath = None,
    policies: Policies = None,
    sweep: SweepOver = None,
    html: HtmlPath = None,
    repeat: Repeat = 3,
    settings: Settings = None,
    as_json: AsJson = False,
) -> None:
    """Train with every policy on the same data and model, and hold each to the reference, bit for bit.

    Who fetches fewest rows comes first: that is the same in every run. Speeds are medians of runs in turns.
    """
    from bagpipe.config import load_config

    configured = load_config(config, settings or ())  # before PyTorch is loaded: a wrong one is refused at once
    with progress(None, "training") as report:
        report.prepares("loading PyTorch")
        rows, title, swept = _compare(configured, policies, sweep, html, repeat, report)
    if as_json:
        print_json(rows)
    else:
        _print(title, rows, None if swept is None else swept.name)
    if html is not None:
        from bagpipe.compare_page import compare_page

        compare_page(title, rows, swept).save(html)
    raise typer.Exit(1 if any(map(_is_broken, rows)) or all("reason" in row for row in rows) else 0)


def _compare(
    configured: Config, policies: str | None, sweep: str | None, html: Path | None, repeat: int, report: Reporter
) -> tuple[list[dict[str, Any]], str, Sweep | None]:
    """The rows of the comparison, its title, and what was swept."""
    from bagpipe.compare import Point, chosen, compare_over, num_iterations, parse_sweep, points_of
    from bagpipe.job import prepare

    names = chosen(None if policies is None else [name.strip() for name in policies.split(",")])
    swept = None if sweep is None else parse_sweep(sweep)
    if html is not None:
        _require_writable(html)
    with tempfile.TemporaryDirectory(prefix="bagpipe-compare-") as directory:
        job = prepare(configured, Path(directory) / "run")
        points = [Point(job)] if swept is None else points_of(job, swept)
        report.begins(num_iterations(points, names, repeat))
        rows = compare_over(points, names, report, repeat, partial(_tell, report))
    of_batches = swept is not None and swept.name == "batch"
    trained = f"{job.samples_of(job.iterations):,} samples" if of_batches else f"{job.iterations} iterations"
    return rows, f"{job.config.model.name} on {job.source}, {trained}", swept


def _tell(report: Reporter, point: Point, name: str, run: dict[str, Any]) -> None:
    """What a run of a policy has come to, at once: all of them take long."""
    at = "" if point.value is None else f" at {point.value}"
    report.tell(
        f"{name}{at}: {run['fetched_rows']:,} rows fetched, {run['hit_rate']:.1%} hits, "
        f"{run['samples_per_second']:,.0f} samples/s, {'' if run['exact'] else 'not '}the reference's bits"
    )


def _require_writable(path: Path) -> None:
    """Before hours of training, not after."""
    there = path.exists()
    try:
        with path.open("a"):  # what is there stays, should training fail
            pass
        if not there:
            path.unlink()
    except OSError as error:
        raise ConfigError(f"--html {path} can't be written ({error.strerror}): choose another file") from error


def _print(title: str, rows: list[dict[str, Any]], swept: str | None) -> None:
    names = SHOWN | ({} if swept is None else {"value": swept})
    alike = len({row["cache_rows"] for row in rows} - {None}) <= 1
    hidden = (*HIDDEN, "cache_rows") if alike else HIDDEN
    print_rows(
        title,
        [
            {names.get(name, name): _shown(name, value) for name, value in _spread(row).items() if name not in hidden}
            for row in rows
        ],
    )
    _tell_of_speeds(rows, swept)
    for name in dict.fromkeys(row["policy"] for row in rows if not row["promised"]):
        console.print(f"{name} does not promise the reference's bits with these options")
    for row in rows:
        if _is_broken(row):
            console.print(f"{row['policy']} has other bits than the reference, though it promises them: a defect")
        if "reason" in row:
            at = f" at {swept} {row['value']}" if swept else ""
            console.print(f"{row['policy']} can't run{at}: {row['reason']}")


def _tell_of_speeds(rows: list[dict[str, Any]], swept: str | None) -> None:
    """How far speeds can be relied on, and which policies they do not tell apart."""
    most = max((row["runs"] for row in rows), default=0)
    told = "Whoever fetches fewest rows comes first: that is the same in every run. "
    if most == 1:
        told += "Speeds are of one run each, and may differ by noise alone: --repeat 3 shows how far they vary."
    elif most:
        told += f"Speeds are medians of {most} runs in turns; spread is from the slowest of these to the fastest."
    console.print(told)
    for value in dict.fromkeys(row.get("value") for row in rows):
        alike = [row["policy"] for row in rows if row.get("value") == value and row["as_fast_as_any"]]
        if len(alike) > 1:
            at = "" if value is None else f" at {swept} {value}"
            console.print(f"Not told apart by speed{at}, the fastest among them: {', '.join(alike)}")


def _is_broken(row: dict[str, Any]) -> bool:
    return bool(row["promised"]) and row["exact"] is False


def _spread(row: dict[str, Any]) -> dict[str, Any]:
    """With how far its speeds are apart, beside them, where there are several."""
    if row["runs"] < 2:
        return row
    apart = (row["samples_per_second_max"] - row["samples_per_second_min"]) / row["samples_per_second"]
    place = list(row).index("samples_per_second") + 1
    items = list(row.items())
    return dict([*items[:place], ("spread", apart), *items[place:]])


def _shown(name: str, value: Any) -> Any:
    return f"{value:.1%}" if name in SHARES and value is not None else value
