"""Processes of a benchmark that talk with the one that started them, in lines of JSON on standard input and output.

None of them outlives it: they are ended with its use of them, and end by themselves when it was killed.
"""

from __future__ import annotations

import os
import subprocess
import sys
import threading
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from typing import Any

import msgspec

from bagpipe.errors import PipelineError

Process = subprocess.Popen[bytes]
WATCH_S = 1.0


class Call(msgspec.Struct, frozen=True):
    """What a process is asked to do: a method of the object that it is there for, and its arguments by name."""

    do: str
    given: dict[str, Any]


@contextmanager
def child(command: Sequence[str], environment: Mapping[str, str]) -> Iterator[Process]:
    """A process that ends with this one's use of it. Of a session of its own: Ctrl-C is for us, who then end it."""
    with subprocess.Popen(  # noqa: S603 - our own modules, or an interpreter that the user has named
        command,
        env={**os.environ, **environment},
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        start_new_session=True,
    ) as process:
        try:
            yield process
        finally:
            process.kill()
            assert process.stdin is not None
            with suppress(BrokenPipeError):  # what it was told last, if it had ended before
                process.stdin.close()


def say(process: Process, record: msgspec.Struct) -> None:
    """A line to a process; one that has ended shows when it is heard."""
    assert process.stdin is not None
    with suppress(BrokenPipeError):
        process.stdin.write(msgspec.json.encode(record) + b"\n")
        process.stdin.flush()


def heard(process: Process) -> bytes:
    """The next line of a process."""
    assert process.stdout is not None
    line = process.stdout.readline()
    if not line:
        raise PipelineError(f"a process of this benchmark ended with {process.wait()}: see above")
    return line


def call(
    processes: Sequence[Process], do: str, own: Sequence[Mapping[str, Any]] | None = None, **given: Any
) -> list[Any]:
    """Ask all processes for the same at once, each with arguments of its `own`; what each has answered."""
    for number, process in enumerate(processes):
        say(process, Call(do, {**given, **(own[number] if own else {})}))
    return [msgspec.json.decode(heard(process)) for process in processes]


def tell(record: Any) -> None:
    """A line for the process that started this one."""
    sys.stdout.buffer.write(msgspec.json.encode(record) + b"\n")
    sys.stdout.flush()


def answer(role: Any) -> None:
    """Do what this process is asked for, until it is asked for nothing more."""
    end_with_parent()
    while line := sys.stdin.buffer.readline():
        asked = msgspec.json.decode(line, type=Call)
        tell(getattr(role, asked.do)(**asked.given))


def end_with_parent() -> None:
    """Nobody waits for the results of a process whose parent is gone."""
    threading.Thread(target=_watch, args=(os.getppid(),), daemon=True).start()


def _watch(parent: int) -> None:
    while os.getppid() == parent:
        time.sleep(WATCH_S)
    os._exit(1)
