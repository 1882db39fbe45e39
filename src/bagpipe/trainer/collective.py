"""What trainers exchange with each other: the interface, its twin in memory, and sums in rank order.

Ranks issue the same exchanges in the same order, so no index, size or header travels. Sums are taken in rank order from
+0.0, so they do not depend on timing (I1). Waits have deadlines and name what was exchanged and with whom (I7).
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Sequence
from typing import NamedTuple, Protocol

import torch
from torch import Tensor

from bagpipe.errors import ConsistencyError, DeadlineError, PipelineError
from bagpipe.kernels.rank_sum import sum_parts
from bagpipe.trainer.stages import DEADLINE_S
from bagpipe.types import contiguous_parts


class Pending(Protocol):
    """An exchange that is under way. Its buffers belong to it until `wait` has returned."""

    def ready(self) -> bool:
        """Whether `wait` would do without waiting for a driver: in memory all has arrived; over sockets always."""

    def wait(self) -> None:
        """Return when all that was to be received is there and all that was to be sent has left."""


class Collective(Protocol):
    """One rank's end of a group of trainers. One object for each purpose; one thread at a time uses it."""

    rank: int
    size: int

    def exchange(self, send: Sequence[Tensor], receive: Sequence[Tensor], what: str) -> Pending:
        """Send one tensor to each rank and receive one from each: send[p] fills receive[self.rank] at rank p.

        They are 1-dimensional, contiguous and float32; sizes may differ and be 0, both sides know them. Bits travel as
        they are. The own part is copied. `what` is the same text on all ranks.
        """

    def abort(self, reason: BaseException | str) -> None:
        """This rank can't go on: waits of all ranks, those of other threads of this one too, end with an error."""

    def close(self) -> None:
        """Let go of the group; what this rank has sent still arrives. May be called twice."""


class RankOrderSum:
    """The first half of a sum over ranks: every rank's contributions are on their way to those who add them."""

    def __init__(self, group: Collective, buffer: Tensor, what: str, total: float | None) -> None:
        self._group, self._what, self._total = group, what, total
        self._parts = [buffer[start:stop] for start, stop in contiguous_parts(len(buffer), group.size)]
        self._mine = self._parts[group.rank]
        self._contributions = buffer.new_empty((group.size, len(self._mine)))
        self._pending = group.exchange(self._parts, list(self._contributions), what)

    def ready(self) -> bool:
        """Whether `add` would do without waiting for a driver."""
        return self._pending.ready()

    def add(self) -> Pending:
        """The second half: add what has come and send the sums to all. The buffer holds them once this was waited for.

        The order of a group's exchanges counts: ranks call this in the same order among their other exchanges.
        """
        self._pending.wait()
        sums = torch.empty_like(self._mine)
        sum_parts(self._contributions, sums, self._total)
        return self._group.exchange([sums] * self._group.size, self._parts, self._what)


def sum_in_rank_order(group: Collective, buffer: Tensor, what: str, total: float | None = None) -> RankOrderSum:
    """Replace the buffer by its sum over ranks, added in rank order from +0.0; divided by `total`, if there is one.

    Rank k adds part k of the buffer for all: the bytes are those of an all-reduce. In one go:
    `sum_in_rank_order(group, buffer, what).add().wait()`.
    """
    return RankOrderSum(group, buffer, what, total)


def check_exchange(group: Collective, send: Sequence[Tensor], receive: Sequence[Tensor], what: str) -> None:
    """Refuse what can't be exchanged, before anything is sent."""
    for name, tensors in (("send", send), ("receive", receive)):
        if len(tensors) != group.size:
            raise PipelineError(f"{what}: {len(tensors)} tensors to {name} for {group.size} trainers: give one each")
        for peer, tensor in enumerate(tensors):
            if tensor.dtype != torch.float32 or tensor.dim() != 1 or not tensor.is_contiguous():
                raise PipelineError(
                    f"{what}: the tensor to {name} for trainer {peer} is {tensor.dtype} of shape {tuple(tensor.shape)} "
                    f"and strides {tensor.stride()}: give contiguous float32 of one dimension"
                )
    if len(send[group.rank]) != len(receive[group.rank]):
        raise PipelineError(
            f"{what}: trainer {group.rank} sends itself {len(send[group.rank])} numbers and expects "
            f"{len(receive[group.rank])}: give the same number"
        )


class Message(NamedTuple):
    """What one rank sent to another."""

    what: str
    values: Tensor


class MemoryGroup:
    """A rank of a group that lives in one process, in threads or under a scheduler; made by `memory_groups`.

    It is stricter than sockets, so that tests find what would go wrong there: what is to be received is NaN until it
    was waited for, and a buffer that changes while it is being sent is an error.
    """

    def __init__(self, hub: _Hub, rank: int, size: int) -> None:
        self.rank, self.size = rank, size
        self._hub = hub
        self._sequence = 0

    def exchange(self, send: Sequence[Tensor], receive: Sequence[Tensor], what: str) -> Pending:
        """As the protocol; messages are copied when they are sent."""
        check_exchange(self, send, receive, what)
        messages = [Message(what, values.clone()) for values in send]
        receive[self.rank].copy_(send[self.rank])
        for peer, buffer in enumerate(receive):
            if peer != self.rank:
                buffer.fill_(torch.nan)
        sequence = self._post(messages, what)

        def fill(received: Sequence[Message]) -> None:
            for sent, message in zip(send, messages, strict=True):
                if not _same_bits(sent, message.values):
                    raise ConsistencyError(f"{what}: trainer {self.rank} changed a buffer while it was being sent")
            for peer, message in enumerate(received):
                self._check(message, peer, len(receive[peer]), what)
            for peer, message in enumerate(received):
                receive[peer].copy_(message.values)

        return _Arrival(self._hub, self, sequence, what, fill)

    def abort(self, reason: BaseException | str) -> None:
        """As the protocol."""
        self._hub.leave(self.rank, reason, abort=True)

    def close(self) -> None:
        """As the protocol; a rank that waits for more than was sent is told."""
        self._hub.leave(self.rank, "it has closed the group")

    def _post(self, messages: Sequence[Message], what: str) -> int:
        sequence, self._sequence = self._sequence, self._sequence + 1
        self._hub.send(self.rank, sequence, messages, what)
        return sequence

    def _check(self, message: Message, peer: int, expected: int, what: str) -> None:
        if message.what != what:
            raise PipelineError(
                f"trainers are out of step: trainer {self.rank} is at {what}, trainer {peer} at {message.what}"
            )
        if len(message.values) != expected:
            raise PipelineError(
                f"{what}: trainer {peer} sent {len(message.values)} numbers, trainer {self.rank} expects {expected}"
            )


def memory_groups(
    size: int, notify: Callable[[], None] = lambda: None, deadline_s: float = DEADLINE_S
) -> list[MemoryGroup]:
    """The ranks of a group in memory.

    `notify` is called, by whoever sends, aborts or closes, when a rank's wait may have come to its end: give a function
    that notifies the drivers of all ranks, if these are `Threads`. A seeded driver looks by itself: give none.
    """
    hub = _Hub(size, notify, deadline_s)
    return [MemoryGroup(hub, rank, size) for rank in range(size)]


class _Hub:
    """The mailboxes of a group. `notify` is called without the lock: drivers look at `ready` under locks of theirs."""

    def __init__(self, size: int, notify: Callable[[], None], deadline_s: float) -> None:
        self.deadline_s = deadline_s
        self.changed = threading.Condition()
        self._notify = notify
        self._mailboxes: list[dict[tuple[int, int], Message]] = [{} for _ in range(size)]
        self._aborted: tuple[int, BaseException | str] | None = None
        self._left: dict[int, BaseException | str] = {}

    def send(self, rank: int, sequence: int, messages: Sequence[Message], what: str) -> None:
        with self.changed:
            if self._aborted is not None:
                raise _lost(what, *self._aborted)
            if rank in self._left:
                raise _lost(what, rank, self._left[rank])
            for mailbox, message in zip(self._mailboxes, messages, strict=True):
                mailbox[sequence, rank] = message
            self.changed.notify_all()
        self._notify()

    def leave(self, rank: int, reason: BaseException | str, abort: bool = False) -> None:
        with self.changed:
            if abort and self._aborted is None:
                self._aborted = rank, reason
            self._left.setdefault(rank, reason)
            self.changed.notify_all()
        self._notify()

    def missing(self, rank: int, sequence: int) -> list[int]:
        mailbox = self._mailboxes[rank]
        return [peer for peer in range(len(self._mailboxes)) if (sequence, peer) not in mailbox]

    def failure(self, missing: Sequence[int], rank: int, what: str) -> PipelineError | None:
        """Why those who are missing will never send, if so."""
        if self._aborted is not None:
            return _lost(what, *self._aborted)
        return next((_lost(what, peer, self._left[peer]) for peer in (rank, *missing) if peer in self._left), None)

    def received(self, rank: int, sequence: int) -> list[Message]:
        return [self._mailboxes[rank][sequence, peer] for peer in range(len(self._mailboxes))]

    def discard(self, rank: int, sequence: int) -> None:
        for peer in range(len(self._mailboxes)):
            del self._mailboxes[rank][sequence, peer]


class _Arrival:
    """The messages of one exchange on their way to one rank."""

    def __init__(
        self, hub: _Hub, group: MemoryGroup, sequence: int, what: str, fill: Callable[[Sequence[Message]], None]
    ) -> None:
        self._hub, self._rank, self._sequence, self._what = hub, group.rank, sequence, what
        self._fill: Callable[[Sequence[Message]], None] | None = fill

    def ready(self) -> bool:
        with self._hub.changed:
            return self._settled()

    def wait(self) -> None:
        if self._fill is None:
            return
        until = time.monotonic() + self._hub.deadline_s
        with self._hub.changed:
            while not self._settled():
                if not self._hub.changed.wait(until - time.monotonic()) and not self._settled():
                    missing = self._hub.missing(self._rank, self._sequence)
                    raise DeadlineError(
                        f"trainer {self._rank} waited {self._hub.deadline_s:g} s for {self._what} from "
                        f"{name_trainers(missing)}: is it stuck, or has it skipped this exchange?"
                    )
            missing = self._hub.missing(self._rank, self._sequence)
            if missing:
                failure = self._hub.failure(missing, self._rank, self._what)
                assert failure is not None
                raise failure
            received = self._hub.received(self._rank, self._sequence)
        self._fill(received)
        self._fill = None
        with self._hub.changed:
            self._hub.discard(self._rank, self._sequence)

    def _settled(self) -> bool:
        if self._fill is None:
            return True
        missing = self._hub.missing(self._rank, self._sequence)
        return not missing or self._hub.failure(missing, self._rank, self._what) is not None


def name_trainers(ranks: Sequence[int]) -> str:
    """Ranks as people read them."""
    return f"trainer{'s' * (len(ranks) != 1)} {', '.join(map(str, ranks))}"


def _lost(what: str, rank: int, reason: BaseException | str) -> PipelineError:
    if isinstance(reason, str):
        return PipelineError(f"{what} can't be exchanged, trainer {rank} has left: {reason}")
    error = PipelineError(f"{what} can't be exchanged, trainer {rank} failed: {type(reason).__name__}: {reason}")
    error.__cause__ = reason
    return error


def _same_bits(left: Tensor, right: Tensor) -> bool:
    return torch.equal(left.view(torch.int32), right.view(torch.int32))
