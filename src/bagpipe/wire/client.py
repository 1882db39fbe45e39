"""The one client of every service: numbered requests to one address, several under way, answered in order.

When the connection breaks, or nothing is heard for a while, another is made and what was not answered is sent again,
until the deadline (I7). So whoever answers must answer a repeated request in the same way: reads change nothing, and
writes carry numbers. What waits here is bounded by the requests under way (I5).
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from threading import Event
from typing import TypeAlias

from bagpipe import errors
from bagpipe.errors import BagpipeError, DeadlineError, PipelineError, WireError
from bagpipe.wire.connection import Buffers, Connection, Network
from bagpipe.wire.messages import Body, Failed, Message, NotYet

AHEAD = 4
"""Requests that readers of plans and batches have under way."""
PAUSE_S_MIN, PAUSE_S_MAX = 0.02, 0.5
RETRY_GROWTH_MAX = 8
CONNECT_S = 5.0
LOOK_S = 0.2
"""How soon an interruption, or the loss of the other side, is noticed."""

Compose: TypeAlias = Callable[[], tuple[Body, Buffers]]
"""Makes a request, each time that it is sent."""


@dataclass(frozen=True, slots=True)
class Patience:
    """How long to wait for the other side."""

    retry_s: float = 5.0
    """After so long without a word the connection is made anew; the next times after longer, up to eight times."""
    deadline_s: float = 60.0
    """After so long without a word the other side counts as lost."""
    work_s: float = 600.0
    """How long an answer may take while the other side says that it waits itself, or works without progress."""


@dataclass(slots=True)
class _Request:
    number: int
    compose: Compose
    what: str
    progress: int = -1
    word: str = "which says nothing"
    """The last that was heard of it."""
    since: float = 0.0
    """When it last made progress, as far as anybody listened."""


class Client:
    """Used by one thread, except for `interrupt`."""

    def __init__(
        self,
        network: Network,
        address: str,
        name: str,
        *,
        run: bytes,
        generation: int = 0,
        hello: Callable[[Client, Connection], None] = lambda *_: None,
        patience: Patience | None = None,
        watch: Callable[[], str | None] = lambda: None,
        lost: type[BagpipeError] = DeadlineError,
        otherwise: type[BagpipeError] = PipelineError,
    ) -> None:
        """`hello` introduces us on each new connection, by `ask_first`; `name` is for people.

        `watch` says why the other side is known to be gone, if it is, or raises what is to end the wait. Where the
        other side does not answer, that is a `lost`, and an error of its own that is none of ours an `otherwise`.
        """
        self.name = name
        self.bytes_received = 0
        self.failed: Failed | None = None
        """What `poll` was told last, if it has raised because the request has failed."""
        self._network, self._address, self._run, self._generation = network, address, run, generation
        self._hello, self._patience, self._watch = hello, patience or Patience(), watch
        self._lost, self._otherwise = lost, otherwise
        self._connection: Connection | None = None
        self._under_way: deque[_Request] = deque()
        self._number = 0
        self._trouble = ""
        self._interrupted: BagpipeError | None = None
        self._waited_for: _Request | None = None
        self._heard = self._asked = 0.0
        """When there was the last word, and when the connection was made."""
        self._retry_s, self._pause_s = self._patience.retry_s, PAUSE_S_MIN
        self._closed = False

    @property
    def is_under_way(self) -> bool:
        """Whether some request is not answered."""
        return bool(self._under_way)

    def call(self, body: Body, buffers: Buffers = (), what: str = "") -> Message:
        """Ask one thing; its answer."""
        self.send(lambda: (body, buffers), what)
        return self.receive()

    def send(self, compose: Compose, what: str) -> None:
        """Have a request on its way; if that fails, that shows when its answer is due."""
        self._number += 1
        request = _Request(self._number, compose, what)
        self._under_way.append(request)
        if self._connection is not None:
            try:
                self._try_send(request)
            except BaseException:
                self.forget()
                raise

    def receive(self) -> Message:
        """The answer to the oldest request; errors of the other side are raised as the type that they name."""
        while (answer := self.poll(LOOK_S)) is None:
            pass
        return answer

    def poll(self, timeout_s: float) -> Message | None:
        """The same, or None if it does not come within about this time."""
        try:
            return self._poll(timeout_s)
        except BaseException:
            self.forget()
            raise

    def forget(self) -> None:
        """Ask nothing of what is under way any more: an answer would be taken for that of what is asked next."""
        self._under_way.clear()
        self.disconnect()

    def interrupt(self, error: BagpipeError) -> None:
        """From another thread: `receive` raises this, now or when it is called."""
        self._interrupted = error

    def disconnect(self) -> None:
        """Let go of the connection; what is under way is asked again on another."""
        if self._connection is not None:
            self._connection.close()
            self._connection = None

    def close(self) -> None:
        """Let go; a second call does nothing."""
        self._closed = True
        self._under_way.clear()
        self.disconnect()

    def ask_first(self, connection: Connection, body: Body, what: str, descriptor: int | None = None) -> Body:
        """For `hello`: ask something on a connection before anything else is; the body of the answer."""
        self._number += 1
        message = Message(self._run, self._generation, self._number, body)
        connection.send(message, self._patience.deadline_s, descriptor)
        request = _Request(self._number, lambda: (body, ()), what, since=self._network.now())
        heard = self._network.now()
        while True:
            self._check_interrupted()
            try:
                answer = connection.receive(min(LOOK_S, self._patience.deadline_s))
            except TimeoutError:
                if self._network.now() - heard >= self._retry_s:
                    self._retry_s = min(2 * self._retry_s, RETRY_GROWTH_MAX * self._patience.retry_s)
                    raise ConnectionResetError("it did not answer") from None
                self._check_lost()
                continue
            heard, self._trouble = self._network.now(), ""
            self._heard = heard
            self._check_answer(request, answer)
            if isinstance(answer.body, Failed):  # of what is under way nothing is known by that
                raise named_error(answer.body, self.name, self._otherwise)
            if not isinstance(answer.body, NotYet):
                return answer.body
            self._take_word(request, answer.body)
            if self._under_way:  # which waits for the same
                self._under_way[0].word = request.word

    def _poll(self, timeout_s: float) -> Message | None:
        assert not self._closed, f"the client of {self.name} is closed"
        self.failed = None
        self._check_interrupted()
        assert self._under_way, f"nothing was asked of {self.name}"
        request = self._under_way[0]
        if request is not self._waited_for:
            self._begin_waiting(request)
        answer = None
        try:
            answer = self._opened().receive(timeout_s)
        except BagpipeError:
            raise
        except TimeoutError:
            pass
        except OSError as error:
            self._break(error)
        now = self._network.now()
        if answer is None:
            self._check_lost()
            self._check_work(request)
            self._try_anew(now)
            return None
        self._heard, self._pause_s, self._trouble = now, PAUSE_S_MIN, ""
        self._check_answer(request, answer)
        if isinstance(answer.body, NotYet):
            self._take_word(request, answer.body)
            if answer.body.again:
                self._send_again(request)
            else:
                self._network.pause(0.0)  # under a seed what is waited for may be for others to do
            return None
        self._under_way.popleft()
        self._waited_for = None
        self.bytes_received += sum(buffer.nbytes for buffer in answer.buffers)
        if isinstance(answer.body, Failed):
            self.failed = answer.body
            raise named_error(answer.body, self.name, self._otherwise)
        return answer

    def _begin_waiting(self, request: _Request) -> None:
        """While nobody listened, nobody could be late."""
        self._waited_for, self._retry_s = request, self._patience.retry_s
        self._heard = self._asked = request.since = self._network.now()

    def _send_again(self, request: _Request) -> None:
        """After a pause; those behind it have been sent already, and would be answered first on this connection."""
        self._network.pause(self._pause_s)
        if len(self._under_way) > 1:
            self.disconnect()
        else:
            self._try_send(request)

    def _try_anew(self, now: float) -> None:
        """Nothing came: make another connection, after a pause where there is none, or where this one says nothing."""
        if self._connection is None:
            self._asked = now
            self._network.pause(self._pause_s)
            self._pause_s = min(2 * self._pause_s, PAUSE_S_MAX)
        elif now - max(self._asked, self._heard) >= self._retry_s:
            self._trouble = "it is connected, and says nothing"
            self.disconnect()
            self._asked, self._retry_s = now, min(2 * self._retry_s, RETRY_GROWTH_MAX * self._patience.retry_s)

    def _try_send(self, request: _Request) -> None:
        """Where the connection breaks it is let go of: what is under way is sent on the next one."""
        try:
            self._send(request)
        except BagpipeError:
            raise
        except OSError as error:
            self._break(error)

    def _break(self, error: OSError) -> None:
        self._trouble = _said(error)
        self.disconnect()

    def _opened(self) -> Connection:
        if self._connection is None:
            timeout_s = min(CONNECT_S, self._patience.deadline_s)
            try:
                connection = self._network.connect(self._address, timeout_s)
            except TimeoutError as error:
                raise ConnectionAbortedError(f"no connection was made within {timeout_s:g} s") from error
            try:
                self._hello(self, connection)
            except BaseException:
                connection.close()
                raise
            self._connection = connection
            for request in self._under_way:
                self._send(request)
        return self._connection

    def _send(self, request: _Request) -> None:
        assert self._connection is not None
        body, buffers = request.compose()
        try:
            self._connection.send(
                Message(self._run, self._generation, request.number, body, buffers), self._patience.deadline_s
            )
        except TimeoutError as error:  # a part of it may have left
            raise ConnectionAbortedError(f"it took nothing for {self._patience.deadline_s:g} s") from error

    def _check_interrupted(self) -> None:
        if self._interrupted is not None:
            raise self._interrupted

    def _check_lost(self) -> None:
        gone = self._watch()
        if gone is not None:
            raise self._lost(f"{self.name} {gone}")
        silent_s = self._network.now() - self._heard
        if silent_s >= self._patience.deadline_s:
            raise self._lost(
                f"{self.name} did not answer for {silent_s:.1f} s, asked for {self._what()}"
                f"{f' ({self._trouble})' if self._trouble else ''}: see that it runs and can be reached"
            )

    def _check_answer(self, request: _Request, answer: Message) -> None:
        if answer.request == 0 and isinstance(answer.body, Failed):  # it cuts the connection, and says why
            raise named_error(answer.body, self.name, self._otherwise)
        if answer.run != self._run:
            raise WireError(f"{self.name} answered for another run: check the addresses")
        if answer.request != request.number:
            raise WireError(f"{self.name} answered request {answer.request} where {request.number} was due")

    def _take_word(self, request: _Request, word: NotYet) -> None:
        """It is heard, and not answered yet."""
        now = self._network.now()
        if word.progress > request.progress:
            request.progress, request.since = word.progress, now
        request.word = f"which {word.why}"
        self._check_work(request)

    def _check_work(self, request: _Request) -> None:
        waited_s = self._network.now() - request.since
        if waited_s >= self._patience.work_s:
            raise DeadlineError(
                f"waited {waited_s:.0f} s for {request.what} from {self.name}, {self._trouble or request.word}: "
                "see what holds it up"
            )

    def _what(self) -> str:
        return self._under_way[0].what if self._under_way else "a first sign of life"


class Series:
    """Answers to numbered requests in the order of their numbers, several of them under way; used by one thread."""

    def __init__(
        self,
        clients: Sequence[Client],
        compose: Callable[[int], Body],
        what: Callable[[int], str],
        *,
        place: Callable[[int], int] = lambda _: 0,
        start: int = 0,
        stop: int | None = None,
        ahead: int = AHEAD,
    ) -> None:
        """Number n is asked of the client place(n), and nothing from `stop` on."""
        self.next = start
        """The number that is taken next: all before it have arrived."""
        self.waited_s = 0.0
        self._clients, self._compose, self._what, self._place = clients, compose, what, place
        self._asked_to, self._stop, self._ahead = start, stop, ahead
        self._over = Event()

    @property
    def bytes_received(self) -> int:
        """With all answers."""
        return sum(client.bytes_received for client in self._clients)

    def take(self) -> Message | None:
        """The answer to the next number; None once `interrupt` was called."""
        if self._over.is_set():
            return None
        assert self._stop is None or self.next < self._stop, f"there is no {self._what(self.next)}"
        self._ask_ahead()
        if self._over.is_set():  # then nothing may be under way
            return None
        began = time.monotonic()
        try:
            message = self.client(self.next).receive()
        except PipelineError:
            if self._over.is_set():
                return None
            raise
        self.waited_s += time.monotonic() - began
        self.next += 1
        self._ask_ahead()
        return message

    def client(self, number: int) -> Client:
        """Who is asked for this number."""
        return self._clients[self._place(number)]

    def interrupt(self) -> None:
        """From another thread: end the wait in `take`."""
        self._over.set()
        for client in self._clients:
            client.interrupt(PipelineError("nothing more is wanted"))

    def close(self) -> None:
        """Let go of the connections; nothing is taken any more. A second call does nothing."""
        self._over.set()
        for client in self._clients:
            client.close()

    def _ask_ahead(self) -> None:
        end = self.next + self._ahead if self._stop is None else min(self.next + self._ahead, self._stop)
        while self._asked_to < end and not self._over.is_set():
            number, self._asked_to = self._asked_to, self._asked_to + 1
            self.client(number).send(lambda number=number: (self._compose(number), ()), self._what(number))  # type: ignore[misc]


def named_error(failed: Failed, name: str, otherwise: type[BagpipeError] = PipelineError) -> BagpipeError:
    """The error that a peer of this name reports; `otherwise` where it names none of ours."""
    return errors.named_error(failed.error, f"{name}: {failed.message}", failed.fields, otherwise)


def unexpected(answer: Body, due: str) -> WireError:
    """The error of an answer that is none to what was asked."""
    return WireError(f"{type(answer).__name__} came where {due} was due: run the same release on both sides")


def _said(error: OSError) -> str:
    """What is wrong with a connection, for people."""
    if isinstance(error, ConnectionRefusedError):
        return "it is not running, or not at this address"
    return (error.strerror or str(error) or type(error).__name__).lower()
