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
from bagpipe.wire.frames import MAGIC, VERSION, decode, encode, envelope
from bagpipe.wire.limits import Limits
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
    SharedMemory,
    Write,
    Written,
)
from bagpipe.wire.recovery_messages import Confirm, Load, Mark, Marks, Recover, Save, Saved
from harness.examples import examples

RUN = bytes(range(16))
SMALL = Limits(body_bytes=100, buffers=2, buffer_bytes=64, message_bytes=120)


def message(body, *buffers, request=7):
    return Message(RUN, 3, request, body, [memoryview(buffer) for buffer in buffers])


def a_write():
    return message(Write(0, 1, 5, [Part(0, 2), Part(1, 1)]), np.arange(3), np.arange(8, dtype=np.float32))


SAMPLES = [
    message(Open(0, 2, [4, 8], SharedMemory("boot", 12, 3, 4096, b"token"))),
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


@pytest.mark.parametrize("sent", SAMPLES, ids=lambda sent: type(sent.body).__name__)
def test_what_is_sent_comes_back(sent):
    got = decode(encode(sent))
    assert (got.run, got.generation, got.request, got.body) == (sent.run, sent.generation, sent.request, sent.body)
    assert [bytes(buffer) for buffer in got.buffers] == [bytes(buffer) for buffer in sent.buffers]


def test_buffers_are_not_copied():
    rows = np.ones((3, 4), np.float32)
    frames = encode(message(Rows(3), b"\1\1\1", rows))
    got = decode(frames)
    rows[2, 3] = 5
    assert np.frombuffer(got.buffers[1], np.float32)[-1] == 5


def test_empty_buffers_of_any_shape_travel():
    got = decode(encode(message(Rows(0), b"", np.empty((0, 48), np.float32))))
    assert [buffer.nbytes for buffer in got.buffers] == [0, 0]


def test_the_format_is_what_the_documentation_says():
    header, body, ids = encode(message(Read([Part(2, 1)], 9), np.array([5])))
    number = 3
    assert header == MAGIC + struct.pack("<BBHIIQ", VERSION, number, 1, 3, len(body), 7) + RUN + struct.pack("<Q", 8)
    assert msgspec.msgpack.decode(body) == ["Read", [[2, 1, 0]], 9]
    assert bytes(ids) == struct.pack("<q", 5)


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


def header(magic=MAGIC, version=VERSION, number=3, buffers=1, body=14, lengths=(8,), run=RUN):
    packed = struct.pack("<4sBBHIIQ16s", magic, version, number, buffers, 3, body, 7, run)
    return packed + b"".join(struct.pack("<Q", length) for length in lengths)


def body(record=None):
    return msgspec.msgpack.encode(record or Read([Part(0, 1)]))


IDS = bytes(8)


@pytest.mark.parametrize(
    ("frames", "text"),
    [
        ([], "a message of 0 frames"),
        ([header()], "a message of 1 frames"),
        ([header()] * 7, "a message of 7 frames: 2 to 4 are allowed"),
        ([b"x", b""], "a header of 1 bytes"),
        ([header(magic=b"HTTP"), body(), IDS], "begins with b'HTTP'"),
        ([header(version=6), body(), IDS], "the peer speaks version 6, this is version 8: run the same release"),
        ([header(version=9), body(), IDS], "the peer speaks version 9, this is version 8"),
        ([header(number=200), body(), IDS], "message type 200 is unknown"),
        ([header(lengths=(8, 8)), body(), IDS], "a header of 56 bytes: with 1 buffers it has 48"),
        ([header(body=len(body())), body()], "announces 1 buffers, 0 came"),
        ([header(body=1 << 31), body(), IDS], "a body of 2147483648 bytes"),
        ([header(lengths=(1 << 60,)), body(), IDS], "buffer 0 has 1152921504606846976 bytes: 64 are allowed"),
        ([header(body=len(body()), lengths=(16,)), body(), IDS], "announces 16 bytes of buffer 0, 8 came"),
        ([header(body=5), body(), IDS], "announces 5 bytes of body"),
        ([header(number=4, body=len(body())), body(), IDS], "the body is no Rows"),
    ],
)
def test_what_is_wrong_is_named(frames, text):
    with pytest.raises(WireError, match=text):
        decode(frames, SMALL)


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
    wrong = msgspec.msgpack.encode(record)
    with pytest.raises(WireError, match="the body is no Read"):
        decode([header(body=len(wrong)), wrong, IDS], SMALL)


def test_a_deeply_nested_body_is_refused():
    wrong = b"\x91" * 90
    with pytest.raises(WireError, match="the body is no Read"):
        decode([header(body=len(wrong)), wrong, IDS], SMALL)


def test_whoever_sent_what_can_not_be_read_can_still_be_answered():
    assert envelope([header(version=9), b"?"]) is not None
    assert envelope([header(version=9)]).request == 7
    assert envelope([header(magic=b"HTTP")]) is None
    assert envelope([b"short"]) is None
    assert envelope([]) is None


def test_records_keep_their_numbers():
    """A new record goes to the end, or the version changes."""
    names = [record.__name__ for record in messages.Body.__args__]
    assert names == [
        "Open", "Opened", "Unopened", "Read", "Rows", "Waiting", "Write", "Written", "Scan", "Scanned", "AskStats",
        "Stats", "Failed", "GetBatch", "GotBatch", "NotYet", "DescribePlans", "PlansDescribed", "NextPlan", "Planned",
        "NoMorePlans", "Mark", "Save", "Saved", "Load", "Confirm", "Confirmed", "AskWork", "Working",
        "Worked", "AskMarks", "Marks", "Recover",
    ]  # fmt: skip


class Trap:
    sprung = False

    def __reduce__(self):
        return setattr, (Trap, "sprung", True)


def mutated(rng: random.Random) -> list[bytes]:
    """Frames of a message with something wrong, or just bytes."""
    frames = [bytes(frame) for frame in encode(rng.choice(SAMPLES))]
    for _ in range(rng.randrange(1, 4)):
        each = rng.randrange(len(frames))
        content = bytearray(frames[each])
        match rng.randrange(9):
            case 0 if content:
                content[rng.randrange(len(content))] = rng.randrange(256)
            case 1:
                del content[rng.randrange(len(content) + 1) :]
            case 2:
                content += rng.randbytes(rng.randrange(40))
            case 3:
                content = bytearray(rng.randbytes(rng.randrange(120)))
            case 4:
                frames.insert(each, rng.randbytes(rng.randrange(20)))
                continue
            case 5 if len(frames) > 1:
                del frames[each]
                continue
            case 6 if len(content) >= 8:
                start = rng.randrange(len(content) - 7)
                content[start : start + 8] = rng.choice([b"\xff" * 8, bytes(8), struct.pack("<Q", 1 << 40)])
            case 7:
                content = bytearray(pickle.dumps(Trap()))
            case 8:
                rng.shuffle(frames)
                continue
        frames[each] = bytes(content)
    return frames


def test_a_hundred_thousand_fuzzed_messages_give_messages_or_typed_errors_only():
    rng = random.Random(0)
    refused = 0
    for _ in range(100_000):
        frames = mutated(rng)
        envelope(frames)
        try:
            got = decode(frames)
        except WireError:
            refused += 1
        else:
            assert isinstance(got, Message)
    assert refused > 80_000
    assert not Trap.sprung


@examples(300)
@given(st.lists(st.binary(max_size=200), max_size=8))
def test_random_bytes_are_refused(frames):
    with pytest.raises(WireError):
        decode(frames)


@examples(300)
@given(st.binary(max_size=99), st.integers(0, len(messages.Body.__args__) - 1))
def test_random_bodies_give_records_or_typed_errors(wrong, number):
    try:
        got = decode([header(number=number, body=len(wrong)), wrong, IDS], SMALL)
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


@pytest.mark.parametrize("name", ["body_bytes", "queue_messages", "silence_s"])
def test_a_limit_of_nothing_is_refused(name):
    with pytest.raises(ConfigError, match=f"limit {name} is 0"):
        Limits(**{name: 0})
