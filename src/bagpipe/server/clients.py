"""The connections that a server remembers, each with the memory that its client may share."""

from __future__ import annotations

from collections import OrderedDict
from threading import Lock

from bagpipe.server.shared import ForeignMemory, attach
from bagpipe.wire.messages import Open


class Client:
    """One connection of a trainer."""

    def __init__(self, opened: Open, foreign: ForeignMemory | None) -> None:
        self.opened, self.trainer, self.foreign = opened, opened.trainer, foreign
        self._newest = -1
        self._lock = Lock()

    @property
    def memory(self) -> memoryview | None:
        """What the client shares."""
        return None if self.foreign is None else self.foreign.memory

    def is_new(self, request: int) -> bool:
        """Whether this request is no copy of an earlier one; clients number theirs in ascending order."""
        with self._lock:
            if request <= self._newest:
                return False
            self._newest = request
            return True


class Clients:
    """By the name of the connection; when there are too many, the one that was silent longest is forgotten."""

    def __init__(self, num_max: int) -> None:
        self._num_max = num_max
        self._by_peer: OrderedDict[bytes, Client] = OrderedDict()
        self._lock = Lock()

    def __len__(self) -> int:
        return len(self._by_peer)

    @property
    def num_shared(self) -> int:
        """Clients whose memory is shared."""
        with self._lock:
            return sum(client.foreign is not None for client in self._by_peer.values())

    def find(self, peer: bytes) -> Client | None:
        """Who this is, if that is known."""
        with self._lock:
            if peer in self._by_peer:
                self._by_peer.move_to_end(peer)
            return self._by_peer.get(peer)

    def add(self, peer: bytes, opened: Open) -> Client:
        """Remember a client. A copy of its message changes nothing, but another memory makes it another client."""
        known = self.find(peer)
        if known is not None and known.opened == opened:
            return known
        client = Client(opened, None if opened.shared is None else attach(opened.shared))
        with self._lock:
            self._by_peer[peer] = client
            self._by_peer.move_to_end(peer)
            while len(self._by_peer) > self._num_max:
                self._by_peer.popitem(last=False)
        self.release_abandoned()
        return client

    def clear(self) -> None:
        """Know nobody any more."""
        with self._lock:
            self._by_peer.clear()

    def release_abandoned(self) -> None:
        """Forget the clients whose memory is no longer theirs: they have reconnected, or are gone."""
        with self._lock:
            shared = [(peer, client) for peer, client in self._by_peer.items() if client.foreign is not None]
        for peer, client in shared:
            if client.foreign is not None and client.foreign.abandoned:
                with self._lock:
                    if self._by_peer.get(peer) is client:
                        del self._by_peer[peer]
