"""`bagpipe keys`."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from bagpipe.cli.output import AsJson, console, print_json

app = typer.Typer(help="Make keys for servers and clients on several machines.", no_args_is_help=True)

Name = Annotated[Path, typer.Argument(metavar="FILE", help="Two files are written: FILE.server and FILE.client.")]
Days = Annotated[int, typer.Option(help="How long the keys are good for.")]


@app.command("new")
def new(name: Name, days: Days = 365, as_json: AsJson = False) -> None:
    """Write fresh keys, readable by you only; files that are there already are kept, and it fails."""
    from bagpipe.wire.keys import VARIABLE, write_keys

    server, client = write_keys(name, days)
    if as_json:
        print_json({"server": str(server), "client": str(client)})
        return
    console.print(f"{server}: for embedding servers\n{client}: for their clients", soft_wrap=True)
    console.print(f"Name the file in {VARIABLE} where each of them runs.", soft_wrap=True)


@app.callback()
def _keys() -> None:
    """Make keys for servers and clients on several machines."""
