"""What trainers exchange with each other: the interface, groups in memory, and sums in rank order.

Ranks issue the same exchanges in the same order and know all sizes beforehand. Sums are taken in rank order from +0.0,
so they do not depend on timing (I1). Waits have deadlines and name what was exchanged and with whom (I7).
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from types import TracebackType
from typing import NamedTuple, Protocol

import torch
from torch import Tensor

from bagpipe.errors import PipelineError
from bagpipe.kernels.rank_sum import sum_parts
from bagpipe.trainer.stages import DEADLINE_S
from bagpipe.types import contiguous_parts
from bagpipe.waits import Waits

CLOSED = "it has closed the group"


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


@dataclass(frozen=True)
class Groups:
    """One end of each of the groups that trainers exchange over; as a context manager it closes them."""

    critical: Collective
    delayed: Collective
    dense: Collective
    on_close: Sequence[Callable[[], None]] = ()
    """What else to let go of."""

    def abort(self, reason: BaseException | str) -> None:
        """This trainer can't go on: all waits, of others and of other threads of this one, end with an error."""
        for group in (self.critical, self.delayed, self.dense):
            group.abort(reason)

    def close(self) -> None:
        """Let go of all connections, threads and ports. May be called twice, and after errors."""
        for group in (self.critical, self.delayed, self.dense):
            group.close()
        for close in self.on_close:
            close()

    def __enter__(self) -> Groups:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if error is not None:
            self.abort(error)
        self.close()


class RankOrderSum:
    """The first half of a sum over ranks: every rank's contributions are on their way to those who add them."""

    def __init__(self, group: Collective, buffer: Tensor, what: str, total: float | None) -> None:
        self._group, self.what, self._total = group, what, total
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
        return self._group.exchange([sums] * self._group.size, self._parts, self.what)


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


def check_message(rank: int, what: str, expected: int, peer: int, theirs: str, count: int) -> None:
    """Refuse what a peer has sent if it is at another exchange, or sent another size than this rank expects."""
    if theirs != what:
        raise PipelineError(f"trainers are out of step: trainer {rank} is at {what}, trainer {peer} at {theirs}")
    if count != expected:
        raise PipelineError(f"{what}: trainer {peer} sent {count} numbers, trainer {rank} expects {expected}")


class _Post(NamedTuple):
    """One rank's buffers of an exchange."""

    what: str
    send: Sequence[Tensor]
    receive: Sequence[Tensor]


class MemoryGroup:
    """A rank of a group that lives in one process, in threads or under a scheduler; made by `memory_groups`.

    Of two ranks the one that comes second copies what both have sent, so nothing is stored in between.
    """

    def __init__(self, hub: _Hub, rank: int, size: int) -> None:
        self.rank, self.size = rank, size
        self._hub = hub
        self._sequence = 0

    def exchange(self, send: Sequence[Tensor], receive: Sequence[Tensor], what: str) -> Pending:
        """As the protocol."""
        check_exchange(self, send, receive, what)
        sequence, self._sequence = self._sequence, self._sequence + 1
        return _Arrival(self._hub, self.rank, what, self._hub.post(self.rank, sequence, _Post(what, send, receive)))

    def abort(self, reason: BaseException | str) -> None:
        """As the protocol."""
        self._hub.leave(self.rank, reason, abort=True)

    def close(self) -> None:
        """As the protocol; a rank that waits for more than was sent is told."""
        self._hub.leave(self.rank, CLOSED)


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
    """Where the ranks of a group meet. Who comes or leaves takes the lock; others look without it, as what is there
    stays."""

    def __init__(self, size: int, notify: Callable[[], None], deadline_s: float) -> None:
        self.size, self.deadline_s = size, deadline_s
        self._lock = threading.Lock()
        self.waits = [Waits(f"trainer {rank}") for rank in range(size)]
        self._notify = notify
        self._under_way: dict[int, dict[int, _Post]] = {}
        """The exchanges that some ranks have not come to, by their number; and who has."""
        self._aborted: tuple[int, BaseException | str] | None = None
        self._left: dict[int, BaseException | str] = {}

    def post(self, rank: int, sequence: int, own: _Post) -> dict[int, _Post]:
        """A rank has come to an exchange; who else has."""
        with self._lock:
            if self._aborted is not None:
                raise lost(own.what, *self._aborted)
            if rank in self._left:
                raise lost(own.what, rank, self._left[rank])
            posts = self._under_way.setdefault(sequence, {})
            for peer, post in (*posts.items(), (rank, own)):
                _copy(own, rank, post, peer)
                _copy(post, peer, own, rank)
            posts[rank] = own  # seen without the lock, so when its messages are there
            if len(posts) == self.size:
                del self._under_way[sequence]
        self._changed()
        return posts

    def leave(self, rank: int, reason: BaseException | str, abort: bool = False) -> None:
        """A rank comes to no further exchange; with `abort` what is under way fails too."""
        with self._lock:
            if abort and self._aborted is None:
                self._aborted = rank, reason
            self._left.setdefault(rank, reason)
        self._changed()

    def failure(self, missing: Sequence[int], rank: int, what: str) -> PipelineError | None:
        """Why those who are missing will never come, if so."""
        if self._aborted is not None:
            return lost(what, *self._aborted)
        return next((lost(what, peer, self._left[peer]) for peer in (rank, *missing) if peer in self._left), None)

    def _changed(self) -> None:
        for waits in self.waits:
            waits.changed()
        self._notify()


class _Arrival:
    """One rank's part of an exchange under way."""

    def __init__(self, hub: _Hub, rank: int, what: str, posts: dict[int, _Post]) -> None:
        self._hub, self._rank, self._what, self._posts = hub, rank, what, posts

    def ready(self) -> bool:
        missing = self._missing()
        return not missing or self._hub.failure(missing, self._rank, self._what) is not None

    def wait(self) -> None:
        if not self.ready():
            self._hub.waits[self._rank].until(self._described, self.ready, self._hub.deadline_s)
        if missing := self._missing():
            failure = self._hub.failure(missing, self._rank, self._what)
            assert failure is not None
            raise failure
        own = self._posts[self._rank]
        for peer, post in sorted(self._posts.items()):
            check_message(
                self._rank, self._what, len(own.receive[peer]), peer, post.what, len(post.send[self._rank])
            )  # fmt: skip

    def _missing(self) -> list[int]:
        return [peer for peer in range(self._hub.size) if peer not in self._posts]

    def _described(self) -> str:
        return f"{self._what} from {name_trainers(self._missing())}: is it stuck, or has it skipped this exchange?"


def name_trainers(ranks: Sequence[int]) -> str:
    """Ranks as people read them."""
    return f"trainer{'s' * (len(ranks) != 1)} {', '.join(map(str, ranks))}"


def _copy(source: _Post, sender: int, target: _Post, receiver: int) -> None:
    """Copy what one rank sends to another, unless they do not agree on it: then both waits say so."""
    sent, room = source.send[receiver], target.receive[sender]
    if source.what == target.what and len(sent) == len(room):
        room.copy_(sent)


def lost(what: str, rank: int, reason: BaseException | str) -> PipelineError:
    """The error of an exchange with a trainer that takes no part in any more."""
    if isinstance(reason, str):
        return PipelineError(f"{what} can't be exchanged, trainer {rank} has left: {reason}")
    error = PipelineError(f"{what} can't be exchanged, trainer {rank} failed: {type(reason).__name__}: {reason}")
    error.__cause__ = reason
    return error
