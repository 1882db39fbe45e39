"""What a bad peer can do to a listener: nothing. After each attempt a good client is served and no memory is gone."""

from __future__ import annotations

import os
import pickle
import random
import socket
import struct
import time

import pytest

from bagpipe.errors import WireError
from bagpipe.wire.frames import VERSION, encode
from bagpipe.wire.keys import new_keys
from bagpipe.wire.listener import Listener
from bagpipe.wire.messages import Failed, Written
from harness import raw_socket as raw_peer
from harness.wire import (
    SHORT,
    a_read,
    ask,
    connected,
    doubling,
    get,
    listening,
    nothing_left_behind,
    resident_bytes,
    until,
    values,
)

MB = 1 << 20
GROWTH_MAX = 24 * MB
SERVER, CLIENT = new_keys()


@pytest.fixture
def listener():
    """A listener that serves a good client before and after, and whose process has not grown."""
    with nothing_left_behind(), listening() as under_attack:
        serve_a_good_client(under_attack.address)
        before = resident_bytes()
        yield under_attack
        serve_a_good_client(under_attack.address)
        until(lambda: resident_bytes() - before < GROWTH_MAX)


def serve_a_good_client(address, keys=None):
    with connected(address, keys) as (network, channel):
        channel.send(a_read(20, 21))
        assert values(get(network, channel)) == [40, 42]


def frames_of(message):
    return [bytes(frame) for frame in encode(message)]


def answers_to(listener, expected, *frames):
    """What a well-connected peer is told about these frames, so many answers, besides that to a good request."""
    with raw_peer.greet(listener.address) as peer:
        raw_peer.send(peer, *frames)
        raw_peer.send(peer, *frames_of(a_read(1, request=99)))
        answers = [receive_message(peer) for _ in range(expected + 1)]
    told = [body for header, body, *_ in answers if struct.unpack_from("<Q", header, 16)[0] != 99]
    assert len(told) == expected
    return told


def receive_message(peer):
    message, more = [], True
    while more:
        (flags,) = raw_peer.receive(peer, 1)
        size = int.from_bytes(raw_peer.receive(peer, 8 if flags & raw_peer.LONG else 1), "big")
        content = raw_peer.receive(peer, size)
        if flags & raw_peer.COMMAND:
            if content.startswith(b"\x04PING"):
                peer.sendall(bytes([raw_peer.COMMAND, 5]) + b"\x04PONG")
            continue
        message.append(content)
        more = bool(flags & raw_peer.MORE)
    return message


@pytest.mark.parametrize("size", [1, 64, 100_000])
def test_garbage_on_the_port(listener, size):
    rng = random.Random(size)
    for _ in range(20):
        with raw_peer.connect(listener.address) as peer:
            try:
                peer.sendall(rng.randbytes(size))
            except ConnectionError:
                continue
    with raw_peer.connect(listener.address) as peer:
        peer.sendall(b"GET / HTTP/1.1\r\nHost: localhost\r\n\r\n")
        assert raw_peer.is_closed(peer)


def test_garbage_after_the_handshake(listener):
    rng = random.Random(0)
    for _ in range(20):
        with raw_peer.greet(listener.address) as peer:
            try:
                peer.sendall(rng.randbytes(rng.randrange(2000)))
            except ConnectionError:
                continue


def test_garbage_in_whole_messages(listener):
    rng = random.Random(1)
    with raw_peer.greet(listener.address) as peer:
        for _ in range(500):
            raw_peer.send(peer, *(rng.randbytes(rng.randrange(100)) for _ in range(rng.randrange(1, 6))))
        until(lambda: listener.refused == 500)


def test_a_frame_that_announces_more_than_is_allowed_ends_the_connection(listener):
    for length in (SHORT.buffer_bytes + 100, 1 << 40, (1 << 64) - 1):
        with raw_peer.greet(listener.address) as peer:
            peer.sendall(raw_peer.frame(b"BGPW", length=length))
            assert raw_peer.is_closed(peer)


@pytest.mark.parametrize("length", [9, 1 << 40, (1 << 64) - 1])
def test_a_header_that_announces_more_than_there_is(listener, length):
    header, body, ids = frames_of(a_read(1, request=5))
    (told,) = answers_to(listener, 1, header[:-8] + struct.pack("<Q", length), body, ids)
    assert b"WireError" in told
    assert str(length).encode() in told


def test_a_message_of_too_many_frames(listener):
    header, body, ids = frames_of(a_read(1, request=5))
    (told,) = answers_to(listener, 1, header, body, ids, *[b""] * 10_000)
    assert b"frames" in told


def test_a_message_that_never_ends_is_cut_off(listener):
    part = raw_peer.frame(bytes(MB // 2), more=True)
    with raw_peer.greet(listener.address) as peer:
        sent = 0
        try:
            while sent < 100_000:
                peer.sendall(part)
                sent += 1
        except ConnectionError:
            pass
        assert sent < 8_000
    until(lambda: listener.refused == 1)


def test_a_wrong_version_is_told_both_numbers(listener):
    header, body, ids = frames_of(a_read(1, request=5))
    (told,) = answers_to(listener, 1, header[:4] + b"\x09" + header[5:], body, ids)
    assert f"version 9, this is version {VERSION}".encode() in told


def test_a_wrong_version_of_zeromq_is_hung_up_on(listener):
    with raw_peer.connect(listener.address) as peer:
        peer.sendall(b"\xff" + bytes(8) + b"\x7f" + b"\x63" * 54)
        assert raw_peer.is_closed(peer)


class Trap:
    def __reduce__(self):
        return os.mkdir, ("/proc/self/sprung",)


def test_pickle_bytes_are_bytes(listener):
    trap = pickle.dumps(Trap())
    header, _, ids = frames_of(a_read(1, request=5))
    announced = header[:12] + struct.pack("<I", len(trap)) + header[16:]
    (told,) = answers_to(listener, 1, announced, trap, ids)
    assert b"the body is no Read" in told
    assert answers_to(listener, 0, trap, trap) == []


def test_a_replayed_message_is_just_a_message(listener):
    """Writes are numbered, so that a server applies a second copy of one as little as a resent one."""
    frames = frames_of(a_read(1, request=5))
    with raw_peer.greet(listener.address) as peer, raw_peer.greet(listener.address) as replaying:
        raw_peer.send(peer, *frames)
        first = receive_message(peer)
        raw_peer.send(replaying, *frames)
        assert receive_message(replaying) == first
    assert listener.refused == 0


def test_a_client_that_never_finishes_its_frame_is_given_up(listener):
    with raw_peer.greet(listener.address) as peer:
        peer.sendall(raw_peer.frame(b"BGPW", length=SHORT.buffer_bytes))
        serve_a_good_client(listener.address)
        assert raw_peer.is_closed(peer)


def test_many_slow_clients_take_no_memory_with_what_they_announce(listener):
    before = resident_bytes()
    peers = [raw_peer.greet(listener.address) for _ in range(40)]
    for peer in peers:
        peer.sendall(raw_peer.frame(b"BGPW", length=SHORT.buffer_bytes))
    serve_a_good_client(listener.address)  # after it the listener has seen the others too
    assert resident_bytes() - before < GROWTH_MAX
    for peer in peers:
        peer.close()


def test_a_client_that_never_begins_is_given_up(listener):
    with raw_peer.connect(listener.address) as silent, raw_peer.connect(listener.address) as halfway:
        halfway.sendall(raw_peer.GREETING[:20])
        assert raw_peer.is_closed(silent)
        assert raw_peer.is_closed(halfway)


def test_a_half_open_connection_is_given_up(listener):
    """A peer whose machine is gone answers no question whether it is there."""
    with raw_peer.greet(listener.address) as peer:
        raw_peer.send(peer, *frames_of(a_read(1)))
        assert raw_peer.is_closed(peer)


def test_a_client_notices_a_server_that_is_gone_without_a_word():
    """The server takes the connection and the request and never says anything again."""
    with nothing_left_behind(), socket.create_server(("127.0.0.1", 0)) as server:
        address = f"tcp://127.0.0.1:{server.getsockname()[1]}"
        with connected(address) as (network, channel):
            with raw_peer.welcome(server):
                channel.send(a_read(1))
                until(lambda: channel.receive() is None and "lost" in channel.trouble)
            assert network.wait([channel], 0) == []


def test_a_client_that_never_takes_its_answers_costs_only_itself(listener):
    with raw_peer.greet(listener.address) as peer:
        request = b"".join(
            raw_peer.frame(content, more=each < 2)
            for each, content in enumerate(frames_of(a_read(*range(50_000), request=5)))
        )
        peer.settimeout(0.5)
        try:
            for _ in range(200):
                peer.sendall(request)
        except OSError:
            pass
        serve_a_good_client(listener.address)


def test_a_bad_server_can_not_hurt_a_client():
    with nothing_left_behind(), socket.create_server(("127.0.0.1", 0)) as server:
        address = f"tcp://127.0.0.1:{server.getsockname()[1]}"
        with connected(address) as (network, channel), raw_peer.welcome(server) as peer:
            raw_peer.send(peer, b"garbage", b"more")
            raw_peer.send(peer, *frames_of(ask(Written(3))))
            assert network.wait([channel], 10) == [channel]
            with pytest.raises(WireError, match="a header of 7 bytes"):
                channel.receive()
            assert get(network, channel).body == Written(3)


def test_a_port_in_use_is_named(listener):
    with pytest.raises(WireError, match=f"{listener.address} is in use"):
        Listener(listener.address, doubling)
    with pytest.raises(WireError, match=f"{listener.address} is in use"):
        Listener(listener.address, doubling, security=SERVER)


def refused(address, keys):
    """What a client that asks is told."""
    with connected(address, keys) as (network, channel):
        channel.send(a_read(1))
        deadline = time.monotonic() + 1
        while time.monotonic() < deadline:
            network.wait([channel], 0.1)
            try:
                assert channel.receive() is None
            except WireError as error:
                return str(error)
        return channel.trouble


def test_without_the_right_key_there_is_no_answer_and_others_are_served():
    stranger_server, stranger = new_keys()
    asked = []

    def note(peer, message, reply):
        asked.append(peer)
        doubling(peer, message, reply)

    unknown = type(CLIENT)("client", stranger.public, stranger.secret, SERVER.public)
    with nothing_left_behind(), listening(note, SERVER) as listener:
        before = resident_bytes()
        assert "does not admit our key" in refused(listener.address, unknown)
        assert listener.refused > 0
        assert "give keys on both sides or on neither" in refused(listener.address, None)
        assert "has another key than we expect" in refused(listener.address, stranger)
        with raw_peer.connect(listener.address) as peer:
            peer.sendall(raw_peer.GREETING + bytes([raw_peer.COMMAND, len(raw_peer.READY)]) + raw_peer.READY)
            assert raw_peer.is_closed(peer)
        assert asked == []
        serve_a_good_client(listener.address, CLIENT)
        assert resident_bytes() - before < GROWTH_MAX
    with listening(note, stranger_server) as impostor:
        refused(impostor.address, CLIENT)
    assert len(asked) == 1


def test_keys_where_the_server_has_none_are_refused(listener):
    assert "give keys on both sides or on neither" in refused(listener.address, CLIENT)


def test_no_secret_is_logged(caplog):
    with caplog.at_level(0), listening(doubling, SERVER) as listener:
        serve_a_good_client(listener.address, CLIENT)
        refused(listener.address, None)
    assert SERVER.secret not in caplog.text
    assert CLIENT.secret not in caplog.text


def test_a_fault_of_one_client_is_not_the_fault_of_another(listener):
    header, body, ids = frames_of(a_read(1, request=5))
    with connected(listener.address) as (network, channel), raw_peer.greet(listener.address) as bad:
        for each in range(50):
            raw_peer.send(bad, header, body[:-1], ids)
            channel.send(a_read(each, request=each))
            got = get(network, channel)
            assert not isinstance(got.body, Failed)
            assert values(got) == [2 * each]
        until(lambda: listener.refused == 50)  # else its close, with answers unread, drops frames
