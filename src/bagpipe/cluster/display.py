"""One line a role on standard error while a run goes on: a live table on a terminal, plain lines elsewhere."""

from __future__ import annotations

import re
import time
from types import TracebackType
from typing import TYPE_CHECKING

from rich.console import Console
from rich.live import Live
from rich.table import Table

if TYPE_CHECKING:
    from typing import Self

EVERY_S = 10.0
"""How often a role has a plain line in which only figures are new."""


class StatusLines:
    """Shows how each role is; to be used as a context manager."""

    def __init__(self, console: Console, live: bool = True) -> None:
        """Without `live` lines are plain on a terminal too: for runs that print something themselves."""
        self._console = console
        self._lines: dict[str, str] = {}
        self._said: dict[str, tuple[str, float]] = {}
        """The words of each role's last plain line, and when that was."""
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
        elif self._is_due(role, _words(line)):
            self._console.print(f"{role}: {line}", soft_wrap=True)

    def tell(self, line: str) -> None:
        """Say something that stays; on a terminal above the table."""
        self._console.print(line, soft_wrap=True)

    def _is_due(self, role: str, words: str) -> bool:
        """Whether a plain line says something new, or the last one was long ago."""
        before, said_at = self._said.get(role, ("", 0.0))
        now = time.monotonic()
        if words == before and now < said_at + EVERY_S:
            return False
        self._said[role] = words, now
        return True

    def _table(self) -> Table:
        table = Table.grid(padding=(0, 2))
        table.add_column(style="bold", no_wrap=True)
        table.add_column(no_wrap=True)
        for role, line in self._lines.items():
            table.add_row(role, line)
        return table


def _words(line: str) -> str:
    """A line without its figures."""
    return re.sub(r"[-\d.,]+", "#", line)
