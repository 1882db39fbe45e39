"""`bagpipe doctor`."""

from __future__ import annotations

import typer
from rich.markup import escape

from bagpipe.cli.output import AsJson, console, print_json


def doctor(as_json: AsJson = False) -> None:
    """Say what this machine has, what would go wrong, and how to mend it."""
    from bagpipe.doctor import examine

    checks = examine()
    ok = all(check.ok is not False for check in checks)
    if as_json:
        print_json({"ok": ok, "checks": [check.as_dict() for check in checks]})
    else:
        marks = {True: "[green]ok  [/]", False: "[red]bad [/]", None: "[yellow]note[/]"}
        for check in checks:
            console.print(f"{marks[check.ok]} [bold]{check.name}[/]: {escape(check.found)}", highlight=False)
            if check.remedy:
                console.print(f"     {escape(check.remedy)}", highlight=False)
    raise typer.Exit(0 if ok else 1)
