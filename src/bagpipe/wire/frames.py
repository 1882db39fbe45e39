"""Messages to bytes and back. Every length is checked against the limits before anything is allocated for it; whatever
is wrong is a WireError that names it (promise I8). Nothing is ever unpickled.

A message is a header of fixed size, the body as MessagePack, and the raw buffers, which are never copied here.
"""

from __future__ import annotations

import struct
from collections.abc import Sequence
from typing import Any, NamedTuple, get_args

import msgspec

from bagpipe.errors import WireError
from bagpipe.wire.limits import LIMITS, Limits
from bagpipe.wire.messages import Body, Message

MAGIC = b"BGPW"
VERSION = 8
RUN_BYTES = 16
BUFFERS_MAX = 4

_HEADER = struct.Struct(f"<4sBBHIIQ{RUN_BYTES}s{BUFFERS_MAX}Q")
"""Magic, version, type, number of buffers, generation, bytes of the body, request, run, bytes of each buffer."""
HEADER_BYTES = _HEADER.size
_TYPES: tuple[type[Any], ...] = get_args(Body)  # a type's number is its place: new ones go to the end
_NUMBERS = {record: number for number, record in enumerate(_TYPES)}
_DECODERS = [msgspec.msgpack.Decoder(record, strict=True) for record in _TYPES]
_ENCODER = msgspec.msgpack.Encoder()
_TLS_RECORDS = (b"\x14\x03", b"\x15\x03", b"\x16\x03")

Frame = bytes | bytearray | memoryview


class Head(NamedTuple):
    """What the header of a message says of it, within the limits."""

    kind: int
    generation: int
    request: int
    run: bytes
    body_bytes: int
    buffer_bytes: tuple[int, ...]

    @property
    def num_bytes(self) -> int:
        """That follow the header."""
        return self.body_bytes + sum(self.buffer_bytes)


def encode(message: Message, limits: Limits = LIMITS) -> list[Frame]:
    """A message as what is sent: header and body, then its buffers; refuses what the other side would refuse."""
    number = _NUMBERS.get(type(message.body))
    if number is None:
        raise WireError(f"{type(message.body).__name__} is not a record that travels: see bagpipe.wire.messages")
    if len(message.run) != RUN_BYTES:
        raise WireError(f"the run has {len(message.run)} bytes: give {RUN_BYTES}")
    if not (0 <= message.generation < 1 << 32 and 0 <= message.request < 1 << 64):
        raise WireError(
            f"generation {message.generation} or request {message.request} does not fit: "
            "give unsigned numbers of 32 and 64 bits"
        )
    body = _encode_body(message.body)
    buffers = [_flat(buffer) for buffer in message.buffers]
    lengths = [buffer.nbytes for buffer in buffers]
    _check_sizes(len(body), lengths, limits)
    header = _HEADER.pack(
        MAGIC, VERSION, number, len(buffers), message.generation, len(body), message.request, message.run,
        *lengths, *[0] * (BUFFERS_MAX - len(lengths)),
    )  # fmt: skip
    return [header + body, *buffers]


def read_head(header: Frame, limits: Limits = LIMITS) -> Head:
    """What a header of `HEADER_BYTES` announces; WireError unless it may be received."""
    magic, version, kind, num_buffers, generation, body_bytes, request, run, *lengths = _HEADER.unpack(header)
    if magic != MAGIC:
        if magic[:2] in _TLS_RECORDS:
            raise WireError("the peer speaks TLS and this side does not: give keys on both sides or on neither")
        raise WireError(f"a message begins with {magic!r}, not {MAGIC!r}: the peer is not a Bagpipe")
    if version != VERSION:
        raise WireError(
            f"the peer speaks version {version}, this is version {VERSION}: run the same release on both sides"
        )
    if kind >= len(_TYPES):
        raise WireError(f"message type {kind} is unknown: the last one is {len(_TYPES) - 1}")
    if num_buffers > BUFFERS_MAX or any(lengths[num_buffers:]):
        raise WireError(f"a message with {num_buffers} buffers of {lengths} bytes: {limits.buffers} are allowed")
    _check_sizes(body_bytes, lengths[:num_buffers], limits)
    return Head(kind, generation, request, run, body_bytes, tuple(lengths[:num_buffers]))


def decode(head: Head, body: Frame, buffers: Sequence[memoryview]) -> Message:
    """The message of this head, body and buffers, which have the lengths that the head says."""
    try:
        record: Body = _DECODERS[head.kind].decode(body)
    except (msgspec.MsgspecError, UnicodeDecodeError, OverflowError, RecursionError) as error:
        raise WireError(f"the body is no {_TYPES[head.kind].__name__}: {error}") from error
    return Message(head.run, head.generation, head.request, record, buffers)


def _check_sizes(body_bytes: int, lengths: Sequence[int], limits: Limits) -> None:
    if len(lengths) > min(limits.buffers, BUFFERS_MAX):
        raise WireError(f"a message with {len(lengths)} buffers: {limits.buffers} are allowed")
    if body_bytes > limits.body_bytes:
        raise WireError(f"a body of {body_bytes} bytes: {limits.body_bytes} are allowed")
    for each, length in enumerate(lengths):
        if length > limits.buffer_bytes:
            raise WireError(f"buffer {each} has {length} bytes: {limits.buffer_bytes} are allowed, ask for fewer rows")
    if (total := body_bytes + sum(lengths)) > limits.message_bytes:
        raise WireError(f"a message of {total} bytes: {limits.message_bytes} are allowed, ask for fewer rows")


def _encode_body(body: Body) -> bytes:
    try:
        return _ENCODER.encode(body)
    except (TypeError, OverflowError, ValueError, msgspec.MsgspecError) as error:
        raise WireError(f"{type(body).__name__} can't be sent: {error}") from error


def _flat(buffer: memoryview) -> memoryview:
    """The same bytes in one dimension."""
    if buffer.nbytes == 0:
        return memoryview(b"")  # a view with a zero in its shape can't be cast
    if not buffer.c_contiguous:
        raise WireError(f"a buffer of shape {buffer.shape} is not contiguous: copy it first")
    return buffer.cast("B")
