"""`bagpipe doctor`."""

from __future__ import annotations

import typer
from rich.text import Text

from bagpipe.cli.output import AsJson, console, print_json
from bagpipe.visible import visible


def doctor(as_json: AsJson = False) -> None:
    """Say what this machine has, what would go wrong, and how to mend it."""
    from bagpipe.doctor import examine

    checks = examine()
    ok = all(check.ok is not False for check in checks)
    if as_json:
        print_json({"ok": ok, "checks": [check.as_dict() for check in checks]})
    else:
        marks = {True: ("ok  ", "green"), False: ("bad ", "red"), None: ("note", "yellow")}
        for check in checks:
            console.print(Text.assemble(marks[check.ok], " ", (check.name, "bold"), f": {visible(check.found)}"))
            if check.remedy:
                console.print(f"     {check.remedy}")
    raise typer.Exit(0 if ok else 1)
