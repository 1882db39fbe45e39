"""What strangers can do to an embedding server, a real process with rows: not a row changes, its clients are served
meanwhile and afterwards, and it has not grown.
"""

from __future__ import annotations

import os
import pickle
import random
import socket
import struct
from contextlib import ExitStack, suppress
from dataclasses import replace

import msgspec
import numpy as np
import pytest

from bagpipe.errors import StoreError, WireError
from bagpipe.wire.client import Patience
from bagpipe.wire.frames import HEADER_BYTES, VERSION
from bagpipe.wire.keys import load_keys, new_keys, write_keys
from bagpipe.wire.messages import Failed, Message, NotYet, Open, Opened, Part, Read, Rows, Scan, Write
from bagpipe.wire.recovery_messages import Confirm, Load, Mark, Recover, Save, Saved
from bagpipe.wire.shared import OwnMemory
from harness import raw_socket as raw_peer
from harness.server_process import WIDTH, Tap, read, servers, store_over, values

MB = 1 << 20
GROWTH_MAX = 32 * MB
NUM_ROWS = 1000
IDS = np.arange(NUM_ROWS)
RUN = bytes(range(16))
HASTY = Patience(retry_s=0.5, deadline_s=2.0)


@pytest.fixture(scope="module")
def server():
    with servers(1) as (one,):
        yield one


@pytest.fixture(scope="module")
def store(server):
    """Of the good client, whose bytes travel as those of other machines do."""
    with store_over([server.address], run=RUN, shared_memory=False, local=False) as opened:
        opened.write(0, IDS, values(0, NUM_ROWS))
        yield opened


@pytest.fixture
def attacked(server, store):
    """The server's address; after the attack the good client finds everything as it was."""
    spare = np.arange(10**6, 10**6 + 10)
    (before,), size = store.server_stats(), server.resident_bytes()
    yield server.address
    assert server.process.poll() is None
    assert np.array_equal(read(store, IDS), values(0, NUM_ROWS))
    (after,) = store.server_stats()
    assert (after.rows_written, after.num_rows) == (before.rows_written, before.num_rows)
    assert server.resident_bytes() - size < GROWTH_MAX
    store.write(0, spare, values(1, 10))
    assert np.array_equal(read(store, spare), values(1, 10))


def bytes_of(body, *buffers, request=1, run=RUN, generation=0) -> bytes:
    return raw_peer.frames_of(Message(run, generation, request, body, [memoryview(buffer) for buffer in buffers]))


def opened(address, *, run=RUN, kind="writes"):
    """A peer that the server has welcomed as the trainer it knows, and what it said."""
    peer = raw_peer.connect(address)
    return peer, told(peer, bytes_of(Open(0, 1, [WIDTH], kind), run=run))


def told(peer, said: bytes):
    """What a peer that sends this is told first."""
    peer.sendall(said)
    return raw_peer.receive_message(peer).body


def refusal(body) -> str:
    assert isinstance(body, Failed), body
    return f"{body.error}: {body.message}"


def header_of(message: bytes, num_bytes: int) -> bytes:
    """The header of a message, with another length of its body."""
    return message[:12] + struct.pack("<I", num_bytes) + message[16:HEADER_BYTES]


def test_garbage_on_the_port_and_inside_a_connection(attacked, store):
    rng = random.Random(0)
    for number in range(40):
        peer = raw_peer.connect(attacked) if number % 2 else opened(attacked)[0]
        with peer, suppress(ConnectionError):
            peer.sendall(rng.randbytes(rng.choice([1, 64, 5000])))
        assert np.array_equal(read(store, IDS[:10]), values(0, NUM_ROWS)[:10])


@pytest.mark.parametrize("length", [65 * MB, 1 << 40, (1 << 64) - 1])
@pytest.mark.parametrize("who", ["a stranger", "a client"])
def test_a_buffer_of_an_impossible_length_ends_the_connection_that_announced_it(attacked, length, who):
    peer = raw_peer.connect(attacked) if who == "a stranger" else opened(attacked)[0]
    with peer:
        peer.sendall(raw_peer.header(run=RUN, lengths=[length]))
        assert raw_peer.is_closed(peer)


IMPOSSIBLE = {
    "a read of more rows than ids": (Read([Part(0, 2**40)]), (bytes(8),)),
    "a read of a table that is not there": (Read([Part(7, 1)]), (bytes(8),)),
    "a read of more columns than there are": (Read([Part(0, 1, 2**62)]), (bytes(8),)),
    "a scan of everything at once": (Scan(0, 0, 2**62), ()),
    "a write of a trainer that is not there": (Write(9, 10**6, 0, [Part(0, 1)]), (bytes(8), bytes(4 * WIDTH))),
    "a write before the first": (Write(0, 0, 0, [Part(0, 1)]), (bytes(8), bytes(4 * WIDTH))),
    "rows of another width": (Open(0, 1, [WIDTH + 1], "writes"), ()),
    "rows of a terabyte": (Open(0, 1, [2**38], "writes"), ()),
    "more trainers": (Open(0, 2**31, [WIDTH], "writes"), ()),
    "a mark of a trainer that is not there": (Mark(9, 10**6, 1, ""), ()),
    "an answer": (Opened(0, 1, False, 0, b"", 1), ()),
}


@pytest.mark.parametrize("name", IMPOSSIBLE)
def test_a_request_that_can_not_be_is_refused(attacked, name):
    body, buffers = IMPOSSIBLE[name]
    peer, _ = opened(attacked)
    with peer:
        said = refusal(told(peer, bytes_of(body, *buffers, request=2)))
        assert said.startswith(("WireError", "StoreError", "ConfigError")), said


UNFIT = {
    "a write of some columns": (Write(0, 0, 0, [Part(0, 1, 1)]), (bytes(8), bytes(4))),
    "a write of more rows than values": (Write(0, 0, 0, [Part(0, 2**30)]), (bytes(8), bytes(4 * WIDTH))),
    "files in a directory of others": (Save(0, 0, 1, "/etc", ["ad"], None), ()),
    "files of a mark that is not there": (Save(0, 0, 7, "/tmp/00000007", ["ad"], 2**62), ()),
    "a checkpoint in a directory of others": (Saved(0, 0, 1, "/etc"), ()),
    "rows of others' files": (Load(0, 0, 1, "/etc", "", ["ad"]), ()),
}


def test_what_does_not_fit_is_refused_in_its_turn_and_changes_nothing():
    """Whoever belongs to the run can use up its numbers, but reaches no files and no row."""
    with servers(1) as (server,), store_over([server.address], run=RUN) as store:
        store.write(0, IDS, values(0, NUM_ROWS))
        for name, (body, buffers) in UNFIT.items():
            peer, welcome = opened(server.address)
            with peer:
                body = msgspec.structs.replace(body, sequence=welcome.sequence + 1)
                said = refusal(told(peer, bytes_of(body, *buffers, request=2)))
                assert said.startswith(("WireError", "StoreError")), (name, said)
        (stats,) = store.server_stats()
        assert (stats.rows_written, stats.num_rows) == (NUM_ROWS, [NUM_ROWS])
        assert np.array_equal(read(store, IDS), values(0, NUM_ROWS))


@pytest.mark.parametrize("body", [Write(0, 10**6, 0, [Part(0, 1)]), Mark(0, 10**6, 1, ""), Saved(0, 10**6, 1, "/etc")])
def test_numbers_far_ahead_wait_on_their_own_connection_and_hold_up_nobody(attacked, store, body):
    buffers = (bytes(8), bytes(4 * WIDTH)) if isinstance(body, Write) else ()
    with ExitStack() as stack:
        for _ in range(20):
            peer, _ = opened(attacked)
            stack.enter_context(peer)
            peer.sendall(bytes_of(body, *buffers, request=2))
        assert isinstance(raw_peer.receive_message(peer).body, NotYet)
        spare = np.arange(10**6 + 10, 10**6 + 20)
        (before,) = store.server_stats()
        assert np.array_equal(read(store, IDS), values(0, NUM_ROWS))
        (after,) = store.server_stats()
        assert (after.rows_written, after.num_rows) == (before.rows_written, before.num_rows)
        assert len(read(store, spare)) == 10


@pytest.mark.parametrize("token", ["../../etc/passwd", "ABCDEF", "a/b", "a\0", "0" * 65, "00\n", 7, None])
def test_a_token_that_is_none_is_refused(attacked, token):
    """It is compared with what a file says, and told in messages."""
    for record, fields in ((Mark(0, 1, 1, ""), (0, 1, 1)), (Load(0, 1, 1, "/a", "", ["ad"]), (0, 1, 1, "/a"))):
        name = type(record).__name__
        wrong = msgspec.msgpack.encode([name, *fields, token, *([["ad"]] if name == "Load" else [])])
        peer, _ = opened(attacked)
        with peer:
            said = told(peer, header_of(bytes_of(record, request=2), len(wrong)) + wrong)
            assert f"the body is no {name}" in refusal(said)


def test_a_recovery_of_the_past_or_from_elsewhere_is_refused_and_changes_nothing(attacked):
    """Who has no part in the run can't end its generation; who has, can't make a server read any file."""
    for body in (Recover(0, None, ""), Confirm()):
        with raw_peer.connect(attacked) as peer:
            assert "serves run 00010203" in refusal(told(peer, bytes_of(body, run=bytes(16), generation=9)))
    with raw_peer.connect(attacked) as peer:
        elsewhere = told(peer, bytes_of(Recover(1, "/etc", ""), generation=9))
        assert "to use only what is in or below none" in refusal(elsewhere)
        said = told(peer, bytes_of(Recover(0, None, ""), request=2))
        while isinstance(said, NotYet):
            said = raw_peer.receive_message(peer).body
        assert "generation 0 is at work" in refusal(said)


@pytest.mark.parametrize("what", ["a file", "a pipe", "a socket", "a file to read", "another size", "nothing"])
def test_what_is_not_the_clients_memory_is_not_shared(attacked, what, tmp_path):
    """A server must not write into whatever a client's descriptor is."""
    (tmp_path / "file").write_bytes(b"x" * MB)
    own, (readable, writable) = OwnMemory(MB), os.pipe()
    with (tmp_path / "file").open("r+b") as file, raw_peer.connect_at_home(attacked) as peer:
        descriptors = {
            "a file": [file.fileno()],
            "a pipe": [writable],
            "a socket": [peer.fileno()],
            "a file to read": [os.open("/proc/self/exe", os.O_RDONLY)],
            "another size": [own.descriptor],
            "nothing": [],
        }[what]
        num_bytes = 2 * MB if what == "another size" else MB
        socket.send_fds(peer, [bytes_of(Open(0, 1, [WIDTH], "reads", num_bytes))], descriptors)
        welcome = raw_peer.receive_message(peer).body
        assert isinstance(welcome, Opened)
        assert not welcome.shared
        answered = told(peer, bytes_of(Read([Part(0, 1)]), IDS[:1].tobytes(), request=2))
        assert answered == Rows(1), "rows travel then"
    own.close()
    for descriptor in {readable, writable, *(descriptors if what == "a file to read" else [])}:
        os.close(descriptor)
    assert (tmp_path / "file").read_bytes() == b"x" * MB


def test_a_wrong_version_is_told_both_numbers(attacked):
    message = bytes_of(Read([Part(0, 1)]), bytes(8))
    with raw_peer.connect(attacked) as peer:
        said = refusal(told(peer, message[:4] + b"\xf0" + message[5:]))
        assert f"version 240, this is version {VERSION}" in said


class Trap:
    """Unpickled, it makes a directory."""

    def __init__(self, path):
        self.path = path

    def __reduce__(self):
        return os.mkdir, (self.path,)


def test_pickle_bytes_are_never_unpickled(attacked, tmp_path):
    trap = pickle.dumps(Trap(str(tmp_path / "sprung")))
    message = bytes_of(Read([Part(0, 1)]), bytes(8))
    with raw_peer.connect(attacked) as peer:
        assert "the body is no Read" in refusal(told(peer, header_of(message, len(trap)) + trap + bytes(8)))
    with raw_peer.connect(attacked) as peer, suppress(ConnectionError):
        peer.sendall(trap * 4)
    peer, _ = opened(attacked)
    with peer:
        assert "bytes of ids" in refusal(told(peer, bytes_of(Read([Part(0, 1)]), trap, request=2)))
    assert not (tmp_path / "sprung").exists()


def test_a_message_of_another_run_is_refused(attacked):
    peer, said = opened(attacked, run=bytes(16))
    with peer:
        assert "a message of run 00000000: server 0 serves run 00010203" in refusal(said)


def test_clients_that_never_finish_what_they_announce_hold_up_nobody(attacked, store):
    with ExitStack() as stack:
        for number in range(30):
            peer = stack.enter_context(raw_peer.connect(attacked))
            peer.sendall(raw_peer.header(run=RUN, lengths=[60_000])[: None if number % 2 else 20])
        for _ in range(30):
            stack.enter_context(raw_peer.connect(attacked))
        assert np.array_equal(read(store, IDS), values(0, NUM_ROWS))


def test_a_client_that_takes_no_answers_holds_up_nobody(attacked, store):
    everything = bytes_of(Read([Part(0, NUM_ROWS)]), IDS.tobytes(), request=2)
    peer, _ = opened(attacked)
    with peer:
        peer.settimeout(0.5)
        try:
            for _ in range(2000):
                peer.sendall(everything)
        except OSError:
            pass
        assert np.array_equal(read(store, IDS), values(0, NUM_ROWS))


def replay(recorded, address):
    """Say all of it again, piece by piece, each after the answers to the one before; the bytes of all answers."""
    heard = 0
    with raw_peer.connect(address) as peer:
        peer.settimeout(0.1)
        try:
            for piece in recorded:
                peer.sendall(piece)
                with suppress(TimeoutError):
                    while more := peer.recv(1 << 16):
                        heard += len(more)
        except ConnectionError:
            pass
    return heard


def test_replayed_writes_are_not_applied_again():
    with (
        servers(1) as (server,),
        Tap(server.address) as tap,
        store_over([tap.address], shared_memory=False) as store,
    ):
        store.write(0, IDS, values(1, NUM_ROWS))
        (recorded,) = (list(said) for said in tap.recorded if values(1, NUM_ROWS).tobytes() in b"".join(said))
        store.write(0, IDS, values(2, NUM_ROWS))
        (before,) = store.server_stats()
        replay(recorded, server.address)
        (after,) = store.server_stats()
        assert after.requests - before.requests >= 1 + 2, "our question, and Open and Write that were replayed"
        assert after.rows_written == before.rows_written
        assert np.array_equal(read(store, IDS), values(2, NUM_ROWS))
        store.write(0, IDS[:10], values(3, 10))
        assert np.array_equal(read(store, IDS[:10]), values(3, 10))


# With keys


@pytest.fixture(scope="module")
def keys(tmp_path_factory):
    """The client's keys, and a server with the others."""
    server_file, client_file = write_keys(tmp_path_factory.mktemp("keys") / "run")
    with servers(1, "--keys", str(server_file)) as (server,):
        yield server, load_keys(client_file, "client")


def test_with_keys_nothing_can_be_read_on_the_way_and_nothing_replayed(keys):
    server, client = keys
    with Tap(server.address) as tap, store_over([tap.address], client, run=RUN, shared_memory=False) as store:
        store.write(0, IDS, values(1, NUM_ROWS))
        (recorded,) = (list(said) for said in tap.recorded if len(b"".join(said)) > values(1, NUM_ROWS).nbytes)
        assert not any(values(1, 1).tobytes() in b"".join(said) for said in tap.recorded)
        (before,) = store.server_stats()
        assert replay(recorded, server.address) > 64, "the server has not even shaken hands"
        (after,) = store.server_stats()
        assert after.requests == before.requests + 1, "only our own question was taken"
        assert np.array_equal(read(store, IDS), values(1, NUM_ROWS))


def test_without_the_right_keys_there_is_no_way_in(keys):
    server, client = keys
    _, stranger = new_keys()
    unknown = replace(stranger, peer=client.peer)
    with store_over([server.address], client, local=False, run=RUN) as store:
        store.write(0, IDS, values(4, NUM_ROWS))
        (before,), size = store.server_stats(), server.resident_bytes()
        for wrong, reason in (
            (None, "give keys on both sides or on neither"),
            ("none", "give keys on both sides or on neither"),
            (unknown, "does not admit our key"),
            (stranger, "another key than the one that we expect"),
        ):
            with (
                pytest.raises((WireError, StoreError), match=reason),
                store_over([server.address], wrong, local=False, run=RUN, patience=HASTY),
            ):
                pass
            assert np.array_equal(read(store, IDS[:10]), values(4, NUM_ROWS)[:10])
        with raw_peer.connect(server.address) as peer:
            peer.sendall(bytes_of(Open(0, 1, [WIDTH], "writes")))
            assert raw_peer.is_closed(peer)
        (after,) = store.server_stats()
        assert (after.rows_written, after.num_rows) == (before.rows_written, before.num_rows)
        assert server.resident_bytes() - size < GROWTH_MAX


def test_many_connections_that_say_nothing_are_no_reason_to_refuse_another(keys):
    server, client = keys
    size = server.resident_bytes()
    with ExitStack() as stack:
        for _ in range(200):
            stack.enter_context(raw_peer.connect(server.address))
        with store_over([server.address], client, local=False, run=RUN) as store:
            assert len(read(store, IDS)) == NUM_ROWS
        assert server.resident_bytes() - size < GROWTH_MAX
