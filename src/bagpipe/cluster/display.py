"""One line a role on standard error while a run goes on: a live table on a terminal, plain lines elsewhere."""

from __future__ import annotations

import time
from types import TracebackType
from typing import TYPE_CHECKING

from rich.console import Console
from rich.live import Live
from rich.table import Table

if TYPE_CHECKING:
    from typing_extensions import Self

EVERY_S = 10.0
"""How often a role has a plain line."""


class StatusLines:
    """Shows how each role is; to be used as a context manager."""

    def __init__(self, console: Console, live: bool = True) -> None:
        """Without `live` lines are plain on a terminal too: for runs that print something themselves."""
        self._console = console
        self._lines: dict[str, str] = {}
        self._said_at: dict[str, float] = {}
        self._live = (
            Live(console=console, transient=True, auto_refresh=False, redirect_stdout=False)
            if live and console.is_terminal
            else None
        )

    def __enter__(self) -> Self:
        if self._live is not None:
            self._live.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._live is not None:
            self._live.stop()

    def __call__(self, role: str, line: str) -> None:
        """This role is like that now."""
        if self._lines.get(role) == line:
            return
        self._lines[role] = line
        if self._live is not None:
            self._live.update(self._table(), refresh=True)
        elif time.monotonic() >= self._said_at.get(role, 0.0) + EVERY_S:
            self._said_at[role] = time.monotonic()
            self._console.print(f"{role}: {line}", markup=False, highlight=False, soft_wrap=True)

    def _table(self) -> Table:
        table = Table.grid(padding=(0, 2))
        table.add_column(style="bold", no_wrap=True)
        table.add_column(no_wrap=True)
        for role, line in self._lines.items():
            table.add_row(role, line)
        return table
