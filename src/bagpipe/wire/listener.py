"""Listens: a thread for each connection, which reads a request, has it answered, and only then reads the next.

So a connection holds one request at most, and all of them together no more memory than was announced (I5). A handler
may simply block, as a read does until all trainers are so far; meanwhile it tells its peer why (I7). What a peer sends,
and what happens inside the handler, is that peer's concern alone: it gets a typed error that shows nothing of this
process, or its connection is cut (I8).
"""

from __future__ import annotations

import errno
import logging
import select
import socket
import threading
import time
from collections import OrderedDict, deque
from collections.abc import Callable

from bagpipe.errors import BagpipeError, DeadlineError, WireError
from bagpipe.failpoints import reach
from bagpipe.waits import Waits
from bagpipe.wire.connection import (
    TICK_S,
    Answer,
    Buffers,
    Connection,
    DroppedError,
    Handler,
    Listen,
    Peer,
    PeerGoneError,
)
from bagpipe.wire.frames import Head
from bagpipe.wire.keys import Address, Keys, Security, check_security, parse_address, tls_context
from bagpipe.wire.limits import LIMITS, Limits
from bagpipe.wire.messages import Body, Failed, Message, NotYet
from bagpipe.wire.stream import SocketConnection, is_ours, unix_name

LOOPBACK = "tcp://127.0.0.1:0"
_BACKLOG = 256
_FAREWELL_S = 1.0
"""How long one that is cut is told why."""
_LINES_A_MINUTE = 100
"""Of the log, about strangers."""
_LOGGED_LETTERS = 500
"""Of why a stranger was refused."""
_log = logging.getLogger(__name__)


class Budget:
    """Bytes of requests that may be in memory at once; who came first has room first, however much it needs."""

    def __init__(self, num_bytes: int, waits: Waits) -> None:
        self.num_bytes, self._free = num_bytes, num_bytes
        self._waits, self._lock = waits, threading.Lock()
        self._queue: deque[object] = deque()
        self._first: object = None
        """Of the queue."""

    def take(self, num_bytes: int, deadline_s: float, tell: Callable[[], None] = lambda: None) -> None:
        """Once there is room; DeadlineError if there is none for too long. `tell` is called now and then meanwhile.

        What is larger than all of it has room when nothing else is there.
        """
        place, needed, waited_s = object(), min(num_bytes, self.num_bytes), 0.0
        if self._try_take(None, needed, num_bytes):  # nobody is before it
            return
        self._line_up(place)
        try:
            while not self._try_take(place, needed, num_bytes):
                if waited_s >= deadline_s:
                    raise DeadlineError(f"waited {deadline_s:g} s for {self._what(num_bytes)}")
                tick_s = min(TICK_S, deadline_s - waited_s)
                try:
                    self._waits.until(
                        self._what(num_bytes), lambda: self._first is place and self._free >= needed, tick_s
                    )
                except DeadlineError:
                    waited_s += tick_s
                    tell()
        finally:
            self._leave(place)

    def give(self, num_bytes: int) -> None:
        """Have so much of it back."""
        with self._lock:
            self._free += num_bytes
        self._waits.changed()

    def _try_take(self, place: object | None, needed: int, num_bytes: int) -> bool:
        with self._lock:
            if self._first is not place or self._free < needed:
                return False
            self._free -= num_bytes
            return True

    def _line_up(self, place: object) -> None:
        with self._lock:
            self._queue.append(place)
            self._first = self._queue[0]

    def _leave(self, place: object) -> None:
        with self._lock:
            self._queue.remove(place)
            self._first = self._queue[0] if self._queue else None
        self._waits.changed()

    def _what(self, num_bytes: int) -> str:
        return f"room for {num_bytes:,} B among {self.num_bytes:,} B of requests"


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
        self._refusal = ""

    @property
    def is_admitted(self) -> bool:
        """Whether it has shown that it belongs to the run."""
        return self._budget is not None

    def why_unknown(self, error: OSError) -> str:
        """Why it has not shown that, for the log, when its connection has ended so."""
        return f"it was refused: {self._refusal}" if self._refusal else str(error)

    def admit(self, kind: str = "") -> None:
        """It has shown that it belongs to the run."""
        budget = self._budgets.of(kind)
        if budget is not self._budget:  # with every request it may be said again
            self.give_back()
            self._budget = budget
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
            left_s = max(until - time.monotonic(), 0.0)
            try:
                if self.is_admitted:
                    self._request = self._connection.receive(None, self._make_room)
                else:
                    self._request = self._connection.receive(left_s, self._make_room, left_s)
                self._is_answered = False
                reach("wire.received")
                self._answer(handler, self._request)
            except DroppedError as dropped:
                self._send(dropped.head, NotYet("has no room for requests", again=True))
            finally:
                self._request = None
                self.give_back()

    def reply(self, body: Body, buffers: Buffers = ()) -> None:
        """Answer the request; with an error instead if that can't be sent."""
        request = self._request
        assert request is not None, "there is a request to answer"
        self._is_answered = not isinstance(body, NotYet) or body.again
        if isinstance(body, Failed) and not self.is_admitted:
            self._refusal = body.message[:_LOGGED_LETTERS]
        try:
            self._send(request, body, buffers)
        except WireError as error:
            _log.warning("%s can't be sent as an answer: %s", type(body).__name__, error)
            self._send(request, Failed.of(error))

    def _answer(self, handler: Handler, request: Message) -> None:
        """What it takes is let go of on return, and not only when there is another request."""
        answer = answered(handler, self, request)
        if answer is not None and not self._is_answered:  # else what failed came after the answer
            self.reply(*answer)

    def _send(self, request: Message | Head, body: Body, buffers: Buffers = ()) -> None:
        answer = Message(request.run, request.generation, request.request, body, buffers)
        try:
            self._connection.send(answer, self._limits.send_s)
        except OSError as error:
            raise PeerGoneError(str(error) or type(error).__name__) from error

    def _make_room(self, head: Head) -> bool:
        num_bytes = head.num_bytes
        if self._budget is None:
            if num_bytes > self._limits.stranger_bytes:
                raise WireError(
                    f"{num_bytes:,} B came of a peer that has not said who it is: "
                    f"{self._limits.stranger_bytes:,} are allowed"
                )
            return True
        try:
            self._budget.take(
                num_bytes, self._limits.memory_wait_s, lambda: self._send(head, NotYet("has no room for requests"))
            )
        except DeadlineError as error:
            _log.warning("%s is asked to come again: %s", self.name, error)
            return False
        self._taken = num_bytes
        return True


class Notes:
    """What the log is told of strangers: so many lines a minute, and then how many more there were. So nobody who can
    only reach the port fills a disk (I5)."""

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock, self._lock = clock, threading.Lock()
        self._since, self._lines, self._untold = clock(), 0, 0

    def warn(self, text: str, *arguments: object) -> None:
        """One thing that a stranger did."""
        now, untold = self._clock(), 0
        with self._lock:
            if now - self._since >= 60.0:
                untold, self._since, self._lines, self._untold = self._untold, now, 0, 0
            is_told = self._lines < _LINES_A_MINUTE
            self._lines += is_told
            self._untold += not is_told
        self._tell(untold)
        if is_told:
            _log.warning(text, *arguments)

    def close(self) -> None:
        """There will be no more."""
        with self._lock:
            untold, self._untold = self._untold, 0
        self._tell(untold)

    @staticmethod
    def _tell(untold: int) -> None:
        if untold:
            _log.warning("%d more connections of strangers were refused or have ended, without a line for each", untold)


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
        self._notes = Notes()
        self._closing = threading.Event()
        self._lock = threading.Lock()
        self._open: dict[SocketConnection, threading.Thread] = {}
        self._strangers: OrderedDict[SocketConnection, None] = OrderedDict()
        front = _bound(where)
        where = where._replace(port=front.getsockname()[1])
        self.address = str(where)
        """Where it listens, with the port that the system chose if it was left to it."""
        self._fronts = [front, *_beside(where)]
        self._wake, self._woken = socket.socketpair()
        self._accepting = threading.Thread(target=self._accept, name="bagpipe-accept", daemon=True)
        self._accepting.start()

    def close(self, timeout_s: float = 10.0) -> None:
        """Cut all connections, free the port and wait for handlers to end; a second call does nothing more."""
        until = time.monotonic() + timeout_s
        with self._lock:
            self._closing.set()
        self._wake.close()  # a shut listening socket would not wake who waits for it on every system
        self._accepting.join(max(until - time.monotonic(), 0.0))
        if not self._accepting.is_alive():
            for each in (*self._fronts, self._woken):
                each.close()
        with self._lock:
            peers = list(self._open.items())
        for connection, _ in peers:
            connection.interrupt()
        for _, thread in peers:
            if thread is not threading.current_thread():
                thread.join(max(until - time.monotonic(), 0.0))
        self._notes.close()
        if busy := [
            thread.name for _, thread in peers if thread.is_alive() and thread is not threading.current_thread()
        ]:
            raise DeadlineError(
                f"{len(busy)} requests at {self.address} are still being handled after {timeout_s:g} s: {busy[0]}"
            )

    def _accept(self) -> None:
        poll = select.poll()
        fronts = {each.fileno(): each for each in self._fronts}
        for descriptor in (*fronts, self._woken.fileno()):
            poll.register(descriptor, select.POLLIN)
        while not self._closing.is_set():
            for descriptor, _ in poll.poll():
                if descriptor in fronts:
                    self._accept_from(fronts[descriptor])

    def _accept_from(self, front: socket.socket) -> None:
        try:
            connected, where = front.accept()
        except (BlockingIOError, ConnectionAbortedError):  # it has left again
            return
        except OSError as error:
            self._notes.warn("%s can't accept a connection: %s", self.address, error)
            self._closing.wait(0.1)  # descriptors may have run out
            return
        try:
            is_local = front.family == socket.AF_UNIX
            if is_local and not is_ours(connected):
                raise PermissionError("it is a process of another user")
            name = "a process of this host" if is_local else str(Address(*where[:2])).removeprefix("tcp://")
            self._begin(SocketConnection(connected, name, self._limits), is_local)
        except (OSError, RuntimeError) as error:  # also where no thread can be started
            connected.close()
            self._count_refused()
            self._notes.warn("%s: refused a connection: %s", self.address, error)

    def _begin(self, connection: SocketConnection, is_local: bool) -> None:
        """Serve a new connection in a thread; where there are too many strangers, the first of them goes."""
        thread = threading.Thread(target=self._serve, args=(connection, is_local), daemon=True)
        thread.name = f"bagpipe-peer {connection.peer}"
        oldest = None
        with self._lock:
            if self._closing.is_set():
                raise ConnectionAbortedError("it is closing")
            if len(self._open) >= self._limits.connections:
                raise ConnectionAbortedError(f"there are {len(self._open)} connections")
            if len(self._strangers) >= self._limits.strangers:
                oldest, _ = self._strangers.popitem(last=False)
            thread.start()  # it takes this lock before it ends
            self._open[connection] = thread
            self._strangers[connection] = None
        if oldest is not None:
            oldest.interrupt()

    def _serve(self, connection: SocketConnection, is_local: bool) -> None:
        name, limits = connection.peer, self._limits
        visitor = Visitor(connection, limits, self._budgets, lambda: self._admit(connection))
        try:
            until = time.monotonic() + limits.stranger_s
            if self._context is not None and not is_local:
                assert isinstance(self._security, Keys)
                connection.secure(self._security, self._context, limits.stranger_s)
            visitor.serve(self._handler, max(until - time.monotonic(), 0.0))
        except WireError as error:  # logged as text: whoever keeps records would keep its frames and their buffers
            self._count_refused()
            warn = _log.warning if visitor.is_admitted else self._notes.warn
            warn("%s: cut the connection of %s: %s", self.address, name, str(error))
            connection.hang_up(str(error), _FAREWELL_S)
        except OSError as error:  # it has left, was silent in the middle of a message, or takes no answer
            if visitor.is_admitted:
                _log.info("%s: the connection of %s has ended: %s", self.address, name, str(error))
            elif not self._closing.is_set():
                self._count_refused()
                self._notes.warn("%s: %s has not said who it is: %s", self.address, name, visitor.why_unknown(error))
        except Exception:  # a defect of ours, which must not cost more than this connection
            _log.exception("the connection of %s to %s was lost", name, self.address)
        finally:
            self._let_go(connection, visitor)

    def _let_go(self, connection: SocketConnection, visitor: Visitor) -> None:
        try:
            connection.close()
            close = getattr(visitor.state, "close", None)
            if close is not None:
                close()
        except Exception:
            _log.exception("the connection of %s to %s did not end well", visitor.name, self.address)
        with self._lock:
            self._open.pop(connection, None)
            self._strangers.pop(connection, None)

    def _admit(self, connection: SocketConnection) -> None:
        with self._lock:
            self._strangers.pop(connection, None)

    def _count_refused(self) -> None:
        with self._lock:
            self.refused += 1


def on_socket(address: str = LOOPBACK, *, security: Security = None, limits: Limits = LIMITS) -> Listen:
    """On a TCP port, by default one of this machine's that is free."""
    return lambda handler: Listener(address, handler, security, limits)


def answered(handler: Handler, visitor: Peer, request: Message) -> Answer | None:
    """What the handler answers, or that it failed."""
    try:
        return handler(visitor, request)
    except PeerGoneError:
        raise
    except BagpipeError as error:
        return Failed.of(error), ()
    except MemoryError:
        return Failed("StoreError", "there is no memory for this request: ask for fewer rows at once"), ()
    except Exception:
        _log.exception("%s of %s failed", type(request.body).__name__, visitor.name)
        return Failed(BagpipeError.__name__, "the server failed inside: its log says how"), ()


def _bound(address: Address) -> socket.socket:
    host = "127.0.0.1" if address.host == "localhost" else address.host
    try:
        family, _, _, _, where = socket.getaddrinfo(host, address.port, type=socket.SOCK_STREAM)[0]
    except (OSError, UnicodeError) as error:
        raise WireError(f"{address} can't be listened on: {host!r} is no address of this machine") from error
    front = socket.socket(family, socket.SOCK_STREAM)
    try:
        front.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        front.bind(where)
        front.listen(_BACKLOG)
        front.setblocking(False)
    except OSError as error:
        front.close()
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
        beside.setblocking(False)
    except OSError:  # the name is taken: everybody can take the front
        beside.close()
        return []
    return [beside]
