"""Connections over stream sockets: TCP, TLS 1.3 between machines, Unix sockets between processes of one host.

Every length is checked before anything is allocated for it (I8), and everything that is waited for has an end (I7).
"""

from __future__ import annotations

import math
import os
import select
import socket
import ssl
import struct
import threading
import time
from collections.abc import Callable
from contextlib import suppress
from functools import partial

import numpy as np

from bagpipe.errors import ConfigError, WireError
from bagpipe.wire.connection import Admit, Connection, DroppedError, Network
from bagpipe.wire.frames import HEADER_BYTES, RUN_BYTES, Frame, Head, decode, encode, read_head
from bagpipe.wire.keys import Address, Keys, Security, check_security, parse_address, tls_context
from bagpipe.wire.limits import LIMITS, Limits
from bagpipe.wire.messages import Failed, Message

_AHEAD_BYTES = 32 << 10
"""What is read at once; longer buffers go to their place without a copy."""
_JOINED_BYTES = 16 << 10
"""Short buffers leave with what is before them: a record of TLS has as much."""
_CREDENTIALS = struct.Struct("3i")
_DESCRIPTOR_SPACE = socket.CMSG_SPACE(4)
_TLS_HANDSHAKE = b"\x16"
_KEEPALIVE = {"TCP_KEEPIDLE": 10, "TCP_KEEPALIVE": 10, "TCP_KEEPINTVL": 5, "TCP_KEEPCNT": 4}
"""A host that is gone without a word is noticed after half a minute."""

_KEY_REFUSED = {
    "TLSV1_ALERT_UNKNOWN_CA", "SSLV3_ALERT_BAD_CERTIFICATE", "TLSV1_ALERT_DECRYPT_ERROR",
    "TLSV13_ALERT_CERTIFICATE_REQUIRED", "SSLV3_ALERT_CERTIFICATE_UNKNOWN", "TLSV1_ALERT_ACCESS_DENIED",
}  # fmt: skip
_KEY_EXPIRED = {"SSLV3_ALERT_CERTIFICATE_EXPIRED"}


class _Pace:
    """How slow the bytes of one message may be: who keeps to the rate, after a while of grace, is never late."""

    def __init__(self, grace_s: float, bytes_per_second: float, whole_s: float = math.inf) -> None:
        now = time.monotonic()
        self._from, self._rate, self._last = now + grace_s, bytes_per_second, now + whole_s
        self.grace_s = grace_s
        """Also how long nothing may come at all."""
        self.num_bytes = 0

    @property
    def until(self) -> float:
        """When the next ones are late."""
        return min(self._from + self.num_bytes / self._rate, self._last)


class SocketConnection(Connection):
    """A connected socket."""

    def __init__(self, connected: socket.socket, peer: str, limits: Limits = LIMITS) -> None:
        self.peer, self._limits = peer, limits
        self._socket = connected
        self._closing = threading.Lock()
        """Held by whoever shuts the socket, so that no other one is that has its descriptor by then."""
        self._is_tls = False
        self._is_unix = connected.family == socket.AF_UNIX
        self._ahead = memoryview(bytearray(_AHEAD_BYTES))
        self._begin = self._end = 0
        """Of what was read ahead and is still to be used."""
        self._descriptor: int | None = None
        connected.setblocking(False)
        if not self._is_unix:
            connected.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            connected.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
            for name, value in _KEEPALIVE.items():
                if hasattr(socket, name):
                    connected.setsockopt(socket.IPPROTO_TCP, getattr(socket, name), value)

    @property
    def shares_host(self) -> bool:
        """Whether it is a Unix socket."""
        return self._is_unix

    def send(self, message: Message, timeout_s: float, descriptor: int | None = None) -> None:
        """Send a message whole; buffers may change when it has returned."""
        parts = _joined(encode(message, self._limits))
        pace = _Pace(timeout_s, self._limits.bytes_per_second)
        if descriptor is not None and self._is_unix:
            sent = self._when_writable(lambda: socket.send_fds(self._socket, [parts[0]], [descriptor]), pace)
            parts[0] = parts[0][sent:]
        while parts:
            if self._is_tls:
                sent = self._when_writable(lambda: self._socket.send(parts[0]), pace)
            else:
                sent = self._when_writable(lambda: self._socket.sendmsg(parts), pace)
            while parts and sent >= len(parts[0]):
                sent -= len(parts.pop(0))
            if sent:
                parts[0] = parts[0][sent:]

    def receive(self, timeout_s: float | None, admit: Admit = lambda _: True, whole_s: float = math.inf) -> Message:
        """The next message; its buffers are memory of their own."""
        last = time.monotonic() + whole_s
        if self._begin == self._end:
            self._read_ahead(timeout_s, None)
        try:
            header = bytearray(HEADER_BYTES)
            self._fill(memoryview(header), self._pace(last))
            head = read_head(header, self._limits)
            if admit(head):
                return self._rest(head, self._pace(last))  # of its own: there may have been no room for a while
            self._skip(head.num_bytes, self._pace(last))
        except TimeoutError as error:  # where the next message begins is unknown now
            raise ConnectionAbortedError("it stopped in the middle of a message") from error
        raise DroppedError(head)

    def secure(self, keys: Keys, context: ssl.SSLContext, timeout_s: float) -> None:
        """Go on under TLS, once each side has shown that it holds the key that the other expects."""
        until = time.monotonic() + timeout_s
        try:
            if keys.role == "server":
                self._when_readable(self._check_speaks_tls, None, until)
            with self._closing:
                self._socket = context.wrap_socket(
                    self._socket, server_side=keys.role == "server", do_handshake_on_connect=False
                )
            self._is_tls = True
            secured = self._socket
            assert isinstance(secured, ssl.SSLSocket)
            self._when_ready(lambda: _shake_hands(secured), select.POLLIN, None, until)
        except TimeoutError as error:
            raise ConnectionAbortedError(f"its TLS handshake was not over after {timeout_s:g} s") from error
        if not keys.is_peer(secured.getpeercert(binary_form=True)):
            raise WireError(f"{self.peer} has another key than the one that we expect: give both sides the files that "
                            "were made together")  # fmt: skip

    def take_descriptor(self) -> int | None:
        """The descriptor that came with the last message, if any."""
        descriptor, self._descriptor = self._descriptor, None
        return descriptor

    def interrupt(self) -> None:
        """From another thread: nothing goes through any more, and who waits here is told."""
        with self._closing:
            self._shut(socket.SHUT_RDWR)

    def hang_up(self, why: str, timeout_s: float) -> None:
        """Tell the other side why it is cut, as far as it listens; only `close` may follow.

        It may still be sending: were the socket closed on that, the system would take back what it was told.
        """
        until = time.monotonic() + timeout_s
        with suppress(OSError, WireError):
            self.send(Message(bytes(RUN_BYTES), 0, 0, Failed(WireError.__name__, why)), timeout_s)
        with suppress(OSError, WireError):
            self._shut(socket.SHUT_WR)
            while True:
                self._when_readable(lambda: socket.socket.recv_into(self._socket, self._ahead), None, until)

    def close(self) -> None:
        """Let go; a second call does nothing."""
        with self._closing:
            self._shut(socket.SHUT_RDWR)
            self._socket.close()
        if (descriptor := self.take_descriptor()) is not None:
            os.close(descriptor)

    def _shut(self, how: int) -> None:
        with suppress(OSError):
            socket.socket.shutdown(self._socket, how)  # what ssl makes of it would end TLS under its user

    def _check_speaks_tls(self) -> int:
        first = self._socket.recv(1, socket.MSG_PEEK)
        if first not in (b"", _TLS_HANDSHAKE):
            raise WireError("the peer does not speak TLS and this side does: give keys on both sides or on neither")
        return len(first)

    def _pace(self, last: float) -> _Pace:
        return _Pace(self._limits.stall_s, self._limits.bytes_per_second, last - time.monotonic())

    def _rest(self, head: Head, pace: _Pace) -> Message:
        body = bytearray(head.body_bytes)
        self._fill(memoryview(body), pace)
        buffers = [np.empty(length, np.uint8).data for length in head.buffer_bytes]
        for buffer in buffers:
            self._fill(buffer, pace)
        return decode(head, body, buffers)

    def _skip(self, num_bytes: int, pace: _Pace) -> None:
        scratch = memoryview(bytearray(min(num_bytes, _AHEAD_BYTES)))
        while num_bytes:
            part = scratch[: min(num_bytes, len(scratch))]
            self._fill(part, pace)
            num_bytes -= len(part)

    def _fill(self, into: memoryview, pace: _Pace) -> None:
        while into.nbytes:
            if count := min(self._end - self._begin, into.nbytes):
                into[:count] = self._ahead[self._begin : self._begin + count]
                self._begin += count
            elif into.nbytes >= _AHEAD_BYTES:
                read = partial(self._socket.recv_into, into)
                count = self._when_readable(read, pace.grace_s, pace.until)
            else:
                self._read_ahead(pace.grace_s, pace.until)
                continue
            pace.num_bytes += count
            into = into[count:]

    def _read_ahead(self, timeout_s: float | None, until: float | None) -> None:
        read = self._receive_with_descriptor if self._is_unix else lambda: self._socket.recv_into(self._ahead)
        self._begin, self._end = 0, 0
        self._end = self._when_readable(read, timeout_s, until)

    def _receive_with_descriptor(self) -> int:
        count, ancillary, _, _ = self._socket.recvmsg_into(
            [self._ahead], _DESCRIPTOR_SPACE, getattr(socket, "MSG_CMSG_CLOEXEC", 0)
        )
        for level, kind, data in ancillary:
            if (level, kind) == (socket.SOL_SOCKET, socket.SCM_RIGHTS):
                for (descriptor,) in struct.iter_unpack("i", data[: len(data) // 4 * 4]):
                    if self._descriptor is not None:  # nobody took the one before: who sends more keeps one
                        os.close(self._descriptor)
                    self._descriptor = descriptor
        return count

    def _when_readable(self, read: Callable[[], int], timeout_s: float | None, until: float | None) -> int:
        count = self._when_ready(read, select.POLLIN, timeout_s, until)
        if not count:
            raise ConnectionResetError("the other side closed the connection")
        return count

    def _when_writable(self, write: Callable[[], int], pace: _Pace) -> int:
        sent = self._when_ready(write, select.POLLOUT, pace.grace_s, pace.until)
        pace.num_bytes += sent
        return sent

    def _when_ready(self, act: Callable[[], int], event: int, timeout_s: float | None, until: float | None) -> int:
        """The result of a system call, once it can be made; TimeoutError after so long, and at the time in any case."""
        stalled = None
        while True:
            try:
                return act()
            except (BlockingIOError, ssl.SSLWantReadError):
                wanted = select.POLLIN if self._is_tls else event
            except ssl.SSLWantWriteError:
                wanted = select.POLLOUT
            except ssl.SSLError as error:
                raise tls_error(error, self.peer) from error
            except ValueError as error:  # a socket that another thread has closed has no descriptor
                raise ConnectionAbortedError("this side closed the connection") from error
            now = time.monotonic()
            if timeout_s is not None and stalled is None:
                stalled = now + timeout_s
            ends = min((each for each in (stalled, until) if each is not None), default=None)
            if ends is not None and now >= ends:
                raise TimeoutError("nothing was received in time" if event == select.POLLIN else "nothing was taken")
            if wait_for(self._socket, wanted, None if ends is None else ends - now) & select.POLLNVAL:
                raise ConnectionAbortedError("this side closed the connection")


def _shake_hands(secured: ssl.SSLSocket) -> int:
    secured.do_handshake()
    return 0


def wait_for(waited_for: socket.socket, events: int, timeout_s: float | None) -> int:
    """What has become of a socket; 0 after the time."""
    poll = select.poll()
    descriptor = waited_for.fileno()
    if descriptor < 0:
        return select.POLLNVAL
    poll.register(descriptor, events)
    found = poll.poll(None if timeout_s is None else max(timeout_s, 0.0) * 1000)
    return found[0][1] if found else 0


def tls_error(error: ssl.SSLError, peer: str) -> OSError | WireError:
    """What an error of TLS means: the connection broke, or it will never be made."""
    if isinstance(error, ssl.SSLEOFError | ssl.SSLZeroReturnError | ssl.SSLSyscallError):
        return ConnectionResetError("the other side closed the connection")
    if isinstance(error, ssl.SSLCertVerificationError):
        if error.verify_code == 10:  # X509_V_ERR_CERT_HAS_EXPIRED
            return WireError(f"the certificate of {peer} has expired: make new keys with `bagpipe keys new`")
        if error.verify_code == 9:  # X509_V_ERR_CERT_NOT_YET_VALID
            return WireError(f"the certificate of {peer} is not valid yet: set the clocks of both machines")
        return WireError(
            f"{peer} has another key than the one that we expect ({error.verify_message}): give both sides the files "
            "that were made together"
        )
    if error.reason in _KEY_EXPIRED:
        return WireError(f"{peer} says that our certificate has expired: make new keys with `bagpipe keys new`")
    if error.reason in _KEY_REFUSED:
        return WireError(f"{peer} does not admit our key: use the client's file made together with the server's")
    if error.reason == "PEER_DID_NOT_RETURN_A_CERTIFICATE":
        return WireError(f"{peer} has no key: give keys on both sides or on neither")
    return WireError(f"{peer} does not speak TLS as we do ({error.reason}): give keys on both sides or on neither")


def is_ours(connected: socket.socket) -> bool:
    """Whether the other end of a Unix socket is a process of our user."""
    found = connected.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, _CREDENTIALS.size)
    return bool(_CREDENTIALS.unpack(found)[1] == os.geteuid())


def unix_name(address: Address) -> str | None:
    """Where processes of this host meet who listens at an address: a name without a file, in the namespace of the
    network, so that what sees the port sees the name. None where the system has no such names."""
    if not hasattr(socket, "SO_PEERCRED"):
        return None
    host = "127.0.0.1" if address.host == "localhost" else address.host
    return f"\0bagpipe-{host}:{address.port}"


class SocketNetwork(Network):
    """Connections to other processes; may be used by several threads."""

    def __init__(self, security: Security = None, limits: Limits = LIMITS, *, local: bool = True) -> None:
        """Without `local` connections within this host take TCP as others do."""
        self._security, self._limits, self._local = security, limits, local
        self._context = tls_context(security) if isinstance(security, Keys) else None

    def connect(self, address: str, timeout_s: float) -> SocketConnection:
        """A connection to whoever listens there: by a Unix socket if it is a process of our user on this host."""
        where = parse_address(address)
        if where.port == 0:
            raise ConfigError(f"the address {address!r} has port 0: give the one that the server listens on")
        check_security(where, "client", self._security)
        connected = self._at_home(where, timeout_s) if self._local else None
        if connected is not None:
            return SocketConnection(connected, str(where), self._limits)
        connected = socket.create_connection((where.host, where.port), timeout_s)
        connection = SocketConnection(connected, f"the server at {where}", self._limits)
        if self._context is not None:
            assert isinstance(self._security, Keys)
            try:
                connection.secure(self._security, self._context, timeout_s)
            except BaseException:
                connection.close()
                raise
        return connection

    def _at_home(self, address: Address, timeout_s: float) -> socket.socket | None:
        if (name := unix_name(address)) is None:
            return None
        connected = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM | getattr(socket, "SOCK_CLOEXEC", 0))
        connected.settimeout(timeout_s)  # else it would wait for room in the other side's backlog
        with suppress(OSError):
            connected.connect(name)
            if is_ours(connected):
                return connected
        connected.close()
        return None


def _joined(frames: list[Frame]) -> list[memoryview]:
    """The same bytes, with short parts copied behind the one before them."""
    parts: list[memoryview] = []
    joined = bytearray()
    for frame in frames:
        if len(frame) <= _JOINED_BYTES - len(joined):
            joined += frame
            continue
        if joined:
            parts.append(memoryview(bytes(joined)))
            joined.clear()
        parts.append(memoryview(frame))
    return [*parts, memoryview(bytes(joined))] if joined else parts
