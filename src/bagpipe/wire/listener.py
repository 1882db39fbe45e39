"""Listens: a thread for each connection, which reads a request, has it answered, and only then reads the next.

So a connection holds one request at most, and all of them together no more memory than was announced (I5). A handler
may simply block, as a read does until all trainers are so far; meanwhile it tells its peer why (I7). What a peer sends,
and what happens inside the handler, is that peer's concern alone: it gets a typed error that shows nothing of this
process, or its connection is cut (I8).
"""

from __future__ import annotations

import errno
import logging
import socket
import threading
import time
from collections import OrderedDict
from collections.abc import Callable
from contextlib import suppress

from bagpipe.errors import BagpipeError, DeadlineError, WireError
from bagpipe.failpoints import reach
from bagpipe.waits import Waits
from bagpipe.wire.connection import Answer, Buffers, Connection, Handler, Listen
from bagpipe.wire.keys import Address, Keys, Security, check_security, parse_address, tls_context
from bagpipe.wire.limits import LIMITS, Limits
from bagpipe.wire.messages import Body, Failed, Message, NotYet
from bagpipe.wire.stream import SocketConnection, is_ours, shake_hands, unix_name

LOOPBACK = "tcp://127.0.0.1:0"
_BACKLOG = 256
_log = logging.getLogger(__name__)


class Budget:
    """Bytes of requests that may be in memory at once."""

    def __init__(self, num_bytes: int, waits: Waits) -> None:
        self.num_bytes, self._free = num_bytes, num_bytes
        self._waits, self._lock = waits, threading.Lock()

    def take(self, num_bytes: int, deadline_s: float) -> None:
        """Once there is room; DeadlineError if there is none for too long."""
        while not self.try_take(num_bytes):
            self._waits.until(
                f"room for {num_bytes:,} B among {self.num_bytes:,} B of requests",
                lambda: self._free >= min(num_bytes, self.num_bytes), deadline_s,
            )  # fmt: skip

    def try_take(self, num_bytes: int) -> bool:
        """Whether there was room. What is larger than all of it has room when nothing else is there."""
        with self._lock:
            if self._free < min(num_bytes, self.num_bytes):
                return False
            self._free -= num_bytes
            return True

    def give(self, num_bytes: int) -> None:
        """Have so much of it back."""
        with self._lock:
            self._free += num_bytes
        self._waits.changed()


class Budgets:
    """One for each kind of request: one that must not wait for another's end is not of its kind."""

    def __init__(self, num_bytes: int, waits: Waits) -> None:
        self._num_bytes, self._waits = num_bytes, waits
        self._of_kind: dict[str, Budget] = {}
        self._lock = threading.Lock()

    def of(self, kind: str) -> Budget:
        """That of a kind, always the same."""
        with self._lock:
            if kind not in self._of_kind:
                self._of_kind[kind] = Budget(self._num_bytes, self._waits)
            return self._of_kind[kind]


class Visitor:
    """One connection, as its handler sees it: a `Peer`."""

    def __init__(self, connection: Connection, limits: Limits, budgets: Budgets, on_admit: Callable[[], None]) -> None:
        self.name = connection.peer
        self.state: object = None
        self._connection, self._limits, self._budgets, self._on_admit = connection, limits, budgets, on_admit
        self._budget: Budget | None = None
        self._taken = 0
        self._request: Message | None = None
        self._is_answered = False

    @property
    def is_admitted(self) -> bool:
        """Whether it has shown that it belongs to the run."""
        return self._budget is not None

    def admit(self, kind: str = "") -> None:
        """It has shown that it belongs to the run."""
        self.give_back()
        self._budget = self._budgets.of(kind)
        self._on_admit()

    def still_waiting(self, why: str, progress: int = 0) -> None:
        """Tell it that it was heard."""
        self.reply(NotYet(why, progress))

    def give_back(self) -> None:
        """Its request takes no memory from now on."""
        taken, self._taken = self._taken, 0
        if self._budget is not None and taken:
            self._budget.give(taken)

    def take_descriptor(self) -> int | None:
        """The descriptor that came with its request, if any; the caller's to close."""
        return self._connection.take_descriptor()

    def serve(self, handler: Handler, first_s: float) -> None:
        """Answer one request after the other; raises when the connection ends, or is to be cut."""
        until = time.monotonic() + first_s
        while True:
            self._request = self._connection.receive(
                None if self.is_admitted else max(until - time.monotonic(), 0.0), self._make_room
            )
            self._is_answered = False
            reach("wire.received")
            try:
                answer = answered(handler, self, self._request)
                if answer is not None and not self._is_answered:  # else what failed came after the answer
                    self.reply(*answer)
            finally:
                self._request = None
                self.give_back()

    def reply(self, body: Body, buffers: Buffers = ()) -> None:
        """Answer the request; with an error instead if that can't be sent."""
        request = self._request
        assert request is not None, "there is a request to answer"
        self._is_answered = not isinstance(body, NotYet) or body.again
        answer = Message(request.run, request.generation, request.request, body, buffers)
        try:
            self._connection.send(answer, self._limits.send_s)
        except WireError as error:
            _log.warning("%s can't be sent as an answer: %s", type(body).__name__, error)
            failed = Failed.of(error)
            self._connection.send(
                Message(request.run, request.generation, request.request, failed), self._limits.send_s
            )

    def _make_room(self, num_bytes: int) -> None:
        if self._budget is None:
            if num_bytes > self._limits.stranger_bytes:
                raise WireError(
                    f"{num_bytes:,} B came of a peer that has not said who it is: "
                    f"{self._limits.stranger_bytes:,} are allowed"
                )
            return
        self._budget.take(num_bytes, self._limits.memory_wait_s)
        self._taken = num_bytes


class Listener:
    """Listens on an address until it is closed, and beside it where processes of this host look first."""

    def __init__(self, address: str, handler: Handler, security: Security = None, limits: Limits = LIMITS) -> None:
        where = parse_address(address)
        check_security(where, "server", security)
        self._handler, self._limits, self._security = handler, limits, security
        self._context = tls_context(security) if isinstance(security, Keys) else None
        self._budgets = Budgets(limits.memory_bytes, Waits())
        self.refused = 0
        """Connections that were cut, or never admitted."""
        self._closing = False
        self._lock = threading.Lock()
        self._open: dict[SocketConnection | socket.socket, None] = {}
        self._strangers: OrderedDict[SocketConnection | socket.socket, None] = OrderedDict()
        self._threads: set[threading.Thread] = set()
        front = _bound(where)
        where = where._replace(port=front.getsockname()[1])
        self.address = str(where)
        """Where it listens, with the port that the system chose if it was left to it."""
        self._fronts = [front, *_beside(where)]
        self._accepting = [
            threading.Thread(target=self._accept, args=(each,), name="bagpipe-accept", daemon=True)
            for each in self._fronts
        ]
        for thread in self._accepting:
            thread.start()

    def close(self, timeout_s: float = 10.0) -> None:
        """Finish what is being answered, cut all connections and free the port; a second call does nothing."""
        self._closing = True
        until = time.monotonic() + timeout_s
        for front in self._fronts:
            with suppress(OSError):
                front.shutdown(socket.SHUT_RDWR)  # wakes who accepts
        for thread in self._accepting:
            thread.join(max(until - time.monotonic(), 0.0))
        with self._lock:
            open_ones, threads = list(self._open), list(self._threads)
        for each in open_ones:
            _interrupt(each)
        for thread in threads:
            if thread is not threading.current_thread():
                thread.join(max(until - time.monotonic(), 0.0))
                if thread.is_alive():
                    raise DeadlineError(
                        f"{thread.name} of {self.address} still handles a message after {timeout_s:g} s"
                    )
        for front in self._fronts:
            front.close()

    def _accept(self, front: socket.socket) -> None:
        while not self._closing:
            try:
                connected, where = front.accept()
            except OSError as error:
                if self._closing or front.fileno() < 0:
                    return
                _log.warning("%s can't accept a connection: %s", self.address, error)
                time.sleep(0.1)  # descriptors may have run out
                continue
            if front.family == socket.AF_UNIX and not is_ours(connected):
                connected.close()
                self.refused += 1
                continue
            name = "a process of this host" if front.family == socket.AF_UNIX else f"{where[0]}:{where[1]}"
            self._begin(connected, name)

    def _begin(self, connected: socket.socket, name: str) -> None:
        """Serve a new connection in a thread; where there are too many strangers, the first of them goes."""
        thread = threading.Thread(target=self._serve, args=(connected, name), name="bagpipe-peer", daemon=True)
        with self._lock:
            if self._closing or len(self._open) >= self._limits.connections:
                connected.close()
                self.refused += 1
                _log.warning("%s: refused %s, as there are %d connections", self.address, name, len(self._open))
                return
            oldest = next(iter(self._strangers)) if len(self._strangers) >= self._limits.strangers else None
            self._open[connected] = self._strangers[connected] = None
            self._threads.add(thread)
            if oldest is not None:
                del self._strangers[oldest]
        if oldest is not None:
            _interrupt(oldest)
        thread.start()

    def _serve(self, connected: socket.socket, name: str) -> None:
        held: SocketConnection | socket.socket = connected  # what this thread lets go of in the end
        visitor: Visitor | None = None
        try:
            until = time.monotonic() + self._limits.stranger_s
            secured = connected
            if self._context is not None and connected.family != socket.AF_UNIX:
                assert isinstance(self._security, Keys)
                secured = shake_hands(connected, self._security, self._context, name, self._limits.stranger_s)
            connection = SocketConnection(secured, name, self._limits)
            self._replace(connected, connection)
            held = connection
            visitor = Visitor(connection, self._limits, self._budgets, lambda: self._admit(connection))
            visitor.serve(self._handler, max(until - time.monotonic(), 0.0))
        except (WireError, DeadlineError) as error:
            self.refused += 1
            _log.warning("%s: cut the connection of %s: %s", self.address, name, error)
        except OSError as error:  # it has left, was silent in the middle of a message, or takes no answer
            if not self._closing and (visitor is None or not visitor.is_admitted):
                self.refused += 1
                _log.info("%s: %s left before it said who it is: %s", self.address, name, error)
        except Exception:  # a defect of ours, which must not cost more than this connection
            _log.exception("the connection of %s to %s was lost", name, self.address)
        finally:
            if visitor is not None:
                visitor.give_back()
                close = getattr(visitor.state, "close", None)
                if close is not None:
                    close()
            held.close()
            with self._lock:
                self._open.pop(held, None)
                self._strangers.pop(held, None)
                self._threads.discard(threading.current_thread())

    def _replace(self, before: socket.socket, now: SocketConnection) -> None:
        with self._lock:
            self._open[now] = None
            del self._open[before]
            if before in self._strangers:
                del self._strangers[before]
                self._strangers[now] = None
                return
        raise ConnectionAbortedError("too many others came before it said who it is")

    def _admit(self, connection: SocketConnection) -> None:
        with self._lock:
            self._strangers.pop(connection, None)


def on_socket(address: str = LOOPBACK, *, security: Security = None, limits: Limits = LIMITS) -> Listen:
    """On a TCP port, by default one of this machine's that is free."""
    return lambda handler: Listener(address, handler, security, limits)


def answered(handler: Handler, visitor: Visitor, request: Message) -> Answer | None:
    """What the handler answers, or that it failed."""
    try:
        return handler(visitor, request)
    except (ConnectionError, TimeoutError) as error:
        if isinstance(error, BagpipeError):
            return Failed.of(error), ()
        raise  # its own connection: nobody hears an answer
    except BagpipeError as error:
        return Failed.of(error), ()
    except MemoryError:
        return Failed("StoreError", "there is no memory for this request: ask for fewer rows at once"), ()
    except Exception:
        _log.exception("%s of %s failed", type(request.body).__name__, visitor.name)
        return Failed(BagpipeError.__name__, "the server failed inside: its log says how"), ()


def _interrupt(connected: SocketConnection | socket.socket) -> None:
    if isinstance(connected, SocketConnection):
        connected.interrupt()
    else:
        with suppress(OSError):
            socket.socket.shutdown(connected, socket.SHUT_RDWR)


def _bound(address: Address) -> socket.socket:
    host = "127.0.0.1" if address.host == "localhost" else address.host
    front = socket.socket(socket.AF_INET6 if ":" in host else socket.AF_INET, socket.SOCK_STREAM)
    try:
        front.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        front.bind(socket.getaddrinfo(host, address.port, type=socket.SOCK_STREAM)[0][4])
        front.listen(_BACKLOG)
    except OSError as error:
        front.close()
        if isinstance(error, socket.gaierror):
            raise WireError(f"{address} can't be listened on: {host!r} is no address of this machine") from error
        if error.errno == errno.EADDRINUSE:
            raise WireError(f"{address} is in use: choose another port, or 0 for any that is free") from error
        raise WireError(f"{address} can't be listened on: {(error.strerror or str(error)).lower()}") from error
    return front


def _beside(address: Address) -> list[socket.socket]:
    """Where processes of this host and user come by a Unix socket; none where there is no such thing."""
    if (name := unix_name(address)) is None:
        return []
    beside = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    try:
        beside.bind(name)
        beside.listen(_BACKLOG)
    except OSError:  # the name is taken: everybody can take the front
        beside.close()
        return []
    return [beside]
