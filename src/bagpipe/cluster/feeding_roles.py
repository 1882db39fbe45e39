"""Those who feed the trainer, as roles: data processors and the oracle."""

from __future__ import annotations

from contextlib import ExitStack

from bagpipe.cluster.role import Role, told
from bagpipe.cluster.settings import Wiring
from bagpipe.data.service import DataOrder, DataProcessorService, RemoteBatches
from bagpipe.oracle.service import OracleService, PlanSettings
from bagpipe.wire.listening import on_socket
from bagpipe.wire.sockets import SocketNetwork


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
