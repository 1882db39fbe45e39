"""Groups of trainers in processes of their own, over torch.distributed's gloo.

Each purpose has connections of its own. Nothing of torch.distributed's global state is used, so a script's own groups
stay as they are. A peer that ends, or does not answer until the deadline, is an error that names it, what was exchanged
and, if the peer could still say it, why (I7). Connections are neither encrypted nor authenticated: use a network that
only the trainers reach.

Gloo's collectives are not used: its all-to-all sends before it receives, which took 1.01 s for 6 MB each way over
100 Mbit/s, and plain sends and receives that are all posted at once 0.51 s, cut into pieces or not.
"""

from __future__ import annotations

import math
import struct
import time
import zlib
from collections.abc import Callable, Sequence
from contextlib import suppress
from datetime import timedelta
from typing import Any

import numpy as np
import torch
from torch import Tensor

from bagpipe.cluster.interface import LOOPBACK, find_address
from bagpipe.errors import (
    BagpipeError,
    ConfigError,
    DeadlineError,
    GenerationOverError,
    PeerLostError,
    PipelineError,
    again,
)
from bagpipe.trainer.collective import CLOSED, Groups, Pending, check_exchange, check_message, lost, memory_groups
from bagpipe.trainer.meeting import Meeting, MeetingPoint, Reason, c10d, describe, listening_at, sentence
from bagpipe.trainer.stages import DEADLINE_S

_LABEL_BYTES_MAX = 1 << 16
_HEAD = struct.Struct("<II")
"""What a label begins with: how many numbers are sent, and the length of the name of the exchange, which follows."""
_NAME_BYTES_MAX = 240
_IN_LABEL = (_LABEL_BYTES_MAX - _HEAD.size - _NAME_BYTES_MAX) // 4
"""So many numbers fit into a label behind the name."""
_LABELS, _NUMBERS, _TAG_MAX = 1, 0x40000000, 0x3FFFFFFF
_LATE_S = 2.0
"""How much later than ours the deadline of a peer may end."""
_CLOSE_S = 5.0
"""How long `close` waits for the others to have all that was sent."""


class ProcessGroup:
    """One rank's end of a group over gloo, with tensors in the memory of the CPU; usable until its first failure.

    That failure says what was exchanged with whom, and why it failed as far as anybody could say; then all who wait in
    it are let go (I7).
    """

    def __init__(self, meeting: Meeting, purpose: str, host: str, deadline_s: float) -> None:
        options = c10d.ProcessGroupGloo._Options()
        options._timeout = timedelta(seconds=deadline_s)
        options._threads = 1
        options._devices = [c10d.ProcessGroupGloo.create_device(hostname=host)]
        store = c10d.PrefixStore(purpose, meeting.store)
        self.backend: Any = c10d.ProcessGroupGloo(store, meeting.rank, meeting.size, options)
        self.rank, self.size, self.purpose, self.deadline_s = meeting.rank, meeting.size, purpose, deadline_s
        self.others = [(self.rank + distance) % self.size for distance in range(1, self.size)]
        self.sequence = 0
        self._meeting = meeting
        self._failure: BagpipeError | None = None
        self._under_way: dict[int, _Exchange] = {}

    def exchange(self, send: Sequence[Tensor], receive: Sequence[Tensor], what: str) -> Pending:
        """As the protocol."""
        check_exchange(self, send, receive, what)
        if self._failure is not None:
            raise self._failed_before(what) from self._failure
        receive[self.rank].copy_(send[self.rank])
        self.sequence += 1
        begun = _Exchange(self, send, receive, what)
        # Its memory may be written to until it was waited for, or the connections are gone.
        self._under_way[id(begun)] = begun
        begun.start()
        return begun

    def abort(self, reason: BaseException | str) -> None:
        """As the protocol; what was not yet received is lost."""
        if self._failure is None:
            self._meeting.tell(reason)
            message = f"trainer {self.rank} left its group for {self.purpose} exchanges: {describe(reason)}"
            self._failure = _reworded(reason, message)
            self._disconnect()

    def close(self) -> None:
        """As the protocol; it waits a little for others to close theirs."""
        if self._under_way:
            self.abort(CLOSED)
        if self._failure is None:
            self._failure = PipelineError(f"trainer {self.rank} has closed its group for {self.purpose} exchanges")
            self._part()
        self._under_way.clear()
        self.backend = None

    def done(self, exchange: _Exchange) -> None:
        """It was waited for, or has failed."""
        self._under_way.pop(id(exchange), None)

    def fail(self, error: BagpipeError, exchange: str = "", reason: Reason | None = None) -> BagpipeError:
        """End the group with an error; everyone who waits for this trainer is let go, and told another's reason."""
        if self._failure is None:
            self._failure = error
            self._meeting.tell(reason or error, exchange)
            self._disconnect()
        return error

    def broken(self, what: str, peer: int, exchange: str, error: RuntimeError) -> BagpipeError:
        """The error of an exchange with a peer whose connection has ended."""
        if self._failure is not None:  # another thread's, or an abort: it came first
            return self._failed_before(what)
        reason = self._meeting.hear(peer)
        if reason is not None and reason.lost is None:
            stopped = f"trainer {self.rank} can't exchange {what}: trainer {reason.trainer} has stopped: {reason.text}"
            over = reason.over
            failure = PipelineError(stopped) if over is None else GenerationOverError(stopped, over)
            return self.fail(failure, exchange, reason)
        return self.fail(self._peer_lost(what, peer, sentence(error), reason), exchange)

    def late(self, what: str, peer: int, exchange: str) -> BagpipeError:
        """The error of an exchange with a peer that did not answer until the deadline.

        One that has waited in vain at the same exchange has not skipped it: then it is their connection that broke.
        """
        waited = f"trainer {self.rank} waited {self.deadline_s:g} s for {what}"
        error: BagpipeError = DeadlineError(f"{waited}: is it stuck, or has it skipped this exchange?")
        if self._failure is None:
            self._meeting.tell(error, exchange, peer)
            reason = self._meeting.hear(peer, _LATE_S)
            if reason is not None and reason.exchange == exchange:
                error = self._peer_lost(what, peer, f"both waited {self.deadline_s:g} s for each other", None)
        return self.fail(error)

    def _peer_lost(self, what: str, peer: int, cause: str, reason: Reason | None) -> PeerLostError:
        """Names the trainer that was lost first: one that loses a peer ends its other connections, too."""
        broke, first = f"the connection to trainer {peer} broke: {cause}", peer
        lost = None if reason is None else reason.lost
        if lost is not None and lost not in (self.rank, peer):
            first = lost
            broke += f"; trainer {peer} has lost trainer {first}"
        return PeerLostError(f"trainer {self.rank} can't exchange {what}: {broke}", first)

    def _failed_before(self, what: str) -> BagpipeError:
        return _reworded(self._failure, f"{what} can't be exchanged: {self._failure}")

    def _part(self) -> None:
        """Tell the others that nothing more comes, and hear the same of them, or wait a little.

        Gloo's connections end with a reset, which may overtake what was sent last. Who has sent its farewell has
        received everything before.
        """
        until = time.monotonic() + _CLOSE_S
        farewell = _label("", torch.empty(0))
        rooms = {peer: torch.empty(_LABEL_BYTES_MAX, dtype=torch.uint8) for peer in self.others}
        with suppress(RuntimeError):
            works = [self.backend.recv([room], peer, _LABELS) for peer, room in rooms.items()]
            works += [self.backend.send([farewell], peer, _LABELS) for peer in self.others]
            for work in works:
                work.wait(_remaining(until))

    def _disconnect(self) -> None:
        """End the waits of all threads and peers: a receive that times out closes all connections of the group."""
        with suppress(RuntimeError):
            self.backend.recv([torch.empty(0)], self.others[0], _NUMBERS).wait(timedelta(milliseconds=1))


class _Exchange:
    """One exchange under way: a message from each peer that has something to send, and one to each that is sent it.

    What does not fit into a label is sent in front of it: gloo tells a receive that has not begun that its peer is
    gone, but not one in the middle of a message, so the label is waited for first. Labels have one tag, arrive in the
    order in which they were sent, and have room for any, so trainers who are out of step are told at once. The tag of
    what comes in front depends on its length, since gloo ends the process where a message is longer than expected.
    """

    def __init__(self, group: ProcessGroup, send: Sequence[Tensor], receive: Sequence[Tensor], what: str) -> None:
        self._group, self._send, self._receive, self._what = group, send, receive, what
        self._sequence = group.sequence
        self._labels: dict[int, Tensor] = {}
        self._receiving: dict[int, list[Any]] = {}
        self._sending: dict[int, list[Any]] = {}

    def start(self) -> None:
        """Post all receives, then all sends; of each peer in one order."""
        for peer in self._group.others:
            if len(room := self._receive[peer]):
                works = self._receiving[peer] = []
                if len(room) > _IN_LABEL:
                    self._post(works, "recv", room, peer, self._tag(room))
                self._labels[peer] = torch.empty(_LABEL_BYTES_MAX, dtype=torch.uint8)
                self._post(works, "recv", self._labels[peer], peer, _LABELS)
        for peer in self._group.others:
            if len(values := self._send[peer]):
                works = self._sending[peer] = []
                if len(values) > _IN_LABEL:
                    self._post(works, "send", values, peer, self._tag(values))
                self._post(works, "send", _label(self._what, values), peer, _LABELS)

    def ready(self) -> bool:
        return True

    def wait(self) -> None:
        until = time.monotonic() + self._group.deadline_s
        for peer, works in self._receiving.items():
            self._wait(works[-1:], f"from trainer {peer}", peer, until)
            self._read_label(peer)
            self._wait(works[:-1], f"from trainer {peer}", peer, until)
        for peer, works in self._sending.items():
            self._wait(works, f"to trainer {peer}", peer, until)
        self._let_go()

    def _post(self, works: list[Any], operation: str, buffer: Tensor, peer: int, tag: int) -> None:
        try:
            works.append(getattr(self._group.backend, operation)([buffer], peer, tag))
        except RuntimeError as error:
            failure = self._group.broken(f"{self._what} with trainer {peer}", peer, self._what, error)
        else:
            return
        self._let_go()
        raise failure

    def _wait(self, works: list[Any], direction: str, peer: int, until: float) -> None:
        try:
            for work in works:
                work.wait(_remaining(until))
        except RuntimeError as error:
            what = f"{self._what} {direction}"
            if time.monotonic() >= until:
                failure = self._group.late(what, peer, self._what)
            else:
                failure = self._group.broken(what, peer, self._what, error)
        else:
            return
        del work
        works.clear()
        self._let_go()
        raise failure

    def _read_label(self, peer: int) -> None:
        """See that it is of this exchange, and take the numbers that came with it."""
        label, room = self._labels.pop(peer), self._receive[peer]
        count, length = _HEAD.unpack(label[: _HEAD.size].numpy().tobytes())
        begin = _HEAD.size + length
        what = label[_HEAD.size : begin].numpy().tobytes().decode(errors="replace").rstrip()
        try:
            if not what:
                raise lost(self._what, peer, CLOSED)
            check_message(self._group.rank, _name(self._what), len(room), peer, what, count)
        except PipelineError as error:
            self._group.fail(error)
            self._let_go()
            raise
        if count <= _IN_LABEL:
            room.copy_(label[begin : begin + 4 * count].view(torch.float32))

    def _let_go(self) -> None:
        """Each work holds connections and their thread, and the traceback of an error holds this object."""
        for works in [*self._receiving.values(), *self._sending.values()]:
            works.clear()
        self._receiving, self._sending, self._labels = {}, {}, {}
        self._group.done(self)

    def _tag(self, values: Tensor) -> int:
        return _NUMBERS | (zlib.crc32(f"{self._sequence} {len(values)}".encode()) & _TAG_MAX)


def _reworded(reason: BaseException | str | None, message: str) -> BagpipeError:
    """What comes of a failure: who is to blame for it stays, if that is known."""
    return again(reason, message) if isinstance(reason, PeerLostError | GenerationOverError) else PipelineError(message)


PURPOSES = ("critical", "delayed", "dense")


def open_groups(
    rank: int,
    size: int,
    meeting: MeetingPoint | str,
    *,
    interface: str = LOOPBACK,
    generation: int = 0,
    deadline_s: float = DEADLINE_S,
    given_up: Callable[[], BagpipeError | None] = lambda: None,
) -> Groups:
    """Join the other trainers; returns when all `size` of them are there.

    `meeting` is the address (host:port) of trainer 0's meeting point; trainer 0 gives the point itself, or an address
    at which it shall listen. `interface` is the one that this trainer's connections use, by name or address. After a
    failure trainers may meet again at the same point, under another `generation`. `given_up` says why nobody is waited
    for any more, if so.
    """
    if not 0 <= rank < size:
        raise ConfigError(f"rank {rank} of {size} trainers: give a number from 0 to {size - 1}")
    if size == 1:
        return Groups(memory_groups(1)[0], memory_groups(1)[0], memory_groups(1)[0])
    host = find_address(interface)
    own = listening_at(meeting) if isinstance(meeting, str) and rank == 0 else None
    met: Meeting | None = None
    groups: list[ProcessGroup] = []
    try:
        address = meeting if isinstance(meeting, str) else meeting.address
        met = Meeting(address, rank, size, f"trainers-{generation}", deadline_s, given_up)
        met.gather("joined", f"trainers = {size}")
        met.connect(host)
        for purpose in PURPOSES:
            groups += [_connect(met, purpose, host, deadline_s)]
        met.gather("connected", "")
    except BaseException as error:
        for group in groups:
            group.abort(error)
            group.close()
        for each in (met, own):
            if each is not None:
                each.close()
        raise
    critical, delayed, dense = groups
    return Groups(critical, delayed, dense, [each.close for each in (met, own) if each is not None])


def _connect(meeting: Meeting, purpose: str, host: str, deadline_s: float) -> ProcessGroup:
    try:
        return ProcessGroup(meeting, purpose, host, deadline_s)
    except RuntimeError as error:
        raise PipelineError(
            f"trainer {meeting.rank} can't connect to the others from {host}: {sentence(error)}: can they reach each "
            "other on this interface?"
        ) from error


def _label(what: str, values: Tensor) -> Tensor:
    """What is sent of an exchange, with the numbers themselves if there is room."""
    name = _name(what).encode()
    name += b" " * (-len(name) % 4)
    begin = _HEAD.size + len(name)
    label = torch.empty(begin + (4 * len(values) if len(values) <= _IN_LABEL else 0), dtype=torch.uint8)
    label.numpy()[:begin] = np.frombuffer(_HEAD.pack(len(values), len(name)) + name, np.uint8)
    if len(label) > begin:
        label[begin:].view(torch.float32).copy_(values)
    return label


def _name(what: str) -> str:
    """What an exchange is called in a head."""
    return what.encode()[:_NAME_BYTES_MAX].decode(errors="ignore").rstrip()


def _remaining(until: float) -> timedelta:
    """Rounded up to milliseconds, as torch counts them: a wait that ends with it is over the deadline."""
    return timedelta(milliseconds=max(1, math.ceil(1e3 * (until - time.monotonic()))))
