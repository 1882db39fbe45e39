"""What all roles of a run have in common: objects, each in a process of its own, which Ray makes actors of.

Every method returns plain values. What goes wrong comes back as a `Failure`, so that the driver can raise the same
error with the same words; what nobody foresaw is in the role's log with its traceback.
"""

from __future__ import annotations

import functools
import logging
import os
import socket
from abc import ABC, abstractmethod
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Concatenate, ParamSpec, TypeVar

from bagpipe._version import __version__
from bagpipe.cluster.extra import import_ray
from bagpipe.cluster.interface import find_address
from bagpipe.cluster.log import LogPlace, RoleLog
from bagpipe.cluster.settings import Failure, Introduction, Report
from bagpipe.cluster.shared_directory import prove
from bagpipe.errors import BagpipeError, ClusterError

P = ParamSpec("P")
R = TypeVar("R")
SomeRole = TypeVar("SomeRole", bound="Role")
_log = logging.getLogger(__name__)


def told(method: Callable[Concatenate[SomeRole, P], R]) -> Callable[Concatenate[SomeRole, P], R | Failure]:
    """A method whose errors are returned."""

    @functools.wraps(method)
    def call(self: SomeRole, /, *args: P.args, **kwargs: P.kwargs) -> R | Failure:
        try:
            return method(self, *args, **kwargs)
        except BagpipeError as error:
            _log.error("%s: %s", type(error).__name__, error)
            return Failure.of(error)
        except Exception as error:
            _log.exception("%s failed", self.name)
            unforeseen = ClusterError(f"{self.name} failed with {type(error).__name__}: {error}")
            unforeseen.__cause__ = error.__cause__
            return Failure.of(unforeseen)

    return call


class Role(ABC):
    """What all roles can be asked."""

    def __init__(self, name: str) -> None:
        self.name = name
        self._output: RoleLog | None = None
        self._left: dict[str, Report] = {}
        self._over = -1
        """The last generation that is over."""

    @told
    def introduce(self, interface: str | None, place: LogPlace) -> Introduction:
        """Where this role runs; from now on what it prints is kept. Without an interface Ray's address is ours too."""
        self._output = RoleLog(place, self.name)
        _log.info("%s is process %d on %s", self.name, os.getpid(), socket.gethostname())
        address = _ray_address() if interface is None else find_address(interface)
        return Introduction(__version__, socket.gethostname(), machine(), address, os.getpid())

    @told
    def prove(self, place: str, token: str) -> None:
        """See the directory of checkpoints, and leave word of it there."""
        prove(self.name, Path(place), token)

    @told
    def report(self) -> dict[str, Report]:
        """How it is, and how those are who left word here: by name."""
        left, self._left = self._left, {}
        return left | {self.name: self.own_report()}

    def leave(self, role: str, report: Report, generation: int) -> bool:
        """Keep a report of a role that can't be asked while it works; what is printed adds up.

        False: its generation is over, and what it does does not count any more.
        """
        before, counts = self._left.get(role), generation > self._over
        printed = (before.printed if before else b"") + report.printed
        self._left[role] = replace(report, printed=printed, done=report.done if counts else 0)
        return counts

    def end_generation(self, generation: int) -> None:
        """Whoever leaves word is told that this generation is over; what was done in it does not count any more."""
        self._over = max(self._over, generation)
        self._left = {role: replace(report, done=0) for role, report in self._left.items()}

    def own_report(self) -> Report:
        """How this role is, and what it printed since the last time."""
        return Report(self.line(), b"" if self._output is None else self._output.news(), self.done())

    def done(self) -> int:
        """Iterations of the run that are over, where a role knows that."""
        return 0

    @abstractmethod
    def line(self) -> str:
        """What it does, in a few words."""

    @abstractmethod
    def stop(self) -> Failure | None:
        """End in order."""


def _ray_address() -> str:
    ray = import_ray()
    address: str = ray.util.get_node_ip_address()
    return address


def machine() -> str:
    """What Introduction.machine says of this process."""
    boot = Path("/proc/sys/kernel/random/boot_id").read_text(encoding="ascii").strip()
    return f"{boot} {Path('/proc/self/ns/net').readlink()}"
