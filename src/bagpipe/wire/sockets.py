"""Channels over ZeroMQ: one socket each, no more queued than announced, and a connection that died shows (I5, I7)."""

from __future__ import annotations

import secrets
import select
import threading
import time
from collections.abc import Sequence

import zmq
from zmq.utils.monitor import recv_monitor_message

from bagpipe.errors import ConfigError, DeadlineError, WireError
from bagpipe.wire.channel import Channel, Network
from bagpipe.wire.endpoint import (
    Address,
    CopyableSocket,
    check_security,
    option,
    parse_address,
    receive_frames,
    send_frames,
    set_options,
    wire_error,
)
from bagpipe.wire.frames import decode, encode
from bagpipe.wire.keys import Keys, Security
from bagpipe.wire.limits import LIMITS, Limits
from bagpipe.wire.messages import Message
from bagpipe.wire.side_door import NAME_BYTES, DoorClosedError, Passage, enter, packed

RECONNECT_MS_MIN, RECONNECT_MS_MAX = 50, 1000

_REFUSED: dict[int, str] = {
    zmq.EVENT_HANDSHAKE_FAILED_AUTH: "does not admit our key: use the client's file made together with the server's",
    zmq.EVENT_HANDSHAKE_FAILED_PROTOCOL: "does not speak as we do: give keys on both sides or on neither, and check "
    "that it is a Bagpipe server",
}
_TROUBLE: dict[int, str] = {
    zmq.EVENT_HANDSHAKE_FAILED_NO_DETAIL: "broke off before it knew us: it died, or has another key than we expect",
    zmq.EVENT_DISCONNECTED: "closed the connection, or it was lost",
    zmq.EVENT_CONNECT_RETRIED: "does not answer: it is not running, or not at this address",
}
_EVENTS = sum((*_REFUSED, *_TROUBLE, zmq.EVENT_HANDSHAKE_SUCCEEDED))


class SocketChannel(Channel):
    """A DEALER socket, and perhaps a side door. ZeroMQ connects anew by itself when a connection is lost."""

    def __init__(self, context: zmq.Context[CopyableSocket], address: str, security: Security, limits: Limits) -> None:
        self._where: Address = parse_address(address)
        if self._where.port == 0:
            raise ConfigError(f"the address {address!r} has port 0: give the one that the server listens on")
        check_security(self._where, "client", security)
        self.address = str(self._where)
        self._context, self._security, self._limits = context, security, limits
        self._refusal = ""
        self._socket: CopyableSocket | None = None
        self._monitor: CopyableSocket | None = None
        self._passage: Passage | None = None
        self._open()

    def send(self, message: Message) -> None:
        """Queue a message; waits a little where the queue is full, then raises DeadlineError."""
        assert self._socket is not None, "the channel is closed"
        frames = encode(message, self._limits)
        if self._passage is not None and (packet := packed(frames)) is not None and self._passage.send(packet):
            return
        try:
            send_frames(self._socket, frames)
        except zmq.Again:
            self._heed_monitor()
            raise DeadlineError(
                f"{self._limits.queue_messages} messages to {self.address} were not taken within "
                f"{self._limits.send_wait_s:g} s: {self.trouble or 'the server is busy or the network slow'}"
            ) from None

    def receive(self) -> Message | None:
        """A message that has arrived, or None. Raises WireError for bytes that are no message, or a key refused."""
        assert self._socket is not None, "the channel is closed"
        if self._passage is not None and (frames := self._receive_at_side(self._passage)) is not None:
            return decode(frames, self._limits)
        try:
            return decode(receive_frames(self._socket, self._limits.frames), self._limits)
        except zmq.Again:
            self._heed_monitor()
        if self._refusal:
            refusal, self._refusal = self._refusal, ""
            raise WireError(refusal)
        return None

    def take_side_door(self) -> None:
        """Let short messages go past ZeroMQ from now on, if the server is here, of our user, and has no keys."""
        if self._passage is None and not isinstance(self._security, Keys):
            self._passage = enter(self._where, self._name)

    def reconnect(self) -> None:
        """Begin anew with a fresh socket; whatever was under way is lost."""
        self.close()
        self._open()

    def close(self) -> None:
        """Let go; a second call does nothing."""
        self._leave_side_door()
        if self._socket is not None:
            self._socket.disable_monitor()
            self._socket.close(linger=0)
        if self._monitor is not None:
            self._monitor.close(linger=0)
        self._socket = self._monitor = None

    @property
    def closed(self) -> bool:
        """Whether it can no longer be used."""
        return self._socket is None

    def sources(self) -> list[CopyableSocket | int]:
        """What to poll: the sockets of messages, and last a descriptor that tells of events of the connection."""
        assert self._socket is not None, "the channel is closed"
        side = [] if self._passage is None else [self._passage.descriptor]
        return [self._socket, *side, self._monitor_descriptor]

    def was_refused(self) -> bool:
        """Whether the events that have come mean that no message ever will."""
        self._heed_monitor()
        return bool(self._refusal)

    def _open(self) -> None:
        self._refusal = self.trouble = ""
        self._socket = self._context.socket(zmq.DEALER)
        set_options(self._socket, self._where, self._limits, self._security)
        self._socket.set(zmq.SNDTIMEO, int(self._limits.send_wait_s * 1000))
        self._name = b"n" + secrets.token_bytes(NAME_BYTES - 1)  # names that begin with 0 are the server's to give
        self._socket.set(zmq.ROUTING_ID, self._name)
        self._socket.set(zmq.RECONNECT_IVL, RECONNECT_MS_MIN)
        self._socket.set(zmq.RECONNECT_IVL_MAX, RECONNECT_MS_MAX)
        self._monitor = self._socket.get_monitor_socket(_EVENTS)
        self._monitor.set(zmq.LINGER, 0)
        # it tells of what comes after all was taken, so that is done now, and whenever it tells
        self._monitor_descriptor = option(self._monitor, zmq.FD)
        self._take_events()
        self._news = select.poll()
        self._news.register(self._monitor_descriptor, select.POLLIN)
        try:
            self._socket.connect(self.address)
        except zmq.ZMQError as error:
            self.close()
            raise wire_error(self._where, error) from error

    def _receive_at_side(self, passage: Passage) -> list[memoryview] | None:
        try:
            return passage.receive()
        except DoorClosedError:
            self._leave_side_door()
            return None

    def _leave_side_door(self) -> None:
        if self._passage is not None:
            self._passage.close()
            self._passage = None

    def _heed_monitor(self) -> None:
        if self._news.poll(0):
            self._take_events()

    def _take_events(self) -> None:
        assert self._monitor is not None
        while True:
            try:
                event = recv_monitor_message(self._monitor, zmq.DONTWAIT)["event"]
            except zmq.Again:
                return
            if event == zmq.EVENT_HANDSHAKE_SUCCEEDED:
                self.trouble = ""
            elif event in _REFUSED:
                self._refusal = self.trouble = f"the server at {self.address} {_REFUSED[event]}"
            elif event in _TROUBLE and not self.trouble:  # the first event is the cause of those that follow
                self.trouble = f"the server at {self.address} {_TROUBLE[event]}"


class SocketNetwork(Network):
    """Channels over TCP that share one thread for their bytes. May be used by several threads, its channels by one."""

    def __init__(self, security: Security = None, limits: Limits = LIMITS) -> None:
        self._security, self._limits = security, limits
        self._context: zmq.Context[CopyableSocket] = zmq.Context()
        self._channels: list[SocketChannel] = []
        self._lock = threading.Lock()

    def connect(self, address: str) -> SocketChannel:
        """A channel to the server at this address; whether it is there shows with the first answer."""
        channel = SocketChannel(self._context, address, self._security, self._limits)
        with self._lock:
            self._channels = [each for each in self._channels if not each.closed] + [channel]
        return channel

    def wait(self, channels: Sequence[Channel], timeout_s: float) -> list[Channel]:
        """Channels on which something has arrived, or whose server refused us; empty after the timeout."""
        deadline = time.monotonic() + timeout_s
        while True:
            polled: list[tuple[CopyableSocket | int, int]] = []
            for channel in channels:
                assert isinstance(channel, SocketChannel)
                polled += [(source, zmq.POLLIN) for source in channel.sources()]
            left_ms = max(int((deadline - time.monotonic()) * 1000 + 0.999), 0)
            ready: set[CopyableSocket | int] = {source for source, _ in zmq.zmq_poll(polled, left_ms)}
            found = [channel for channel in channels if self._has_news(channel, ready)]
            if found or time.monotonic() >= deadline:
                return found

    def close(self) -> None:
        """Let go of what all channels share; they must be closed."""
        if open_channels := [channel.address for channel in self._channels if not channel.closed]:
            raise WireError(f"channels to {', '.join(open_channels)} are still open: close them before their network")
        self._context.term()

    @staticmethod
    def _has_news(channel: Channel, ready: set[CopyableSocket | int]) -> bool:
        assert isinstance(channel, SocketChannel)
        *messages, monitor = channel.sources()
        return not ready.isdisjoint(messages) or (monitor in ready and channel.was_refused())
