"""Dataclasses of every kind of field come back to the last bit, in few bytes; whatever else comes is a typed error."""

from __future__ import annotations

import random
import resource
import subprocess
import sys
import tracemalloc
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass, field, fields, is_dataclass, replace
from typing import Any, Literal

import msgspec
import numpy as np
import pyarrow
import pytest
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.extra import numpy as arrays
from numpy.typing import NDArray

from bagpipe.errors import BatchError, WireError
from bagpipe.wire import codec
from bagpipe.wire.codec import pack, unpack
from bagpipe.wire.limits import Limits
from harness.examples import examples

KINDS = (
    "bool",
    "int8",
    "int16",
    "int32",
    "int64",
    "uint8",
    "uint16",
    "uint32",
    "uint64",
    "float16",
    "float32",
    "float64",
)


@dataclass(frozen=True, slots=True, eq=False)
class Inner:
    """What is nested."""

    numbers: NDArray[np.int32]
    name: str = ""


@dataclass(frozen=True, slots=True, eq=False)
class More(Inner):
    """One that inherits its fields."""

    flags: NDArray[np.bool_] | None = None


@dataclass(frozen=True, slots=True, eq=False)
class Whole:
    """A field of every kind that plans and batches have."""

    number: int
    text: str
    raw: bytes
    yes: bool
    share: float
    choice: Literal["a", "b"]
    counts: tuple[tuple[int, ...], ...]
    inner: More
    several: list[Inner]
    named: Mapping[str, Inner]
    perhaps: Inner | None
    ids: NDArray[np.int64]
    places: tuple[NDArray[np.int32], ...]
    weights: NDArray[np.float32] | None
    default: NDArray[np.int64] = field(default_factory=lambda: np.arange(3))


def strategy_of(dtype, **options):
    return arrays.arrays(
        np.dtype(dtype), arrays.array_shapes(min_dims=0, max_dims=3, min_side=0, max_side=9), **options
    )


def extremes(dtype):
    limits = np.iinfo(dtype)
    edges = [limits.min, limits.max, 0, 1, min(255, limits.max), max(-1, limits.min)]
    return st.sampled_from(edges) | st.integers(limits.min, limits.max)


INT32S = strategy_of("int32", elements=extremes("int32"))
INT64S = strategy_of("int64", elements=extremes("int64"))
TEXTS = st.text(st.characters(exclude_categories=["Cs"]), max_size=8)
INNERS = st.builds(Inner, INT32S, TEXTS)
WHOLES = st.builds(
    Whole,
    number=st.integers(-(2**63), 2**64 - 1),
    text=TEXTS,
    raw=st.binary(max_size=8),
    yes=st.booleans(),
    share=st.floats(),
    choice=st.sampled_from("ab"),
    counts=st.lists(st.lists(st.integers(0, 9), max_size=3).map(tuple), max_size=3).map(tuple),
    inner=st.builds(More, INT32S, TEXTS, st.none() | strategy_of("bool")),
    several=st.lists(INNERS, max_size=3),
    named=st.dictionaries(TEXTS, INNERS, max_size=3),
    perhaps=st.none() | INNERS,
    ids=INT64S,
    places=st.lists(INT32S, max_size=3).map(tuple),
    weights=st.none() | strategy_of("float32"),
)


def flat(part):
    """All that a value holds, in a form that compares bit for bit."""
    if isinstance(part, np.ndarray):
        return part.dtype.str, part.shape, part.tobytes()
    if is_dataclass(part):
        return type(part), [flat(getattr(part, each.name)) for each in fields(part)]
    if isinstance(part, dict):
        return [(key, flat(value)) for key, value in part.items()]
    if isinstance(part, float):
        return np.float64(part).tobytes()
    return [type(part), *map(flat, part)] if isinstance(part, tuple | list) else part


@pytest.mark.parametrize("compress", [False, True])
@examples(150)
@given(value=WHOLES)
def test_a_dataclass_of_fields_of_every_kind_comes_back_to_the_last_bit(compress, value):
    body, buffers = pack(value, compress=compress)
    found = unpack(body, buffers, Whole)
    assert flat(found) == flat(value)
    assert (body, list(map(bytes, buffers))) == (lambda b, m: (b, list(map(bytes, m))))(*pack(found, compress=compress))


def holder(dtype):
    """A dataclass with an array of this type."""
    return dataclass(type("Holder", (), {"__annotations__": {"array": NDArray[np.dtype(dtype).type]}}))


@pytest.mark.parametrize("dtype", KINDS)
@examples(60)
@given(data=st.data())
def test_arrays_of_every_type_and_shape_come_back_writable(dtype, data):
    kind = holder(dtype)
    array = data.draw(strategy_of(dtype, elements=extremes(dtype) if dtype.strip("u").startswith("int") else None))
    body, buffers = pack(kind(array))
    found = unpack(body, buffers, kind).array
    assert flat(found) == flat(array)
    assert found.flags.writeable
    assert found.flags.c_contiguous
    assert not any(np.may_share_memory(found, np.frombuffer(buffer, np.uint8)) for buffer in buffers)


@pytest.mark.parametrize(
    "array",
    [
        np.arange(12, dtype=np.int64).reshape(3, 4).T,
        np.arange(12, dtype=np.int64)[::-2],
        np.arange(12, dtype=">i8"),
        np.broadcast_to(np.int64(-7), (3, 5)),
        np.arange(-5, 7).astype(np.int16),
    ],
    ids=["transposed", "backwards", "big-endian", "repeated", "narrower than is declared"],
)
def test_arrays_come_back_whatever_their_strides_and_as_they_are_declared(array):
    found = unpack(*pack(holder("int64")(array)), holder("int64")).array
    assert found.dtype == np.int64
    assert found.tolist() == array.tolist()


@pytest.mark.parametrize(
    ("values", "num_bytes"),
    [
        ([], 0), ([0], 1), ([255], 1), ([0, 256], 2), ([-1], 1), ([-1, 254], 1), ([-1, 255], 2), ([-128, 127], 1),
        ([0, 2**24 - 1], 3), ([256], 1), ([-(2**63), 2**63 - 1], 8), ([2**63 - 256, 2**63 - 1], 1), ([0, 2**41], 6),
    ],
)  # fmt: skip
def test_integers_take_as_few_bytes_as_the_largest_needs(values, num_bytes):
    kind = holder("int64")
    body, buffers = pack(kind(np.array(values, np.int64)))
    assert sum(buffer.nbytes for buffer in buffers) == num_bytes * len(values)
    assert unpack(body, buffers, kind).array.tolist() == values


@pytest.mark.parametrize("count", [0, 1, 7, 8, 9, 64, 100])
def test_flags_take_a_bit_each(count):
    kind = holder("bool")
    flags = np.random.default_rng(count).random(count) < 0.5
    body, buffers = pack(kind(flags))
    assert sum(buffer.nbytes for buffer in buffers) == -(-count // 8)
    assert unpack(body, buffers, kind).array.tolist() == flags.tolist()


def test_floats_come_back_with_all_their_bits():
    kind = holder("float32")
    bits = np.array([0x7FC00001, 0xFFC12345, 0x80000000, 1, 0x7F800000], np.uint32)
    assert unpack(*pack(kind(bits.view(np.float32))), kind).array.view(np.uint32).tolist() == bits.tolist()


def test_what_is_compressed_is_smaller_where_it_can_be_and_else_as_it_was():
    kind, drawn = holder("int32"), np.random.default_rng(0)
    rising = np.cumsum(drawn.integers(0, 4, 50_000), dtype=np.int32)
    (plain,), (smaller,) = pack(kind(rising))[1], pack(kind(rising), compress=True)[1]
    assert smaller.nbytes < 0.6 * plain.nbytes
    chance = drawn.integers(0, 256, 5000, np.int32)
    assert [bytes(b) for b in pack(kind(chance), compress=True)[1]] == [bytes(b) for b in pack(kind(chance))[1]]
    zeros = np.zeros(100_000, np.int32)
    body, (sent,) = pack(kind(zeros), compress=True)
    assert sent.nbytes == 100_000, "what would become very small is sent as it is: few bytes never become many"
    assert not unpack(body, [sent], kind).array.any()


def test_arrays_fill_as_few_buffers_as_the_limits_allow(monkeypatch):
    @dataclass
    class Many:
        arrays: list[NDArray[np.uint8]]

    monkeypatch.setattr(codec, "LIMITS", Limits(buffer_bytes=1000))
    value = Many([np.full(size, size % 251, np.uint8) for size in (0, 400, 0, 500, 300, 700, 1000, 0, 1)])
    body, buffers = pack(value)
    assert [buffer.nbytes for buffer in buffers] == [900, 1000, 1000, 1]
    monkeypatch.setattr(codec, "LIMITS", Limits())
    assert flat(unpack(body, buffers, Many)) == flat(value)


# What can't be sent


@pytest.mark.parametrize(
    ("value", "reason"),
    [
        (Inner(np.array([None])), "Inner can't be sent: an array of object does not travel"),
        (Inner(np.array(["a"])), "an array of <U1 does not travel"),
        (Inner(np.array([1j])), "an array of complex128 does not travel"),
        (Inner(np.zeros(1, np.longdouble)), "an array of float128 does not travel"),
        (Inner(np.int32(3)), "a int32 does not travel"),
        (Inner(np.zeros(1), object()), "a object does not travel"),
        (Inner(np.zeros(1), 2**64), "Inner can't be sent: "),
        (Inner(np.zeros(1), "x" * (1 << 20)), "has a body of 10486.. bytes besides its arrays: 1048576 are allowed"),
    ],
)
def test_what_does_not_travel_is_refused_when_it_is_sent(value, reason):
    with pytest.raises(WireError, match=reason):
        pack(value)


# What can't be read


def raw(value, *buffers, lengths=None):
    """A body of these plain values, and buffers."""
    lengths = [0] * len(buffers) if lengths is None else lengths
    return msgspec.msgpack.encode([lengths, value]), [memoryview(buffer) for buffer in buffers]


@dataclass
class Loose:
    array: NDArray[Any]


@dataclass
class Picky:
    number: int

    def __post_init__(self):
        if self.number:
            raise BatchError("this is none")


ZSTD = bytes(pyarrow.Codec("zstd").compress(bytes(1000)))
ZSTD_MORE = 1001


@pytest.mark.parametrize(
    ("value", "kind", "reason"),
    [
        (raw({"numbers": [0, 1, 2]}, b"12"), Inner, "a field is there twice"),
        (raw({"numbers": [0, 1, 2], "name": "", "other": 1}, b"12"), Inner, "a field is there twice"),
        (raw({"name": "", "numbers": [0, 1, 2]}, b"12"), Inner, "a field is there twice"),
        (raw({"name": ""}), Inner, "missing required field `numbers`"),
        (raw({"numbers": [0, 1, 2], "name": 3}, b"12"), Inner, r"Expected `str`, got `int` - at `\$.name`"),
        (raw({"numbers": None, "name": ""}), Inner, r"no array - at `\$.numbers`"),
        (raw({"numbers": [0], "name": ""}), Inner, "no array"),
        (raw({"numbers": [0, True, 1], "name": ""}, b"1"), Inner, "no array"),
        (raw({"numbers": [0, 1, 2.0], "name": ""}, b"12"), Inner, "no array"),
        (raw({"numbers": [0, 1, 3], "name": ""}, b"12"), Inner, r"3 bytes where 2 are left - at `\$.numbers`"),
        (raw({"numbers": [0, 1, 3], "name": ""}), Inner, "3 bytes where 0 are left"),
        (raw({"numbers": [0, 1, 1], "name": ""}, b"12"), Inner, "1 bytes more than its arrays"),
        (raw({"numbers": [0, 0, 3], "name": ""}), Inner, "3 numbers of 0 bytes where int32 is due"),
        (raw({"numbers": [0, 5, 1], "name": ""}, b"12345"), Inner, "1 numbers of 5 bytes where int32 is due"),
        (raw({"numbers": [0, -1, 1], "name": ""}), Inner, "1 numbers of -1 bytes"),
        (raw({"numbers": [0, 4, 1], "name": ""}, b"\xff" * 4), Inner, "numbers from 0 to 4294967295 where int32 is"),
        (raw({"numbers": [2**31 - 1, 1, 1], "name": ""}, b"\x01"), Inner, "to 2147483648 where int32 is due"),
        (raw({"numbers": [-(2**31) - 1, 1, 1], "name": ""}, b"\x01"), Inner, "from -2147483649"),
        (raw({"numbers": [0, 1, -1], "name": ""}), Inner, "an array of shape .-1."),
        (raw({"numbers": [0, 1, 2**31], "name": ""}), Inner, "an array of shape .2147483648."),
        (raw({"numbers": [0, 1, 0, 2**30, 2**30], "name": ""}), Inner, "it is too large"),
        (raw({"numbers": [0, 1, *[1] * 17], "name": ""}, b"1"), Inner, "an array of shape"),
        (raw({"array": [0, 1, 3]}, b"\xff"), holder("bool"), "flags of more than 3"),
        (raw({"array": [1, 1, 3]}, b"\x07"), holder("bool"), "numbers of 1 bytes where bool is due"),
        (raw({"array": [0, 4, 1]}, bytes(4)), holder("float64"), "numbers of 4 bytes where float64 is due"),
        (raw({"array": [1, 8, 1]}, bytes(8)), holder("float64"), "numbers of 8 bytes where float64 is due"),
        (raw({"array": [0, 1, 1]}, b"1"), Loose, "of no declared type"),
        (raw({"number": 1}), Picky, "this is none"),
        (raw({"array": [0, 1, 1]}, b"1", lengths=[]), holder("int8"), "it announces 0 buffers, and 1 came"),
        (raw({"array": [0, 1, 0]}, lengths=[0] * 5), holder("int8"), "length <= 4"),
        (raw({"array": [0, 1, 0]}, lengths=[-1]), holder("int8"), ">= 0"),
        (raw({"array": [0, 1, 65]}, b"1", lengths=[65]), holder("int8"), "a buffer of 1 bytes announces 65"),
        (raw({"array": [0, 1, 9]}, b"123", lengths=[9]), holder("int8"), "a buffer of 3 bytes, announced as 9"),
        (raw({"array": [0, 1, 900]}, ZSTD, lengths=[900]), holder("int8"), "announced as 900"),
        (raw({"array": [0, 1, 1]}, ZSTD, lengths=[ZSTD_MORE]), holder("int8"), f"announced as {ZSTD_MORE}"),
        (raw({"array": [0, 1, 900]}, ZSTD[:-4], lengths=[900]), holder("int8"), "announced as 900"),
        ((b"", []), Inner, "Input data was truncated"),
        ((b"\xc1", []), Inner, "Inner can't be read"),
        ((bytes((1 << 20) + 1), []), Inner, "a body of 1048577 bytes besides its arrays: 1048576 are allowed"),
    ],
)  # fmt: skip
def test_what_is_wrong_is_named(value, kind, reason):
    with pytest.raises(WireError, match=reason):
        unpack(*value, kind)


def test_a_field_that_is_there_twice_is_refused():
    body, _ = pack(holder("int8")(np.ones(2, np.int8)))
    part = msgspec.msgpack.encode("array") + msgspec.msgpack.encode([0, 1, 2])
    once = b"\x92" + msgspec.msgpack.encode([0]) + b"\x81" + part
    assert body == once
    with pytest.raises(WireError, match="a field is there twice"):
        unpack(b"\x92" + msgspec.msgpack.encode([0]) + b"\x82" + part * 2, [memoryview(b"1234")], holder("int8"))


def test_the_error_says_what_was_read():
    with pytest.raises(WireError, match=r"^the plan of iteration 7 can't be read: "):
        unpack(b"", [], Inner, "the plan of iteration 7")


def peak(read):
    """The most that is allocated while something is read, WireErrors included."""
    tracemalloc.start()
    try:
        with suppress(WireError):
            read()
        return tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()


@pytest.mark.parametrize(
    "value",
    [
        raw({"array": [0, 1, 2**31 - 1]}, b"12"),
        raw({"array": [0, 8, 2**31 - 1]}, b"12"),
        raw({"array": [0, 0, 2**31 - 1]}),
        raw({"array": [0, 1, 2**20, 2**19]}, b"12"),
        raw({"array": [0, 1, 0, 2**31 - 1]}),
        raw({"array": [0, 1, 64 << 20]}, ZSTD, lengths=[64 << 20]),
        raw({"array": [0, 1, 64 << 20]}, ZSTD, lengths=[2**63]),
        raw({"array": [0, 1, 2**62]}, ZSTD, lengths=[2**62]),
    ],
)  # fmt: skip
def test_nothing_is_allocated_beyond_what_came(value):
    pack(holder("int8")(np.zeros(1, np.int8)), compress=True)
    assert peak(lambda: unpack(*value, holder("int64"))) < 300_000


@pytest.mark.parametrize("item", [b"\x90", b"\x80", b"\xc0", b"\xa0"])
def test_a_body_of_nothing_but_containers_takes_a_bounded_multiple_of_its_bytes(item):
    count = 100_000
    body = b"\x92\x90\x81" + msgspec.msgpack.encode("array") + b"\xdd" + count.to_bytes(4, "big") + item * count
    assert peak(lambda: unpack(body, [], holder("int8"))) < 90 * count
    with pytest.raises(WireError, match="no array"):
        unpack(body, [], holder("int8"))


def mutated(rng, body, buffers):
    """The same with some of it changed, cut, doubled or taken away."""
    parts = [bytearray(body), *map(bytearray, buffers)]
    for _ in range(rng.randrange(1, 4)):
        data = parts[0 if rng.random() < 0.7 else rng.randrange(len(parts))]
        place = rng.randrange(len(data)) if data else 0
        match rng.randrange(8):
            case 0:
                del data[place:]
            case 1:
                data[place:place] = rng.randbytes(rng.randrange(1, 9))
            case 2:
                del data[place : place + rng.randrange(1, 9)]
            case 3 if data:
                data[place : place + 9] = rng.choice(
                    [b"\xcf" + b"\xff" * 8, b"\xd3\x80" + bytes(7), b"\xdd" + b"\xff" * 4]
                )
            case 4 if len(parts) > 1 and rng.random() < 0.3:
                del parts[-1]
            case 5 if rng.random() < 0.2:
                parts.append(bytearray(rng.randbytes(5)))
            case _ if data:
                data[place] = rng.choice([0, 1, 0x7F, 0x80, 0x90, 0xC0, 0xCB, 0xFF, rng.randrange(256)])
    return bytes(parts[0]), [memoryview(part) for part in parts[1:]]


def some_wholes():
    drawn = np.random.default_rng(0)
    inner = More(drawn.integers(-9, 9, (3, 4)).astype(np.int32), "inner", drawn.random(20) < 0.5)
    whole = Whole(
        -1, "text", b"raw", True, 1.5, "a", ((1, 2), (3,)), inner, [inner, Inner(np.arange(3, dtype=np.int32))],
        {"one": inner, "two": inner}, inner, drawn.integers(0, 2**40, 50), (np.arange(600, dtype=np.int32),),
        drawn.random(9, np.float32),
    )  # fmt: skip
    empty = np.empty(0, np.int32)
    nothing = Whole(0, "", b"", False, 0.0, "b", (), More(empty), [], {}, None, np.empty((0, 3), np.int64), (), None)
    return [
        pack(value, compress=compress) for value in (whole, nothing, replace(whole, several=[])) for compress in (0, 1)
    ]


@pytest.mark.parametrize("times", [20_000, pytest.param(1_000_000, marks=pytest.mark.long)])
def test_whatever_happens_to_the_bytes_there_is_a_typed_error_or_another_value_and_memory_stays_flat(times):
    rng, packed = random.Random(3), some_wholes()
    refused, before, worst = 0, 0, 0
    for number in range(times):
        body, buffers = mutated(rng, *rng.choice(packed))
        if number % 50 == 0:
            worst = max(worst, peak(lambda body=body, buffers=buffers: unpack(body, buffers, Whole)))
        if number == times // 10:
            before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
        try:
            found = unpack(body, buffers, Whole)
        except WireError:
            refused += 1
            continue
        again = pack(found)
        assert flat(unpack(*again, Whole)) == flat(found)
    assert times // 2 < refused < times
    assert worst < 1_000_000
    assert resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before < 20_000, "kilobytes"


def test_who_packs_samples_needs_no_torch():
    code = """
import sys
import numpy as np
from bagpipe.data.samples import Column, Samples, SentBatch
from bagpipe.wire.codec import pack, unpack
columns = {"a": Column(np.arange(4).reshape(2, 2))}
sent = SentBatch(3, Samples(np.ones((2, 1), np.float32), columns, np.ones(2, np.float32)))
assert unpack(*pack(sent, compress=True), SentBatch).number == 3
assert "torch" not in sys.modules
"""
    subprocess.run([sys.executable, "-c", code], check=True, timeout=60)
