"""The servers of the launch that this process is a trainer of, if it is one: how a script's `accelerate` finds them."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING

from bagpipe.config import Config
from bagpipe.store.base import RowSource
from bagpipe.wire.keys import Security

if TYPE_CHECKING:
    from bagpipe.store.remote import RemoteStore


@dataclass(frozen=True)
class Launch:
    """Where rows live under `bagpipe launch`."""

    config: Config
    servers: Sequence[str]
    run: bytes
    security: Security
    trainer: int = 0
    trainers: int = 1

    def open_store(self, tables: Sequence[RowSource]) -> RemoteStore:
        """The rows of these tables, on the servers of the launch."""
        from bagpipe.store.links import Patience
        from bagpipe.store.remote import RemoteStore
        from bagpipe.wire.sockets import SocketNetwork

        wire, network = self.config.wire, SocketNetwork(self.security)
        return RemoteStore(
            tables,
            self.servers,
            network,
            run=self.run,
            trainer=self.trainer,
            trainers=self.trainers,
            shared_memory=wire.shared_memory,
            patience=Patience(retry_s=min(5.0, wire.deadline_s / 4), deadline_s=wire.deadline_s),
            on_close=network.close,
        )


_current: Launch | None = None


def current() -> Launch | None:
    """The launch that this process belongs to."""
    return _current


@contextmanager
def within(launch: Launch) -> Iterator[None]:
    """This process belongs to a launch while the block runs."""
    global _current
    before, _current = _current, launch
    try:
        yield
    finally:
        _current = before
