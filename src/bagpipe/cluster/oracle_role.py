"""The oracle as a role."""

from __future__ import annotations

from contextlib import ExitStack

from bagpipe.cluster.role import Role, told
from bagpipe.cluster.settings import Wiring
from bagpipe.data.service import DataOrder, RemoteBatches
from bagpipe.oracle.service import OracleService, PlanSettings
from bagpipe.wire.keys import parse_address
from bagpipe.wire.listener import on_socket
from bagpipe.wire.stream import SocketNetwork


class OracleRole(Role):
    """The oracle."""

    def __init__(self, name: str) -> None:
        super().__init__(name)
        self._service: OracleService | None = None
        self._opened = ExitStack()

    @told
    def start(
        self,
        address: str,
        processors: list[str],
        order: DataOrder,
        settings: PlanSettings,
        wiring: Wiring,
        generation: int = 0,
        done: int = 0,
    ) -> str:
        """Begin to plan from the iteration after `done` others on, and listen; the address."""
        self._opened.close()
        with ExitStack() as stack:
            network = SocketNetwork(wiring.client)
            run = wiring.session(generation)
            batches = RemoteBatches(network, processors, order, run=run, start=settings.first_needed(done))
            stack.callback(batches.close)
            listen = on_socket(address, security=wiring.listener)
            compress = not parse_address(address).is_local
            self._service = OracleService(listen, batches, settings, run=run, done=done, compress=compress)
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
    def leave_off(self) -> None:
        """Answer nobody any more, until it is started again."""
        self._opened.close()

    @told
    def stop(self) -> None:
        """Answer nobody any more."""
        self._opened.close()
