"""What strangers can do to an embedding server, a real process with rows: not a row changes, its clients are served
meanwhile and afterwards, and it has not grown.
"""

from __future__ import annotations

import itertools
import os
import pickle
import random
import struct
from contextlib import ExitStack, suppress
from pathlib import Path

import msgspec
import numpy as np
import pytest
from bagpipe.store.links import Patience

from bagpipe.errors import StoreError, WireError
from bagpipe.wire.frames import VERSION, decode, encode
from bagpipe.wire.keys import Keys, load_keys, new_keys, write_keys
from bagpipe.wire.messages import Message, Open, Opened, Part, Read, Scan, SharedMemory, Write
from bagpipe.wire.recovery_messages import AskWork, Confirm, Load, Mark, Recover, Save, Saved
from harness import raw_socket as raw_peer
from harness.server_process import WIDTH, Tap, read, servers, store_over, values
from harness.wire import until

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
    with store_over([server.address], run=RUN, shared_memory=False) as opened:
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


def frames_of(body, *buffers, request=1, run=RUN, generation=0):
    message = Message(run, generation, request, body, [memoryview(buffer) for buffer in buffers])
    return [bytes(frame) for frame in encode(message)]


def opened(address, *, run=RUN):
    """A peer that the server has welcomed as the trainer it knows."""
    peer = raw_peer.greet(address)
    raw_peer.send(peer, *frames_of(Open(0, 1, [WIDTH]), run=run))
    return peer, answer(peer)


def answer(peer):
    """The frames of the next message, without those of the connection itself."""
    message, more = [], True
    while more:
        (flags,) = raw_peer.receive(peer, 1)
        content = raw_peer.receive(peer, int.from_bytes(raw_peer.receive(peer, 8 if flags & 2 else 1), "big"))
        if not flags & raw_peer.COMMAND:
            message.append(content)
            more = bool(flags & raw_peer.MORE)
    return message


def told(peer, *frames):
    """What a peer that sends this is told."""
    raw_peer.send(peer, *frames)
    return answer(peer)[1]


def test_garbage_on_the_port_and_inside_a_connection(attacked, store):
    rng = random.Random(0)
    for number in range(40):
        connection = raw_peer.connect if number % 2 else raw_peer.greet
        with connection(attacked) as peer:
            try:
                peer.sendall(rng.randbytes(rng.choice([1, 64, 5000])))
            except ConnectionError:
                continue
        assert np.array_equal(read(store, IDS[:10]), values(0, NUM_ROWS)[:10])


@pytest.mark.parametrize("length", [65 * MB, 1 << 40, (1 << 64) - 1])
def test_a_frame_of_an_impossible_length_ends_the_connection_that_announced_it(attacked, length):
    with raw_peer.greet(attacked) as peer:
        peer.sendall(raw_peer.frame(b"BGPW", length=length))
        assert raw_peer.is_closed(peer)


IMPOSSIBLE = {
    "a read of more rows than ids": (Read([Part(0, 2**40)]), (bytes(8),)),
    "a read of a table that is not there": (Read([Part(7, 1)]), (bytes(8),)),
    "a read of more columns than there are": (Read([Part(0, 1, 2**62)]), (bytes(8),)),
    "a write of some columns": (Write(0, 10**6, 0, [Part(0, 1, 1)]), (bytes(8), bytes(4))),
    "a scan of everything at once": (Scan(0, 0, 2**62), ()),
    "a write of more rows than values": (Write(0, 10**6, 0, [Part(0, 2**30)]), (bytes(8), bytes(4 * WIDTH))),
    "a write of a trainer that is not there": (Write(9, 10**6, 0, [Part(0, 1)]), (bytes(8), bytes(4 * WIDTH))),
    "a write far ahead of its order": (Write(0, 10**6, 0, [Part(0, 1)]), (bytes(8), bytes(4 * WIDTH))),
    "rows of another width": (Open(0, 1, [WIDTH + 1]), ()),
    "rows of a terabyte": (Open(0, 1, [2**38]), ()),
    "more trainers": (Open(0, 2**31, [WIDTH]), ()),
    "a mark of a trainer that is not there": (Mark(9, 10**6, 1, ""), ()),
    "a mark far ahead of its order": (Mark(0, 10**6, 1, ""), ()),
    "files in a directory of others": (Save(0, 10**6, 1, "/etc", ["ad"], None), ()),
    "files of a mark that is not there": (Save(0, 10**6, 7, "/tmp/00000007", ["ad"], 2**62), ()),
    "a checkpoint in a directory of others": (Saved(0, 10**6, 1, "/etc"), ()),
    "rows of others' files": (Load(0, 10**6, 1, "/etc", "", ["ad"]), ()),
    "work that was never begun": (AskWork(10**6), ()),
}


@pytest.mark.parametrize("name", IMPOSSIBLE)
def test_a_request_that_can_not_be_is_refused(attacked, name):
    body, buffers = IMPOSSIBLE[name]
    peer, _ = opened(attacked)
    with peer:
        said = told(peer, *frames_of(body, *buffers, request=2))
        assert b"WireError" in said or b"StoreError" in said or b"ConfigError" in said, said


@pytest.mark.parametrize("token", ["../../etc/passwd", "ABCDEF", "a/b", "a\0", "0" * 65, "00\n", 7, None])
def test_a_token_that_is_none_is_refused(attacked, token):
    """It is compared with what a file says, and told in messages."""
    for record, fields in ((Mark(0, 1, 1, ""), (0, 1, 1)), (Load(0, 1, 1, "/a", "", ["ad"]), (0, 1, 1, "/a"))):
        header, _ = frames_of(record, request=2)
        name = type(record).__name__
        wrong = msgspec.msgpack.encode([name, *fields, token, *([["ad"]] if name == "Load" else [])])
        peer, _ = opened(attacked)
        with peer:
            announced = header[:12] + struct.pack("<I", len(wrong)) + header[16:]
            assert f"the body is no {name}".encode() in told(peer, announced, wrong)


def test_a_recovery_of_the_past_or_from_elsewhere_is_refused_and_changes_nothing(attacked):
    """Who has no part in the run can't end its generation; who has, can't make a server read any file."""
    with raw_peer.greet(attacked) as peer:
        for body in (Recover(0, None, ""), Confirm()):
            assert b"serves run 00010203" in told(peer, *frames_of(body, run=bytes(16), generation=9))
        assert b"to use only what is in or below none" in told(peer, *frames_of(Recover(1, "/etc", ""), generation=9))
        request = itertools.count(1)
        until(lambda: b"generation 0 is at work" in told(peer, *frames_of(Recover(0, None, ""), request=next(request))))


def test_memory_that_is_not_the_clients_is_not_shared(attacked):
    """A client says where its memory is; a server must not write into whatever lies there."""
    boot = Path("/proc/sys/kernel/random/boot_id").read_text().strip()
    for descriptor in range(4):
        shared = SharedMemory(boot, os.getpid(), descriptor, 1 << 20, b"token" * 4)
        with raw_peer.greet(attacked) as peer:
            raw_peer.send(peer, *frames_of(Open(0, 1, [WIDTH], shared)))
            welcome = decode(answer(peer)).body
            assert isinstance(welcome, Opened)
            assert not welcome.shared


def test_a_wrong_version_is_told_both_numbers(attacked):
    header, *rest = frames_of(Read([Part(0, 1)]), bytes(8))
    with raw_peer.greet(attacked) as peer:
        assert f"version 9, this is version {VERSION}".encode() in told(peer, header[:4] + b"\x09" + header[5:], *rest)


class Trap:
    """Unpickled, it makes a directory."""

    def __init__(self, path):
        self.path = path

    def __reduce__(self):
        return os.mkdir, (self.path,)


def test_pickle_bytes_are_never_unpickled(attacked, tmp_path):
    trap = pickle.dumps(Trap(str(tmp_path / "sprung")))
    header, _, ids = frames_of(Read([Part(0, 1)]), bytes(8))
    with raw_peer.greet(attacked) as peer:
        announced = header[:12] + struct.pack("<I", len(trap)) + header[16:]
        assert b"the body is no Read" in told(peer, announced, trap, ids)
        raw_peer.send(peer, trap)
        raw_peer.send(peer, trap, trap, trap)
    peer, _ = opened(attacked)
    with peer:
        assert b"bytes of ids" in told(peer, *frames_of(Read([Part(0, 1)]), trap, request=2))
    assert not (tmp_path / "sprung").exists()


def test_a_message_of_another_run_is_refused(attacked):
    peer, (_, said) = opened(attacked, run=bytes(16))
    with peer:
        assert b"a message of run 00000000: server 0 serves run 00010203" in said


def test_clients_that_never_finish_what_they_announce_hold_up_nobody(attacked, store):
    with ExitStack() as stack:
        for number in range(30):
            peer = stack.enter_context(raw_peer.greet(attacked))
            peer.sendall(raw_peer.frame(b"BGPW", length=64 * MB, more=number % 2 == 0))
        silent = [stack.enter_context(raw_peer.connect(attacked)) for _ in range(30)]
        silent[0].sendall(raw_peer.GREETING[:20])
        assert np.array_equal(read(store, IDS), values(0, NUM_ROWS))


def test_a_client_that_takes_no_answers_holds_up_nobody(attacked, store):
    everything = frames_of(Read([Part(0, NUM_ROWS)]), IDS.tobytes(), request=2)
    peer, _ = opened(attacked)
    with peer:
        peer.settimeout(0.5)
        try:
            for _ in range(2000):
                raw_peer.send(peer, *everything)
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
        (recorded,) = map(list, tap.recorded)
        assert values(1, NUM_ROWS).tobytes() in b"".join(recorded)
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
        (recorded,) = map(list, tap.recorded)
        assert len(b"".join(recorded)) > values(1, NUM_ROWS).nbytes
        assert values(1, 1).tobytes() not in b"".join(recorded)
        (before,) = store.server_stats()
        assert replay(recorded, server.address) > 64, "the server has not even shaken hands"
        (after,) = store.server_stats()
        assert after.requests == before.requests + 1, "only our own question was taken"
        assert np.array_equal(read(store, IDS), values(1, NUM_ROWS))


def test_without_the_right_keys_there_is_no_way_in(keys):
    server, client = keys
    _, stranger = new_keys()
    unknown = Keys("client", stranger.public, stranger.secret, client.peer)
    with store_over([server.address], client, run=RUN) as store:
        store.write(0, IDS, values(4, NUM_ROWS))
        (before,), size = store.server_stats(), server.resident_bytes()
        for wrong, reason in (
            (None, "give keys on both sides or on neither"),
            ("none", "give keys on both sides or on neither"),
            (unknown, "does not admit our key"),
            (stranger, "another key than we expect"),
        ):
            with (
                pytest.raises((WireError, StoreError), match=reason),
                store_over([server.address], wrong, run=RUN, patience=HASTY),
            ):
                pass
            assert np.array_equal(read(store, IDS[:10]), values(4, NUM_ROWS)[:10])
        with raw_peer.connect(server.address) as peer:
            peer.sendall(raw_peer.GREETING + bytes([raw_peer.COMMAND, len(raw_peer.READY)]) + raw_peer.READY)
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
        with store_over([server.address], client, run=RUN) as store:
            assert len(read(store, IDS)) == NUM_ROWS
        assert server.resident_bytes() - size < GROWTH_MAX
