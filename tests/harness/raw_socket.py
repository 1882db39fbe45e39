"""A peer that speaks the wire byte by byte, and so can also speak it wrongly."""

from __future__ import annotations

import socket
import struct
from collections.abc import Sequence

from bagpipe.wire.frames import HEADER_BYTES, MAGIC, VERSION, decode, encode, read_head
from bagpipe.wire.keys import parse_address
from bagpipe.wire.messages import Message
from bagpipe.wire.stream import unix_name

READ = 2
"""The type of a read."""


def connect(address: str) -> socket.socket:
    """A plain TCP connection."""
    where = parse_address(address)
    return socket.create_connection((where.host, where.port), timeout=10)


def connect_at_home(address: str) -> socket.socket:
    """A Unix socket to the same listener."""
    name = unix_name(parse_address(address))
    assert name is not None
    connected = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    connected.settimeout(10)
    connected.connect(name)
    return connected


def header(
    magic: bytes = MAGIC, version: int = VERSION, kind: int = READ, buffers: int = 1, generation: int = 0,
    body: int = 10, request: int = 7, run: bytes = bytes(16), lengths: Sequence[int] = (8,),
) -> bytes:  # fmt: skip
    """The header of a message, right or wrong."""
    packed = struct.pack("<4sBBHIIQ16s", magic, version, kind, buffers, generation, body, request, run)
    return packed + struct.pack("<4Q", *lengths, *[0] * (4 - len(lengths)))


def frames_of(message: Message) -> bytes:
    """All bytes of a message."""
    return b"".join(map(bytes, encode(message)))


def receive(peer: socket.socket, num_bytes: int) -> bytes:
    """Exactly so many bytes."""
    got = b""
    while len(got) < num_bytes:
        more = peer.recv(num_bytes - len(got))
        if not more:
            raise ConnectionError(f"closed after {len(got)} of {num_bytes} bytes")
        got += more
    return got


def receive_message(peer: socket.socket) -> Message:
    """The next message."""
    head = read_head(receive(peer, HEADER_BYTES))
    body = receive(peer, head.body_bytes)
    return decode(head, body, [memoryview(receive(peer, length)) for length in head.buffer_bytes])


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
