"""A data processor as a role; its process does without PyTorch."""

from __future__ import annotations

from bagpipe.cluster.role import Role, told
from bagpipe.cluster.settings import Wiring
from bagpipe.data.service import DataOrder, DataProcessorService
from bagpipe.wire.listener import on_socket


class ProcessorRole(Role):
    """One data processor."""

    def __init__(self, name: str) -> None:
        super().__init__(name)
        self._service: DataProcessorService | None = None

    @told
    def start(
        self,
        address: str,
        order: DataOrder,
        wiring: Wiring,
        processor: int,
        processors: int,
        generation: int = 0,
        first: int = 0,
    ) -> str:
        """Open the data, read from batch `first` on, and listen; the address."""
        self._close()
        self._service = DataProcessorService(
            on_socket(address, security=wiring.listener),
            order,
            run=wiring.session(generation),
            processor=processor,
            processors=processors,
            start=first,
        )
        return self._service.start()

    def line(self) -> str:
        """Batches."""
        if self._service is None:
            return "starts"
        status = self._service.status()
        return f"{status.batches:,} batches, {status.bytes_sent / 1e6:,.1f} MB"

    @told
    def leave_off(self) -> None:
        """Answer nobody any more, until it is started again."""
        self._close()

    @told
    def stop(self) -> None:
        """Answer nobody any more."""
        self._close()

    def _close(self) -> None:
        if self._service is not None:
            self._service.close()
