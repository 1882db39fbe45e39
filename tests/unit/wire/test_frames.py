"""Frames: what is sent comes back, whatever else is refused by name."""

from __future__ import annotations

import pickle
import random
import struct

import msgspec
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from bagpipe.errors import ConfigError, WireError
from bagpipe.wire import messages
from bagpipe.wire.checks import check_read, check_rows, check_scanned, check_write
from bagpipe.wire.frames import HEADER_BYTES, decode, encode, read_head
from bagpipe.wire.limits import LIMITS, Limits
from bagpipe.wire.messages import (
    AskStats,
    Failed,
    Message,
    Open,
    Part,
    Read,
    Rows,
    Scan,
    Scanned,
    Write,
    Written,
)
from bagpipe.wire.recovery_messages import Confirm, Load, Mark, Marks, Recover, Save, Saved
from harness.examples import examples
from harness.raw_socket import frames_of, header
from harness.wire import MB, resident_bytes

RUN = bytes(range(16))
SMALL = Limits(body_bytes=100, buffers=2, buffer_bytes=64, message_bytes=120)


def message(body, *buffers, request=7):
    return Message(RUN, 3, request, body, [memoryview(buffer) for buffer in buffers])


def a_write():
    return message(Write(0, 1, 5, [Part(0, 2), Part(1, 1)]), np.arange(3), np.arange(8, dtype=np.float32))


SAMPLES = [
    message(Open(0, 2, [4, 8], "reads", 4096)),
    message(Read([Part(0, 2), Part(1, 1, 3)], 9), np.arange(3)),
    message(Rows(1), np.array([0, 1], np.uint8), np.ones((1, 4), np.float32)),
    a_write(),
    message(Written(3)),
    message(Confirm()),
    message(AskStats()),
    message(Failed("StoreError", "the disk is full")),
    message(Mark(0, 3, 100, "00ff")),
    message(Save(0, 4, 100, "/run/checkpoints/.tmp-00000100-0-00000000", ["ad", "user"], 50)),
    message(Saved(0, 5, 100, "/run/checkpoints/00000100")),
    message(Load(0, 6, 100, "/run/checkpoints/00000100", "a" * 64, ["ad", "user"])),
    message(Recover(0, None, "")),
    message(Marks(1, 3, [100, 200], ["/run/checkpoints/00000100"])),
]


def parse(letter: bytes, limits: Limits = LIMITS) -> Message | None:
    """What a receiver makes of these bytes; None where it would wait for more."""
    if len(letter) < HEADER_BYTES:
        return None
    head = read_head(letter[:HEADER_BYTES], limits)
    if len(letter) < HEADER_BYTES + head.num_bytes:
        return None
    at = HEADER_BYTES + head.body_bytes
    buffers = []
    for length in head.buffer_bytes:
        buffers.append(memoryview(letter)[at : at + length])
        at += length
    return decode(head, letter[HEADER_BYTES : HEADER_BYTES + head.body_bytes], buffers)


@pytest.mark.parametrize("sent", SAMPLES, ids=lambda sent: type(sent.body).__name__)
def test_what_is_sent_comes_back(sent):
    got = parse(frames_of(sent))
    assert (got.run, got.generation, got.request, got.body) == (sent.run, sent.generation, sent.request, sent.body)
    assert [bytes(buffer) for buffer in got.buffers] == [bytes(buffer) for buffer in sent.buffers]


def test_buffers_are_not_copied():
    rows = np.ones((3, 4), np.float32)
    *_, sent = encode(message(Rows(3), b"\1\1\1", rows))
    rows[2, 3] = 5
    assert np.frombuffer(sent, np.float32)[-1] == 5


def test_empty_buffers_of_any_shape_travel():
    got = parse(frames_of(message(Rows(0), b"", np.empty((0, 48), np.float32))))
    assert [buffer.nbytes for buffer in got.buffers] == [0, 0]


def test_the_format_is_what_the_documentation_says():
    sent = frames_of(message(Read([Part(2, 1)], 9), np.array([5])))
    number, body = 2, msgspec.msgpack.encode(["Read", [[2, 1, 0]], 9])
    assert sent == b"".join(
        (
            b"BGPW", struct.pack("<BBHIIQ", 8, number, 1, 3, len(body), 7), RUN, struct.pack("<4Q", 8, 0, 0, 0),
            body, struct.pack("<q", 5),
        )
    )  # fmt: skip


@pytest.mark.parametrize(
    ("wrong", "text"),
    [
        (Message(b"short", 0, 0, Confirm()), "the run has 5 bytes"),
        (Message(RUN, 1 << 32, 0, Confirm()), "generation 4294967296"),
        (Message(RUN, 0, -1, Confirm()), "request -1"),
        (Message(RUN, 0, 0, "text"), "str is not a record"),
        (Message(RUN, 0, 0, Written(1 << 70)), "Written can't be sent"),
        (message(Rows(2), np.ones((2, 4))[:, ::2]), "not contiguous"),
        (message(Failed("WireError", "x" * 200)), "a body of 2"),
        (message(Rows(0), bytes(65)), "buffer 0 has 65 bytes: 64 are allowed"),
        (message(Rows(0), bytes(64), bytes(64)), "are allowed, ask for fewer rows"),
        (message(Rows(0), b"", b"", b""), "3 buffers: 2 are allowed"),
    ],
)
def test_what_the_other_side_would_refuse_is_not_sent(wrong, text):
    with pytest.raises(WireError, match=text):
        encode(wrong, SMALL)


@pytest.mark.parametrize(
    ("wrong", "text"),
    [
        (header(magic=b"HTTP"), "begins with b'HTTP', not b'BGPW'"),
        (header(magic=b"\x16\x03\x01\x02"), "the peer speaks TLS and this side does not: give keys on both sides"),
        (header(version=7), "the peer speaks version 7, this is version 8: run the same release on both sides"),
        (header(version=9), "the peer speaks version 9, this is version 8"),
        (header(kind=200), "message type 200 is unknown"),
        (header(buffers=5), "a message with 5 buffers"),
        (header(buffers=65535), "a message with 65535 buffers"),
        (header(buffers=0, lengths=(8,)), "a message with 0 buffers of"),
        (header(buffers=1, lengths=(8, 8)), "a message with 1 buffers of"),
        (header(buffers=3, lengths=(8, 8, 8)), "3 buffers: 2 are allowed"),
        (header(body=101), "a body of 101 bytes: 100 are allowed"),
        (header(body=(1 << 32) - 1), "a body of 4294967295 bytes"),
        (header(lengths=(65,)), "buffer 0 has 65 bytes: 64 are allowed"),
        (header(lengths=(1 << 60,)), "buffer 0 has 1152921504606846976 bytes"),
        (header(lengths=((1 << 64) - 1,)), "buffer 0 has 18446744073709551615 bytes"),
        (header(buffers=2, lengths=(60, 60)), "a message of 130 bytes: 120 are allowed"),
    ],
)
def test_what_a_header_says_is_refused_before_there_is_memory_for_it(wrong, text):
    with pytest.raises(WireError, match=text):
        read_head(wrong, SMALL)


def read_body(content: bytes, kind: int = 2) -> Message:
    return decode(read_head(header(kind=kind, body=len(content)), SMALL), content, [memoryview(bytes(8))])


def test_a_body_of_another_type_is_refused():
    with pytest.raises(WireError, match="the body is no Rows"):
        read_body(msgspec.msgpack.encode(Read([Part(0, 1)])), kind=3)


@pytest.mark.parametrize(
    "record",
    [
        ["Read", [[0, -1]], 0],
        ["Read", [[-1, 1]], 0],
        ["Read", [[0, 1]], -2],
        ["Read", [[0, 1, -1]], 0],
        ["Read", [[0, 1, 1.5]], 0],
        ["Read", [[0, 1, None]], 0],
        ["Read", [[0, 1, 1, 1]], 0],
        ["Read", [[0, 1.5]], 0],
        ["Read", [[0, "1"]], 0],
        ["Read", [[0, 1]], 0, "more"],
        ["Read", [[0]], 0],
        ["Read"],
        ["Write", [[0, 1]], 0],
        {"type": "Read"},
        "Read",
        None,
    ],
)
def test_a_body_that_is_not_exactly_its_record_is_refused(record):
    with pytest.raises(WireError, match="the body is no Read"):
        read_body(msgspec.msgpack.encode(record))


def test_a_deeply_nested_body_is_refused():
    with pytest.raises(WireError, match="the body is no Read"):
        read_body(b"\x91" * 90)


def test_records_keep_their_numbers():
    """A new record goes to the end, or the version changes."""
    names = [record.__name__ for record in messages.Body.__args__]
    assert names == [
        "Open", "Opened", "Read", "Rows", "Write", "Written", "Scan", "Scanned", "AskStats", "Stats", "NotYet",
        "Failed", "GetBatch", "GotBatch", "DescribePlans", "PlansDescribed", "NextPlan", "Planned", "NoMorePlans",
        "Mark", "Save", "Saved", "Load", "Confirm", "Confirmed", "Worked", "AskMarks", "Marks", "Recover",
    ]  # fmt: skip


class Trap:
    sprung = False

    def __reduce__(self):
        return setattr, (Trap, "sprung", True)


LETTERS = [frames_of(sent) for sent in SAMPLES]


def mutated(rng: random.Random) -> bytes:
    """The bytes of a message with something wrong, or just bytes."""
    content = bytearray(rng.choice(LETTERS))
    for _ in range(rng.randrange(1, 4)):
        # most of what can be wrong is wrong in the header: a mutation of the magic number is found at once
        at = rng.choice((rng.randrange(4, HEADER_BYTES), rng.randrange(len(content) + 1)))
        match rng.randrange(7):
            case 0 if at < len(content):
                content[at] = rng.randrange(256)
            case 1:
                del content[at:]
            case 2:
                content[at:at] = rng.randbytes(rng.randrange(40))
            case 3:
                del content[at : at + rng.randrange(20)]
            case 4:
                content[at : at + 8] = rng.choice([b"\xff" * 8, bytes(8), struct.pack("<Q", 1 << 40), b"\1" + bytes(7)])
            case 5:
                content[HEADER_BYTES:] = pickle.dumps(Trap()) + bytes(40)
            case 6 if rng.random() < 0.1:
                content = bytearray(rng.randbytes(rng.randrange(300)))
    return bytes(content)


def fuzz(number: int, seed: int) -> tuple[int, int, int]:
    """How many of so many mutated messages are refused, understood, and would be waited for."""
    rng, counts = random.Random(seed), [0, 0, 0]
    for _ in range(number):
        try:
            got = parse(mutated(rng))
        except WireError:
            counts[0] += 1
        else:
            assert got is None or isinstance(got, Message)
            counts[2 if got is None else 1] += 1
    assert not Trap.sprung
    return counts[0], counts[1], counts[2]


def test_mutated_messages_give_messages_or_typed_errors_only():
    refused, understood, _ = fuzz(20_000, seed=0)
    assert refused > 10_000
    assert understood > 500  # not all that was tried ends at the first look


@pytest.mark.long
def test_a_million_mutated_messages_take_no_memory():
    fuzz(50_000, seed=1)
    before = resident_bytes()
    refused, understood, _ = fuzz(1_000_000, seed=2)
    assert refused > 500_000
    assert understood > 25_000
    assert resident_bytes() - before < 8 * MB


@examples(300)
@given(st.binary(min_size=HEADER_BYTES, max_size=400))
def test_random_bytes_are_refused(letter):
    with pytest.raises(WireError):
        parse(letter)


@examples(300)
@given(st.binary(max_size=99), st.integers(0, len(messages.Body.__args__) - 1))
def test_random_bodies_give_records_or_typed_errors(wrong, number):
    try:
        got = read_body(wrong, number)
    except WireError:
        return
    assert isinstance(got.body, messages.Body.__args__[number])


WIDTHS = [2, 4]


def views(*buffers):
    return [memoryview(buffer).cast("B") for buffer in buffers]


def test_buffers_that_hold_what_the_record_says_become_arrays():
    ids, values = check_write(a_write().body, a_write().buffers, WIDTHS)
    assert ids.tolist() == [0, 1, 2]
    assert values.tolist() == list(range(8))
    read = Read([Part(1, 2), Part(0, 1)])
    assert check_read(read, views(np.arange(3)), WIDTHS).tolist() == [0, 1, 2]
    flags, values = check_rows(Rows(2), views(b"\0\1\1", np.ones(6, np.float32)), read.parts, WIDTHS)
    assert flags.tolist() == [False, True, True]
    assert values.size == 6
    flags, values = check_rows(
        Rows(2), views(b"\0\1\1", np.ones(4, np.float32)), [Part(1, 2, 3), Part(0, 1, 1)], WIDTHS
    )
    assert (flags.tolist(), values.size) == ([False, True, True], 4)
    ids, rows = check_scanned(Scanned(1), views(np.arange(1), np.ones(4, np.float32)), Scan(1, 0, 9), 4)
    assert rows.shape == (1, 4)
    ids, rows = check_scanned(Scanned(1), views(np.arange(1)), Scan(1, 0, 9, values=False), 4)
    assert (ids.tolist(), rows.shape) == ([0], (0, 4))
    assert check_read(Read([]), [memoryview(b"")], WIDTHS).size == 0


def test_arrays_are_aligned_wherever_their_bytes_lie():
    memory = memoryview(bytearray(64))
    for shift in range(8):
        write = Write(0, 1, 0, [Part(0, 1)])
        ids, values = check_write(write, [memory[shift : shift + 8], memory[shift + 8 : shift + 16]], WIDTHS)
        assert ids.flags.aligned
        assert values.flags.aligned


@pytest.mark.parametrize(
    ("check", "text"),
    [
        (lambda: check_read(Read([Part(0, 2)]), views(np.arange(3)), WIDTHS), "24 bytes of ids: 2 rows need 16"),
        (lambda: check_read(Read([Part(2, 1)]), views(np.arange(1)), WIDTHS), "names table 2: there are 2"),
        (lambda: check_read(Read([Part(0, -1), Part(0, 2)]), views(np.arange(1)), WIDTHS), "has -1 rows of table 0"),
        (
            lambda: check_read(Read([Part(1, 1, 5)]), views(np.arange(1)), WIDTHS),
            "5 columns of rows of table 1: there are 4",
        ),
        (lambda: check_read(Read([Part(0, 1, -1)]), views(np.arange(1)), WIDTHS), "has -1 columns"),
        (lambda: check_rows(Rows(1), views(b"\1", bytes(8)), [Part(0, 1, 1)], WIDTHS), "8 bytes of values: .* need 4"),
        (lambda: check_write(Write(0, 1, 0, [Part(0, 1, 1)]), views(np.arange(1), bytes(4)), WIDTHS), "written whole"),
        (lambda: check_read(Read([Part(0, 1)]), [], WIDTHS), "has 0 buffers: it needs 1"),
        (lambda: check_read(Read([Part(0, 1 << 62)]), views(np.arange(1)), WIDTHS), "8 bytes of ids"),
        (lambda: check_write(Write(0, 1, 0, [Part(1, 1)]), views(np.arange(1), bytes(8)), WIDTHS), "rows need 16"),
        (lambda: check_rows(Rows(1), views(b"\1\0", bytes(8)), [Part(0, 1)], WIDTHS), "flags for 2 ids: 1 were"),
        (lambda: check_rows(Rows(1), views(b"\2", bytes(8)), [Part(0, 1)], WIDTHS), "the flag 2"),
        (lambda: check_rows(Rows(0), views(b"\1", bytes(8)), [Part(0, 1)], WIDTHS), "announces 0 rows: its flags"),
        (lambda: check_rows(Rows(1), views(b"\1", bytes(4)), [Part(0, 1)], WIDTHS), "4 bytes of values"),
        (lambda: check_scanned(Scanned(2), views(bytes(16), bytes(16)), Scan(0, 0, 1), 2), "2 rows: 1 were asked"),
    ],
)
def test_buffers_that_hold_something_else_are_refused(check, text):
    with pytest.raises(WireError, match=text):
        check()


@pytest.mark.parametrize("name", ["body_bytes", "strangers", "stall_s"])
def test_a_limit_of_nothing_is_refused(name):
    with pytest.raises(ConfigError, match=f"limit {name} is 0"):
        Limits(**{name: 0})
