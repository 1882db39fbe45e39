"""An embedding server as a role."""

from __future__ import annotations

import logging
import threading

from bagpipe.checkpoint.point import ResumePoint
from bagpipe.cluster.role import Role, told
from bagpipe.cluster.settings import Failure, Wiring
from bagpipe.errors import BagpipeError, ClusterError
from bagpipe.server.process import Ready, ServerOptions, serve
from bagpipe.server.server import EmbeddingServer

READY_S = 120.0
STOP_S = 30.0
_log = logging.getLogger(__name__)


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
        """Listen; the address. A second call does nothing more."""
        if self._thread is None:
            self._thread = threading.Thread(
                target=self._serve, args=(options, wiring), name="bagpipe-server", daemon=True
            )
            self._thread.start()
        if not self._ready.wait(READY_S):
            raise ClusterError(f"{self.name} is not ready after {READY_S:g} s: see whether its machine is overloaded")
        return self._address or self._failure

    @told
    def abandon(self, generation: int) -> None:
        """Refuse everything of earlier generations from now on, and tell those who leave word here."""
        self.end_generation(generation - 1)
        self._running().abandon(generation)

    @told
    def checkpoints(self) -> list[str]:
        """Those that may be complete, as far as it knows."""
        return list(map(str, self._running().checkpoints()))

    @told
    def recover(self, generation: int, point: ResumePoint) -> None:
        """Have the rows of that point, and serve that generation."""
        self._running().recover(generation, point)

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

    def _running(self) -> EmbeddingServer:
        if self._server is None:
            raise ClusterError(f"{self.name} does not run: {self._failure.message or 'it was not started'}")
        return self._server

    def _serve(self, options: ServerOptions, wiring: Wiring) -> None:
        try:
            serve(options, wiring.listener, self._announce, self._stop, self._watch)
        except BagpipeError as error:
            self._failure = Failure.of(error)
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
