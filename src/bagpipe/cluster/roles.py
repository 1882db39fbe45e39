"""The roles of a run as objects, each in a process of its own; Ray makes actors of them.

Every method returns plain values. What goes wrong comes back as a `Failure`, so that the driver can raise the same
error with the same words; what nobody foresaw is in the role's log with its traceback.
"""

from __future__ import annotations

import functools
import logging
import os
import socket
import threading
from abc import ABC, abstractmethod
from collections.abc import Callable
from contextlib import ExitStack
from pathlib import Path
from typing import Concatenate, ParamSpec, TypeVar

from bagpipe._version import __version__
from bagpipe.cluster.extra import import_ray
from bagpipe.cluster.interface import find_address
from bagpipe.cluster.log import LogPlace, RoleLog
from bagpipe.cluster.settings import Failure, Introduction, Report, Wiring
from bagpipe.data.service import DataOrder, DataProcessorService, RemoteBatches
from bagpipe.errors import BagpipeError, ClusterError
from bagpipe.oracle.service import OracleService, PlanSettings
from bagpipe.server.core import EmbeddingServer
from bagpipe.server.process import Ready, ServerOptions, serve
from bagpipe.wire.listening import on_socket
from bagpipe.wire.sockets import SocketNetwork

READY_S = 120.0
STOP_S = 30.0

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
            return Failure(type(error).__name__, str(error))
        except Exception as error:
            _log.exception("%s failed", self.name)
            return Failure(ClusterError.__name__, f"{self.name} failed with {type(error).__name__}: {error}")

    return call


class Role(ABC):
    """What all roles can be asked."""

    def __init__(self, name: str) -> None:
        self.name = name
        self._output: RoleLog | None = None
        self._left: dict[str, Report] = {}

    @told
    def introduce(self, interface: str | None, node_address: str | None, place: LogPlace) -> Introduction:
        """Where this role runs; from now on what it prints is kept.

        Without an interface its address is that of the node, which Ray knows if it is not given.
        """
        self._output = RoleLog(place, self.name)
        _log.info("%s is process %d on %s", self.name, os.getpid(), socket.gethostname())
        address = find_address(interface) if interface is not None else (node_address or _ray_address())
        return Introduction(__version__, socket.gethostname(), _machine(), address, os.getpid())

    @told
    def report(self) -> dict[str, Report]:
        """How it is, and how those are who left word here: by name."""
        left, self._left = self._left, {}
        return left | {self.name: self.own_report()}

    def leave(self, role: str, report: Report) -> None:
        """Keep a report of a role that can't be asked while it works; what is printed adds up."""
        before = self._left.get(role)
        self._left[role] = Report(report.line, (before.printed if before else b"") + report.printed)

    def own_report(self) -> Report:
        """How this role is, and what it printed since the last time."""
        return Report(self.line(), b"" if self._output is None else self._output.news())

    @abstractmethod
    def line(self) -> str:
        """What it does, in a few words."""

    @abstractmethod
    def stop(self) -> Failure | None:
        """End in order."""


class ServerRole(Role):
    """One embedding server."""

    def __init__(self, name: str) -> None:
        super().__init__(name)
        self._server: EmbeddingServer | None = None
        self._stop, self._ready = threading.Event(), threading.Event()
        self._address, self._failure = "", Failure("", "")
        self._thread: threading.Thread | None = None

    @told
    def start(self, options: ServerOptions, wiring: Wiring) -> str | Failure:
        """Listen; the address."""
        self._thread = threading.Thread(target=self._serve, args=(options, wiring), name="bagpipe-server", daemon=True)
        self._thread.start()
        if not self._ready.wait(READY_S):
            raise ClusterError(f"{self.name} is not ready after {READY_S:g} s: see whether its machine is overloaded")
        return self._address or self._failure

    def line(self) -> str:
        """Rows and requests."""
        if self._server is None:
            return "starts"
        stats = self._server.stats()
        held = stats.bytes_in_memory + stats.bytes_on_disk
        return f"{sum(stats.num_rows):,} rows, {held / 1e6:,.1f} MB, {stats.requests:,} requests"

    @told
    def stop(self) -> None:
        """Answer nobody any more."""
        self._stop.set()
        if self._thread is not None:
            self._thread.join(STOP_S)

    def _serve(self, options: ServerOptions, wiring: Wiring) -> None:
        try:
            serve(options, wiring.listener, self._announce, self._stop, self._watch)
        except BagpipeError as error:
            self._failure = Failure(type(error).__name__, str(error))
            _log.error("%s", error)
        except Exception as error:
            self._failure = Failure(ClusterError.__name__, f"{self.name} failed with {type(error).__name__}: {error}")
            _log.exception("%s failed", self.name)
        finally:
            self._ready.set()

    def _watch(self, server: EmbeddingServer) -> None:
        self._server = server

    def _announce(self, ready: Ready) -> None:
        self._address = ready.address
        self._ready.set()


class ProcessorRole(Role):
    """One data processor."""

    def __init__(self, name: str) -> None:
        super().__init__(name)
        self._service: DataProcessorService | None = None

    @told
    def start(self, address: str, order: DataOrder, wiring: Wiring, processor: int, processors: int) -> str:
        """Open the data and listen; the address."""
        listen = on_socket(address, security=wiring.listener)
        self._service = DataProcessorService(listen, order, run=wiring.run, processor=processor, processors=processors)
        return self._service.start()

    def line(self) -> str:
        """Batches."""
        if self._service is None:
            return "starts"
        status = self._service.status()
        return f"{status.batches:,} batches, {status.bytes_sent / 1e6:,.1f} MB"

    @told
    def stop(self) -> None:
        """Answer nobody any more."""
        if self._service is not None:
            self._service.close()


class OracleRole(Role):
    """The oracle."""

    def __init__(self, name: str) -> None:
        super().__init__(name)
        self._service: OracleService | None = None
        self._opened = ExitStack()

    @told
    def start(
        self, address: str, processors: list[str], order: DataOrder, settings: PlanSettings, wiring: Wiring
    ) -> str:
        """Begin to plan, and listen; the address."""
        with ExitStack() as stack:
            network = SocketNetwork(wiring.client)
            stack.callback(network.close)
            batches = RemoteBatches(network, processors, order, run=wiring.run)
            stack.callback(batches.close)
            listen = on_socket(address, security=wiring.listener)
            self._service = OracleService(listen, batches, settings, run=wiring.run)
            stack.callback(self._service.close)
            where = self._service.start()
            self._opened = stack.pop_all()
        return where

    def line(self) -> str:
        """Plans."""
        if self._service is None:
            return "starts"
        status = self._service.status()
        return f"{status.planned:,} plans, lookahead {status.lookahead}, {status.bytes_sent / 1e6:,.1f} MB"

    @told
    def stop(self) -> None:
        """Answer nobody any more."""
        self._opened.close()


def _ray_address() -> str:
    ray = import_ray()
    address: str = ray.util.get_node_ip_address()
    return address


def _machine() -> str:
    boot = Path("/proc/sys/kernel/random/boot_id").read_text(encoding="ascii").strip()
    return f"{boot} {Path('/proc/self/ns/net').readlink()}"
