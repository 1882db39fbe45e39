"""Connections over stream sockets: TCP, TLS 1.3 between machines, Unix sockets between processes of one host.

Every length is checked before anything is allocated for it (I8), and everything that is waited for has an end (I7).
"""

from __future__ import annotations

import os
import select
import socket
import ssl
import struct
import time
from collections.abc import Callable
from contextlib import suppress

import numpy as np

from bagpipe.errors import ConfigError, WireError
from bagpipe.wire.connection import Connection, Network
from bagpipe.wire.frames import HEADER_BYTES, Frame, Head, decode, encode, read_head
from bagpipe.wire.keys import Address, Keys, Security, check_security, parse_address, tls_context
from bagpipe.wire.limits import LIMITS, Limits
from bagpipe.wire.messages import Message

_AHEAD_BYTES = 32 << 10
"""What is read at once; longer buffers go to their place without a copy."""
_JOINED_BYTES = 16 << 10
"""Short buffers leave with what is before them: a record of TLS has as much."""
_CREDENTIALS = struct.Struct("3i")
_DESCRIPTOR_SPACE = socket.CMSG_SPACE(4)
_KEEPALIVE = {"TCP_KEEPIDLE": 10, "TCP_KEEPINTVL": 5, "TCP_KEEPCNT": 4}
"""A host that is gone without a word is noticed after half a minute."""

_KEY_REFUSED = {
    "TLSV1_ALERT_UNKNOWN_CA", "SSLV3_ALERT_BAD_CERTIFICATE", "TLSV1_ALERT_DECRYPT_ERROR",
    "TLSV13_ALERT_CERTIFICATE_REQUIRED", "SSLV3_ALERT_CERTIFICATE_UNKNOWN", "TLSV1_ALERT_ACCESS_DENIED",
}  # fmt: skip
_KEY_EXPIRED = {"SSLV3_ALERT_CERTIFICATE_EXPIRED"}


class SocketConnection(Connection):
    """A connected socket."""

    def __init__(self, connected: socket.socket, peer: str, limits: Limits = LIMITS) -> None:
        self.peer, self._limits = peer, limits
        self._socket = connected
        self._is_tls = isinstance(connected, ssl.SSLSocket)
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
        until = time.monotonic() + timeout_s + sum(map(len, parts)) / self._limits.bytes_per_second
        if descriptor is not None and self._is_unix:
            sent = self._when_writable(
                lambda: socket.send_fds(self._socket, [parts[0]], [descriptor]), timeout_s, until
            )
            parts[0] = parts[0][sent:]
        while parts:
            if self._is_tls:
                sent = self._when_writable(lambda: self._socket.send(parts[0]), timeout_s, until)
            else:
                sent = self._when_writable(lambda: self._socket.sendmsg(parts), timeout_s, until)
            while parts and sent >= len(parts[0]):
                sent -= len(parts.pop(0))
            if sent:
                parts[0] = parts[0][sent:]

    def receive(self, timeout_s: float | None, admit: Callable[[int], None] = lambda _: None) -> Message:
        """The next message; its buffers are memory of their own."""
        if self._begin == self._end:
            self._read_ahead(timeout_s, None)
        stall_s, until = self._limits.stall_s, time.monotonic() + self._limits.stall_s
        header = bytearray(HEADER_BYTES)
        self._fill(memoryview(header), stall_s, until)
        head = read_head(header, self._limits)
        admit(head.num_bytes)
        return self._rest(head, stall_s, until + head.num_bytes / self._limits.bytes_per_second)

    def take_descriptor(self) -> int | None:
        """The descriptor that came with the last message, if any."""
        descriptor, self._descriptor = self._descriptor, None
        return descriptor

    def interrupt(self) -> None:
        """From another thread: nothing goes through any more, and who waits here is told."""
        with suppress(OSError):
            socket.socket.shutdown(self._socket, socket.SHUT_RDWR)  # what ssl makes of it would end TLS under its user

    def close(self) -> None:
        """Let go; a second call does nothing."""
        self.interrupt()
        self._socket.close()
        if (descriptor := self.take_descriptor()) is not None:
            os.close(descriptor)

    def _rest(self, head: Head, stall_s: float, until: float) -> Message:
        body = bytearray(head.body_bytes)
        self._fill(memoryview(body), stall_s, until)
        buffers = [np.empty(length, np.uint8).data for length in head.buffer_bytes]
        for buffer in buffers:
            self._fill(buffer, stall_s, until)
        return decode(head, body, buffers)

    def _fill(self, into: memoryview, stall_s: float, until: float) -> None:
        while into.nbytes:
            if held := min(self._end - self._begin, into.nbytes):
                into[:held] = self._ahead[self._begin : self._begin + held]
                self._begin += held
                into = into[held:]
            elif into.nbytes >= _AHEAD_BYTES:
                count = self._when_readable(lambda into=into: self._socket.recv_into(into), stall_s, until)  # type: ignore[misc]
                into = into[count:]
            else:
                self._read_ahead(stall_s, until)

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

    def _when_writable(self, write: Callable[[], int], timeout_s: float, until: float) -> int:
        return self._when_ready(write, select.POLLOUT, timeout_s, until)

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


def shake_hands(
    connected: socket.socket, keys: Keys, context: ssl.SSLContext, peer: str, timeout_s: float
) -> ssl.SSLSocket:
    """The same connection under TLS, once each side has shown that it holds the key that the other expects."""
    secured = context.wrap_socket(connected, server_side=keys.role == "server", do_handshake_on_connect=False)
    try:
        secured.settimeout(timeout_s)
        secured.do_handshake()
        if not keys.is_peer(secured.getpeercert(binary_form=True)):
            raise WireError(f"{peer} has another key than the one that we expect: give both sides the files that were "
                            "made together")  # fmt: skip
    except ssl.SSLError as error:
        secured.close()
        raise tls_error(error, peer) from error
    except BaseException:
        secured.close()
        raise
    return secured


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
        connected = self._at_home(where) if self._local else None
        if connected is None:
            connected = socket.create_connection((where.host, where.port), timeout_s)
            if self._context is not None:
                assert isinstance(self._security, Keys)
                connected = shake_hands(connected, self._security, self._context, f"the server at {where}", timeout_s)
        return SocketConnection(connected, str(where), self._limits)

    def _at_home(self, address: Address) -> socket.socket | None:
        if (name := unix_name(address)) is None:
            return None
        connected = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM | getattr(socket, "SOCK_CLOEXEC", 0))
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
