"""Policies side by side as a page with pictures: bars for one comparison, lines over a sweep."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from bagpipe.compare import Sweep
from bagpipe.observe.charts import NUM_COLOURS, Axis, Chart, Number, Series, bar_chart, count, line_chart, percent
from bagpipe.observe.page import Cell, Page

Rows = Sequence[dict[str, Any]]

FIGURES: tuple[tuple[str, str, str, Callable[[Number], str]], ...] = (
    ("samples_per_second", "Speed", "samples a second", count),
    ("stall_fraction", "Time that training waited for rows", "share of the time", percent),
    ("hit_rate", "Rows found in the cache", "share of a batch's rows", percent),
    ("fetched_rows", "Rows fetched", "rows in all", count),
    ("written_rows", "Rows written back", "rows in all", count),
    ("peak_rows", "Slots in use at the most", "rows", count),
)
COLUMNS = {
    "samples_per_second": "samples/s",
    "hit_rate": "hit rate",
    "fetched_rows": "fetched",
    "written_rows": "written",
    "stall_fraction": "stall",
    "peak_rows": "peak slots",
    "cache_rows": "slots",
    "loss": "loss",
    "auc": "AUC",
}


def compare_page(title: str, rows: Rows, sweep: Sweep | None = None) -> Page:
    """A page on what `bagpipe.compare` has found."""
    page = Page(title, _summary(rows))
    ran = [row for row in rows if "reason" not in row]
    if ran:
        page.section("Side by side" if sweep is None else f"Over {sweep.name}")
        page.charts(*[_bars(ran, *figure) if sweep is None else _lines(ran, sweep, *figure) for figure in FIGURES])
    page.section("Figures")
    values = [None] if sweep is None else sweep.values
    for value in values:
        own = [row for row in rows if row.get("value") == value]
        named = "Policies" if sweep is None or value is None else f"{sweep.name} {value}"
        page.table(named, ["policy", *COLUMNS.values(), "exact"], [_line_of(row) for row in own])
    missing = [row for row in rows if "reason" in row]
    if missing:
        page.section("Not run")
        for row in missing:
            page.text(f"{row['policy']}{' at ' + row['value'] if 'value' in row else ''}: {row['reason']}")
    return page


def _summary(rows: Rows) -> str:
    ran = [row for row in rows if "reason" not in row]
    wrong = sorted({row["policy"] for row in ran if row["promised"] and not row["exact"]})
    inexact = sorted({row["policy"] for row in ran if not row["promised"]})
    text = (
        f"{sum(row['runs'] for row in ran)} runs on the same executor, each compared with the reference bit for bit. "
    )
    text += f"Not the reference's bits, though promised: {', '.join(wrong)}. " if wrong else ""
    text += f"Does not promise the reference's bits: {', '.join(inexact)}. " if inexact else ""
    runs = max((row["runs"] for row in ran), default=0)
    return text + (
        f"Policies in order of rows fetched; speeds are medians of {runs} runs each, in turns."
        if runs > 1
        else "Policies in order of rows fetched; speeds are of one run each, and may differ by noise alone."
    )


def _bars(rows: Rows, key: str, title: str, label: str, show: Callable[[Number], str]) -> Chart:
    names = [row["policy"] for row in rows]
    return bar_chart(title, names, [Series("", [(i, row[key]) for i, row in enumerate(rows)])], Axis(label, show=show))


def _lines(rows: Rows, sweep: Sweep, key: str, title: str, label: str, show: Callable[[Number], str]) -> Chart:
    """Values stand at equal distances: they need not be numbers."""
    series = []
    for number, name in enumerate(dict.fromkeys(row["policy"] for row in rows)):
        found = {row["value"]: row[key] for row in rows if row["policy"] == name}
        points = [(place, found.get(value)) for place, value in enumerate(sweep.values)]
        series.append(Series(name, points, dashed=number >= NUM_COLOURS))
    across = Axis(sweep.name, ticks=list(enumerate(sweep.values)))
    return line_chart(title, series, across, Axis(label, show=show))


def _line_of(row: dict[str, Any]) -> list[Cell]:
    cells: list[Cell] = [row["policy"]]
    for key in COLUMNS:
        value = row[key]
        cells.append(percent(value) if key in ("hit_rate", "stall_fraction") and value is not None else value)
    if row["exact"] is None:
        return [*cells, None]
    promised = "" if row["promised"] else " (not promised)"
    return [*cells, ("yes" if row["exact"] else "no") + promised]
