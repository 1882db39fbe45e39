"""A client's ways to embedding servers: requests are asked again until they are answered, and not for ever (I7).

A request that is not answered in time goes out again over a new connection, with new shared memory: what the old one
may still do then, it does to memory that nobody reads. Asking again is harmless, since reads change nothing and writes
carry numbers.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Generic, Literal, TypeAlias, TypeVar

from bagpipe.errors import BagpipeError, DeadlineError, StoreError, WireError, again
from bagpipe.server.shared import OwnMemory
from bagpipe.wire.channel import Network
from bagpipe.wire.in_order import named_error
from bagpipe.wire.messages import NO_ITERATION, Body, Failed, Message, Open, Opened, Unopened, Waiting
from bagpipe.wire.recovery_messages import Worked, Working

Buffers = Sequence[memoryview]
Failures: TypeAlias = list[BagpipeError | None]
"""Of each server, how what it was asked has failed."""

_PAUSE_S = 0.05
_RETRY_GROWTH_MAX = 8
_WORK_PAUSE_S, _WORK_PAUSE_S_MAX = 0.01, 0.25
_WATCH_S = 0.5
_GRACE_S = 1.0
"""How long servers may still answer when one of them has said that we have no part in the run any more."""


@dataclass(frozen=True, slots=True)
class Patience:
    """How long a client waits for a server, and for other trainers."""

    retry_s: float = 5.0
    """After this long without an answer a request is sent again; the next times after longer, up to eight times."""
    deadline_s: float = 60.0
    """After this long without an answer the server counts as lost."""
    trainers_s: float = 600.0
    """How long a read waits for other trainers, while the server answers."""


@dataclass
class Session:
    """What all links of a client share."""

    network: Network
    addresses: Sequence[str]
    run: bytes
    generation: int
    trainer: int
    trainers: int
    widths: list[int]
    shared_memory: bool | Literal["auto"] = "auto"
    patience: Patience = field(default_factory=Patience)
    watch: Callable[[int], str | None] = lambda _: None
    """Why a server is known to be gone, if it is; may raise what is to end the wait for it."""
    passed: int = NO_ITERATION
    """Of this trainer, before the session began."""
    births: dict[int, bytes] = field(default_factory=dict)
    sequences: dict[int, int] = field(default_factory=dict)
    """The last write that each server has decided."""

    def name(self, server: int) -> str:
        """A server, for people."""
        return f"server {server} at {self.addresses[server]}"


class Link:
    """A connection to one server and the memory shared with it; used by one thread at a time."""

    def __init__(self, session: Session, server: int) -> None:
        self.session, self.server = session, server
        self.channel = session.network.connect(session.addresses[server])
        self.opened: Opened | None = None
        self.stale = False
        """Something may be under way still."""
        self._own: OwnMemory | None = None
        self._number = 0

    @property
    def memory(self) -> memoryview | None:
        """Where ids and rows go, if not into buffers."""
        return self._own.memory if self._own is not None and self.opened is not None and self.opened.shared else None

    def open(self) -> int:
        """Introduce ourselves; the number of the request."""
        session = self.session
        if self._own is None and session.shared_memory is not False:
            self._own = self._make_memory()
        announcement = None if self._own is None else self._own.announcement
        return self.send(Open(session.trainer, session.trainers, session.widths, announcement, session.passed))

    def welcome(self, opened: Opened) -> None:
        """The server has answered; is it the one we know?"""
        session, name = self.session, self.session.name(self.server)
        if (opened.server, opened.servers) != (self.server, len(session.addresses)):
            raise StoreError(
                f"{name} is server {opened.server} of {opened.servers}, not {self.server} of {len(session.addresses)}: "
                "give the addresses of all servers of the run, in order"
            )
        if session.births.setdefault(self.server, opened.birth) != opened.birth:
            raise StoreError(f"{name} was started again and its rows are lost: start again from a checkpoint")
        session.sequences.setdefault(self.server, opened.sequence)
        if session.shared_memory is True and not opened.shared:
            raise StoreError(
                f"{name} can't use our shared memory: run it on this host as the same user, or leave "
                'wire.shared_memory at "auto"'
            )
        self.opened = opened
        if opened.shared:  # only short messages travel
            self.channel.take_side_door()

    def send(self, body: Body, buffers: Buffers = ()) -> int:
        """The number of the request."""
        self._number += 1
        session = self.session
        self.channel.send(Message(session.run, session.generation, self._number, body, buffers))
        return self._number

    def renew(self) -> None:
        """Begin anew: what was under way finds neither this connection nor its memory."""
        self._let_go()
        self.channel.reconnect()
        self.stale = False

    def close(self) -> None:
        """A second call does nothing."""
        self._let_go()
        self.channel.close()

    def _let_go(self) -> None:
        self.opened = None
        if self._own is not None:
            self._own.close()
            self._own = None

    def _make_memory(self) -> OwnMemory | None:
        try:
            return OwnMemory()
        except OSError as error:
            if self.session.shared_memory is True:
                raise StoreError(
                    f"there is no shared memory here ({error}): leave it to wire.shared_memory = auto"
                ) from error
            return None


class Request(ABC):
    """Something to ask a server."""

    what: str
    """For people."""
    needs_open = True
    """Whether only a client that has introduced itself is answered."""

    @abstractmethod
    def compose(self, link: Link) -> tuple[Body, Buffers]:
        """The message; ids and rows in the buffers, or in the link's memory. Called each time that it is sent."""

    @abstractmethod
    def accept(self, link: Link, answer: Body, buffers: Buffers) -> None:
        """Take the answer; raises WireError if it does not fit."""

    def refused(self, link: Link, failed: Failed) -> None:  # noqa: B027 - most need not know
        """The server has refused it, which will be raised."""


Answer = TypeVar("Answer", bound=Body)


class Question(Request, Generic[Answer]):
    """What is asked and answered without rows."""

    def __init__(self, what: str, body: Body, *expected: type[Answer], needs_open: bool = True) -> None:
        self.what, self.needs_open = what, needs_open
        self._body, self._expected = body, expected
        self._answer: Answer | None = None
        self.result = b""
        """What has come with the answer."""

    @property
    def answer(self) -> Answer:
        """The last one."""
        assert self._answer is not None, "it was answered, or has failed"
        return self._answer

    @property
    def progress(self) -> int | None:
        """How far it is, before it is answered; None afterwards."""
        if self._answer is None:
            return -1
        return self._answer.progress if isinstance(self._answer, Working) else None

    def compose(self, link: Link) -> tuple[Body, Buffers]:  # noqa: ARG002
        """As it was given."""
        return self._body, ()

    def accept(self, link: Link, answer: Body, buffers: Buffers) -> None:  # noqa: ARG002
        """One of what is expected."""
        if not isinstance(answer, self._expected) or (isinstance(answer, Worked) and len(buffers) != 1):
            raise unexpected(answer, self._expected[-1].__name__)
        self._answer, self.result = answer, b"".join(buffers)


def unexpected(answer: Body, expected: str) -> WireError:
    """The error of an answer that is none to what was asked."""
    return WireError(
        f"a server answered {type(answer).__name__} where {expected} was due: run the same release on both"
    )


class Asking:
    """Requests to one server, one after the other, until all are answered or one fails."""

    def __init__(self, link: Link, requests: Iterator[Request]) -> None:
        self.link, self._requests = link, requests
        self.failure: BagpipeError | None = None
        self.done = False
        self._patience = link.session.patience
        self._request: Request | None = None
        self._number: int | None = None
        self._began = self._asked = self._retry_s = 0.0
        self._waiting_since: float | None = None
        self._pausing = False
        self.due = 0.0
        """When to look again if nothing has come."""

    def begin(self, now: float) -> None:
        """Go on to the next request, if there is one."""
        self._request = next(self._requests, None)
        self.done = self._request is None
        if self.done:
            return
        self._began, self._retry_s = now, self._patience.retry_s
        self._waiting_since = None
        if self.link.stale:
            self.link.renew()
        self._ask(now)

    def listen(self, now: float) -> None:
        """Take what has arrived."""
        while not self.done and (message := self.link.channel.receive()) is not None:
            if message.request == self._number:
                self._number = None
                self._take(message, now)

    def look(self, now: float) -> None:
        """Nothing has come: ask again, or give up."""
        if self.done:
            return
        gone = self.link.session.watch(self.link.server)
        if gone is not None:
            raise StoreError(f"{self._name} {gone}: its rows are lost, start again from a checkpoint")
        if now < self.due:
            return
        if not self._pausing:
            self._check_deadline(now)
            self._retry_s = min(self._retry_s * 2, self._patience.retry_s * _RETRY_GROWTH_MAX)
            self.link.renew()
        self._ask(now)

    def _check_deadline(self, now: float) -> None:
        if now >= self._began + self._patience.deadline_s:  # rounded as `due`, where a simulated clock may stand still
            assert self._request is not None
            trouble = f" ({self.link.channel.trouble})" if self.link.channel.trouble else ""
            raise StoreError(
                f"{self._name} did not answer for {now - self._began:.1f} s, asked for {self._request.what}{trouble}: "
                "see that it runs and can be reached, or raise wire.deadline_s"
            )

    def note(self, work: Callable[[float], None], now: float) -> None:
        """Do some of this; if it fails, that is the end of it, but not of what other servers were asked."""
        try:
            work(now)
        except BagpipeError as error:
            self.failure, self.done = error, True
            self.link.stale = True

    def give_up(self, why: BagpipeError) -> None:
        """Wait no longer, because another server has refused us."""
        self.failure, self.done = again(why, f"{self._name} was not waited for any longer: {why}"), True
        self.link.stale = True

    @property
    def _name(self) -> str:
        return self.link.session.name(self.link.server)

    def _ask(self, now: float) -> None:
        self._asked, self._pausing = now, False
        self.due = min(now + self._retry_s, max(self._began + self._patience.deadline_s, now))
        assert self._request is not None
        try:
            if self.link.opened is None and self._request.needs_open:
                self._number = self.link.open()
            else:
                self._number = self.link.send(*self._request.compose(self.link))
        except DeadlineError:  # the queue is full of what nobody takes; it goes with the connection
            self._number = None

    def _take(self, message: Message, now: float) -> None:
        answer = message.body
        assert self._request is not None
        if isinstance(answer, Opened):
            self.link.welcome(answer)
            self._ask(now)
        elif isinstance(answer, Unopened):
            self.link.renew()
            self._ask(now)
        elif isinstance(answer, Waiting):
            self._wait_for_trainers(answer, now)
        elif isinstance(answer, Failed):
            self._request.refused(self.link, answer)
            raise named_error(answer, self._name, StoreError)
        else:
            self._request.accept(self.link, answer, message.buffers)
            self.begin(now)

    def _wait_for_trainers(self, waiting: Waiting, now: float) -> None:
        self._began = now
        if self._waiting_since is None:
            self._waiting_since = self._asked
        waited_s = now - self._waiting_since
        if waited_s >= self._patience.trainers_s:
            behind = ", ".join(
                f"{trainer} (at {'none' if passed == NO_ITERATION else passed})"
                for trainer, passed in zip(waiting.trainers, waiting.passed, strict=False)
            )
            assert self._request is not None
            if not behind:
                raise DeadlineError(
                    f"{self._name} was asked for {self._request.what} and was not ready for {waited_s:.0f} s, "
                    "since its rows are being replaced: see its log"
                )
            raise DeadlineError(
                f"{self._name} was asked for {self._request.what} and waited {waited_s:.0f} s for trainers {behind}: "
                "see what holds them up"
            )
        if now - self._asked >= _PAUSE_S:
            self._ask(now)
        else:  # the server has no room for reads that wait
            self._pausing = True
            self.due = now + _PAUSE_S


def exchange(session: Session, askings: Sequence[Asking]) -> None:
    """Have all requests answered, those to different servers at once. Failures are left in the askings.

    Once a server has said that we have no part in the run, the others are not waited for much longer.
    """
    network = session.network
    pending = list(askings)
    refused_at: float | None = None
    try:
        for asking in pending:
            asking.note(asking.begin, network.now())
        while pending := [asking for asking in pending if not asking.done]:
            by_channel = {id(asking.link.channel): asking for asking in pending}
            wait_s = min(min(asking.due for asking in pending) - network.now(), _WATCH_S)
            for channel in network.wait([asking.link.channel for asking in pending], max(wait_s, 0.0)):
                asking = by_channel[id(channel)]
                asking.note(asking.listen, network.now())
            for asking in pending:
                asking.note(asking.look, network.now())
            refusal = next((each.failure for each in askings if isinstance(each.failure, WireError)), None)
            if refusal is not None:
                refused_at = network.now() if refused_at is None else refused_at
                if network.now() - refused_at >= _GRACE_S:
                    for asking in pending:
                        if not asking.done:
                            asking.give_up(refusal)
    finally:
        for asking in pending:
            asking.link.stale = True


def ask(session: Session, links: Sequence[Link], requests: Sequence[Iterator[Request]]) -> Failures:
    """Have requests to each server answered."""
    askings = [Asking(link, of_server) for link, of_server in zip(links, requests, strict=True)]
    exchange(session, askings)
    return [asking.failure for asking in askings]


def ask_until_done(
    session: Session,
    questions: Sequence[Question[Answer]],
    ask_all: Callable[[Sequence[Iterator[Request]]], Failures],
) -> None:
    """Ask each server again as long as it is at work, and while any of them makes progress; then raise a failure."""
    network, deadline_s = session.network, session.patience.deadline_s
    failures: Failures = [None] * len(questions)
    last, pause_s = network.now(), _WORK_PAUSE_S
    while waiting := [n for n, each in enumerate(questions) if each.progress is not None and failures[n] is None]:
        before = [each.progress for each in questions]
        found = ask_all([iter([each] if n in waiting else []) for n, each in enumerate(questions)])
        failures = [old or new for old, new in zip(failures, found, strict=True)]
        if before != [each.progress for each in questions]:
            last, pause_s = network.now(), _WORK_PAUSE_S
        elif network.now() - last >= deadline_s:
            raise DeadlineError(
                f"no progress with {questions[0].what} for {network.now() - last:.0f} s at "
                f"{', '.join(map(session.name, waiting))}: see its log, and whether its disk answers"
            )
        network.wait([], pause_s)
        pause_s = min(pause_s * 1.5, _WORK_PAUSE_S_MAX)
    raise_first(failures)


def raise_first(failures: Failures) -> None:
    """Raise the failure of the first server that has failed, if any has."""
    for failure in failures:
        if failure is not None:
            raise failure
