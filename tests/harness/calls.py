"""Requests to a handler without a network: each in a thread, so that one may wait while the test goes on."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable

from bagpipe.wire.connection import PeerGoneError
from bagpipe.wire.listener import answered
from bagpipe.wire.messages import Body, Message, NotYet

ANSWER_S = 60.0


class Call:
    """One request, as its handler sees it: a `Peer` that shares its state with others of the same connection."""

    def __init__(self, connection: Connection, message: Message) -> None:
        self.connection, self.message, self.name = connection, message, connection.name
        self.answers: list[tuple[Body, tuple[bytes, ...]]] = []
        self.words: list[tuple[str, int]] = []
        """Why it was to wait, and how far what it waits for was."""
        self.given_back = False
        self._changed = threading.Condition()
        self.thread = threading.Thread(target=self._run, name="call", daemon=True)

    @property
    def state(self) -> object:
        return self.connection.state

    @state.setter
    def state(self, state: object) -> None:
        self.connection.state = state

    def admit(self, kind: str = "") -> None:
        self.connection.kinds.append(kind)

    def give_back(self) -> None:
        self.given_back = True

    def take_descriptor(self) -> int | None:
        descriptor, self.connection.descriptor = self.connection.descriptor, None
        return descriptor

    def reply(self, body: Body, buffers=()) -> None:
        with self._changed:
            if self.connection.is_broken:
                raise PeerGoneError("the connection broke")
            self.answers.append((body, tuple(map(bytes, buffers))))
            self._changed.notify_all()

    def still_waiting(self, why: str, progress: int = 0) -> None:
        with self._changed:
            if self.connection.is_broken:
                raise PeerGoneError("the connection broke")
            self.words.append((why, progress))
            self._changed.notify_all()

    def begin(self) -> Call:
        """Have it handled; return when it is answered, or was told that it must wait."""
        self.thread.start()
        return self.until(lambda: self.answers or self.words or not self.thread.is_alive())

    def until(self, ready: Callable[[], object]) -> Call:
        until = time.monotonic() + ANSWER_S
        with self._changed:
            while not ready():
                assert time.monotonic() < until, (
                    f"{type(self.message.body).__name__} was not answered: {self.words[-1:]}"
                )
                self._changed.wait(0.01)
        return self

    def answer(self) -> tuple[Body, tuple[bytes, ...]]:
        """Its only answer, when it has come."""
        self.until(lambda: self.answers or not self.thread.is_alive())
        self.thread.join(ANSWER_S)
        (only,) = self.answers
        return only

    def _run(self) -> None:
        try:
            answer = answered(self.connection.handler, self, self.message)
            if answer is not None:
                self.reply(*answer)
        except PeerGoneError:
            assert self.connection.is_broken


class Connection:
    """A client's connection to a handler, with its numbers."""

    def __init__(self, handler, *, run: bytes, generation: int = 0, name: str = "a") -> None:
        self.handler, self.run, self.generation, self.name = handler, run, generation, name
        self.state: object = None
        self.descriptor: int | None = None
        self.kinds: list[str] = []
        self.is_broken = False
        self.number = 0

    def begin(self, body: Body, *buffers) -> Call:
        """A request that may have to wait."""
        self.number += 1
        views = [memoryview(buffer).cast("B") if memoryview(buffer).nbytes else memoryview(b"") for buffer in buffers]
        return Call(self, Message(self.run, self.generation, self.number, body, views)).begin()

    def ask(self, body: Body, *buffers) -> Body:
        """The body of the answer."""
        return self.begin(body, *buffers).answer()[0]

    def break_off(self) -> None:
        """The connection is gone, as the server will notice."""
        self.is_broken = True
        close = getattr(self.state, "close", None)
        if close is not None:
            close()


CUT = object()


class Overheard:
    """A peer on a simulated network whose answers pass through a function.

    It gives what is said in their place, None for silence, or CUT: then the connection breaks instead.
    """

    def __init__(self, peer, message: Message, change) -> None:
        vars(self).update(_peer=peer, _message=message, _change=change)

    def reply(self, body: Body, buffers=()) -> None:
        changed = self._change(self._message, body, buffers)
        if changed is CUT:
            self._peer.other.close()
            raise PeerGoneError("it was cut")
        if changed is not None:
            self._peer.reply(*changed)

    def still_waiting(self, why: str, progress: int = 0) -> None:
        self.reply(NotYet(why, progress))

    def __getattr__(self, name: str) -> object:
        return getattr(self._peer, name)

    def __setattr__(self, name: str, value: object) -> None:
        setattr(self._peer, name, value)


def overheard(handler, change):
    """The handler, whose answers pass through `change(message, body, buffers)`."""

    def handle(peer, message: Message) -> None:
        through = Overheard(peer, message, change)
        answer = answered(handler, through, message)
        if answer is not None:
            through.reply(*answer)

    return handle


def ask_once(handler, body: Body, run: bytes) -> Message:
    """The answer to one request in this thread; what the handler refuses is raised here."""
    call = Call(Connection(handler, run=run), Message(run, 0, 1, body))
    answer = handler(call, call.message)
    if answer is not None:
        call.reply(*answer)
    ((body, buffers),) = call.answers
    return Message(run, 0, 1, body, [memoryview(buffer) for buffer in buffers])


def until(ready: Callable[[], object]) -> None:
    """Wait for something that another thread does."""
    end = time.monotonic() + ANSWER_S
    while not ready():
        assert time.monotonic() < end, "it never became true"
        time.sleep(0.002)
