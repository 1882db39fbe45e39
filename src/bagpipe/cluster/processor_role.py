"""A data processor as a role; its process does without PyTorch."""

from __future__ import annotations

from bagpipe.cluster.role import Role, told
from bagpipe.cluster.settings import Wiring
from bagpipe.data.service import DataOrder, DataProcessorService
from bagpipe.wire.listening import on_socket


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
