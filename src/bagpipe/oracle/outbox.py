"""Plans that are ready for trainers, kept until all have received them, and requests that came before their plan.

An iteration asked for again gets the same bytes again. Neither plans nor requests pile up: who makes plans waits for
room, and who asks too far ahead is refused (I5).
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from threading import Lock

from bagpipe.errors import WireError
from bagpipe.failpoints import reach
from bagpipe.waits import Waits
from bagpipe.wire.dispatch import Reply
from bagpipe.wire.messages import Body, Message
from bagpipe.wire.plan_messages import NotYet
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


@dataclass(frozen=True, slots=True)
class _Request:
    message: Message
    reply: Reply


class Outbox:
    """Answers by iteration, one a trainer; may be used by any thread."""

    def __init__(self, trainers: int, room: int) -> None:
        """Keep up to `room` plans that some trainer has not received."""
        self.bytes_sent = self.num_sent = 0
        self._room = room
        self._received = dict.fromkeys(range(trainers), NO_ITERATION)
        self._answers: dict[int, Sequence[Answer]] = {}
        """Of each iteration one for each trainer."""
        self._next = 0
        self._end: Answer | None = None
        self._parked: dict[tuple[int, int], _Request] = {}
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

    def describe(self, answer: Answer) -> None:
        """What the plans are like, before the first one; the same for all."""
        with self._lock:
            self._answers[DESCRIPTION] = [answer] * len(self._received)
        self._answer_parked()

    def put(self, iteration: int, answers: Sequence[Answer]) -> bool:
        """Add the plan of the next iteration, a part for each trainer, once there is room; False after `close`."""
        assert len(answers) == len(self._received), "a plan has a part for each trainer"
        # For as long as training takes; requests have deadlines.
        self._waits.until("room for a plan", lambda: self._closed or iteration - self.received <= self._room, math.inf)
        with self._lock:
            if self._closed:
                return False
            if iteration > self.received:  # after a restart trainers may have it already
                self._answers[iteration] = answers
            self._next = iteration + 1
        self._answer_parked()
        return True

    def finish(self, answer: Answer) -> None:
        """There are no more plans for anybody, and this is why."""
        with self._lock:
            self._end = answer
        self._answer_parked()

    def ask(self, trainer: int, iteration: int, received: int, message: Message, reply: Reply) -> None:
        """Answer a request now or when its plan is there; `received` are the plans that this trainer has."""
        with self._lock:
            if self._closed:
                return
            if trainer not in self._received:
                raise WireError(f"trainer {trainer} asks for plans: there are {len(self._received)}, counted from 0")
            if DESCRIPTION < iteration <= self._received[trainer]:
                raise WireError(f"trainer {trainer} asks for plan {iteration}, which it has received")
            if iteration > max(self._received[trainer], received) + AHEAD_MAX:
                raise WireError(f"trainer {trainer} asks for plan {iteration} and has received those up to {received}")
            self._receive(trainer, received)
            answer = self._find(trainer, iteration)
            if answer is None:
                again = (trainer, iteration) in self._parked
                self._parked[trainer, iteration] = _Request(message, reply)  # the newest: it may have reconnected
                if again:
                    answer = Answer(NotYet(f"has planned {self._next} iterations and reads on"))
        if answer is not None:
            self._send(_Request(message, reply), answer)

    def close(self) -> None:
        """Let whoever waits for room go; nothing is answered any more."""
        with self._lock:
            self._closed = True
            self._parked.clear()
            self._answers.clear()
        self._waits.changed()

    def _receive(self, trainer: int, received: int) -> None:
        if received > self._received[trainer]:
            self._received[trainer] = received
            for iteration in [each for each in self._answers if DESCRIPTION < each <= self.received]:
                del self._answers[iteration]
            for key in [key for key in self._parked if key[0] == trainer and DESCRIPTION < key[1] <= received]:
                del self._parked[key]
            self._waits.changed()

    def _find(self, trainer: int, iteration: int) -> Answer | None:
        if (answers := self._answers.get(iteration)) is not None:
            return answers[trainer]
        return self._end if iteration >= self._next or iteration == DESCRIPTION else None

    def _answer_parked(self) -> None:
        with self._lock:
            found = [(key, answer) for key in self._parked if (answer := self._find(*key)) is not None]
            released = [(self._parked.pop(key), answer) for key, answer in found]
        for request, answer in released:  # not under the lock: sending may take one of its own
            self._send(request, answer)

    def _send(self, request: _Request, answer: Answer) -> None:
        if answer.buffers:
            self.num_sent += 1
            self.bytes_sent += sum(buffer.nbytes for buffer in answer.buffers)
        message = request.message
        request.reply(Message(message.run, message.generation, message.request, answer.body, answer.buffers))
        reach("oracle.plan.sent")
