"""Dataclasses as bytes and back, whatever their fields are: the one codec of plans and batches (I8).

The plain part is MessagePack, by the names of fields. Arrays lie in raw buffers, end to end, in the order in which the
body names them; there it says of each the number that is added to all, the bytes of each, and the shape. Integers take
as few bytes as the largest needs, first the lowest bytes of all, then the next ones: so -1 takes one byte, and zstd
finds what upper bytes have in common. Flags take a bit each, floating-point numbers lie there as they are.

What comes out is a value of the type that was asked for, whose arrays are writable, have memory of their own, and take
no more than 8 times what came in (64 times that if it was compressed).
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from functools import lru_cache
from typing import Annotated, Any, TypeVar, get_args

import msgspec
import numpy as np
from numpy.typing import NDArray

from bagpipe.errors import BagpipeError, WireError
from bagpipe.wire.limits import LIMITS

T = TypeVar("T")

BODY_BYTES_MAX = 1 << 20
"""Of a body, which takes more memory once it is read; some 20,000 features."""
RATIO_MAX = 64
"""A buffer that zstd makes smaller than one part in so many is sent as it is, so that few bytes never become many."""
DIMENSIONS_MAX = 16
_UNSIGNED = [np.dtype(f"u{size}") for size in (1, 1, 2, 4, 4, 8, 8, 8, 8)]
"""The narrowest type of so many bytes."""
_SIZE_MAX = 1 << 31
_ELEMENTS_MAX = 1 << 40
"""Of an array without elements, were each of its empty dimensions 1."""

_Lengths = Annotated[list[Annotated[int, msgspec.Meta(ge=0)]], msgspec.Meta(max_length=LIMITS.buffers)]
_OUTER = msgspec.msgpack.Decoder(tuple[_Lengths, msgspec.Raw])
_ENCODER = msgspec.msgpack.Encoder()


def pack(value: Any, *, compress: bool = False) -> tuple[bytes, list[memoryview]]:
    """A dataclass as a body and raw buffers; WireError if something in it does not travel.

    `compress` is for peers on other machines, where bytes cost more than time.
    """
    arrays: list[_Packed] = []

    def describe(part: Any) -> list[int]:
        arrays.append(_Packed(part))
        return arrays[-1].described

    try:
        raw = msgspec.msgpack.encode(value, enc_hook=describe)
    except (TypeError, OverflowError, ValueError, RecursionError, msgspec.MsgspecError) as error:
        raise WireError(f"{type(value).__name__} can't be sent: {error}") from error
    buffers = _join(arrays)
    lengths = [0] * len(buffers)
    if compress:
        for number, buffer in enumerate(buffers):
            smaller = _compress(buffer)
            if buffer.nbytes / RATIO_MAX <= smaller.nbytes < buffer.nbytes:
                lengths[number], buffers[number] = buffer.nbytes, smaller
    body = _ENCODER.encode((lengths, msgspec.Raw(raw)))
    _check_body(type(value).__name__, body)
    return body, buffers


def unpack(body: bytes | memoryview, buffers: Sequence[memoryview], kind: type[T], name: str = "") -> T:
    """The dataclass of this type; WireError if it is none, or is said in another way than `pack` says it.

    `name` says in people's words what it is.
    """
    name = name or kind.__name__
    _check_body(name, body)
    try:
        lengths, raw = _OUTER.decode(body)
        if len(lengths) != len(buffers):
            raise WireError(f"it announces {len(lengths)} buffers, and {len(buffers)} came")
        reading = _Reading([_plain(*each) for each in zip(buffers, lengths, strict=True)])
        value = msgspec.msgpack.decode(raw, type=kind, dec_hook=reading.take)
        reading.finish()
        if msgspec.msgpack.encode(value, enc_hook=reading.describe) != bytes(raw):
            raise WireError("a field is there twice, is missing, or is not known")
    except (msgspec.MsgspecError, UnicodeDecodeError, OverflowError, RecursionError, BagpipeError) as error:
        raise WireError(f"{name} can't be read: {error}") from error
    return value


def _check_body(name: str, body: bytes | memoryview) -> None:
    if (size := memoryview(body).nbytes) > BODY_BYTES_MAX:
        raise WireError(f"{name} has a body of {size} bytes besides its arrays: {BODY_BYTES_MAX} are allowed")


class _Packed:
    """An array as it will lie in a buffer."""

    def __init__(self, array: Any) -> None:
        if not isinstance(array, np.ndarray) or array.dtype.kind not in "biuf" or array.dtype.itemsize > 8:
            what = f"an array of {array.dtype}" if isinstance(array, np.ndarray) else f"a {type(array).__name__}"
            raise TypeError(f"{what} does not travel")
        self._array, base = array, 0
        if array.dtype.kind == "b":
            self._width, self.num_bytes = 1, -(-array.size // 8)
        elif array.dtype.kind == "f":
            self._width, self.num_bytes = array.itemsize, array.nbytes
        else:
            base, self._width = _range(array)
            self.num_bytes = array.size * self._width
        self._base = base
        self.described = [base, self._width, *array.shape]

    def write(self, out: NDArray[np.uint8]) -> None:
        """Put it there."""
        array = self._array.reshape(-1)
        if not array.dtype.isnative or not array.flags.c_contiguous:
            array = np.ascontiguousarray(array, array.dtype.newbyteorder("="))
        if array.dtype.kind == "b":
            out[:] = np.packbits(array, bitorder="little")
        elif array.dtype.kind == "f":
            out[:] = array.view(np.uint8)
        else:
            numbers = array.view(_UNSIGNED[array.itemsize])
            if self._base:
                numbers = numbers - numbers.dtype.type(self._base % (1 << 8 * array.itemsize))
            numbers = numbers.astype(_UNSIGNED[self._width], copy=False)
            for place, octets in enumerate(out.reshape(self._width, -1)):
                np.right_shift(numbers, 8 * place, out=octets, casting="unsafe", dtype=numbers.dtype)


def _range(array: NDArray[Any]) -> tuple[int, int]:
    """What is added to all integers of an array, and the bytes that each takes then; 0 of none."""
    if not array.size:
        return 0, 0
    least, most = int(np.minimum.reduce(array, axis=None)), int(np.maximum.reduce(array, axis=None))
    width = -(-(most - least).bit_length() // 8) or 1
    return (0 if least >= 0 and most < 1 << 8 * width else least), width


def _join(arrays: Sequence[_Packed]) -> list[memoryview]:
    """The arrays end to end, in as few buffers as limits allow."""
    groups: list[list[_Packed]] = []
    room = 0
    for array in arrays:
        if array.num_bytes > room or not groups:
            groups.append([])
            room = LIMITS.buffer_bytes
        groups[-1].append(array)
        room -= array.num_bytes
    joined = []
    for group in groups:
        buffer = np.empty(sum(array.num_bytes for array in group), np.uint8)
        start = 0
        for array in group:
            if array.num_bytes:
                array.write(buffer[start : start + array.num_bytes])
                start += array.num_bytes
        joined.append(buffer.data)
    return [buffer for buffer in joined if buffer.nbytes]


class _Reading:
    """Takes arrays out of buffers, one after another."""

    def __init__(self, buffers: Sequence[memoryview]) -> None:
        self._buffers = [np.frombuffer(buffer, np.uint8) for buffer in buffers]
        self._taken: list[NDArray[Any]] = []  # kept, so that no two have one id
        self._described: dict[int, list[int]] = {}

    def take(self, kind: Any, described: Any) -> NDArray[Any]:
        """The next array, of the declared type; ValueError if it is not there: msgspec adds the field."""
        if type(described) is not list or len(described) < 2 or set(map(type, described)) != {int}:
            raise ValueError("no array")
        dtype, (base, width, *shape) = _declared(kind), described
        if len(shape) > DIMENSIONS_MAX or (shape and not 0 <= min(shape) <= max(shape) < _SIZE_MAX):
            raise ValueError(f"an array of shape {shape[:DIMENSIONS_MAX]}")
        count = math.prod(shape)
        if not count and math.prod(size or 1 for size in shape) >= _ELEMENTS_MAX:
            raise ValueError(f"an array of shape {shape}: it is too large")
        if dtype.kind in "bf" and (base, width) != (0, dtype.itemsize):
            raise ValueError(f"numbers of {width} bytes where {dtype} is due")
        if dtype.kind == "b":
            array = self._flags(count)
        elif dtype.kind == "f":
            array = self._bytes(count * width).view(dtype).copy()
        else:
            array = self._integers(count, base, width, dtype)
        array = array.reshape(shape)
        self._taken.append(array)
        self._described[id(array)] = described
        return array

    def describe(self, array: Any) -> list[int]:
        """As it was described."""
        return self._described.get(id(array), [])  # one that was not there is a default

    def finish(self) -> None:
        """WireError if something is left."""
        if left := sum(map(len, self._buffers)):
            raise WireError(f"its buffers have {left} bytes more than its arrays")

    def _bytes(self, count: int) -> NDArray[np.uint8]:
        if not count:
            return np.empty(0, np.uint8)
        left = self._buffers[0] if self._buffers else np.empty(0, np.uint8)
        if count > len(left):
            raise ValueError(f"an array of {count} bytes where {len(left)} are left")
        self._buffers[0] = left[count:]
        if count == len(left):
            del self._buffers[0]
        return left[:count]

    def _flags(self, count: int) -> NDArray[Any]:
        flags = np.unpackbits(self._bytes(-(-count // 8)), bitorder="little")
        if flags[count:].any():
            raise ValueError(f"flags of more than {count}")
        return flags[:count].view(np.bool_)

    def _integers(self, count: int, base: int, width: int, dtype: np.dtype[Any]) -> NDArray[Any]:
        if not (bool(count) <= width <= dtype.itemsize):
            raise ValueError(f"{count} numbers of {width} bytes where {dtype} is due")
        octets = self._bytes(count * width)
        if not count:
            return np.empty(0, dtype)
        *lower, top = octets.reshape(width, count)
        numbers = top.astype(_UNSIGNED[width])
        for place in reversed(lower):
            numbers <<= 8
            numbers |= place
        numbers = numbers.astype(_UNSIGNED[dtype.itemsize], copy=False)
        least, most = _limits(dtype)
        if not least <= base <= most + 1 - (1 << 8 * width):
            largest = base + int(numbers.max())
            if not least <= base <= largest <= most:
                raise ValueError(f"numbers from {base} to {largest} where {dtype} is due")
        if base:
            numbers += numbers.dtype.type(base % (1 << 8 * dtype.itemsize))
        return numbers.view(dtype)


@lru_cache(maxsize=256)
def _declared(kind: Any) -> np.dtype[Any]:
    """The type of the numbers of an annotation such as NDArray[np.int32]."""
    of_numbers = get_args(get_args(kind)[1])[0]
    if of_numbers is Any:
        raise ValueError("an array of numbers of no declared type does not travel")
    dtype: np.dtype[Any] = np.dtype(of_numbers)
    return dtype


@lru_cache(maxsize=256)
def _limits(dtype: np.dtype[Any]) -> tuple[int, int]:
    """The least and the largest integer of a type."""
    limits = np.iinfo(dtype)
    return int(limits.min), int(limits.max)


def _compress(buffer: memoryview) -> memoryview:
    from pyarrow import Codec, py_buffer  # here: most processes send nothing to other machines

    return memoryview(Codec("zstd").compress(py_buffer(buffer)))


def _plain(buffer: memoryview, length: int) -> memoryview:
    """A buffer as it was before it was compressed to this one; length 0: it was not."""
    if not length:
        return buffer
    if length > min(LIMITS.buffer_bytes, buffer.nbytes * RATIO_MAX):
        raise WireError(f"a buffer of {buffer.nbytes} bytes announces {length}")
    from pyarrow import ArrowException, Codec, py_buffer

    try:
        return memoryview(Codec("zstd").decompress(py_buffer(buffer), length))
    except (OSError, ValueError, ArrowException) as error:
        raise WireError(f"a buffer of {buffer.nbytes} bytes, announced as {length}: {error}") from error
