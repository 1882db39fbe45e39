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
from collections import deque
from collections.abc import Callable, Sequence
from contextlib import suppress
from typing import Any

import numpy as np

from bagpipe.errors import ConfigError, WireError
from bagpipe.wire.connection import Admit, Connection, DroppedError, Network
from bagpipe.wire.frames import HEADER_BYTES, RUN_BYTES, Frame, Head, decode, encode, read_head
from bagpipe.wire.keys import Address, Keys, Security, check_security, parse_address, tls_context
from bagpipe.wire.limits import LIMITS, Limits
from bagpipe.wire.messages import Failed, Message

_AHEAD_BYTES = 32 << 10
"""What is read at once; longer buffers go to their place without a copy."""
_TICK_S = 0.1
"""How long a system call waits at most: the kernel wakes this thread once for a whole buffer, not for every packet."""
_TIMEVAL = struct.Struct("@ll")
_SENT_BYTES = 1 << 20
"""What one system call is given at most: a Unix socket waits for a tick for every part of it."""
_RECORD_BYTES = 16 << 10
"""Of TLS. Short buffers leave in one with what is before them."""
_RECORDS_AT_ONCE = 8
_ENCRYPTED_BYTES = _RECORDS_AT_ONCE * _RECORD_BYTES
"""What TLS hands to a system call at once, and takes from one: as much as stays in a processor's own cache."""
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

    __slots__ = ("_from", "_grace_s", "_last", "_rate", "num_bytes")

    def __init__(self, grace_s: float, bytes_per_second: float, last: float = math.inf) -> None:
        """`grace_s` is also how long nothing may come at all; `last` is when all is late."""
        self._from, self._rate, self._last, self._grace_s = time.monotonic() + grace_s, bytes_per_second, last, grace_s
        self.num_bytes = 0

    @property
    def until(self) -> float:
        """By when something more must have come or gone."""
        return min(self._from + self.num_bytes / self._rate, self._last, time.monotonic() + self._grace_s)


class _Tls:
    """TLS over memory: encrypted bytes go in and out of it, so that system calls take many records at once."""

    def __init__(self, context: ssl.SSLContext, *, is_server: bool) -> None:
        self.incoming, self.outgoing = ssl.MemoryBIO(), ssl.MemoryBIO()
        self.encrypted = memoryview(bytearray(_ENCRYPTED_BYTES))
        """As it has come."""
        self.object = context.wrap_bio(self.incoming, self.outgoing, server_side=is_server)


class SocketConnection(Connection):
    """A connected socket."""

    def __init__(self, connected: socket.socket, peer: str, limits: Limits = LIMITS) -> None:
        self.peer, self._limits = peer, limits
        self._socket = connected
        self._closing = threading.Lock()
        """Held by whoever shuts the socket, so that no other one is that has its descriptor by then."""
        self._tls: _Tls | None = None
        self._is_unix = connected.family == socket.AF_UNIX
        self._ahead = memoryview(bytearray(_AHEAD_BYTES))
        self._begin = self._end = 0
        """Of what was read ahead and is still to be used."""
        self._descriptor: int | None = None
        self._tick_s = min(_TICK_S, limits.stall_s / 2)
        connected.settimeout(None)  # its own timeouts would be a system call for each packet
        for option in (socket.SO_RCVTIMEO, socket.SO_SNDTIMEO):
            connected.setsockopt(socket.SOL_SOCKET, option, _TIMEVAL.pack(0, int(self._tick_s * 1e6)))
        self._poll = select.poll()
        self._poll.register(connected.fileno(), select.POLLIN)
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
        frames = encode(message, self._limits)
        pace = _Pace(timeout_s, self._limits.bytes_per_second)
        if self._tls is not None:
            self._encrypt(self._tls, frames, pace)
        else:
            self._send_all(frames, pace, descriptor if self._is_unix else None)

    def receive(self, timeout_s: float | None, admit: Admit = lambda _: True, whole_s: float = math.inf) -> Message:
        """The next message; its buffers are memory of their own."""
        last = time.monotonic() + whole_s
        if self._begin == self._end:
            self._await(timeout_s)
        try:
            head = read_head(self._take(HEADER_BYTES, last), self._limits)
            if admit(head):
                return self._rest(head, last)
            self._skip(head.num_bytes, self._pace(last))
        except TimeoutError as error:  # where the next message begins is unknown now
            raise ConnectionAbortedError("it stopped in the middle of a message") from error
        raise DroppedError(head)

    def secure(self, keys: Keys, context: ssl.SSLContext, timeout_s: float) -> None:
        """Go on under TLS, once each side has shown that it holds the key that the other expects."""
        until = time.monotonic() + timeout_s
        try:
            if keys.role == "server":
                self._when_ready(until, self._check_speaks_tls)
            self._tls = _Tls(context, is_server=keys.role == "server")
            while not self._shakes_hands(self._tls, until):
                pass
        except TimeoutError as error:
            raise ConnectionAbortedError(f"its TLS handshake was not over after {timeout_s:g} s") from error
        if not keys.is_peer(self._tls.object.getpeercert(binary_form=True)):
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
            while time.monotonic() < until:
                self._when_ready(until, self._socket.recv_into, self._ahead)

    def close(self) -> None:
        """Let go; a second call does nothing."""
        with self._closing:
            self._shut(socket.SHUT_RDWR)
            self._socket.close()
        if (descriptor := self.take_descriptor()) is not None:
            os.close(descriptor)

    def _shut(self, how: int) -> None:
        with suppress(OSError):
            self._socket.shutdown(how)

    def _check_speaks_tls(self) -> int:
        first = self._socket.recv(1, socket.MSG_PEEK)
        if first not in (b"", _TLS_HANDSHAKE):
            raise WireError("the peer does not speak TLS and this side does: give keys on both sides or on neither")
        return len(first)

    def _pace(self, last: float) -> _Pace:
        return _Pace(self._limits.stall_s, self._limits.bytes_per_second, last)

    def _rest(self, head: Head, last: float) -> Message:
        body = self._take(head.body_bytes, last)
        buffers = [np.empty(length, np.uint8).data for length in head.buffer_bytes]
        message = decode(head, body, buffers)
        pace = self._pace(last) if head.buffer_bytes else None  # of its own: there may have been no room for a while
        for buffer in buffers:
            assert pace is not None
            self._fill(buffer, pace)
        return message

    def _skip(self, num_bytes: int, pace: _Pace) -> None:
        scratch = memoryview(bytearray(min(num_bytes, _AHEAD_BYTES)))
        while num_bytes:
            part = scratch[: min(num_bytes, len(scratch))]
            self._fill(part, pace)
            num_bytes -= len(part)

    # What is read

    def _await(self, timeout_s: float | None) -> None:
        """Read ahead what comes next, once it comes."""
        if self._tls is not None:
            self._await_record(self._tls, timeout_s)
        elif timeout_s is not None and timeout_s >= self._tick_s:
            self._read_ahead(time.monotonic() + timeout_s)
        else:  # who waits for ever does not wake for every tick
            self._await_bytes(timeout_s)
            self._read_ahead(time.monotonic() + self._limits.stall_s)

    def _await_record(self, tls: _Tls, timeout_s: float | None) -> None:
        until = None if timeout_s is None else time.monotonic() + timeout_s
        while not (count := self._decrypt(tls, self._ahead)):
            self._await_bytes(None if until is None else until - time.monotonic())
            self._feed(tls, time.monotonic() + self._limits.stall_s)
        self._begin, self._end = 0, count

    def _await_bytes(self, timeout_s: float | None) -> None:
        found = self._poll.poll(None if timeout_s is None else max(timeout_s, 0.0) * 1000)
        if not found:
            raise TimeoutError("nothing was received in time")
        if found[0][1] & select.POLLNVAL:
            raise ConnectionAbortedError("this side closed the connection")

    def _take(self, num_bytes: int, last: float) -> memoryview:
        """The next bytes; valid until more is read."""
        begin, end = self._begin, self._begin + num_bytes
        if end <= self._end:
            self._begin = end
            return self._ahead[begin:end]
        taken = memoryview(bytearray(num_bytes))
        self._fill(taken, self._pace(last))
        return taken

    def _fill(self, into: memoryview, pace: _Pace) -> None:
        while into.nbytes:
            if count := min(self._end - self._begin, into.nbytes):
                into[:count] = self._ahead[self._begin : self._begin + count]
                self._begin += count
            elif into.nbytes >= _AHEAD_BYTES:
                count = self._read(into, pace.until)
            else:
                self._read_ahead(pace.until)
                continue
            pace.num_bytes += count
            into = into[count:]

    def _read(self, into: memoryview, until: float) -> int:
        """Some of the next bytes, as many as come within a tick."""
        if self._tls is None:
            return self._when_ready(until, self._socket.recv_into, into, 0, socket.MSG_WAITALL)
        while not (count := self._decrypt(self._tls, into)):
            self._feed(self._tls, until)
        return count

    def _read_ahead(self, until: float) -> None:
        self._begin = self._end = 0
        if self._tls is not None:
            self._end = self._read(self._ahead, until)
        elif self._is_unix:
            self._end = self._when_ready(until, self._receive_with_descriptor)
        else:
            self._end = self._when_ready(until, self._socket.recv_into, self._ahead)

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

    def _when_ready(self, until: float, act: Callable[..., int], *arguments: Any, event: int = select.POLLIN) -> int:
        """How many bytes a system call has moved that waits for a tick, as often as need be until the time has come.

        After that it must not wait: who was held up itself still takes what is there.
        """
        while True:
            if time.monotonic() >= until and not self._is_ready(event):
                raise TimeoutError(f"nothing was {'received' if event == select.POLLIN else 'taken'} in time")
            try:
                count = act(*arguments)
            except BlockingIOError:
                continue
            if not count:
                raise ConnectionResetError("the other side closed the connection")
            return count

    def _is_ready(self, event: int) -> bool:
        poll = select.poll()
        if (descriptor := self._socket.fileno()) >= 0:
            poll.register(descriptor, event)
        return bool(poll.poll(0))

    # What is sent

    def _send_all(self, frames: Sequence[Frame], pace: _Pace, descriptor: int | None = None) -> None:
        left = sum(map(len, frames))
        while True:
            given = _beginning(frames) if self._is_unix and left > _SENT_BYTES else frames
            if descriptor is None:
                sent = self._when_ready(pace.until, self._socket.sendmsg, given, event=select.POLLOUT)
            else:
                sent = self._when_ready(
                    pace.until, socket.send_fds, self._socket, given, [descriptor], event=select.POLLOUT
                )
                descriptor = None
            left -= sent
            if not left:
                return
            pace.num_bytes += sent
            frames = _behind(frames, sent)

    # TLS

    def _shakes_hands(self, tls: _Tls, until: float) -> bool:
        """Whether both have said all that they must."""
        try:
            tls.object.do_handshake()
        except ssl.SSLWantReadError:
            is_over = False
        except ssl.SSLError as error:
            with suppress(OSError):  # it is told why
                self._flush(tls, _Pace(0.0, self._limits.bytes_per_second))
            raise tls_error(error, self.peer) from error
        else:
            is_over = True
        self._flush(tls, _Pace(until - time.monotonic(), self._limits.bytes_per_second))
        if not is_over:
            self._feed(tls, until)
        return is_over

    def _decrypt(self, tls: _Tls, into: memoryview) -> int:
        """How much of what has come is in memory now, record by record; 0 before more has come."""
        read: Callable[..., Any] = tls.object.read  # into memory it returns a number
        incoming, done, count = tls.incoming, 0, 1
        try:
            while count and done < len(into) and (not done or incoming.pending):
                count = read(len(into) - done, into[done:])
                done += count
        except ssl.SSLWantReadError:
            pass
        except ssl.SSLError as error:
            raise tls_error(error, self.peer) from error
        if not count and not done:
            raise ConnectionResetError("the other side closed the connection")
        return done

    def _feed(self, tls: _Tls, until: float) -> None:
        """Take what has come to be decrypted; waits until there is something."""
        count = self._when_ready(until, self._socket.recv_into, tls.encrypted)
        tls.incoming.write(tls.encrypted[:count])

    def _encrypt(self, tls: _Tls, frames: Sequence[Frame], pace: _Pace) -> None:
        write, num_records = tls.object.write, 0
        try:
            for part in _joined(frames):
                for begin in range(0, len(part), _RECORD_BYTES):
                    write(part[begin : begin + _RECORD_BYTES])  # memory takes a record whole
                    num_records += 1
                    if num_records % _RECORDS_AT_ONCE == 0:
                        self._flush(tls, pace)
        except ssl.SSLError as error:
            raise tls_error(error, self.peer) from error
        self._flush(tls, pace)

    def _flush(self, tls: _Tls, pace: _Pace) -> None:
        if tls.outgoing.pending:
            self._send_all([tls.outgoing.read()], pace)


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
        try:
            connected = socket.create_connection((where.host, where.port), timeout_s)
        except UnicodeError as error:  # a part of it is empty, or longer than 63 letters
            raise ConfigError(f"the address {address!r} is none: {where.host!r} can't be the name of a host") from error
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


def _beginning(frames: Sequence[Frame]) -> list[Frame]:
    """As much of them as one system call is given."""
    first, room = list[Frame](), _SENT_BYTES
    for frame in frames:
        first.append(memoryview(frame)[:room])
        room -= len(first[-1])
        if not room:
            break
    return first


def _behind(frames: Sequence[Frame], sent: int) -> list[Frame]:
    """What is left when so many bytes have gone."""
    left = deque(frames)
    while sent >= len(left[0]):
        sent -= len(left.popleft())
    left[0] = memoryview(left[0])[sent:]
    return list(left)


def _joined(frames: Sequence[Frame]) -> list[memoryview]:
    """The same bytes, with short parts copied behind the one before them."""
    parts: list[memoryview] = []
    joined = bytearray()
    for frame in frames:
        if len(frame) <= _RECORD_BYTES - len(joined):
            joined += frame
            continue
        if joined:
            parts.append(memoryview(bytes(joined)))
            joined.clear()
        parts.append(memoryview(frame))
    return [*parts, memoryview(bytes(joined))] if joined else parts
