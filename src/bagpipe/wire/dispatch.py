"""From frames to a handler and back, the same on sockets and in the simulation: whatever a peer sends and whatever
happens inside the handler, its peer alone is answered, with a typed error that shows nothing of this process (I8).
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from typing import TypeAlias

from bagpipe.errors import BagpipeError, WireError
from bagpipe.failpoints import reach
from bagpipe.wire.frames import Envelope, Frame, decode, encode, envelope
from bagpipe.wire.limits import Limits
from bagpipe.wire.messages import Failed, Message

Reply: TypeAlias = Callable[[Message], None]
Handler: TypeAlias = Callable[[bytes, Message, Reply], None]
"""Takes the peer (a name for its connection), its message, and what to answer with: at once, later, from any thread."""

_log = logging.getLogger(__name__)


class Dispatcher:
    """Hands messages to a handler; `refused` counts what was none."""

    def __init__(self, handler: Handler, limits: Limits) -> None:
        self.refused = 0
        self._handler, self._limits = handler, limits

    def dispatch(self, address: str, peer: bytes, frames: Sequence[Frame], send: Callable[[list[Frame]], None]) -> None:
        """Let the handler answer a message that came to this address through `send`, which must not raise."""
        try:
            message = decode(frames, self._limits)
        except WireError as error:
            self.refused += 1
            if (sender := envelope(frames)) is not None:
                self._fail(sender, error, send)
            return
        try:
            reach("wire.received")
            self._handler(peer, message, lambda answer: self._reply(answer, send))
        except BagpipeError as error:
            self._fail(_sender(message), error, send)
        except Exception:
            _log.exception("%s to %s failed", type(message.body).__name__, address)
            inside = BagpipeError(f"the server at {address} failed inside: its log says how")
            self._fail(_sender(message), inside, send)

    def _reply(self, answer: Message, send: Callable[[list[Frame]], None]) -> None:
        """Send an answer; what is wrong with it is told to its own peer, whoever's message released it."""
        try:
            frames = encode(answer, self._limits)
        except WireError as error:
            _log.warning("%s can't be sent as an answer: %s", type(answer.body).__name__, error)
            self._fail(_sender(answer), error, send)
        else:
            send(frames)

    def _fail(self, to: Envelope, error: BagpipeError, send: Callable[[list[Frame]], None]) -> None:
        longest = self._limits.body_bytes // 8  # of a text whose letters take up to four bytes
        failed = Failed(type(error).__name__, str(error)[:longest], fields=error.fields)
        send(encode(Message(to.run, to.generation, to.request, failed), self._limits))


def _sender(message: Message) -> Envelope:
    return Envelope(message.run, message.generation, message.request)
