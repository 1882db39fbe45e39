"""Plans that are ready for trainers, kept until all have received them.

An iteration asked for again gets the same bytes again. Plans do not pile up: who makes them waits for room, and who
asks too far ahead is refused (I5).
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from threading import Lock

from bagpipe.errors import WireError
from bagpipe.failpoints import reach
from bagpipe.waits import Waits
from bagpipe.wire.connection import Peer, PeerGoneError, wait_telling
from bagpipe.wire.messages import Body
from bagpipe.wire.records import NO_ITERATION

DESCRIPTION = NO_ITERATION
"""The number under which plans are described: before the first one, and kept to the end."""
AHEAD_MAX = 64
"""How many iterations beyond the last one received may be asked for."""


@dataclass(frozen=True, slots=True)
class Answer:
    """What is sent, each time that it is asked for."""

    body: Body
    buffers: Sequence[memoryview] = ()


class Outbox:
    """Answers by iteration, one a trainer; may be used by any thread."""

    def __init__(self, trainers: int, room: int) -> None:
        """Have up to `room` plans made beyond those that every trainer has asked for."""
        self.bytes_sent = self.num_sent = 0
        self._room = room
        self._received = dict.fromkeys(range(trainers), NO_ITERATION)
        self._asked = dict(self._received)
        """The last plan that each trainer has asked for: whoever waits for one must not keep it from being made."""
        self._answers: dict[int, Sequence[Answer]] = {}
        """Of each iteration one for each trainer."""
        self._next = 0
        self._end: Answer | None = None
        self._closed = False
        self._lock, self._waits = Lock(), Waits()

    @property
    def received(self) -> int:
        """All trainers have received the plans up to this one."""
        return min(self._received.values())

    @property
    def num_ready(self) -> int:
        """Plans that some trainer has not received."""
        return sum(number != DESCRIPTION for number in list(self._answers))

    def has_room(self, iteration: int) -> bool:
        """Whether this plan may be made."""
        return iteration <= min(self._asked.values()) + self._room

    def describe(self, answer: Answer) -> None:
        """What the plans are like, before the first one; the same for all."""
        with self._lock:
            self._answers[DESCRIPTION] = [answer] * len(self._received)
        self._waits.changed()

    def put(self, iteration: int, answers: Sequence[Answer]) -> bool:
        """Add the plan of the next iteration, a part for each trainer, once there is room; False after `close`."""
        assert len(answers) == len(self._received), "a plan has a part for each trainer"
        # For as long as training takes; requests have deadlines.
        self._waits.until("room for a plan", lambda: self._closed or self.has_room(iteration), math.inf)
        with self._lock:
            if self._closed:
                return False
            if iteration > self.received:  # after a restart trainers may have it already
                self._answers[iteration] = answers
            self._next = iteration + 1
        self._waits.changed()
        return True

    def finish(self, answer: Answer) -> None:
        """There are no more plans for anybody, and this is why."""
        with self._lock:
            self._end = answer
        self._waits.changed()

    def answer(self, peer: Peer, trainer: int, iteration: int, received: int) -> None:
        """Answer a request once its plan is there; `received` are the plans that this trainer has."""
        with self._lock:
            if trainer not in self._received:
                raise WireError(f"trainer {trainer} asks for plans: there are {len(self._received)}, counted from 0")
            if DESCRIPTION < iteration <= self._received[trainer]:
                raise WireError(f"trainer {trainer} asks for plan {iteration}, which it has received")
            if iteration > max(self._received[trainer], received) + AHEAD_MAX:
                raise WireError(f"trainer {trainer} asks for plan {iteration} and has received those up to {received}")
            self._receive(trainer, received)
            self._asked[trainer] = max(self._asked[trainer], iteration)
        self._waits.changed()
        wait_telling(
            peer, self._waits, lambda: f"has planned {self._next} iterations and reads on",
            lambda: self._closed or self._find(trainer, iteration) is not None, lambda: self._next,
        )  # fmt: skip
        answer = self._find(trainer, iteration)
        if answer is None:
            raise PeerGoneError("nothing is answered any more")
        self.num_sent += bool(answer.buffers)
        self.bytes_sent += sum(buffer.nbytes for buffer in answer.buffers)
        peer.reply(answer.body, answer.buffers)
        reach("oracle.plan.sent")

    def close(self) -> None:
        """Let whoever waits for room go; nothing is answered any more."""
        with self._lock:
            self._closed = True
            self._answers.clear()
        self._waits.changed()

    def _receive(self, trainer: int, received: int) -> None:
        if received > self._received[trainer]:
            self._received[trainer] = received
            for iteration in [each for each in self._answers if DESCRIPTION < each <= self.received]:
                del self._answers[iteration]

    def _find(self, trainer: int, iteration: int) -> Answer | None:
        if (answers := self._answers.get(iteration)) is not None:
            return answers[trainer]
        return self._end if iteration >= self._next or iteration == DESCRIPTION else None
