"""What a bad peer can do to a listener: nothing. After each attempt a good client is served and no memory is gone."""

from __future__ import annotations

import fcntl
import logging
import os
import pickle
import random
import select
import socket
import struct
import threading
import time
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import replace

import numpy as np
import pytest

from bagpipe.errors import WireError
from bagpipe.wire.client import Client, Patience
from bagpipe.wire.frames import HEADER_BYTES, VERSION
from bagpipe.wire.keys import new_keys
from bagpipe.wire.limits import LIMITS
from bagpipe.wire.listener import Listener, Notes
from bagpipe.wire.messages import Failed, NotYet, Rows, Write, Written
from bagpipe.wire.plan_messages import GetBatch
from bagpipe.wire.recovery_messages import Confirm, Confirmed
from bagpipe.wire.stream import SocketNetwork
from harness import raw_socket as raw
from harness.raw_socket import frames_of, header
from harness.wire import (
    MB,
    RUN,
    SHORT,
    a_read,
    admitted,
    ask,
    call,
    connected,
    doubling,
    get,
    listening,
    nothing_left_behind,
    open_files,
    resident_bytes,
    until,
    values,
)

GROWTH_MAX = 24 * MB
SERVER, CLIENT = new_keys()


@contextmanager
def attacked(handler=doubling, security=None, limits=SHORT, keys=None):
    """A listener that serves a good client before and after, and whose process has not grown."""
    with nothing_left_behind(), listening(handler, security, limits) as listener:
        serve_a_good_client(listener.address, keys)
        before = resident_bytes()
        yield listener
        serve_a_good_client(listener.address, keys)
        until(lambda: resident_bytes() - before < GROWTH_MAX)


@pytest.fixture
def listener():
    with attacked() as under_attack:
        yield under_attack


def serve_a_good_client(address, keys=None):
    with connected(address, keys) as connection:
        assert values(call(connection, a_read(20, 21))) == [40, 42]


def introduced(address, at_home=False):
    """A raw connection of a peer that belongs to the run."""
    peer = raw.connect_at_home(address) if at_home else raw.connect(address)
    peer.sendall(frames_of(ask(Confirm())))
    assert raw.receive_message(peer).body == Confirmed()
    return peer


def told(listener, letter):
    """Why a peer is cut that sends this after it was admitted."""
    with introduced(listener.address) as peer:
        with suppress(ConnectionError):  # cut while it sends
            peer.sendall(letter)
        answer = raw.receive_message(peer)
        assert raw.is_closed(peer)
    assert answer.request == 0
    assert isinstance(answer.body, Failed)
    assert answer.body.error == "WireError"
    return answer.body.message


# Bytes that are no messages


@pytest.mark.parametrize("size", [1, 64, 100_000])
def test_garbage_on_the_port(listener, size):
    rng = random.Random(size)
    for _ in range(20):
        with raw.connect(listener.address) as peer, suppress(ConnectionError):
            peer.sendall(rng.randbytes(size))
    with raw.connect(listener.address) as peer:
        peer.sendall(b"GET / HTTP/1.1\r\nHost: localhost\r\n\r\n" + bytes(100))
        assert raw.is_closed(peer)


def test_garbage_between_messages(listener):
    rng = random.Random(0)
    for _ in range(50):
        with introduced(listener.address) as peer, suppress(ConnectionError):
            peer.sendall(rng.randbytes(rng.randrange(2000)))
    until(lambda: listener.refused > 20)


@pytest.mark.parametrize(
    ("letter", "text"),
    [
        (header(version=9), f"the peer speaks version 9, this is version {VERSION}: run the same release"),
        (header(magic=b"HTTP"), "begins with b'HTTP'"),
        (header(kind=99), "message type 99 is unknown"),
        (header(buffers=5), "5 buffers"),
        (header(body=5000), "a body of 5000 bytes: 4096 are allowed"),
        (header(body=(1 << 32) - 1), "a body of 4294967295 bytes"),
        (header(lengths=(MB + 1,)), "buffer 0 has 1048577 bytes: 1048576 are allowed"),
        (header(lengths=(1 << 62,)), "buffer 0 has 4611686018427387904 bytes"),
        (header(lengths=((1 << 64) - 1,)), "buffer 0 has 18446744073709551615 bytes"),
        (header(body=9) + b"\x91" * 9 + bytes(8), "the body is no Read"),
    ],
)
def test_who_is_cut_is_told_why_and_so_is_the_log(listener, letter, text, caplog):
    assert text in told(listener, letter)
    until(lambda: text in caplog.text)


class Trap:
    def __reduce__(self):
        return os.mkdir, ("/proc/self/sprung",)


def test_pickle_bytes_are_bytes(listener):
    trap = pickle.dumps(Trap())
    assert "the body is no Read" in told(listener, header(body=len(trap)) + trap + bytes(8))
    assert "begins with" in told(listener, trap + bytes(200))


def test_twenty_thousand_mutated_messages_at_a_socket(listener):
    """Each is refused by name or is a message; the process neither fails inside nor grows."""
    rng, letter = random.Random(3), frames_of(a_read(1, 2, 3, request=5))
    for _ in range(400):
        with suppress(OSError), introduced(listener.address) as peer:
            for _ in range(50):
                content = bytearray(letter)
                if rng.random() < 0.3:
                    content[rng.randrange(len(content))] = rng.randrange(256)
                peer.sendall(content)
    assert listener.refused > 100


def test_a_replayed_message_is_just_a_message(listener):
    """Writes are numbered, so that a server applies a second copy of one as little as a resent one."""
    letter = frames_of(a_read(1, request=5))
    with introduced(listener.address) as peer, introduced(listener.address) as replaying:
        answers = []
        for each in (peer, replaying):
            each.sendall(letter)
            answers.append(frames_of(raw.receive_message(each)))
    assert answers[0] == answers[1]
    assert listener.refused == 0


def test_a_fault_of_one_client_is_not_the_fault_of_another(listener):
    wrong = header(body=9) + b"\x91" * 9 + bytes(8)
    with connected(listener.address) as connection:
        for each in range(50):
            with raw.connect(listener.address) as bad:
                bad.sendall(wrong)
                assert values(call(connection, a_read(each, request=each))) == [2 * each]
        until(lambda: listener.refused == 50)


# Messages that do not end, and peers that do not speak


def test_a_client_that_never_finishes_its_message_is_given_up(listener):
    with introduced(listener.address) as peer:
        peer.sendall(header(lengths=(MB // 2,)))
        serve_a_good_client(listener.address)
        assert raw.is_closed(peer)


def test_messages_that_are_announced_and_do_not_come_take_no_memory(listener):
    before = resident_bytes()
    peers = [introduced(listener.address) for _ in range(40)]
    for peer in peers:
        peer.sendall(header(lengths=(MB // 2,)))
    serve_a_good_client(listener.address)
    assert resident_bytes() - before < GROWTH_MAX
    for peer in peers:
        peer.close()


def test_a_peer_that_takes_no_answers_is_given_up():
    answer = admitted(lambda peer, message: (Rows(0), [memoryview(bytes(MB // 2))]))
    with (
        attacked(
            lambda peer, message: doubling(peer, message) if message.request < 9 else answer(peer, message)
        ) as one,
        introduced(one.address) as peer,
    ):
        peer.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
        with suppress(OSError):
            for _ in range(200):
                peer.sendall(frames_of(ask(Confirm(), request=9)))
        time.sleep(0.2)
        serve_a_good_client(one.address)
        until(lambda: not one._open)


@pytest.mark.parametrize("security", [None, SERVER], ids=["plain", "tls"])
@pytest.mark.parametrize("say", [b"", b"\x16", b"\x16\x03\x01\x02\x00\x01\x00", b"BGPW"])
def test_a_stranger_has_a_few_seconds_for_all_that_it_says(security, say, caplog):
    """Nothing at all, a handshake that stalls, a message that stalls."""
    limits = replace(SHORT, stranger_s=0.3, stall_s=30.0)
    with attacked(security=security, limits=limits, keys=CLIENT if security else None) as one:
        with raw.connect(one.address) as peer:
            began = time.monotonic()
            with suppress(ConnectionError):
                peer.sendall(say)
            assert raw.is_closed(peer)
            assert time.monotonic() - began >= (0.0 if security and say == b"BGPW" else 0.25)
        until(lambda: one.refused == 1)


def test_a_stranger_that_drips_is_cut_as_soon():
    limits = replace(SHORT, stranger_s=0.3, stall_s=30.0)
    with attacked(limits=limits) as one, raw.connect(one.address) as peer:
        letter, sent = frames_of(ask(Failed("x", "y" * 4000))), 0
        with suppress(OSError):
            for byte in letter:
                peer.sendall(bytes([byte]))
                sent += 1
                if select.select([peer], [], [], 0.02)[0]:
                    break
        assert sent < len(letter)


def test_a_stranger_may_send_little():
    with attacked() as one, raw.connect(one.address) as peer:
        peer.sendall(header(lengths=(20_000,)))
        answer = raw.receive_message(peer)
        assert "20,010 B came of a peer that has not said who it is: 16,384 are allowed" in answer.body.message
        assert raw.is_closed(peer)


@pytest.mark.parametrize("security", [None, SERVER], ids=["plain", "tls"])
def test_too_many_strangers_push_out_each_other_and_nobody_else(security):
    """Those who belong to the run are served all the while, and new ones come in."""
    keys = CLIENT if security else None
    limits = replace(SHORT, strangers=4, stranger_s=30.0)
    with attacked(security=security, limits=limits, keys=keys) as one, ExitStack() as stack:
        good = stack.enter_context(connected(one.address, keys))
        call(good, a_read(1))
        strangers = [stack.enter_context(raw.connect(one.address)) for _ in range(40)]
        for stranger in strangers:
            with suppress(OSError):
                stranger.sendall(b"\x16\x03")
        for stranger in strangers[:30]:
            assert raw.is_closed(stranger)
        assert values(call(good, a_read(4))) == [8]
        serve_a_good_client(one.address, keys)
        assert len(one._strangers) <= 4


def test_strangers_fill_no_log(caplog):
    """Each of them left a line: 250 KB/s of them while one process came with a wrong key again and again."""
    with listening(doubling) as listener:
        for _ in range(300):
            raw.connect(listener.address).close()
        until(lambda: listener.refused == 300)
    assert caplog.text.count("has not said who it is") == 100
    assert "200 more connections of strangers" in caplog.records[-1].getMessage()


def test_after_a_minute_the_log_is_told_of_strangers_again(caplog):
    times = iter([0.0, *[1.0] * 150, 61.0, 62.0])
    notes = Notes(lambda: next(times))
    for each in range(152):
        notes.warn("stranger %d", each)
    notes.close()
    said = [record.getMessage() for record in caplog.records]
    assert said[:100] == [f"stranger {each}" for each in range(100)]
    assert said[100].startswith("50 more")
    assert said[101:] == ["stranger 150", "stranger 151"]


def test_connections_that_come_and_go_leave_nothing(listener):
    before = len(open_files())
    for _ in range(300):
        raw.connect(listener.address).close()
    until(lambda: len(open_files()) <= before)


def test_where_files_run_out_the_listener_waits_for_some(listener, monkeypatch, caplog):
    accept, failures = socket.socket.accept, [3]

    def fail(front):
        if failures[0]:
            failures[0] -= 1
            raise OSError(24, "Too many open files")
        return accept(front)

    monkeypatch.setattr(socket.socket, "accept", fail)
    serve_a_good_client(listener.address)
    assert "can't accept a connection" in caplog.text


# Floods


def noting_sizes(peer, message):
    if isinstance(message.body, Write):
        return Written(sum(buffer.nbytes for buffer in message.buffers)), ()
    return doubling(peer, message)


def flood(address, stop, letter):
    """Send the same over and over, on one new connection after the other."""
    while not stop.is_set():
        with suppress(OSError), introduced(address) as peer:
            peer.settimeout(0.2)
            while not stop.is_set():
                peer.sendall(letter)
                with suppress(BlockingIOError):
                    peer.recv(1 << 16, socket.MSG_DONTWAIT)


def test_a_flood_of_busy_connections_beside_endless_messages_takes_no_memory_and_cuts_nobody_honest():
    """Busy connections once kept a guard from looking at an endless message, which grew to 1.5 GB."""
    limits = replace(LIMITS, memory_bytes=8 * MB, stall_s=2.0, memory_wait_s=2.0)

    def slow(peer, message):
        if isinstance(message.body, GetBatch):
            time.sleep(0.01)
            return Written(message.body.number), ()
        return noting_sizes(peer, message)

    busy = frames_of(ask(Confirm())) * 20
    endless = header(kind=4, buffers=4, body=100, lengths=(60 * MB, 30 * MB, 10 * MB, 10 * MB)) + bytes(MB)
    with attacked(slow, limits=limits) as one:
        before, stop, highest = resident_bytes(), threading.Event(), 0
        threads = [
            threading.Thread(target=flood, args=(one.address, stop, letter))
            for letter in (busy, busy, endless, endless)
        ]
        for thread in threads:
            thread.start()
        asking = Client(SocketNetwork(limits=limits, local=False), one.address, "server 0", run=RUN,
                        patience=Patience(retry_s=60.0))  # fmt: skip
        try:
            asking.send(lambda: (GetBatch(0, ""), ()), "a thing")
            asking.receive()
            honest = asking._connection
            for number in range(1, 101):
                asking.send(lambda number=number: (GetBatch(number, ""), ()), "a thing")
            for number in range(1, 101):
                assert asking.receive().body == Written(number)
                highest = max(highest, resident_bytes())
            assert asking._connection is honest  # never cut
        finally:
            stop.set()
            for thread in threads:
                thread.join()
            asking.close()
        assert (
            highest - before < 100 * MB
        )  # two endless messages at the most are being read: one larger than the budget


def test_two_that_announce_much_and_send_nothing_hold_up_an_honest_write_only_until_they_stall():
    limits = replace(LIMITS, memory_bytes=32 * MB, stall_s=0.5)
    with attacked(noting_sizes, limits=limits) as one, ExitStack() as stack:
        for _ in range(2):
            peer = stack.enter_context(introduced(one.address))
            peer.sendall(header(kind=4, buffers=2, body=100, lengths=(60 * MB, 60 * MB)))
        with connected(one.address, limits=limits) as connection:
            call(connection, ask(Confirm()))
            writing = threading.Thread(
                target=connection.send, args=(ask(Write(0, 1, 0, []), b"", bytes(10 * MB)), 20.0)
            )
            writing.start()
            answer = get(connection, 20.0)
            while isinstance(answer.body, NotYet):
                assert not answer.body.again
                answer = get(connection, 20.0)
            writing.join()
            assert answer.body == Written(10 * MB)


def test_a_write_that_found_no_room_is_asked_to_come_again_and_not_cut(caplog):
    limits = replace(LIMITS, memory_bytes=MB, memory_wait_s=0.3)
    begun, release = threading.Event(), threading.Event()

    def slow(peer, message):
        if isinstance(message.body, Write) and message.body.sequence == 1:
            begun.set()
            release.wait(20)
        return noting_sizes(peer, message)

    with attacked(slow, limits=limits) as one, connected(one.address, limits=limits) as first:
        call(first, ask(Confirm()))
        first.send(ask(Write(0, 1, 0, []), b"", bytes(MB)), 10.0)
        begun.wait(10)
        asking = Client(SocketNetwork(limits=limits, local=False), one.address, "server 0", run=RUN)
        try:
            asking.call(Confirm(), what="a hello")
            asking.send(lambda: (Write(0, 2, 0, []), (memoryview(b""), memoryview(bytes(MB // 80)))), "a write")
            assert asking.poll(1.0) is None
            honest = asking._connection
            until(lambda: asking.poll(0.1) is None and caplog.text.count("is asked to come again") >= 2)
            release.set()
            assert asking.receive().body == Written(MB // 80)
            assert asking._connection is honest is not None
        finally:
            release.set()
            asking.close()


# Clients against bad servers


@contextmanager
def bad_server(answer):
    """A server that answers each connection with these bytes."""
    with socket.create_server(("127.0.0.1", 0)) as server:
        server.settimeout(0.1)
        stop, held = threading.Event(), []

        def serve():
            while not stop.is_set():
                with suppress(TimeoutError):
                    peer, _ = server.accept()
                    held.append(peer)
                    peer.settimeout(5)
                    with suppress(OSError):
                        peer.recv(1 << 16)
                        peer.sendall(answer)

        thread = threading.Thread(target=serve)
        thread.start()
        try:
            yield f"tcp://127.0.0.1:{server.getsockname()[1]}"
        finally:
            stop.set()
            thread.join()
            for peer in held:
                peer.close()


@pytest.mark.parametrize(
    ("answer", "text"),
    [
        (b"garbage" * 40, "a message begins with b'garb'"),
        (header(version=7), "the peer speaks version 7, this is version 8"),
        (header(lengths=(1 << 50,)), "buffer 0 has 1125899906842624 bytes"),
        (frames_of(ask(Written(3), request=77)), "answered request 77 where 1 was due"),
        (header(kind=4, body=9, buffers=0, lengths=()) + b"\x91" * 9, "the body is no Write"),
    ],
)
def test_a_bad_server_can_not_hurt_a_client(answer, text):
    with nothing_left_behind(), bad_server(answer) as address:
        asking = Client(SocketNetwork(local=False), address, "server 0", run=RUN)
        with pytest.raises(WireError, match=text):
            asking.call(Confirm(), what="a thing")


@pytest.mark.parametrize("answer", [b"", b"BGPW", header(kind=1, lengths=(8,))[:60]], ids=["nothing", "a word", "half"])
def test_a_server_that_stops_in_the_middle_is_lost_after_the_deadline(answer):
    with nothing_left_behind(), bad_server(answer) as address:
        network = SocketNetwork(limits=replace(LIMITS, stall_s=0.2), local=False)
        asking = Client(network, address, "server 0", run=RUN, patience=Patience(retry_s=0.2, deadline_s=1.0))
        with pytest.raises(TimeoutError, match=r"server 0 did not answer for .*, asked for a thing"):
            asking.call(Confirm(), what="a thing")


def test_a_port_in_use_is_named(listener):
    for security in (None, SERVER):
        with pytest.raises(WireError, match=f"{listener.address} is in use"):
            Listener(listener.address, doubling, security=security)


# Descriptors


def sealed(num_bytes):
    descriptor = os.memfd_create("attack", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
    os.ftruncate(descriptor, num_bytes)
    fcntl.fcntl(descriptor, fcntl.F_ADD_SEALS, fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW)
    return descriptor


@pytest.mark.parametrize("count", [1, 2, 3, 50])
def test_descriptors_that_nobody_asked_for_are_closed(listener, count):
    """With each message, more than one, and with bytes in the middle of one."""
    before = len(open_files())
    descriptor = sealed(4096)
    letter = frames_of(ask(Confirm()))
    with introduced(listener.address, at_home=True) as peer:
        for _ in range(20):
            socket.send_fds(peer, [letter], [descriptor] * count)
            assert raw.receive_message(peer).body == Confirmed()
        for part in (letter[:HEADER_BYTES], letter[HEADER_BYTES:]):
            socket.send_fds(peer, [part], [descriptor] * count)
        assert raw.receive_message(peer).body == Confirmed()
        assert len(open_files()) <= before + 5  # the pair of sockets, ours, and one that the last message may keep
    os.close(descriptor)
    until(lambda: len(open_files()) <= before)


def test_who_may_come_by_a_unix_socket_is_what_the_system_says(monkeypatch):
    with attacked() as one:
        monkeypatch.setattr(os, "geteuid", lambda: 12345)
        with raw.connect_at_home(one.address) as peer:
            assert raw.is_closed(peer)
        until(lambda: one.refused == 1)
        with connected(one.address, local=True) as connection:  # nor does a client trust who listens there
            assert not connection.shares_host
        monkeypatch.undo()


# Answers that are cut


class Cutting:
    """Passes bytes on between clients and a listener, and cuts a connection instead of a third of the answers."""

    def __init__(self, address, seed, share=1 / 3):
        self._address, self._random, self._share = address, random.Random(seed), share
        self.num_cut = 0
        self._front = socket.create_server(("127.0.0.1", 0))
        self._front.settimeout(0.05)
        self.address = f"tcp://127.0.0.1:{self._front.getsockname()[1]}"
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._run)
        self._thread.start()

    def close(self):
        self._stop.set()
        self._thread.join()
        self._front.close()

    def _run(self):
        while not self._stop.is_set():
            with suppress(TimeoutError):
                client, _ = self._front.accept()
                with client, raw.connect(self._address) as server, suppress(OSError):
                    self._pass(client, server)

    def _pass(self, client, server):
        while not self._stop.is_set():
            for each in select.select([client, server], [], [], 0.05)[0]:
                content = each.recv(1 << 16)
                if not content:
                    return
                if each is server and self._random.random() < self._share:
                    self.num_cut += 1
                    client.sendall(content[: self._random.randrange(len(content))])
                    return
                (client if each is server else server).sendall(content)


@pytest.mark.parametrize("seed", range(3))
def test_eighty_writes_are_applied_once_while_a_third_of_the_answers_are_cut(seed):
    applied = []

    def once(peer, message):
        if message.body.sequence == len(applied) + 1:
            rows = np.frombuffer(message.buffers[1], np.float32)
            applied.append((message.body.sequence, rows[0], len(rows)))
        return Written(message.body.sequence), ()

    with nothing_left_behind(), listening(admitted(once), limits=LIMITS) as one:
        proxy = Cutting(one.address, seed)
        asking = Client(SocketNetwork(local=False), proxy.address, "server 0", run=RUN)
        try:
            for number in range(1, 81):
                rows = np.full(2000, number, np.float32)
                answer = asking.call(Write(0, number, 0, []), (memoryview(b""), rows.data), "a write")
                assert answer.body == Written(number)
        finally:
            asking.close()
            proxy.close()
    assert applied == [(number, number, 2000) for number in range(1, 81)]
    assert proxy.num_cut > 20


def test_no_secret_is_logged(caplog):
    with caplog.at_level(logging.DEBUG), listening(doubling, SERVER) as one:
        serve_a_good_client(one.address, CLIENT)
        with raw.connect(one.address) as peer:
            peer.sendall(struct.pack("<Q", 1) * 20)
            raw.is_closed(peer)
        until(lambda: one.refused == 1)
    for keys in (SERVER, CLIENT):
        assert not any(line in caplog.text for line in keys.secret.splitlines()[1:-1])
