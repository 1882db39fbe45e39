"""The figures of a data set as a page with pictures."""

from __future__ import annotations

from collections.abc import Sequence

from bagpipe.data.stats import SHARES, TOP, Stats, TableStats
from bagpipe.observe.charts import Axis, Chart, Series, bar_chart, line_chart, percent, share_chart
from bagpipe.observe.page import Cell, Page

CURVES_MAX = 4
"""Tables with a curve of their own beside that of all."""
CURVE_ROWS_MIN = 100
"""Rows in use from which a curve says something."""


def stats_page(title: str, stats: Stats) -> Page:
    """A page on a data set."""
    whole = stats.whole
    page = Page(title, f"{stats.samples:,} samples, {len(stats.tables):,} tables, {whole.accesses:,} ids in all.")
    page.tiles(
        {
            "samples": stats.samples,
            "tables": len(stats.tables),
            "ids a sample": whole.ids_per_sample,
            "different rows": whole.unique_rows,
            **{f"accesses of the top {top}": _percent(whole.top_share[top]) for top in TOP},
            "rows for 90% of accesses": whole.rows_for["90%"],
        }
    )
    page.section(
        "Skew and batches",
        "How unevenly rows are used, and how many different ones a batch needs. Rows are those that occur in this "
        "data: an extract has fewer of them than the whole, so its top 1% is fewer rows.",
    )
    page.charts(_curves(stats), _batches(stats))
    page.section(
        "Drift",
        "How use moves from day to day, over all tables. Data that names no days is cut into equal stretches.",
    )
    page.charts(*_drift(stats))
    page.section("By table")
    page.charts(_tops(stats), _batch_tables(stats))
    page.section("Figures")
    _tables(page, stats)
    _table_batches(page, stats)
    _days(page, stats)
    _table_days(page, stats)
    return page


def _curves(stats: Stats) -> Chart:
    chosen = _spread(stats.tables)
    series = [Series("all tables", stats.whole.curve, dots=False)]
    series += [Series(table.table, table.curve, dots=False, dashed=True) for table in chosen]
    note = "All tables together, and some from the largest to the smallest." if chosen else ""
    return share_chart("Share of accesses of the most used rows", series, "share of rows", "share of accesses", note)


def _spread(tables: Sequence[TableStats]) -> list[TableStats]:
    """A few tables of different sizes, the largest first; none where there is one only."""
    sized = sorted((t for t in tables if t.unique_rows >= CURVE_ROWS_MIN), key=lambda table: -table.unique_rows)
    if len(tables) < 2 or len(sized) <= CURVES_MAX:
        return sized if len(tables) > 1 else []
    return [sized[n * (len(sized) - 1) // (CURVES_MAX - 1)] for n in range(CURVES_MAX)]


def _tops(stats: Stats) -> Chart:
    tables = stats.tables
    series = [Series(f"top {top}", [(i, table.top_share[top]) for i, table in enumerate(tables)]) for top in TOP]
    axis = Axis("share of accesses", show=percent, low=0, high=1)
    return bar_chart("Accesses of the top rows, by table", [table.table for table in tables], series, axis)


def _batches(stats: Stats) -> Chart:
    sizes = [size for size in stats.batch_sizes if stats.whole.rows_per_batch[size] is not None]
    x = Axis("batch size", log=True, ticks=[(size, f"{size:,}") for size in sizes])
    series = [
        Series("different rows", [(size, stats.whole.rows_per_batch[size]) for size in sizes]),
        Series("ids", [(size, size * stats.whole.ids_per_sample) for size in sizes], dashed=True),
    ]
    note = "The gap between the lines is what looking up each row once saves."
    return line_chart("Rows of a batch", series, x, Axis("a batch", log=True), note)


def _batch_tables(stats: Stats) -> Chart:
    sizes = [size for size in stats.batch_sizes if stats.whole.rows_per_batch[size] is not None]
    largest = sizes[-1:] or list(stats.batch_sizes[:1])
    values = [(i, table.rows_per_batch[largest[0]]) for i, table in enumerate(stats.tables)]
    title = f"Rows of a batch of {largest[0]:,}, by table"
    return bar_chart(title, [table.table for table in stats.tables], [Series("", values)], Axis("different rows"))


def _drift(stats: Stats) -> list[Chart]:
    days = stats.whole.days
    x = Axis("day", ticks=[(i, day.name) for i, day in enumerate(days)])
    y = Axis("share of the day's accesses", show=percent, low=0, high=1)
    cover = []
    for colour, top in enumerate(TOP):
        fixed, own = (
            [(i, d.covered[top]) for i, d in enumerate(days)],
            [(i, d.top_share[top]) for i, d in enumerate(days)],
        )
        cover.append(Series(f"first day's top {top}", fixed, colour=colour))
        cover.append(Series(f"its own top {top}", own, dashed=True, dots=False, colour=colour))
    again = [
        Series("accesses to rows of the day before", [(i, day.repeated_accesses) for i, day in enumerate(days)]),
        Series("rows of the day before", [(i, day.repeated_rows) for i, day in enumerate(days)]),
        Series("new rows", [(i, _ratio(day.new_rows, day.unique_rows)) for i, day in enumerate(days)]),
    ]
    share = Axis("share of the day", show=percent, low=0, high=1)
    note = "Where a solid line falls below its dashed one, other rows have become popular."
    return [
        line_chart("Accesses covered by the first day's top rows", cover, x, y, note),
        line_chart("Overlap with the day before", again, x, share, "New rows: never used before."),
    ]


def _tables(page: Page, stats: Stats) -> None:
    columns = [
        *("table", "size", "different rows", "accesses", "ids a sample"),
        *(f"top {top}" for top in TOP),
        *(f"rows for {share}" for share in SHARES),
    ]
    rows: list[list[Cell]] = [
        [
            *(table.table, table.rows, table.unique_rows, table.accesses, table.ids_per_sample),
            *(_percent(table.top_share[top]) for top in TOP),
            *(table.rows_for[share] for share in SHARES),
        ]
        for table in [stats.whole, *stats.tables]
    ]
    page.table("Tables", columns, rows)


def _table_batches(page: Page, stats: Stats) -> None:
    rows: list[list[Cell]] = [
        [table.table, *(table.rows_per_batch[size] for size in stats.batch_sizes)]
        for table in [stats.whole, *stats.tables]
    ]
    page.table("Different rows of a batch, by its size", ["table", *(f"{n:,}" for n in stats.batch_sizes)], rows)


def _days(page: Page, stats: Stats) -> None:
    columns = [
        *("day", "first sample", "samples", "accesses", "different rows", "new rows"),
        *("rows of the day before", "accesses to them"),
        *(f"own top {top}" for top in TOP),
        *(f"covered by first day's top {top}" for top in TOP),
    ]
    rows: list[list[Cell]] = [
        [
            *(day.name, day.start, day.stop - day.start, each.accesses, each.unique_rows, each.new_rows),
            *(_percent(each.repeated_rows), _percent(each.repeated_accesses)),
            *(_percent(each.top_share[top]) for top in TOP),
            *(_percent(each.covered[top]) for top in TOP),
        ]
        for day, each in zip(stats.days, stats.whole.days, strict=True)
    ]
    page.table("Days, all tables together", columns, rows)


def _table_days(page: Page, stats: Stats) -> None:
    rows: list[list[Cell]] = [
        [table.table, *(_percent(day.covered["1%"]) for day in table.days)] for table in [stats.whole, *stats.tables]
    ]
    title = "Accesses of each day covered by the first day's top 1%, by table"
    page.table(title, ["table", *(day.name for day in stats.days)], rows)


def _ratio(part: int, whole: int) -> float | None:
    return part / whole if whole else None


def _percent(share: float | None) -> str:
    return "–" if share is None else f"{share:.1%}"
