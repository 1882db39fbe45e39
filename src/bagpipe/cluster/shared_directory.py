"""Whether all roles see the directory of checkpoints, as the same files under the same path: tried, not assumed.

The driver leaves a token there; each role reads it, and leaves the same under a name of its own, by a rename as
checkpoints are given theirs; and the driver reads that.
"""

from __future__ import annotations

import os
from collections.abc import Collection
from pathlib import Path

from bagpipe.checkpoint.disk import Disk, make_directories
from bagpipe.errors import ClusterError
from bagpipe.whole_file import whole_file

_DRIVER = "driver"


class Sight:
    """A token of this run in a directory; `close` removes it."""

    def __init__(self, directory: Path) -> None:
        self.place, self.token = directory / f".seen-{os.urandom(4).hex()}", os.urandom(16).hex()
        make_directories(Disk(), directory)
        self.place.mkdir(0o700)
        _leave(self.place, _DRIVER, self.token)

    def check(self, roles: Collection[str]) -> None:
        """ClusterError unless what these roles have left is here."""
        for role in roles:
            try:
                seen = (self.place / _name(role)).read_text(encoding="ascii")
            except OSError:
                seen = ""
            if seen != self.token:
                raise ClusterError(_unseen(role, self.place.parent, "what it wrote there did not arrive here"))

    def close(self) -> None:
        """Leave nothing behind; a second call does nothing."""
        for path in self.place.iterdir() if self.place.exists() else ():
            path.unlink(missing_ok=True)
        if self.place.exists():
            self.place.rmdir()


def prove(role: str, place: Path, token: str) -> None:
    """Leave word that this role sees a directory; ClusterError if it does not."""
    try:
        seen = (place / _DRIVER).read_text(encoding="ascii")
    except OSError as error:
        raise ClusterError(_unseen(role, place.parent, f"{error.strerror}: {place / _DRIVER}")) from error
    if seen != token:
        raise ClusterError(_unseen(role, place.parent, "another run's files are there"))
    try:
        _leave(place, _name(role), token)
    except OSError as error:
        raise ClusterError(_unseen(role, place.parent, f"writing there failed: {error.strerror}")) from error


def _leave(place: Path, name: str, token: str) -> None:
    with whole_file(place / name) as file:
        file.write(token.encode("ascii"))


def _name(role: str) -> str:
    return role.replace(" ", "-")


def _unseen(role: str, directory: Path, why: str) -> str:
    return (
        f"{role} does not see the run's directory of checkpoints, {directory} ({why}): mount the same storage under "
        "that path on all machines, name such a directory with --run-dir, or do without recovery and checkpoints "
        "(--set recovery.restarts_max=0)"
    )
