"""What all commands share: one JSON object on standard output with --json, tables for people without it."""

from __future__ import annotations

import json
import math
import sys
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Annotated, Any, Protocol

import typer
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn
from rich.table import Table

AsJson = Annotated[bool, typer.Option("--json", help="Print one JSON object and nothing else on standard output.")]
Settings = Annotated[
    list[str] | None, typer.Option("--set", metavar="A.B=C", help="Override a setting of the configuration.")
]

console = Console()
errors = Console(stderr=True)


class Reporter(Protocol):
    """Told how far a long piece of work is."""

    def __call__(self, done: int, note: str = "") -> None:
        """`done` units are finished; `note` says something about now."""


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
        table.add_row(name.replace("_", " "), show(value))
    console.print(table)


def print_rows(title: str, rows: Sequence[Mapping[str, Any]]) -> None:
    """A table with one line a mapping; columns in the order of their first appearance."""
    columns = list(dict.fromkeys(name for row in rows for name in row))
    table = Table(title=title, title_justify="left")
    for name in columns:
        numeric = all(isinstance(row.get(name), int | float | None) for row in rows)
        table.add_column(name.replace("_", " "), justify="right" if numeric else "left", no_wrap=name == columns[0])
    for row in rows:
        table.add_row(*(show(row.get(name)) for name in columns))
    console.print(table)


def show(value: Any) -> str:
    """A value as people read it."""
    if value is None:
        return "-"
    if isinstance(value, bool):
        return "yes" if value else "no"
    if isinstance(value, int):
        return f"{value:,}"
    if isinstance(value, float):
        return f"{value:,.0f}" if abs(value) >= 1000 else f"{value:.4g}"
    return str(value)


@contextmanager
def progress(total: int, title: str) -> Iterator[Reporter]:
    """A progress bar on standard error; silent where that is not a terminal."""
    columns = (
        TextColumn("[bold]{task.description}"),
        BarColumn(),
        MofNCompleteColumn(),
        TimeRemainingColumn(),
        TextColumn("{task.fields[note]}"),
    )
    with Progress(*columns, console=errors, transient=True) as bar:
        task = bar.add_task(title, total=total, note="")

        def report(done: int, note: str = "") -> None:
            bar.update(task, completed=done, note=note)

        yield report


def fail(error: str, message: str, as_json: bool) -> None:
    """Say what went wrong, on one channel."""
    if as_json:
        print_json({"error": error, "message": message})
    else:
        errors.print(f"[bold red]{error}[/]: ", end="")
        errors.print(message, markup=False, highlight=False, soft_wrap=True)
