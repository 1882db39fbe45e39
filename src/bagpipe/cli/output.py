"""What all commands share: one JSON object on standard output with --json, tables for people without it.

What people see may hold names and values that strangers chose: none of it is markup, and no terminal acts on it (I8).
"""

from __future__ import annotations

import json
import math
import re
import sys
import textwrap
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from itertools import groupby
from typing import Annotated, Any, Protocol

import typer
from rich import box
from rich.console import Console, ConsoleOptions, RenderableType
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn
from rich.segment import Segment
from rich.table import Table
from rich.text import Text

from bagpipe.cluster.display import StatusLines
from bagpipe.visible import visible

AsJson = Annotated[bool, typer.Option("--json", help="Print one JSON object and nothing else on standard output.")]
Settings = Annotated[
    list[str] | None, typer.Option("--set", metavar="A.B=C", help="Override a setting of the configuration.")
]

TEXT_WIDTH_MAX = 32
"""Texts longer than this may be broken to fit a column."""


class PlainConsole(Console):
    """Shows texts as they are, whatever is in them: no markup, no names of emoji, no sequences for a terminal."""

    def __init__(self, **options: Any) -> None:
        super().__init__(markup=False, emoji=False, highlight=False, **options)

    def render_str(self, text: str, **options: Any) -> Text:
        """A text that is about to be laid out, as wide as it will be shown."""
        return super().render_str(visible(text), **options)

    def render(self, renderable: RenderableType, options: ConsoleOptions | None = None) -> Iterator[Segment]:
        """Everything else that is shown; what moves a cursor is the console's own."""
        for part in super().render(renderable, options):
            yield part if part.control else Segment(visible(part.text), part.style)


console = PlainConsole()
errors = PlainConsole(stderr=True)
TITLE = TextColumn("{task.description}", style="bold", markup=False)
"""Of a bar of progress."""


class Reporter(Protocol):
    """Told how far a long piece of work is."""

    def __call__(self, done: int, note: str = "") -> None:
        """`done` units are finished; `note` says something about now."""

    def prepares(self, what: str) -> None:
        """This is done before the first unit begins."""

    def begins(self, total: int) -> None:
        """There are so many units."""

    def tell(self, line: str) -> None:
        """A line that stays."""


def print_json(value: Mapping[str, Any] | Sequence[Any]) -> None:
    """Write one JSON value; what is not a number (an AUC of one class) becomes null."""
    sys.stdout.write(json.dumps(_finite(value), default=str) + "\n")


def _finite(value: Any) -> Any:
    if isinstance(value, float):
        return value if math.isfinite(value) else None
    if isinstance(value, Mapping):
        return {key: _finite(part) for key, part in value.items()}
    if isinstance(value, list | tuple):
        return [_finite(part) for part in value]
    return value


def print_pairs(title: str, values: Mapping[str, Any]) -> None:
    """A table of names and values."""
    table = Table(title=title, show_header=False, title_justify="left")
    table.add_column(style="bold")
    table.add_column(overflow="fold")
    for name, value in values.items():
        table.add_row(name.replace("_", " "), show(value, name))
    console.print(table)


def print_rows(title: str, rows: Sequence[Mapping[str, Any]]) -> None:
    """A table with one line a mapping, where that fits the terminal; columns in the order of their first appearance.

    Where it does not, what all have in common comes first. Mappings of different kinds that follow each other get a
    table for each kind; else lines and columns change places, so that any number of names can be read.
    """
    console.print(title, style="italic")
    if _fits(rows):
        console.print(_table(rows))
        return
    common = _common(rows)
    if common:
        console.print(_standing([common]))
    rest = [{name: value for name, value in row.items() if name not in common} for row in rows]
    kinds = [list(same) for _, same in groupby(rest, key=list)]
    if 2 * len(kinds) <= len(rows) + 1 and all(map(_fits, kinds)):
        for kind in kinds:
            console.print(_table(kind))
        return
    while rest:
        count = next((n for n in range(len(rest), 1, -1) if _standing_width(rest[:n]) <= console.width), 1)
        console.print()
        console.print(_standing(rest[:count]))
        rest = rest[count:]


def show(value: Any, name: str = "") -> str:
    """A value as people read it, in one line; a name such as `disk_bytes` gives it a unit."""
    if value is None:
        return "-"
    if isinstance(value, bool):
        return "yes" if value else "no"
    if isinstance(value, int | float) and name.removesuffix("_max").endswith("bytes"):
        return show_bytes(value)
    if isinstance(value, int):
        return f"{value:,}"
    if isinstance(value, float):
        return f"{value:,.0f}" if abs(value) >= 1000 else f"{value:.{4 if abs(value) >= 0.001 else 2}g}"
    if isinstance(value, Mapping):
        return ", ".join(f"{key} {show(part, str(key))}" for key, part in value.items())
    return visible(str(value), lines=False)


def show_bytes(num_bytes: float) -> str:
    """A number of bytes in the unit that suits it."""
    for unit, factor in (("GB", 1e9), ("MB", 1e6), ("kB", 1e3)):
        if num_bytes >= factor:
            return f"{num_bytes / factor:,.1f} {unit}"
    return f"{num_bytes:,.0f} B"


def _table(rows: Sequence[Mapping[str, Any]]) -> Table:
    """One line a mapping."""
    table = Table(box=box.SIMPLE_HEAD, padding=(0, 1), pad_edge=False)
    for name, cells in _columns(rows).items():
        header = textwrap.fill(name.replace("_", " "), _width(name, cells))
        table.add_column(header, justify="right" if all(map(_is_figure, cells)) else "left")
    for line in zip(*_columns(rows).values(), strict=True):
        table.add_row(*line)
    return table


def _standing(rows: Sequence[Mapping[str, Any]]) -> Table:
    """One column a mapping."""
    table = Table.grid(padding=(0, 2))
    table.add_column()
    for _ in rows:
        table.add_column(justify="right" if len(rows) > 1 else "left", overflow="fold")
    for number, (name, cells) in enumerate(_columns(rows).items()):
        style = "bold" if number == 0 and len(rows) > 1 else None
        table.add_row(f"  {name.replace('_', ' ')}", *cells, style=style)
    return table


def _standing_width(rows: Sequence[Mapping[str, Any]]) -> int:
    columns = zip(*_columns(rows).values(), strict=True)
    return 2 + max(map(len, _columns(rows))) + sum(2 + _cells_width(cells) for cells in columns)


def _common(rows: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """What several mappings have in common; what they begin with tells them apart, and stays with each."""
    first = dict(rows[0]) if len(rows) > 1 else {}
    lead = next(iter(first), None)
    return {
        name: value
        for name, value in first.items()
        if name != lead and all(name in row and row[name] == value for row in rows)
    }


def _columns(rows: Sequence[Mapping[str, Any]]) -> dict[str, list[str]]:
    """The cells under each name; empty where a mapping does not have it."""
    names = dict.fromkeys(name for row in rows for name in row)
    return {
        visible(name, lines=False): [show(row[name], name) if name in row else "" for row in rows] for name in names
    }


def _fits(rows: Sequence[Mapping[str, Any]]) -> bool:
    widths = [_width(name, cells) for name, cells in _columns(rows).items()]
    return sum(widths) + 3 * (len(widths) - 1) + 2 <= console.width


def _width(name: str, cells: Sequence[str]) -> int:
    """Of a column, such that its head takes two lines at the most."""
    words = name.replace("_", " ")
    head = next(width for width in range(max(map(len, words.split())), 99) if len(textwrap.wrap(words, width)) <= 2)
    return max(head, _cells_width(cells))


def _cells_width(cells: Sequence[str]) -> int:
    """Of a column's cells; long texts may be broken."""
    return min(max(map(len, cells), default=0), TEXT_WIDTH_MAX)


def _is_figure(cell: str) -> bool:
    return re.fullmatch(r"-?|yes|no|[-+0-9.,e]+ ?(%|[kMG]?B)?", cell) is not None


@contextmanager
def progress(total: int | None, title: str) -> Iterator[Reporter]:
    """How far a piece of work is, on standard error: a bar on a terminal, else a line every few seconds.

    `total` is None as long as nobody knows it: then it `prepares` until it `begins`.
    """
    if not errors.is_terminal:
        yield _Lines(total, title)
        return
    columns = (
        TITLE,
        BarColumn(),
        MofNCompleteColumn(),
        TimeRemainingColumn(),
        TextColumn("{task.fields[note]}", markup=False),
    )
    with Progress(*columns, console=errors, transient=True) as bar:
        yield _Bar(bar, total, title)


class _Bar:
    """On a terminal."""

    def __init__(self, bar: Progress, total: int | None, title: str) -> None:
        self._bar, self._task = bar, bar.add_task(title, total=total, note="")

    def __call__(self, done: int, note: str = "") -> None:
        self._bar.update(self._task, completed=done, note=note)

    def prepares(self, what: str) -> None:
        self._bar.update(self._task, note=what)

    def begins(self, total: int) -> None:
        self._bar.update(self._task, total=total)

    def tell(self, line: str) -> None:
        self._bar.console.print(line, soft_wrap=True)


class _Lines:
    """Elsewhere: in a log, a pipe, a notebook."""

    def __init__(self, total: int | None, title: str) -> None:
        self._total, self._title, self._status = total, title, StatusLines(errors, live=False)

    def __call__(self, done: int, note: str = "") -> None:
        counted = f"{done:,}" if self._total is None else f"{done:,} of {self._total:,}"
        self._status(self._title, f"{counted}, {note}" if note else counted)

    def prepares(self, what: str) -> None:
        self._status(self._title, what)

    def begins(self, total: int) -> None:
        self._total = total

    def tell(self, line: str) -> None:
        self._status.tell(line)


def fail(error: str, message: str, as_json: bool) -> None:
    """Say what went wrong, on one channel."""
    if as_json:
        print_json({"error": error, "message": message})
    else:
        errors.print(Text.assemble((error, "bold red"), f": {visible(message)}"), soft_wrap=True)
