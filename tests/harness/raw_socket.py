"""A peer that speaks ZeroMQ's protocol (ZMTP 3.0, no security) byte by byte, and so can also speak it wrongly."""

from __future__ import annotations

import socket
from urllib.parse import urlparse

GREETING = b"\xff" + bytes(8) + b"\x7f\x03\x00" + b"NULL".ljust(20, b"\0") + bytes(32)
READY = b"\x05READY\x0bSocket-Type\x00\x00\x00\x06DEALER"
MORE, LONG, COMMAND = 1, 2, 4


def connect(address: str) -> socket.socket:
    """A plain TCP connection."""
    where = urlparse(address)
    return socket.create_connection((where.hostname, where.port), timeout=10)


def greet(address: str) -> socket.socket:
    """A connection to a listener whose handshake is done."""
    return _shake_hands(connect(address), READY)


def welcome(server: socket.socket) -> socket.socket:
    """The next connection of a client to a plain server socket, its handshake done."""
    peer, _ = server.accept()
    peer.settimeout(10)
    return _shake_hands(peer, READY.replace(b"DEALER", b"ROUTER"))


def _shake_hands(peer: socket.socket, ready: bytes) -> socket.socket:
    peer.sendall(GREETING)
    receive(peer, len(GREETING))
    peer.sendall(bytes([COMMAND, len(ready)]) + ready)
    _, size = receive(peer, 2)
    receive(peer, size)
    return peer


def frame(content: bytes, more: bool = False, length: int | None = None) -> bytes:
    """A frame; one that lies about its length if told so."""
    length = len(content) if length is None else length
    return bytes([LONG | (MORE if more else 0)]) + length.to_bytes(8, "big") + content


def send(peer: socket.socket, *frames: bytes) -> None:
    """A message of these frames."""
    last = len(frames) - 1
    peer.sendall(b"".join(frame(content, more=each < last) for each, content in enumerate(frames)))


def receive(peer: socket.socket, num_bytes: int) -> bytes:
    """Exactly so many bytes."""
    got = b""
    while len(got) < num_bytes:
        more = peer.recv(num_bytes - len(got))
        if not more:
            raise ConnectionError(f"closed after {len(got)} of {num_bytes} bytes")
        got += more
    return got


def is_closed(peer: socket.socket, timeout_s: float = 10) -> bool:
    """Whether the other side hangs up within the time, whatever it may still say before."""
    peer.settimeout(timeout_s)
    try:
        while peer.recv(1 << 16):
            pass
    except TimeoutError:
        return False
    except ConnectionError:
        return True
    return True
