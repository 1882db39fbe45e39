"""Answers to numbered requests, in the order of their numbers, with several requests under way at once.

A request that is not answered in time is sent again, over a new connection if nothing at all comes over the old one,
and not for ever (I7). So whoever answers must answer a request that is repeated in the same way. What waits here is
bounded by the requests under way (I5).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from threading import Event

from bagpipe import errors
from bagpipe.errors import BagpipeError, DeadlineError, PipelineError, WireError
from bagpipe.wire.channel import Channel, Network
from bagpipe.wire.messages import Body, Failed, Message
from bagpipe.wire.plan_messages import NotYet

AHEAD = 4
RETRIES_GROW = 2.0
RETRY_S_MAX = 10.0
LOOK_S = 0.2
"""How soon an interruption is noticed."""


@dataclass(frozen=True, slots=True)
class Patience:
    """How long to wait for the other side."""

    retry_s: float = 3.0
    """After this long without an answer a request is sent again; after twice as long the next time, and so on."""
    deadline_s: float = 60.0
    """After this long without a sign of life the other side counts as lost."""
    work_s: float = 600.0
    """How long an answer may take while the other side says that it works on it."""


@dataclass(slots=True)
class _Asked:
    """A request under way."""

    due: float
    retry_s: float


class InOrder:
    """Asks for number after number; used by one thread, except for `interrupt`."""

    def __init__(
        self,
        network: Network,
        addresses: Sequence[str],
        compose: Callable[[int], Body],
        *,
        what: Callable[[int], str],
        run: bytes,
        generation: int = 0,
        place: Callable[[int], int] = lambda _: 0,
        start: int = 0,
        stop: int | None = None,
        ahead: int = AHEAD,
        patience: Patience | None = None,
    ) -> None:
        """Take where to ask: number n goes to address place(n); nothing is asked from `stop` on.

        `compose` makes the body of a request each time that it is sent; `what` says in people's words what it is for.
        """
        self.next = start
        """The number that is taken next: all before it have arrived."""
        self.waited_s = 0.0
        self.bytes_received = 0
        self._network, self._compose, self._place, self._what = network, compose, place, what
        self._run, self._generation = run, generation
        self._asked_to, self._stop, self._ahead = start, stop, ahead
        self._patience = patience or Patience()
        self._asked: dict[int, _Asked] = {}
        self._arrived: dict[int, Message] = {}
        self._why = ""
        self._interrupted = Event()
        self._channels: list[Channel] = []
        try:
            self._channels += (network.connect(address) for address in addresses)
        except BaseException:
            self.close()
            raise
        self._listened = network.now()
        self._heard = [self._listened] * len(addresses)

    def take(self) -> Message | None:
        """The answer to the next number; None once `interrupt` was called."""
        if self._interrupted.is_set():
            return None
        assert self._stop is None or self.next < self._stop, f"there is no {self._what(self.next)}"
        number, since, wait_s = self.next, self._network.now(), 0.0
        self._why = ""
        self._skip_time(since)
        self._ask_ahead()
        while True:
            for channel in self._network.wait(self._channels, wait_s):
                self._receive(channel)
            now = self._listened = self._network.now()
            if number in self._arrived:
                break
            if self._interrupted.is_set():
                return None
            self._check_patience(number, since, now)
            self._ask_again(now)
            wait_s = min(max(min(asked.due for asked in self._asked.values()) - now, 0.0), LOOK_S)
        self.waited_s += now - since
        self.next = number + 1
        message = self._arrived.pop(number)
        self._ask_ahead()
        return message

    def interrupt(self) -> None:
        """End the wait of another thread in `take`."""
        self._interrupted.set()

    def close(self) -> None:
        """Let go of the connections; a second call does nothing."""
        self._interrupted.set()
        for channel in self._channels:
            channel.close()

    def address(self, number: int) -> str:
        """Who is asked for this number."""
        return self._channels[self._place(number)].address

    def _name(self, number: int) -> str:
        return f"{self._what(number)} from {self.address(number)}"

    def _skip_time(self, now: float) -> None:
        """While nobody listened, nobody could be late."""
        gap = now - self._listened
        self._heard = [heard + gap for heard in self._heard]
        for asked in self._asked.values():
            asked.due += gap

    def _ask_ahead(self) -> None:
        end = self.next + self._ahead if self._stop is None else min(self.next + self._ahead, self._stop)
        for number in range(self._asked_to, max(end, self._asked_to)):
            self._asked[number] = _Asked(0.0, self._patience.retry_s)
            self._asked_to = number + 1
            self._send(number)

    def _send(self, number: int) -> None:
        asked, channel = self._asked[number], self._channels[self._place(number)]
        asked.due = self._network.now() + asked.retry_s
        try:
            channel.send(Message(self._run, self._generation, number, self._compose(number)))
        except DeadlineError:  # its queue is full of what nobody takes; it goes with the connection
            asked.due = self._network.now() + asked.retry_s

    def _ask_again(self, now: float) -> None:
        late = [number for number, asked in self._asked.items() if asked.due <= now]
        silent = {
            place for number in late if now - self._heard[place := self._place(number)] >= self._asked[number].retry_s
        }
        for place in silent:
            self._channels[place].reconnect()
        for number, asked in list(self._asked.items()):
            if self._place(number) in silent or number in late:
                asked.retry_s = min(asked.retry_s * RETRIES_GROW, RETRY_S_MAX)
                self._send(number)

    def _receive(self, channel: Channel) -> None:
        place = self._channels.index(channel)
        while (message := channel.receive()) is not None:
            self._heard[place] = self._network.now()
            asked = self._asked.get(message.request)
            if asked is None or self._place(message.request) != place:
                continue  # a copy of what has come already
            if message.run != self._run:
                raise WireError(f"{self._name(message.request)} came from another run: check the addresses")
            if isinstance(message.body, NotYet):
                asked.retry_s = self._patience.retry_s
                if message.request == self.next:
                    self._why = message.body.why
                continue
            self.bytes_received += sum(buffer.nbytes for buffer in message.buffers)
            del self._asked[message.request]
            self._arrived[message.request] = message

    def _check_patience(self, number: int, since: float, now: float) -> None:
        place = self._place(number)
        silent_s = now - max(self._heard[place], since)
        if silent_s >= self._patience.deadline_s:
            trouble = self._channels[place].trouble
            raise DeadlineError(
                f"waited {silent_s:.0f} s for {self._name(number)}, which gave no sign of life"
                f"{f' ({trouble})' if trouble else ''}: see that it runs and can be reached"
            )
        if now - since >= self._patience.work_s:
            raise DeadlineError(
                f"waited {now - since:.0f} s for {self._name(number)}, which {self._why or 'is at work'}: see what "
                "holds it up"
            )


def named_error(failed: Failed, name: str, otherwise: type[BagpipeError] = PipelineError) -> BagpipeError:
    """The error that a peer of this name reports; `otherwise` where it names none of ours."""
    return errors.named_error(failed.error, f"{name}: {failed.message}", failed.fields, otherwise)


def unexpected(answer: Body, due: str) -> WireError:
    """The error of an answer that is none to what was asked."""
    return WireError(f"{type(answer).__name__} came where {due} was due: run the same release on both sides")
