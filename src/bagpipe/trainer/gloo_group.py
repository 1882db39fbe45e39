"""A group of trainers over gloo: tensors in the memory of the CPU, plain sends and receives between each two trainers.

Gloo's collectives are not used. Its all-to-all sends before it receives: 6 MB each way over 100 Mbit/s, which can be
done in 0.48 s, took it 1.01 s, and sends and receives that are all posted at once 0.51 s, cut into pieces or not. And a
peer that is killed in the middle of a message is an error at once here (I7), where gloo waits for its deadline.
"""

from __future__ import annotations

import time
import zlib
from collections import deque
from collections.abc import Sequence
from contextlib import suppress
from datetime import timedelta
from typing import Any

import torch
from torch import Tensor

from bagpipe.errors import BagpipeError, DeadlineError, PipelineError
from bagpipe.trainer.collective import Pending, check_exchange
from bagpipe.trainer.meeting import Meeting, c10d, describe, sentence

_NOTES_KEPT = 64
"""Exchanges whose marks and receipts are kept until they have surely left; no more can be under way at once."""
_CLOSE_S = 5.0
"""How long `close` waits for the last of them to leave."""
_DATA, _TAG_MAX = 0x40000000, 0x3FFFFFFF


class GlooGroup:
    """One end of a group over gloo, usable until its first failure.

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
        self._meeting = meeting
        self._failure: BagpipeError | None = None
        self._under_way: dict[int, object] = {}
        self._sequence = 0
        self._notes: deque[list[Any]] = deque(maxlen=_NOTES_KEPT)

    def exchange(self, send: Sequence[Tensor], receive: Sequence[Tensor], what: str) -> Pending:
        """As the protocol."""
        check_exchange(self, send, receive, what)
        self.check(what)
        receive[self.rank].copy_(send[self.rank])
        self._sequence += 1
        notes: list[Any] = []
        self._notes.append(notes)
        return _Exchange(self, send, receive, what, self._sequence, notes)

    def close(self) -> None:
        """As the protocol."""
        if self.usable and not self.busy:
            until = time.monotonic() + _CLOSE_S
            with suppress(RuntimeError):
                for work, _ in (note for notes in self._notes for note in notes):
                    work.wait(_remaining(until))
        if self.busy:
            self.abort("it has closed the group")
        if self._failure is None:
            self._failure = PipelineError(f"trainer {self.rank} has closed its group for {self.purpose} exchanges")
        self._under_way.clear()
        self.backend = None
        self._notes.clear()

    def abort(self, reason: BaseException | str) -> None:
        """As the protocol; what was not yet received is lost."""
        if self._failure is None:
            self._meeting.tell(reason)
            self._failure = PipelineError(
                f"trainer {self.rank} left its group for {self.purpose} exchanges: {describe(reason)}"
            )
            self.disconnect()

    @property
    def usable(self) -> bool:
        """Whether nothing has failed, and it is open."""
        return self._failure is None

    @property
    def busy(self) -> bool:
        """Whether exchanges are under way."""
        return bool(self._under_way)

    def hold(self, transfer: object) -> None:
        """Keep what is under way: its memory may be written to until it was waited for, or the connections are gone."""
        self._under_way[id(transfer)] = transfer

    def release(self, transfer: object) -> None:
        """It was waited for, or has failed."""
        self._under_way.pop(id(transfer), None)

    def check(self, what: str) -> None:
        """Refuse to begin anything after a failure."""
        if self._failure is not None:
            raise PipelineError(f"{what} can't be exchanged: {self._failure}") from self._failure

    def fail(self, what: str, error: BaseException, waited_s: float) -> BagpipeError:
        """The error to raise for a failed exchange; everyone who waits for this trainer is let go."""
        if self._failure is not None:  # another thread's, or an abort: it came first
            return PipelineError(f"{what} can't be exchanged: {self._failure}")
        if waited_s >= self.deadline_s or "Timed out" in str(error):
            self._failure = DeadlineError(
                f"trainer {self.rank} waited {self.deadline_s:g} s for {what}: is it stuck, or has it skipped this "
                "exchange?"
            )
            self._meeting.tell(self._failure)
        else:
            reasons = self._meeting.reasons()
            told = "; ".join(f"trainer {rank} has stopped: {reason}" for rank, reason in reasons.items())
            cause = told or f"{sentence(error)}: see what that trainer reports"
            self._failure = PipelineError(f"trainer {self.rank} can't exchange {what}: {cause}")
            if not told:
                self._meeting.tell(f"it lost the connection for {what}")
        self.disconnect()
        return self._failure

    def disconnect(self) -> None:
        """End the waits of all threads and peers: a receive that times out closes all connections of the group."""
        with suppress(RuntimeError):
            self.backend.recv([torch.empty(0)], self.others[0], _DATA).wait(timedelta(milliseconds=1))


class _Exchange:
    """One exchange under way.

    Gloo tells sends and receives that have not begun that their peer is gone, but not those in the middle of a message.
    So each tensor is followed by a mark (its length, and what it is for), and answered by a receipt: a tensor that is
    being received is waited for by its mark, one that is being sent by its receipt. Gloo also ends the process where a
    message is longer than was expected: the tags of tensors depend on their length.
    """

    def __init__(
        self,
        group: GlooGroup,
        send: Sequence[Tensor],
        receive: Sequence[Tensor],
        what: str,
        sequence: int,
        notes: list[Any],
    ) -> None:
        self._group, self._send, self._receive, self._what = group, send, receive, what
        self._sequence, self._notes = sequence, notes
        self._name = zlib.crc32(what.encode()) & _TAG_MAX
        self._peers = [peer for peer in group.others if len(send[peer]) or len(receive[peer])]
        self._marks = {peer: torch.zeros(2, dtype=torch.int32) for peer in self._peers}
        self._works: dict[tuple[str, int], Any] = {}
        group.hold(self)
        for peer in self._peers:
            self._start_receiving(peer)
        for peer in self._peers:
            self._start_sending(peer)

    def ready(self) -> bool:
        return True

    def wait(self) -> None:
        until = time.monotonic() + self._group.deadline_s
        for peer in self._peers:
            self._wait("mark", peer, until)
            if self._marks[peer].tolist() != [len(self._receive[peer]), self._name]:
                raise self._failed(f"from trainer {peer}", self._disagreement(peer), until)
            if len(self._receive[peer]):
                self._wait("tensor from", peer, until)
                self._note(peer, 1)
        for peer in self._peers:
            if len(self._send[peer]):
                self._wait("receipt", peer, until)
                self._wait("tensor to", peer, until)
        self._peers = []
        self._works.clear()
        self._group.release(self)

    def _start_receiving(self, peer: int) -> None:
        """In the order in which they will be sent: gloo sends what is asked for first."""
        if len(self._receive[peer]):
            self._start("tensor from", peer, "recv", self._receive[peer], self._tensor_tag(self._receive[peer]))
        self._start("mark", peer, "recv", self._marks[peer], self._note_tag(0))
        if len(self._send[peer]):
            self._start("receipt", peer, "recv", torch.zeros(2, dtype=torch.int32), self._note_tag(1))

    def _start_sending(self, peer: int) -> None:
        if len(self._send[peer]):
            self._start("tensor to", peer, "send", self._send[peer], self._tensor_tag(self._send[peer]))
        self._note(peer, 0)

    def _start(self, part: str, peer: int, operation: str, buffer: Tensor, tag: int) -> None:
        try:
            self._works[part, peer] = getattr(self._group.backend, operation)([buffer], peer, tag)
        except RuntimeError as error:
            raise self._failed(_direction(part, peer), error) from error.with_traceback(None)

    def _note(self, peer: int, kind: int) -> None:
        """Send a mark (0) or receipt (1); nobody waits until it has left."""
        note = torch.tensor([len(self._send[peer]), self._name], dtype=torch.int32)
        try:
            self._notes.append((self._group.backend.send([note], peer, self._note_tag(kind)), note))
        except RuntimeError as error:
            raise self._failed(f"to trainer {peer}", error) from error.with_traceback(None)

    def _wait(self, part: str, peer: int, until: float) -> None:
        try:
            self._works[part, peer].wait(_remaining(until))
        except RuntimeError as error:
            raise self._failed(_direction(part, peer), error, until) from error.with_traceback(None)

    def _failed(self, whom: str, error: RuntimeError, until: float | None = None) -> BagpipeError:
        late = until is not None and time.monotonic() >= until
        failure = self._group.fail(f"{self._what} {whom}", error, self._group.deadline_s if late else 0.0)
        # Each holds connections and their thread, and the traceback of the error holds this object.
        self._works.clear()
        self._notes.clear()
        self._group.release(self)
        return failure

    def _disagreement(self, peer: int) -> RuntimeError:
        length, name = self._marks[peer].tolist()
        if name != self._name:
            return RuntimeError("that trainer is at another exchange")
        return RuntimeError(f"that trainer sent {length} numbers, {len(self._receive[peer])} were expected")

    def _tensor_tag(self, tensor: Tensor) -> int:
        return _DATA | (zlib.crc32(f"{self._sequence} {len(tensor)}".encode()) & _TAG_MAX)

    def _note_tag(self, kind: int) -> int:
        return (2 * self._sequence + kind) & _TAG_MAX


def _remaining(until: float) -> timedelta:
    return timedelta(seconds=max(1e-3, until - time.monotonic()))


def _direction(part: str, peer: int) -> str:
    return f"{'to' if part in ('tensor to', 'receipt') else 'from'} trainer {peer}"
