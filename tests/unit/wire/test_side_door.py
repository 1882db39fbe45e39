"""The side door: short messages of one client by two ways, who may pass, and what happens to those who misbehave."""

from __future__ import annotations

import socket
from contextlib import contextmanager

import pytest
from bagpipe.wire.endpoint import parse_address

from bagpipe.wire import side_door, sockets
from bagpipe.wire.frames import encode
from bagpipe.wire.keys import new_keys
from bagpipe.wire.limits import LIMITS
from bagpipe.wire.listener import Listener
from bagpipe.wire.messages import Failed
from bagpipe.wire.recovery_messages import Confirm, Confirmed
from harness.wire import a_read, answer, ask, connected, doubling, get, listening, nothing_left_behind, until, values


@pytest.fixture(autouse=True)
def _nothing_left_behind():
    with nothing_left_behind():
        yield


@pytest.fixture
def by_front(monkeypatch):
    """What clients sent through ZeroMQ."""
    sent = []

    def note(socket, frames):
        sent.append(frames)
        send(socket, frames)

    send = sockets.send_frames
    monkeypatch.setattr(sockets, "send_frames", note)
    return sent


def passes(channel):
    return len(channel.sources()) == 3


@contextmanager
def stranger(listener):
    """A connection to the door of someone who keeps to nothing."""
    with socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as connection:
        connection.settimeout(10)
        connection.connect(side_door._path(parse_address(listener.address)))
        yield connection


def is_served(listener):
    with connected(listener.address) as (network, channel):
        channel.take_side_door()
        channel.send(ask(Confirm()))
        return passes(channel) and get(network, channel).body == Confirmed()


def test_short_messages_take_the_side_door_and_buffers_the_front(by_front):
    with listening() as listener, connected(listener.address) as (network, channel):
        channel.take_side_door()
        channel.send(ask(Confirm(), request=1))
        assert get(network, channel).body == Confirmed()
        assert by_front == []
        channel.send(a_read(3, request=2))
        assert values(get(network, channel)) == [6]
        assert len(by_front) == 1


def test_a_client_is_the_same_by_both_ways_and_another_after_a_fresh_start():
    peers = []

    def note(peer, message, reply):
        peers.append(peer)
        doubling(peer, message, reply)

    with listening(note) as listener, connected(listener.address) as (network, channel):
        for step in (lambda: None, channel.take_side_door, channel.reconnect, channel.take_side_door):
            step()
            for message in (ask(Confirm()), a_read(1)):
                channel.send(message)
                get(network, channel)
    assert len(set(peers[:4])) == len(set(peers[4:])) == 1
    assert peers[0] != peers[4]


def test_long_requests_and_long_answers_take_the_front(by_front):
    text = "x" * side_door.PACKET_BYTES_MAX

    def long_answer(peer, message, reply):
        reply(answer(message, Failed("StoreError", text)))

    with (
        listening(long_answer, limits=LIMITS) as listener,
        connected(listener.address, limits=LIMITS) as (net, channel),
    ):
        channel.send(ask(Confirm()))
        get(net, channel)  # answers find only those by the front who were heard there
        channel.take_side_door()
        channel.send(ask(Confirm()))
        assert get(net, channel).body.message == text
        assert len(by_front) == 1
        channel.send(ask(Failed("StoreError", text)))
        assert get(net, channel).body.message == text
        assert len(by_front) == 2


def test_many_requests_are_in_flight(by_front):
    with listening() as listener, connected(listener.address) as (network, channel):
        channel.take_side_door()
        for request in range(30):
            channel.send(ask(Confirm(), request=request))
        assert {get(network, channel).request for _ in range(30)} == set(range(30))
        assert by_front == []


def test_where_keys_are_used_there_is_no_side_door():
    server, client = new_keys()
    with listening(security=server) as listener, connected(listener.address, client) as (network, channel):
        assert side_door.enter(parse_address(listener.address), bytes(16)) is None
        channel.take_side_door()
        assert not passes(channel)
        channel.send(ask(Confirm()))
        assert get(network, channel).body == Confirmed()


def test_a_door_of_another_user_is_not_entered_and_another_user_not_let_in(monkeypatch):
    with listening() as listener:
        where = parse_address(listener.address)
        monkeypatch.setattr(side_door.os, "geteuid", lambda: 12345)
        assert side_door.enter(where, bytes(16)) is None
        with stranger(listener) as connection:
            assert connection.recv(1) == b""
        monkeypatch.undo()
        assert is_served(listener)


def test_a_name_that_is_taken_leaves_the_front():
    with socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as taken, socket.create_server(("127.0.0.1", 0)) as free:
        address = f"127.0.0.1:{free.getsockname()[1]}"
        taken.bind(side_door._path(parse_address(address)))
        free.close()
        listener = Listener(address, doubling)
        try:
            with connected(address) as (network, channel):
                channel.take_side_door()
                assert not passes(channel)
                channel.send(ask(Confirm()))
                assert get(network, channel).body == Confirmed()
        finally:
            listener.close()


def test_a_client_goes_on_by_the_front_when_the_door_is_shut():
    with listening() as listener, connected(listener.address) as (network, channel):
        channel.take_side_door()
        channel._passage._connection.shutdown(socket.SHUT_RDWR)
        assert network.wait([channel], 10) == [channel]
        assert channel.receive() is None
        assert not passes(channel)
        channel.send(ask(Confirm()))
        assert get(network, channel).body == Confirmed()


@pytest.mark.parametrize("name", [b"short", b"n" * 17, b"n" * 60, b"n" * (side_door.PACKET_BYTES_MAX + 1)])
def test_who_has_no_name_is_sent_away(name):
    with listening() as listener:
        with stranger(listener) as connection:
            connection.send(name)
            assert connection.recv(1) == b""
        assert is_served(listener)


def test_a_packet_that_is_too_long_is_cut_off():
    with listening() as listener:
        with stranger(listener) as connection:
            connection.send(b"n" * 16)
            connection.send(b"x" * (side_door.PACKET_BYTES_MAX + 1))
            assert connection.recv(1) == b""
        assert is_served(listener)


@pytest.mark.parametrize(
    "packet", [b"x", b"x" * 500, b"".join(encode(ask(Confirm())))[:-1], b"".join(encode(ask(Confirm()))) + b"x"]
)
def test_what_is_no_message_is_refused_and_counted(packet):
    with listening() as listener:
        with stranger(listener) as connection:
            connection.send(b"n" * 16)
            connection.send(packet)
            until(lambda: listener.refused == 1)
        assert is_served(listener)


def test_buffers_that_are_announced_but_can_not_come_are_refused():
    frames = encode(a_read(1))
    with listening() as listener:
        with stranger(listener) as connection:
            connection.send(b"n" * 16)
            connection.send(b"".join(frames[:2]))
            until(lambda: listener.refused == 1)
        assert is_served(listener)


def test_more_clients_than_there_is_room_for_are_sent_away(monkeypatch):
    monkeypatch.setattr(side_door, "CLIENTS_MAX", 1)
    with listening() as listener:
        with stranger(listener) as first:
            first.send(b"n" * 16)
            with stranger(listener) as second:
                assert second.recv(1) == b""
        until(lambda: not listener._side._passages)
        assert is_served(listener)


def test_a_client_that_takes_no_answers_holds_nobody_up():
    with listening() as listener, stranger(listener) as connection:
        connection.send(b"n" * 16)
        for request in range(3000):
            connection.send(b"".join(encode(ask(Confirm(), request=request))))
        assert is_served(listener)
