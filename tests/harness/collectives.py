"""Groups in memory that are stricter than sockets, so that tests find what would go wrong there."""

from __future__ import annotations

import torch

from bagpipe.errors import ConsistencyError
from bagpipe.trainer.collective import check_exchange, memory_groups


def strict_groups(*arguments, **options):
    """As `memory_groups`.

    What is to be received is NaN until it was waited for, and a buffer that changes while it is being sent is an error.
    """
    return [Strict(group) for group in memory_groups(*arguments, **options)]


class Strict:
    """One rank's end."""

    def __init__(self, group):
        self._group, self.rank, self.size = group, group.rank, group.size

    def exchange(self, send, receive, what):
        """Of copies, which nobody else can touch."""
        check_exchange(self, send, receive, what)
        sent = [values.clone() for values in send]
        rooms = [torch.empty_like(room) for room in receive]
        pending = self._group.exchange(sent, rooms, what)
        receive[self.rank].copy_(send[self.rank])
        for peer, room in enumerate(receive):
            if peer != self.rank:
                room.fill_(torch.nan)
        return _Pending(pending, list(zip(send, sent, strict=True)), list(zip(receive, rooms, strict=True)), self, what)

    def abort(self, reason):
        """As the group."""
        self._group.abort(reason)

    def close(self):
        """As the group."""
        self._group.close()


class _Pending:
    """An exchange whose buffers are looked at when it was waited for."""

    def __init__(self, pending, sent, received, group, what):
        self._pending, self._sent, self._received, self._group, self._what = pending, sent, received, group, what

    def ready(self):
        return self._pending.ready()

    def wait(self):
        self._pending.wait()
        for values, copy in self._sent:
            if not torch.equal(values.view(torch.int32), copy.view(torch.int32)):
                raise ConsistencyError(
                    f"{self._what}: trainer {self._group.rank} changed a buffer while it was being sent"
                )
        for room, copy in self._received:
            room.copy_(copy)
        self._sent, self._received = [], []
