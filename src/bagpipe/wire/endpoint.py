"""What both ends of a connection share: addresses, the rule that plain bytes stay on this machine, socket options."""

from __future__ import annotations

import errno
import ipaddress
from typing import NamedTuple

import zmq

from bagpipe.errors import ConfigError, WireError
from bagpipe.wire.frames import Frame
from bagpipe.wire.keys import VARIABLE, Keys, Role, Security
from bagpipe.wire.limits import Limits

CopyableSocket = zmq.Socket[bytes]

_SEAL_BYTES = 64  # at most, that encryption adds to a frame
_COPIED_BYTES_MAX = 512 << 10  # to lend memory to ZeroMQ and get it back takes a turn of another thread


class Address(NamedTuple):
    """A host, by name or number, and a port; port 0 lets the system choose."""

    host: str
    port: int

    def __str__(self) -> str:
        return f"tcp://{f'[{self.host}]' if ':' in self.host else self.host}:{self.port}"

    @property
    def is_local(self) -> bool:
        """Whether what is sent there can't leave this machine."""
        try:
            return ipaddress.ip_address(self.host).is_loopback
        except ValueError:
            return self.host == "localhost"


def parse_address(text: str) -> Address:
    """An address such as tcp://127.0.0.1:5555, 10.0.0.7:5555 or [::1]:5555."""
    host, colon, port = text.removeprefix("tcp://").rpartition(":")
    bare = host[1:-1] if host.startswith("[") and host.endswith("]") else host
    if not colon or not bare or any(letter in bare for letter in "/[]@; ") or (":" in bare and bare == host):
        raise ConfigError(f"the address {text!r} is none: write tcp://HOST:PORT, an IPv6 host in brackets")
    if not (port.isascii() and port.isdigit() and int(port) < 1 << 16):
        raise ConfigError(f"the address {text!r} has the port {port!r}: give a number from 0 to 65535")
    return Address(bare, int(port))


def check_security(address: Address, role: Role, security: Security) -> None:
    """Refuse plain bytes off this machine unless they were chosen by name, and keys that are for the other side."""
    if isinstance(security, Keys):
        if security.role != role:
            raise ConfigError(f"the keys are those of a {security.role}: a {role} needs its own")
    elif security is None and not address.is_local:
        raise ConfigError(
            f"{address} is not on this machine and there are no keys: make some with `bagpipe keys new` and name the "
            f'{role}\'s file in {VARIABLE}, or choose plain bytes with wire.security = "none" or, for '
            "`bagpipe server`, --security none"
        )
    elif security not in (None, "none"):
        raise ConfigError(f'security is {security!r}: give keys, "none" or None')


def set_options(socket: CopyableSocket, address: Address, limits: Limits, security: Security) -> None:
    """Queues, sizes, heartbeats and keys, before the socket is bound or connected."""
    socket.copy_threshold = _COPIED_BYTES_MAX
    socket.set(zmq.LINGER, 0)
    socket.set(zmq.IPV6, ":" in address.host)
    socket.set(zmq.MAXMSGSIZE, max(limits.buffer_bytes, limits.body_bytes) + _SEAL_BYTES)
    socket.set(zmq.SNDHWM, limits.queue_messages)
    socket.set(zmq.RCVHWM, limits.queue_messages)
    socket.set(zmq.HANDSHAKE_IVL, _ms(limits.handshake_s))
    socket.set(zmq.HEARTBEAT_IVL, _ms(limits.heartbeat_s))
    socket.set(zmq.HEARTBEAT_TIMEOUT, _ms(limits.silence_s))
    socket.set(zmq.HEARTBEAT_TTL, _ms(limits.heartbeat_s + limits.silence_s))
    if isinstance(security, Keys):
        socket.set(zmq.CURVE_PUBLICKEY, security.public.encode())
        socket.set(zmq.CURVE_SECRETKEY, security.secret.encode())
        if security.role == "server":
            socket.set(zmq.CURVE_SERVER, 1)
            socket.set(zmq.ZAP_DOMAIN, b"bagpipe")
        else:
            socket.set(zmq.CURVE_SERVERKEY, security.peer.encode())


def send_frames(socket: CopyableSocket, frames: list[Frame]) -> None:
    """All frames as one message; long ones are not copied, so they must not change until they are gone."""
    socket.send_multipart(frames, copy=False)


def receive_frames(socket: CopyableSocket, frames_max: int) -> list[memoryview]:
    """The frames of a message that is there; of one with too many only the first few and one more are kept."""
    frames: list[memoryview] = []
    while True:
        frame = socket.recv(zmq.DONTWAIT, copy=False)
        if len(frames) <= frames_max:
            frames.append(frame.buffer)
        if not frame.more:
            return frames


def option(socket: CopyableSocket, name: zmq.SocketOption) -> int:
    """The value of an option that is a number."""
    value = socket.get(name)
    assert isinstance(value, int)
    return value


def strerror(error: zmq.ZMQError) -> str:
    """What the system said, without numbers."""
    return str(error.strerror or error).lower()


def wire_error(address: Address, error: zmq.ZMQError) -> WireError:
    """Why an address can't be listened on or connected to."""
    if error.errno == zmq.EADDRINUSE:
        return WireError(f"{address} is in use: choose another port, or 0 for any that is free")
    if error.errno in (errno.ENODEV, zmq.EADDRNOTAVAIL):
        return WireError(f"{address} can't be used: {address.host} is no host or address of this machine")
    return WireError(f"{address} can't be used: {strerror(error)}")


def _ms(seconds: float) -> int:
    return max(int(seconds * 1000), 1)
