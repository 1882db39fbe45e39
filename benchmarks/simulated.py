"""A network in memory, for tests and benchmarks: messages are late, lost, doubled and overtaken as a seed says.

Driven by one thread it keeps a clock of its own that only `wait` moves, so that a run is a function of its seed and an
hour passes at once. With `real_time` threads may use it, and its rate is that of a link between clients and servers.
Everything that travels is encoded and decoded as it would be on a socket.
"""

from __future__ import annotations

import heapq
import itertools
import random
import threading
import time
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import partial

from bagpipe.errors import ConfigError, WireError
from bagpipe.wire.channel import Channel, Network
from bagpipe.wire.dispatch import Dispatcher, Handler
from bagpipe.wire.frames import Frame, decode, encode
from bagpipe.wire.limits import LIMITS, Limits
from bagpipe.wire.messages import Message


@dataclass(order=True)
class _Delivery:
    """Frames on their way, in order of arrival."""

    at: float
    number: int
    channel: SimulatedChannel = field(compare=False)
    peer: bytes = field(compare=False)
    """Of the connection: when it is no longer the channel's, the frames are lost."""
    frames: list[Frame] = field(compare=False)
    to_server: bool = field(compare=False)


class SimulatedChannel(Channel):
    """A client's end; made by `SimulatedNetwork.connect`."""

    def __init__(self, network: SimulatedNetwork, address: str) -> None:
        self.address = address
        self.peer = network.new_peer()
        self.arrived: deque[list[Frame]] = deque()
        self.last_arrival = [0.0, 0.0]
        self.closed = False
        self._network = network

    def send(self, message: Message) -> None:
        """Send a message; its frames are copied."""
        assert not self.closed, "the channel is closed"
        self._network.post(self, self.peer, encode(message, self._network.limits), to_server=True)

    def receive(self) -> Message | None:
        """A message that has arrived, or None. Raises WireError for bytes that are no message."""
        assert not self.closed, "the channel is closed"
        frames = self.arrived.popleft() if self.arrived else None
        return None if frames is None else decode(frames, self._network.limits)

    def reconnect(self) -> None:
        """Begin anew as another peer; whatever was under way is lost."""
        self.close()
        self.peer = self._network.new_peer()
        self.last_arrival = [0.0, 0.0]
        self.closed = False

    def close(self) -> None:
        """Let go; a second call does nothing."""
        self.closed = True
        self.peer = b""
        self.arrived.clear()


class SimulatedListener:
    """A server's end, made by `SimulatedNetwork.listen`. What is sent to a closed one is lost, as with a dead one."""

    def __init__(self, network: SimulatedNetwork, address: str, handler: Handler) -> None:
        self.address = address
        self.dispatcher = Dispatcher(handler, network.limits)
        self._network = network

    def close(self, timeout_s: float = 10.0) -> None:  # noqa: ARG002 - as that of a real listener
        """Answer nobody any more; a second call does nothing."""
        self._network.forget(self)

    @property
    def refused(self) -> int:
        """Messages that were malformed."""
        return self.dispatcher.refused


class SimulatedNetwork(Network):
    """Clients and servers of one process with an imperfect network between them.

    `delay` is the shortest and longest time that a message takes, in seconds; messages of one connection arrive in
    order, except for the share `reorder`, which others overtake. The shares `loss` and `duplicate` never arrive, or
    do so twice. `bytes_per_second` is the rate of the one link, each way, that all clients share.
    """

    def __init__(
        self,
        seed: int = 0,
        *,
        delay: tuple[float, float] = (0.0, 0.0),
        loss: float = 0.0,
        duplicate: float = 0.0,
        reorder: float = 0.0,
        bytes_per_second: float | None = None,
        real_time: bool = False,
        limits: Limits = LIMITS,
    ) -> None:
        for name, share in (("loss", loss), ("duplicate", duplicate), ("reorder", reorder)):
            if not 0 <= share <= 1:
                raise ConfigError(f"{name} is {share}: give a share from 0 to 1")
        if not 0 <= delay[0] <= delay[1]:
            raise ConfigError(f"delay is {delay}: give the shortest and the longest, in seconds")
        if bytes_per_second is not None and bytes_per_second <= 0:
            raise ConfigError(f"bytes_per_second is {bytes_per_second}: give more than 0, or None for no limit")
        self.limits = limits
        self._delay, self._loss, self._duplicate, self._reorder = delay, loss, duplicate, reorder
        self._bytes_per_second, self._real_time = bytes_per_second, real_time
        self._random = random.Random(seed)
        self._clock = 0.0
        self._numbers = itertools.count()
        self._listeners: dict[str, SimulatedListener] = {}
        self._deliveries: list[_Delivery] = []
        self._link_free_at = [0.0, 0.0]
        self._changed = threading.Condition(threading.RLock())
        self._closed = False
        self._postman = threading.Thread(target=self._deliver_for_ever, name="bagpipe-simulated", daemon=True)
        if real_time:
            self._postman.start()

    def now(self) -> float:
        """Seconds of the clock that `wait` waits by."""
        return time.monotonic() if self._real_time else self._clock

    def connect(self, address: str) -> SimulatedChannel:
        """A channel to whoever listens at this address when a message arrives."""
        return SimulatedChannel(self, address)

    def listen(self, address: str, handler: Handler) -> SimulatedListener:
        """Hand messages that arrive at this address to a handler, one at a time."""
        with self._changed:
            if address in self._listeners:
                raise WireError(f"{address} is in use: choose another address")
            listener = self._listeners[address] = SimulatedListener(self, address, handler)
        return listener

    def wait(self, channels: Sequence[Channel], timeout_s: float) -> list[Channel]:
        """Channels on which something has arrived; empty after the timeout."""
        deadline = self.now() + timeout_s
        with self._changed:
            while not (found := [each for each in channels if isinstance(each, SimulatedChannel) and each.arrived]):
                if self._real_time:
                    if not self._changed.wait(max(deadline - self.now(), 0)) and self.now() >= deadline:
                        break
                elif self._deliveries and self._deliveries[0].at <= deadline:
                    self._clock = max(self._clock, self._deliveries[0].at)
                    self._deliver(heapq.heappop(self._deliveries))
                else:
                    self._clock = max(self._clock, deadline)
                    break
        return list(found)

    def close(self) -> None:
        """Drop what is under way and end the thread, if there is one."""
        with self._changed:
            self._closed = True
            self._deliveries.clear()
            self._changed.notify_all()
        if self._real_time:
            self._postman.join()

    def new_peer(self) -> bytes:
        """A name for a connection."""
        with self._changed:
            return next(self._numbers).to_bytes(5, "big")

    def forget(self, listener: SimulatedListener) -> None:
        """Stop handing messages to a listener."""
        with self._changed:
            if self._listeners.get(listener.address) is listener:
                del self._listeners[listener.address]

    def post(self, channel: SimulatedChannel, peer: bytes, frames: Sequence[Frame], to_server: bool) -> None:
        """Send frames on their way, once, twice or not at all."""
        copied: list[Frame] = [bytes(frame) for frame in frames]  # the sender may write over them
        with self._changed:
            for _ in range(1 + (self._random.random() < self._duplicate)):
                # drawn in any case, so that one message's fate does not shift those of the next ones
                lost, overtaken = self._random.random() < self._loss, self._random.random() < self._reorder
                at = self._arrival(channel, to_server, sum(map(len, copied)), overtaken)
                if not lost and not self._closed and channel.peer == peer:
                    delivery = _Delivery(at, next(self._numbers), channel, peer, copied, to_server)
                    heapq.heappush(self._deliveries, delivery)
            self._changed.notify_all()

    def _arrival(self, channel: SimulatedChannel, to_server: bool, num_bytes: int, overtaken: bool) -> float:
        leaves = self.now()
        if self._bytes_per_second is not None:
            leaves = max(leaves, self._link_free_at[to_server]) + num_bytes / self._bytes_per_second
            self._link_free_at[to_server] = leaves
        shortest, longest = self._delay
        at = leaves + self._random.uniform(shortest, longest)
        if overtaken:
            return at + self._random.uniform(shortest, longest + max(longest, 1e-6))
        at = channel.last_arrival[to_server] = max(at, channel.last_arrival[to_server])
        return at

    def _deliver(self, delivery: _Delivery) -> None:
        channel = delivery.channel
        if channel.peer != delivery.peer:
            return
        if not delivery.to_server:
            channel.arrived.append(delivery.frames)
            self._changed.notify_all()
        elif (listener := self._listeners.get(channel.address)) is not None:
            answer = partial(self.post, channel, delivery.peer, to_server=False)
            listener.dispatcher.dispatch(channel.address, delivery.peer, delivery.frames, answer)

    def _deliver_for_ever(self) -> None:
        while True:
            with self._changed:
                while not self._closed and (not self._deliveries or self._deliveries[0].at > self.now()):
                    self._changed.wait(self._deliveries[0].at - self.now() if self._deliveries else None)
                if self._closed:
                    return
                delivery = heapq.heappop(self._deliveries)
                if not delivery.to_server:
                    self._deliver(delivery)
            if delivery.to_server:  # not while the lock is held: handlers take their time
                self._deliver(delivery)
