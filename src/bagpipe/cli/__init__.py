"""The command line: `bagpipe COMMAND`. Each command is a thin layer over a function of the library.

Heavy imports happen inside the commands, so that `--help` answers at once. Errors that Bagpipe raises on purpose end
in one readable line and exit code 1, wrong usage in exit code 2, with --json both in one object on standard output;
anything else is a defect and keeps its traceback.
"""

from __future__ import annotations

import logging
import signal
import sys
import traceback
from types import TracebackType

import typer

from bagpipe.cli import bench, checkpoint, compare, data, doctor, keys, launch, plan, server, train, verify
from bagpipe.cli.output import fail
from bagpipe.errors import BagpipeError
from bagpipe.visible import VisibleFormatter, visible

INTERRUPTED, TERMINATED = 130, 143

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
app.command("server")(server.server)
app.command("launch", context_settings={"allow_interspersed_args": False})(launch.launch)
app.command("bench")(bench.bench)
app.command("doctor")(doctor.doctor)
app.add_typer(checkpoint.app, name="checkpoint")
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
    sys.excepthook = _tell_of_defect
    if logging.lastResort is not None:  # prints warnings where nothing else was set up
        logging.lastResort.setFormatter(VisibleFormatter())
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(TERMINATED))  # an exception, so that everything is tidied up
    sys.exit(_run(as_json="--json" in sys.argv))


def _tell_of_defect(kind: type[BaseException], error: BaseException, trace: TracebackType | None) -> None:
    """The traceback of an error that nobody foresaw, whose text may be of strangers."""
    sys.stderr.write(visible("".join(traceback.format_exception(kind, error, trace))))


def _run(as_json: bool) -> int:
    """The exit code: 1 for errors of the work, 2 for those of the command line, 130 for Ctrl-C, 143 for SIGTERM."""
    try:
        # On its own, typer tells people of wrong usage, and ends the process; programs get an object from us.
        code = app(standalone_mode=not as_json)
    except BagpipeError as error:
        fail(type(error).__name__, str(error), as_json)
        return 1
    except KeyboardInterrupt:
        code = INTERRUPTED
    except SystemExit as ended:
        if ended.code not in (INTERRUPTED, TERMINATED):
            raise
        code = ended.code
    except Exception as error:
        if type(error).__name__ == "Abort":  # what older releases of typer make of Ctrl-C
            code = INTERRUPTED
        elif not as_json or not hasattr(error, "format_message"):
            raise
        else:  # the class is private to typer, or to click, which older releases use
            fail("UsageError", error.format_message(), as_json)
            return 2
    if code in (INTERRUPTED, TERMINATED):
        fail("Interrupted", "stopped by Ctrl-C" if code == INTERRUPTED else "stopped by SIGTERM", as_json)
    return code if isinstance(code, int) else 0
