"""Keeps a Ray of our own: starts it on this machine, and ends every process of it when its owner is gone.

A program of its own, in a session of its own. Its owner holds the other end of its standard input: when that closes,
because the owner has finished, failed, or was killed, all processes below this one are killed and the files of Ray are
removed. It is their subreaper, so that also those whose parents have ended stay below it: nothing is left, and nothing
is ended that was not started here. Ray by itself leaves agents behind when the process that started it is killed.
"""

from __future__ import annotations

import ctypes
import json
import logging
import os
import shutil
import signal
import sys
import tempfile
import threading
import time
from pathlib import Path
from typing import Any

PR_SET_CHILD_SUBREAPER = 36
LONGEST_TEMP_DIR = 20
"""Ray puts sockets below it, whose paths have at most 107 characters; 85 of them are names that it and we give."""
OBJECT_STORE_BYTES = 80 << 20
"""The least that Ray takes; nothing of ours goes there."""


def main() -> None:
    """Read what to start from standard input, tell the address on standard output, and keep it until that closes."""
    owner, answers = _take_standard_streams()
    asked = _read_line(owner)
    if not asked:
        return
    ctypes.CDLL(None, use_errno=True).prctl(PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0)
    over = threading.Event()
    for number in (signal.SIGTERM, signal.SIGHUP, signal.SIGINT):  # before there is anything to remove
        signal.signal(number, lambda *_: over.set())
    # Ray lets every user write to the directory that it is given: it gets one within ours, which nobody else can enter.
    directory = Path(tempfile.mkdtemp(prefix="bagpipe-ray-", dir=_temp_parent()))
    scratch = directory / "tmp"
    scratch.mkdir()
    os.environ["TMPDIR"] = str(scratch)  # of all roles
    threading.Thread(target=_await_end, args=(owner, directory), daemon=True).start()
    try:
        said = {"address": _start_ray(directory, json.loads(asked))}
    except Exception as error:
        said = {"error": f"{type(error).__name__}: {error}"}
    os.write(answers, json.dumps(said).encode() + b"\n")
    over.wait()
    _end(directory)


def children_of(pid: int) -> list[int]:
    """All processes below this one."""
    parents = {}
    for entry in Path("/proc").iterdir():
        if entry.name.isdigit():
            try:
                parents[int(entry.name)] = int((entry / "stat").read_text().rpartition(")")[2].split()[1])
            except (OSError, IndexError, ValueError):
                continue  # it has ended meanwhile
    below: list[int] = []
    layer = [pid]
    while layer:
        layer = [child for child, parent in parents.items() if parent in layer]
        below += layer
    return below


def end_children(deadline_s: float = 10.0) -> None:
    """Kill all processes below this one, those that they start meanwhile included, and take note of their end."""
    until = time.monotonic() + deadline_s
    while (below := children_of(os.getpid())) and time.monotonic() < until:
        for child in below:
            try:
                os.kill(child, signal.SIGKILL)
            except ProcessLookupError:
                continue
        _reap()
        time.sleep(0.02)


def _reap() -> None:
    try:
        while os.waitpid(-1, os.WNOHANG)[0]:
            pass
    except ChildProcessError:
        return


def _start_ray(directory: Path, asked: dict[str, Any]) -> str:
    import ray

    ray.init(
        address="local",
        include_dashboard=False,
        log_to_driver=False,
        configure_logging=False,
        logging_level=logging.ERROR,
        object_store_memory=OBJECT_STORE_BYTES,
        _node_ip_address="127.0.0.1",
        _temp_dir=str(directory / "r"),
        **asked,
    )
    address: str = ray.get_runtime_context().gcs_address
    return address


def _await_end(owner: int, directory: Path) -> None:
    """In a thread, so that it is heard while Ray still starts."""
    while _read_line(owner):
        pass
    _end(directory)


def _end(directory: Path) -> None:
    end_children()
    shutil.rmtree(directory, ignore_errors=True)
    os._exit(0)


def _take_standard_streams() -> tuple[int, int]:
    """Keep the pipes to the owner for ourselves: processes of Ray, which inherit 0, 1 and 2, get nothing of them."""
    owner, answers = os.dup(0), os.dup(1)
    nothing = os.open(os.devnull, os.O_RDWR)
    for descriptor in (0, 1, 2):
        os.dup2(nothing, descriptor)
    return owner, answers


def _read_line(descriptor: int) -> bytes:
    line = b""
    while not line.endswith(b"\n") and (letter := os.read(descriptor, 1)):
        line += letter
    return line


def _temp_parent() -> str:
    default = tempfile.gettempdir()
    return default if len(default) <= LONGEST_TEMP_DIR else "/tmp"  # noqa: S108 - the directory itself is private


if __name__ == "__main__":
    sys.path.pop(0)  # what lies beside this file is no top-level module
    main()
