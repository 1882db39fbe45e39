"""A network in memory, for tests and benchmarks: messages are late, and connections break, as a seed says.

It does what TCP can do: a connection delivers in order or breaks, and what it had under way may still arrive then,
after its sender has begun anew. Driven by one thread it keeps a clock of its own that only waiting moves, so that a run
is a function of its seed and an hour passes at once; handlers that block let others go on. With `real_time` threads may
use it, and its rate is that of a link between clients and servers. Everything that travels is encoded and decoded as on
a socket.
"""

from __future__ import annotations

import heapq
import itertools
import math
import random
import threading
import time
from collections import deque
from collections.abc import Callable
from contextvars import copy_context
from dataclasses import dataclass, field

from bagpipe.errors import ConfigError, DeadlineError, WireError
from bagpipe.failpoints import reach
from bagpipe.waits import Waits
from bagpipe.wire.connection import Admit, Buffers, Connection, DroppedError, Handler, Network, PeerGoneError
from bagpipe.wire.frames import HEADER_BYTES, decode, encode, read_head
from bagpipe.wire.limits import LIMITS, Limits
from bagpipe.wire.listener import answered
from bagpipe.wire.messages import Body, Failed, Message, NotYet

STEP_S = 60.0
"""How long a handler may run from one wait to the next."""


@dataclass(order=True)
class _Delivery:
    """Bytes on their way, in order of arrival."""

    at: float
    number: int
    end: SimulatedConnection | SimulatedPeer = field(compare=False)
    """That they go to."""
    letter: bytes = field(compare=False)


class SimulatedConnection(Connection):
    """A client's end; made by `SimulatedNetwork.connect`."""

    def __init__(self, network: SimulatedNetwork, address: str) -> None:
        self.address = self.peer = address
        self.arrived: deque[bytes] = deque()
        self.is_broken = False
        self.other = SimulatedPeer(network, self)
        self.last_arrival = 0.0
        self._network = network

    @property
    def shares_host(self) -> bool:
        """No descriptor goes through memory."""
        return False

    def send(self, message: Message, timeout_s: float, descriptor: int | None = None) -> None:  # noqa: ARG002
        """Send a message, which is copied."""
        letter = _letter(message, self._network.limits)
        self._check()
        self._network.post(self.other, letter)

    def receive(
        self,
        timeout_s: float | None,
        admit: Admit = lambda _: True,
        whole_s: float = math.inf,  # noqa: ARG002
    ) -> Message:
        """The next message; None waits for an hour."""
        self._network.wait_for(self, 3600.0 if timeout_s is None else timeout_s)
        if not self.arrived:
            self._check()
            raise TimeoutError("nothing was received in time")
        return _read(self.arrived.popleft(), self._network.limits, admit)

    def close(self) -> None:
        """Let go; a second call does nothing."""
        self._network.cut(self)

    def _check(self) -> None:
        if self.is_broken:
            raise ConnectionResetError("the connection broke")


class SimulatedPeer:
    """A server's end, as its handler sees it: a `Peer`."""

    def __init__(self, network: SimulatedNetwork, other: SimulatedConnection) -> None:
        self.name, self.other = "a client", other
        self.state: object = None
        self.arrived: deque[bytes] = deque()
        self.last_arrival = 0.0
        self.is_busy = False
        self.thread: threading.Thread | None = None
        self._network = network
        self._request: Message | None = None
        self._is_answered = False

    def admit(self, kind: str = "") -> None:
        """Memory is not counted here."""

    def give_back(self) -> None:
        """Memory is not counted here."""

    def take_descriptor(self) -> int | None:
        """None comes through memory."""
        return None

    def still_waiting(self, why: str, progress: int = 0) -> None:
        """Tell it that it was heard."""
        self.reply(NotYet(why, progress))

    def reply(self, body: Body, buffers: Buffers = ()) -> None:
        """Answer the request, which nobody hears if the connection has broken."""
        request = self._request
        assert request is not None, "there is a request to answer"
        self._is_answered = not isinstance(body, NotYet) or body.again
        answer = Message(request.run, request.generation, request.request, body, buffers)
        try:
            letter = _letter(answer, self._network.limits)
        except WireError as error:
            failed = Failed.of(error)
            letter = _letter(Message(request.run, request.generation, request.request, failed), self._network.limits)
        if self.other.is_broken:
            raise PeerGoneError("the connection broke")
        self._network.post(self.other, letter)

    def answer_next(self, handler: Handler) -> None:
        """Have the request that came first answered."""
        try:
            self._request = _read(self.arrived.popleft(), self._network.limits)
            self._is_answered = False
            reach("wire.received")
            answer = answered(handler, self, self._request)
            if answer is not None and not self._is_answered:
                self.reply(*answer)
        except WireError:
            self._network.count_refused(self.other.address)
            self._network.cut(self.other)
        except OSError:
            pass  # nobody hears it
        finally:
            self.is_busy = False

    def close(self) -> None:
        """The connection has ended."""
        close = getattr(self.state, "close", None)
        if close is not None:
            close()


class SimulatedListener:
    """Made by `SimulatedNetwork.listen`. Connections to a closed one break, as with a dead one."""

    def __init__(self, network: SimulatedNetwork, address: str, handler: Handler) -> None:
        self.address, self.handler, self.refused = address, handler, 0
        self._network = network

    def close(self, timeout_s: float = 10.0) -> None:  # noqa: ARG002 - as that of a real listener
        """Answer nobody any more; a second call does nothing."""
        self._network.forget(self)


class Task:
    """A handler in a thread of its own, which runs only within `step`; where it waits, others go on."""

    def __init__(self, run: Callable[[], None], owner: object = None) -> None:
        """It runs in the context of whoever makes it; `owner` is whose it is."""
        self.owner = owner
        self.until = 0.0
        """When it goes on in any case."""
        self.has_ended = False
        self._run = run
        self._ready: Callable[[], bool] = lambda: True
        self._go, self._came = threading.Semaphore(0), threading.Semaphore(0)
        self._error: BaseException | None = None
        self._ending: BaseException | None = None
        context = copy_context()
        self._thread = threading.Thread(target=lambda: context.run(self._work), name="bagpipe-handler", daemon=True)
        _tasks[self._thread] = self
        self._thread.start()

    @staticmethod
    def current() -> Task | None:
        """The one whose thread this is."""
        return _tasks.get(threading.current_thread())

    def is_ready(self, now: float) -> bool:
        """Whether it can go on."""
        return now >= self.until or self._ready()

    def step(self) -> None:
        """Run it until its next wait, or its end; what it raised is raised here."""
        self._go.release()
        if not self._came.acquire(timeout=STEP_S):
            raise DeadlineError(f"a handler has run for {STEP_S:g} s without a wait that others could use")
        if self.has_ended:
            self._thread.join()
            if self._error is not None and self._error is not self._ending:
                raise self._error

    def end(self, why: BaseException) -> None:
        """Let its wait raise, and run it to its end."""
        self._ending = why
        while not self.has_ended:
            self.step()

    def pause(self, ready: Callable[[], bool], until: float) -> None:
        """Called by its own thread: let others go on until it is ready, or the time has come."""
        self._ready, self.until = ready, until
        self._came.release()
        self._go.acquire()
        if self._ending is not None:
            raise self._ending

    def _work(self) -> None:
        self._go.acquire()
        try:
            if self._ending is None:
                self._run()
        except BaseException as error:
            self._error = error
        finally:
            del _tasks[self._thread]
            self.has_ended = True
            self._came.release()


_tasks: dict[threading.Thread, Task] = {}


class SimulatedWaits(Waits):
    """Waits of handlers on the clock of a network."""

    def __init__(self, network: SimulatedNetwork) -> None:
        super().__init__()
        self._network = network

    def until(self, what: str | Callable[[], str], ready: Callable[[], bool], deadline_s: float) -> None:
        """Let others go on until it is so."""
        until = self._network.now() + deadline_s
        while not ready():
            task = Task.current()
            if self._network.now() >= until or (task is None and not self._network.run_tasks()):
                raise DeadlineError(f"waited {deadline_s:g} s for {what if isinstance(what, str) else what()}")
            if task is not None:
                task.pause(ready, until)


class SimulatedNetwork(Network):
    """Clients and servers of one process with an imperfect network between them.

    `delay` is the shortest and longest time that a message takes, in seconds. At the share `breaks` of all messages
    their connection breaks; that message may arrive all the same. `bytes_per_second` is the rate of the one link, each
    way, that all clients share.
    """

    def __init__(
        self,
        seed: int = 0,
        *,
        delay: tuple[float, float] = (0.0, 0.0),
        breaks: float = 0.0,
        bytes_per_second: float | None = None,
        real_time: bool = False,
        limits: Limits = LIMITS,
    ) -> None:
        if not 0 <= breaks < 1:
            raise ConfigError(f"breaks is {breaks}: give a share from 0 to 1")
        if not 0 <= delay[0] <= delay[1]:
            raise ConfigError(f"delay is {delay}: give the shortest and the longest, in seconds")
        if bytes_per_second is not None and bytes_per_second <= 0:
            raise ConfigError(f"bytes_per_second is {bytes_per_second}: give more than 0, or None for no limit")
        self.limits = limits
        self.num_broken = 0
        self._delay, self._breaks = delay, breaks
        self._bytes_per_second, self._real_time = bytes_per_second, real_time
        self._random = random.Random(seed)
        self._clock = 0.0
        self._numbers = itertools.count()
        self._listeners: dict[str, SimulatedListener] = {}
        self._connections: list[SimulatedConnection] = []
        self._deliveries: list[_Delivery] = []
        self._tasks: list[Task] = []
        self._link_free_at = {SimulatedConnection: 0.0, SimulatedPeer: 0.0}
        self._changed = threading.Condition(threading.RLock())
        self._closed = False
        self.waits = Waits() if real_time else SimulatedWaits(self)
        """For handlers that wait here."""
        self._postman = threading.Thread(target=self._deliver_for_ever, name="bagpipe-simulated", daemon=True)
        if real_time:
            self._postman.start()

    # What clients and servers use

    def now(self) -> float:
        """Seconds of the clock that is waited by."""
        return time.monotonic() if self._real_time else self._clock

    def pause(self, seconds: float) -> None:
        """Let time pass."""
        if self._real_time:
            time.sleep(seconds)
        else:
            self._wait_until(lambda: False, self._clock + seconds)

    def connect(self, address: str, timeout_s: float) -> SimulatedConnection:  # noqa: ARG002
        """A connection to whoever listens at this address."""
        with self._changed:
            if address not in self._listeners or self._closed:
                raise ConnectionRefusedError("nobody listens there")
            connection = SimulatedConnection(self, address)
            self._connections.append(connection)
            return connection

    def listen(self, address: str, handler: Handler) -> SimulatedListener:
        """Hand messages that arrive at this address to a handler, one at a time of each connection."""
        with self._changed:
            if address in self._listeners:
                raise WireError(f"{address} is in use: choose another address")
            listener = self._listeners[address] = SimulatedListener(self, address, handler)
        return listener

    def close(self) -> None:
        """Drop what is under way and end the threads, if there are any."""
        with self._changed:
            self._closed = True
            self._deliveries.clear()
            connections = list(self._connections)
            self._changed.notify_all()
        for connection in connections:
            self.cut(connection)
        for task in list(self._tasks):
            task.end(PeerGoneError("the network is closed"))
        self._tasks.clear()
        if self._real_time:
            self._postman.join()

    # What their ends use

    def post(self, end: SimulatedConnection | SimulatedPeer, letter: bytes) -> None:
        """Send bytes on their way to an end; the connection may break of it."""
        with self._changed:
            # drawn in any case, so that one message's fate does not shift those of the next ones
            breaks, arrives = self._random.random() < self._breaks, self._random.random() < 0.5
            at = self._arrival(end, len(letter))
            if not self._closed and (arrives or not breaks):
                heapq.heappush(self._deliveries, _Delivery(at, next(self._numbers), end, letter))
            if breaks:
                self.num_broken += 1
                self._break(end if isinstance(end, SimulatedConnection) else end.other)
            self._changed.notify_all()

    def cut(self, connection: SimulatedConnection) -> None:
        """The connection is gone; a second call does nothing."""
        with self._changed:
            self._break(connection)
            self._changed.notify_all()

    def wait_for(self, connection: SimulatedConnection, timeout_s: float) -> None:
        """Until something has arrived there, the connection has broken, or the time is over."""
        if not self._real_time:
            self._wait_until(lambda: bool(connection.arrived) or connection.is_broken, self._clock + timeout_s)
            return
        with self._changed:
            self._changed.wait_for(lambda: connection.arrived or connection.is_broken, timeout_s)

    def run_tasks(self) -> bool:
        """Let one handler go on that can, if there is one."""
        ready = [task for task in self._tasks if task.is_ready(self._clock)]
        if not ready:
            return False
        task = self._random.choice(ready)
        try:
            task.step()
        finally:
            if task.has_ended and task in self._tasks:
                self._tasks.remove(task)
        return True

    def forget(self, listener: SimulatedListener) -> None:
        """Nobody listens there any more."""
        with self._changed:
            if self._listeners.get(listener.address) is listener:
                del self._listeners[listener.address]
            for connection in [each for each in self._connections if each.address == listener.address]:
                self._break(connection)
            self._changed.notify_all()

    def count_refused(self, address: str) -> None:
        """Bytes came there that were no message."""
        if address in self._listeners:
            self._listeners[address].refused += 1

    # Inside

    def _wait_until(self, ready: Callable[[], bool], deadline: float) -> None:
        """Deliver and handle what there is, and move the clock, until it is so or the time has come."""
        while not ready():
            if self.run_tasks():
                continue
            at = self._next_event()
            if at is None or at > deadline:
                self._clock = max(self._clock, deadline)
                return
            self._clock = max(self._clock, at)
            if self._deliveries and self._deliveries[0].at <= self._clock:
                self._deliver(heapq.heappop(self._deliveries))

    def _next_event(self) -> float | None:
        """When something happens next by itself."""
        times = [task.until for task in self._tasks]
        if self._deliveries:
            times.append(self._deliveries[0].at)
        return min(times, default=None)

    def _arrival(self, end: SimulatedConnection | SimulatedPeer, num_bytes: int) -> float:
        leaves = self.now()
        if self._bytes_per_second is not None:
            leaves = max(leaves, self._link_free_at[type(end)]) + num_bytes / self._bytes_per_second
            self._link_free_at[type(end)] = leaves
        end.last_arrival = max(leaves + self._random.uniform(*self._delay), end.last_arrival)
        return end.last_arrival

    def _break(self, connection: SimulatedConnection) -> None:
        if connection.is_broken:
            return
        connection.is_broken = True
        connection.arrived.clear()
        self._connections.remove(connection)
        connection.other.close()

    def _deliver(self, delivery: _Delivery) -> None:
        end = delivery.end
        if isinstance(end, SimulatedConnection):
            if not end.is_broken:
                end.arrived.append(delivery.letter)
            self._changed.notify_all() if self._real_time else None
            return
        end.arrived.append(delivery.letter)
        self._serve(end)

    def _serve(self, peer: SimulatedPeer) -> None:
        """Have a request handled, if none of its connection is."""
        listener = self._listeners.get(peer.other.address)
        if listener is None:
            return
        if self._real_time:
            if peer.thread is None:
                peer.thread = threading.Thread(target=self._serve_for_ever, args=(peer,), daemon=True)
                peer.thread.start()
            self._changed.notify_all()
        elif not peer.is_busy and peer.arrived:
            peer.is_busy = True
            self._tasks.append(self.make_task(lambda: self._answer(peer, listener)))

    def make_task(self, run: Callable[[], None]) -> Task:
        """What runs a handler."""
        return Task(run)

    def _answer(self, peer: SimulatedPeer, listener: SimulatedListener) -> None:
        peer.answer_next(listener.handler)
        self._serve(peer)

    def _serve_for_ever(self, peer: SimulatedPeer) -> None:
        while True:
            with self._changed:
                self._changed.wait_for(lambda: peer.arrived or peer.other.is_broken or self._closed)
                listener = self._listeners.get(peer.other.address)
                if not peer.arrived or listener is None:
                    return
            peer.answer_next(listener.handler)

    def _deliver_for_ever(self) -> None:
        with self._changed:
            while not self._closed:
                if self._deliveries and self._deliveries[0].at <= self.now():
                    self._deliver(heapq.heappop(self._deliveries))
                else:
                    self._changed.wait(self._deliveries[0].at - self.now() if self._deliveries else None)


def _letter(message: Message, limits: Limits) -> bytes:
    return b"".join(encode(message, limits))  # copied: the sender may write over its buffers


def _read(letter: bytes, limits: Limits, admit: Admit = lambda _: True) -> Message:
    view = memoryview(bytearray(letter))
    head = read_head(view[:HEADER_BYTES], limits)
    if not admit(head):
        raise DroppedError(head)
    at = HEADER_BYTES + head.body_bytes
    buffers = []
    for length in head.buffer_bytes:
        buffers.append(view[at : at + length])
        at += length
    return decode(head, view[HEADER_BYTES : HEADER_BYTES + head.body_bytes], buffers)
