"""Messages to frames and back. Every length is checked against the limits and against what is really there before
anything is done with it; whatever is wrong is a WireError that names it (promise I8). Nothing is ever unpickled.

Frame 0 is the header, frame 1 the body as MessagePack, then come the raw buffers, which are never copied here.
"""

from __future__ import annotations

import struct
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, get_args

import msgspec

from bagpipe.errors import WireError
from bagpipe.wire.limits import LIMITS, Limits
from bagpipe.wire.messages import Body, Message

MAGIC = b"BGPW"
VERSION = 8
RUN_BYTES = 16

_HEADER = struct.Struct("<4sBBHIIQ16s")
"""Magic, version, type, number of buffers, generation, bytes of the body, request, run; a length a buffer follows."""
HEADER_BYTES = _HEADER.size
"""Of a message without buffers."""
_LENGTH = struct.Struct("<Q")
_TYPES: tuple[type[Any], ...] = get_args(Body)  # a type's number is its place: new ones go to the end
_NUMBERS = {record: number for number, record in enumerate(_TYPES)}
_DECODERS = [msgspec.msgpack.Decoder(record, strict=True) for record in _TYPES]
_ENCODER = msgspec.msgpack.Encoder()

Frame = bytes | memoryview


@dataclass(frozen=True, slots=True)
class Envelope:
    """What is needed to answer a message that can't be read any further."""

    run: bytes
    generation: int
    request: int


def encode(message: Message, limits: Limits = LIMITS) -> list[Frame]:
    """The frames of a message; refuses what the other side would refuse."""
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
    _check_sizes(len(body), [buffer.nbytes for buffer in buffers], limits)
    header = _HEADER.pack(
        MAGIC, VERSION, number, len(buffers), message.generation, len(body), message.request, message.run
    ) + b"".join(_LENGTH.pack(buffer.nbytes) for buffer in buffers)
    return [header, body, *buffers]


def decode(frames: Sequence[Frame], limits: Limits = LIMITS) -> Message:
    """The message in these frames, its buffers being views of them."""
    if not 2 <= len(frames) <= limits.frames:
        raise WireError(f"a message of {len(frames)} frames: 2 to {limits.frames} are allowed")
    header = memoryview(frames[0])
    number, num_buffers, generation, body_bytes, request, run = _read_header(header)
    if len(frames) != 2 + num_buffers:
        raise WireError(f"the header announces {num_buffers} buffers, {len(frames) - 2} came")
    lengths = [_LENGTH.unpack_from(header, _HEADER.size + _LENGTH.size * each)[0] for each in range(num_buffers)]
    _check_sizes(body_bytes, lengths, limits)
    buffers = [memoryview(frame).cast("B") for frame in frames[2:]]
    announced = [body_bytes, *lengths]
    there = [memoryview(frames[1]).nbytes, *(buffer.nbytes for buffer in buffers)]
    if announced != there:
        each = next(each for each, length in enumerate(announced) if length != there[each])
        name = f"buffer {each - 1}" if each else "body"
        raise WireError(f"the header announces {announced[each]} bytes of {name}, {there[each]} came")
    return Message(run, generation, request, _decode_body(number, frames[1]), buffers)


def envelope(frames: Sequence[Frame]) -> Envelope | None:
    """Whom to answer, if at least the header can be read; its layout is the same in all versions."""
    if not frames or memoryview(frames[0]).nbytes < _HEADER.size:
        return None
    magic, _, _, _, generation, _, request, run = _HEADER.unpack_from(frames[0])
    return Envelope(run, generation, request) if magic == MAGIC else None


def _read_header(header: memoryview) -> tuple[int, int, int, int, int, bytes]:
    if header.nbytes < _HEADER.size:
        raise WireError(f"a header of {header.nbytes} bytes: it has at least {_HEADER.size}")
    magic, version, number, num_buffers, generation, body_bytes, request, run = _HEADER.unpack_from(header)
    if magic != MAGIC:
        raise WireError(f"a message begins with {magic!r}, not {MAGIC!r}: the peer is not a Bagpipe")
    if version != VERSION:
        raise WireError(
            f"the peer speaks version {version}, this is version {VERSION}: run the same release on both sides"
        )
    if number >= len(_TYPES):
        raise WireError(f"message type {number} is unknown: the last one is {len(_TYPES) - 1}")
    if header.nbytes != (expected := _HEADER.size + _LENGTH.size * num_buffers):
        raise WireError(f"a header of {header.nbytes} bytes: with {num_buffers} buffers it has {expected}")
    return number, num_buffers, generation, body_bytes, request, run


def _check_sizes(body_bytes: int, lengths: Sequence[int], limits: Limits) -> None:
    if len(lengths) > limits.buffers:
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


def _decode_body(number: int, frame: Frame) -> Body:
    try:
        body: Body = _DECODERS[number].decode(frame)
    except (msgspec.MsgspecError, UnicodeDecodeError, OverflowError, RecursionError) as error:
        raise WireError(f"the body is no {_TYPES[number].__name__}: {error}") from error
    return body


def _flat(buffer: memoryview) -> memoryview:
    """The same bytes in one dimension."""
    if buffer.nbytes == 0:
        return memoryview(b"")  # a view with a zero in its shape can't be cast
    if not buffer.c_contiguous:
        raise WireError(f"a buffer of shape {buffer.shape} is not contiguous: copy it first")
    return buffer.cast("B")
