"""The command line: `bagpipe COMMAND`. Each command is a thin layer over a function of the library.

Heavy imports happen inside the commands, so that `--help` answers at once. Errors that Bagpipe raises on purpose end
in one readable line and exit code 1; anything else is a defect and keeps its traceback.
"""

from __future__ import annotations

import signal
import sys

import typer

from bagpipe.cli import bench, compare, data, doctor, keys, plan, train, verify
from bagpipe.cli.output import errors, fail
from bagpipe.errors import BagpipeError

app = typer.Typer(
    name="bagpipe",
    help="Train recommendation models whose embedding tables do not fit, with exactly the result of plain training.",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
)
app.command("train")(train.train)
app.command("verify")(verify.verify)
app.command("compare")(compare.compare)
app.command("plan")(plan.plan)
app.command("bench")(bench.bench)
app.command("doctor")(doctor.doctor)
app.add_typer(data.app, name="data")
app.add_typer(keys.app, name="keys")


def _version(wanted: bool) -> None:
    if wanted:
        from bagpipe import __version__

        typer.echo(__version__)
        raise typer.Exit


@app.callback()
def _root(version: bool = typer.Option(False, "--version", callback=_version, is_eager=True, help="Print it.")) -> None:
    """Train recommendation models whose embedding tables do not fit, with exactly the result of plain training."""


def main() -> None:
    """Entry point of the `bagpipe` command."""
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))  # an exception, so that everything is tidied up
    try:
        app()
    except BagpipeError as error:
        fail(error, as_json="--json" in sys.argv)
        sys.exit(1)
    except KeyboardInterrupt:
        errors.print("interrupted")
        sys.exit(130)
