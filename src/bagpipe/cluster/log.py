"""What a role prints: a file of its own in the run directory, or on its node if the run directory can't be seen there.

The driver gets the lines of files elsewhere with each report, and writes them where the others are.
"""

from __future__ import annotations

import codecs
import faulthandler
import io
import os
import secrets
import sys
import tempfile
from dataclasses import dataclass
from pathlib import Path
from typing import TextIO

from bagpipe.visible import log_to_standard_error

CHUNK_BYTES = 64 << 10


@dataclass(frozen=True)
class LogPlace:
    """A directory for logs, and what lies in it, so that a role sees whether it is the same one on its node."""

    directory: Path
    mark: str

    @classmethod
    def make(cls, directory: Path) -> LogPlace:
        """Make the directory; a run that is gone on with has one."""
        directory.mkdir(0o755, parents=True, exist_ok=True)
        mark = secrets.token_hex(8)
        (directory / ".mark").touch(0o644)
        (directory / ".mark").write_text(mark)
        return cls(directory.resolve(), mark)

    @property
    def is_here(self) -> bool:
        """Whether this node sees it."""
        try:
            return (self.directory / ".mark").read_text() == self.mark
        except OSError:
            return False

    def path(self, role: str) -> Path:
        """The log of a role such as "server 1"."""
        return self.directory / f"{role.replace(' ', '-')}.log"

    def ray(self) -> TextIO:
        """The log of what Ray says to the driver."""
        self.path("ray").touch(0o644)
        return self.path("ray").open("w", buffering=1, encoding="utf-8", errors="replace")

    def finish(self) -> None:
        """No role looks for it any more; Ray had nothing to say in most runs."""
        (self.directory / ".mark").unlink(missing_ok=True)
        said = self.path("ray")
        if said.exists() and not said.stat().st_size:
            said.unlink()


class RoleLog:
    """Takes over standard output and standard error of this process."""

    def __init__(self, place: LogPlace, role: str) -> None:
        self._here = place.is_here
        if self._here:
            descriptor = os.open(place.path(role), os.O_RDWR | os.O_CREAT | os.O_APPEND, 0o644)
        else:
            descriptor, path = tempfile.mkstemp(prefix="bagpipe-")
            Path(path).unlink()  # so that it goes with this process, whatever ends that
        self._descriptor = descriptor
        self._sent = 0
        for stream, target in ((sys.stdout, 1), (sys.stderr, 2)):
            stream.flush()
            os.dup2(descriptor, target)
        sys.stdout, sys.stderr = _unbuffered(1), _unbuffered(2)
        faulthandler.enable(sys.stderr)
        log_to_standard_error(force=True)

    def news(self) -> bytes:
        """What was printed since the last call, at most so much at a time; nothing if the driver can see it."""
        if self._here:
            return b""
        printed = os.pread(self._descriptor, CHUNK_BYTES, self._sent)
        self._sent += len(printed)
        return printed


def _unbuffered(descriptor: int) -> TextIO:
    """A stream that keeps nothing back: this process may be killed at any time, also in the middle of a line."""
    raw = io.FileIO(descriptor, "w", closefd=False)
    return io.TextIOWrapper(raw, encoding="utf-8", errors="replace", write_through=True)


class Tail:
    """What is added to a file, which may not be there yet."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._read = 0
        self._decoder = codecs.getincrementaldecoder("utf-8")(errors="replace")

    def news(self) -> str:
        """All that was added since the last call."""
        try:
            with self._path.open("rb") as file:
                file.seek(self._read)
                added = file.read()
        except FileNotFoundError:
            return ""
        self._read += len(added)
        return self._decoder.decode(added)
