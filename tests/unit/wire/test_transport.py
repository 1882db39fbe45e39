"""Connections and listeners: one contract for TCP, TLS and Unix sockets, and for the simulation."""

from __future__ import annotations

import logging
import os
import socket
import threading
import time
import weakref
from contextlib import contextmanager

import numpy as np
import pytest

from bagpipe.errors import ConfigError, DeadlineError, WireError
from bagpipe.wire import stream
from bagpipe.wire.connection import PeerGoneError
from bagpipe.wire.keys import new_keys, parse_address
from bagpipe.wire.limits import LIMITS, Limits
from bagpipe.wire.listener import Listener
from bagpipe.wire.messages import AskStats, Failed, Message, NotYet, Rows, Write, Written
from bagpipe.wire.recovery_messages import Confirm, Confirmed
from bagpipe.wire.stream import SocketConnection, SocketNetwork
from benchmarks.simulated import SimulatedNetwork
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
    until,
    values,
)

SERVER, CLIENT = new_keys()
ROOMY = Limits(buffer_bytes=MB, message_bytes=MB)


@pytest.fixture(autouse=True)
def _nothing_left_behind():
    with nothing_left_behind():
        yield


@contextmanager
def sockets(handler, keys=(None, None), local=False):
    with listening(handler, keys[0], ROOMY) as listener:
        network, connections = SocketNetwork(keys[1], ROOMY, local=local), []

        def connect():
            connections.append(network.connect(listener.address, 10.0))
            assert connections[-1].shares_host == local
            return connections[-1]

        try:
            yield connect, listener
        finally:
            for connection in connections:
                connection.close()


@contextmanager
def simulation(handler, real_time=False):
    network = SimulatedNetwork(real_time=real_time, limits=ROOMY)
    listener = network.listen("server", handler)
    yield lambda: network.connect("server", 10.0), listener
    listener.close()
    network.close()


KINDS = {
    "tcp": sockets,
    "tls": lambda handler: sockets(handler, (SERVER, CLIENT)),
    "unix": lambda handler: sockets(handler, local=True),
    "simulated": simulation,
    "simulated in real time": lambda handler: simulation(handler, real_time=True),
}
ON_SOCKETS = ["tcp", "tls", "unix"]


@pytest.fixture(params=KINDS)
def transport(request):
    return KINDS[request.param]


@pytest.fixture(params=ON_SOCKETS)
def on_sockets(request):
    return KINDS[request.param]


def test_requests_are_answered(transport):
    with transport(doubling) as (connect, _):
        connection = connect()
        with pytest.raises(TimeoutError):
            connection.receive(0.0)
        got = call(connection, a_read(1, 2, 3, request=5))
        assert (got.run, got.request, values(got)) == (RUN, 5, [2, 4, 6])


@pytest.mark.parametrize("count", [0, 1, 1000, 2047, 2048, 4096, 5000, 100_000])
def test_buffers_of_every_size_travel_unaltered(transport, count):
    with transport(doubling) as (connect, _):
        connection, ids = connect(), np.arange(count)
        call(connection, ask(Confirm()))  # it says who it is, before it sends much
        for request in range(3):
            assert values(call(connection, a_read(*ids, request=request))) == (2 * ids).tolist()


def test_requests_sent_ahead_are_answered_in_order(transport):
    with transport(doubling) as (connect, _):
        connection = connect()
        for request in range(20):
            connection.send(a_read(request, request=request), 10.0)
        answers = [get(connection) for _ in range(20)]
        assert [(each.request, values(each)) for each in answers] == [(each, [2 * each]) for each in range(20)]


def test_each_connection_is_a_peer_of_its_own_whose_state_ends_with_it(transport):
    closed = []

    class State:
        def close(self):
            closed.append(self)

    def note(peer, message):
        if peer.state is None:
            peer.state = State()
            peer.admit()
        states.append(peer.state)
        return Confirmed(), ()

    states = []
    with transport(note) as (connect, _):
        one, other = connect(), connect()
        for connection in (one, one, other):
            call(connection, ask(Confirm()))
        assert states[0] is states[1] is not states[2]
        one.close()
        until(lambda: closed == [states[0]])


def test_a_handler_that_waits_holds_up_nobody_else_and_tells_its_peer_why(transport):
    gate = []

    def wait(peer, message):
        if message.request == 1:
            peer.still_waiting("waits for a gate", 3)
            peer.give_back()
            peer.reply(Confirmed())
            return None
        return Confirmed(), ()

    with transport(admitted(wait)) as (connect, _):
        waiting, other = connect(), connect()
        waiting.send(ask(Confirm(), request=1), 10.0)
        assert call(other, ask(Confirm(), request=2)).body == Confirmed()
        gate.append(1)
        assert get(waiting).body == NotYet("waits for a gate", 3)
        assert get(waiting).body == Confirmed()


def test_handlers_of_different_connections_run_at_once(on_sockets):
    both, release = threading.Barrier(2), threading.Event()

    def handler(peer, message):
        if message.request < 2:
            both.wait(10)
        if message.request == 0:
            release.wait(10)
        return Confirmed(), ()

    with on_sockets(admitted(handler)) as (connect, _):
        held, free = connect(), connect()
        held.send(ask(Confirm(), request=0), 10.0)
        assert call(free, ask(Confirm(), request=1)).request == 1
        assert call(free, ask(Confirm(), request=2)).request == 2
        release.set()
        assert get(held).request == 0


def test_what_a_handler_raises_on_purpose_is_told(transport):
    with transport(doubling) as (connect, _):
        assert call(connect(), ask(AskStats())).body == Failed("BagpipeError", "no statistics today")


def test_what_goes_wrong_inside_is_logged_and_not_told(transport, caplog):
    with transport(doubling) as (connect, _), caplog.at_level(logging.ERROR):
        connection = connect()
        got = call(connection, ask(Failed("", ""))).body
        assert got.error == "BagpipeError"
        assert "failed inside" in got.message
        assert "a secret of memory" in caplog.text
        assert values(call(connection, a_read(1))) == [2]


@pytest.mark.parametrize("error", [ConnectionResetError, BrokenPipeError, TimeoutError, FileNotFoundError])
def test_an_error_of_another_connection_of_the_handler_is_a_failure_and_not_its_peer_gone(transport, error, caplog):
    """Else it would ask for ever, on one new connection after the other."""

    def handler(peer, message):
        raise error("a store far away")

    with transport(admitted(handler)) as (connect, _), caplog.at_level(logging.ERROR):
        got = call(connect(), ask(Confirm())).body
    assert "failed inside" in got.message
    assert "a store far away" in caplog.text


def test_who_answers_one_that_is_gone_is_told(on_sockets):
    told, begun, gone = [], threading.Event(), threading.Event()

    def handler(peer, message):
        begun.set()
        gone.wait(10.0)
        try:
            while True:
                peer.reply(Rows(0), [memoryview(bytes(MB // 2))] * 2)
        except PeerGoneError:
            told.append(1)
            raise

    with on_sockets(admitted(handler)) as (connect, listener):
        connection = connect()
        connection.send(ask(Confirm(), request=1), 10.0)
        begun.wait(10)
        connection.close()
        gone.set()
        until(lambda: told == [1])
        assert listener.refused == 0


def test_an_answer_that_is_too_long_fails_for_its_own_request_only(transport):
    def handler(peer, message):
        return (Rows(0), [memoryview(bytes(2 << 20))]) if message.request == 1 else (Confirmed(), ())

    with transport(admitted(handler)) as (connect, _):
        connection = connect()
        got = call(connection, ask(Confirm(), request=1)).body
        assert got.error == "WireError"
        assert "buffer 0 has 2097152 bytes" in got.message
        assert call(connection, ask(Confirm(), request=2)).body == Confirmed()


def test_a_message_that_is_too_long_is_not_sent(transport):
    with transport(doubling) as (connect, _):
        connection = connect()
        with pytest.raises(WireError, match="ask for fewer rows"):
            connection.send(ask(Rows(0), bytes(2 << 20)), 10.0)
        assert values(call(connection, a_read(1))) == [2]


def test_a_second_close_does_nothing(transport):
    with transport(doubling) as (connect, listener):
        connection = connect()
        connection.close()
        connection.close()
        listener.close()
        listener.close()


@pytest.mark.parametrize(("server", "client"), [(None, None), (SERVER, CLIENT)], ids=["plain", "tls"])
def test_a_buffer_of_exactly_the_allowed_length_travels_both_ways(server, client):
    echo = admitted(lambda peer, message: (Rows(0), message.buffers))
    limits = Limits(buffer_bytes=MB, message_bytes=2 * MB)
    with listening(echo, server, limits) as listener, connected(listener.address, client, limits) as connection:
        call(connection, ask(Rows(0)))
        assert call(connection, ask(Rows(0), bytes(MB))).buffers[0].nbytes == MB


def test_many_clients_in_threads_of_their_own_are_answered(on_sockets):
    failures = []
    with on_sockets(doubling) as (connect, _):

        def client(connection, first):
            for each in range(first, first + 100):
                got = call(connection, a_read(each, request=each))
                if (got.request, values(got)) != (each, [2 * each]):
                    failures.append(each)

        threads = [threading.Thread(target=client, args=(connect(), 1000 * each)) for each in range(6)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
    assert failures == []


def test_message_numbers_reach_their_ends(transport):
    with transport(doubling) as (connect, _):
        got = call(connect(), Message(b"\xff" * 16, (1 << 32) - 1, (1 << 64) - 1, Confirm()))
        assert (got.run, got.generation, got.request) == (b"\xff" * 16, (1 << 32) - 1, (1 << 64) - 1)


# What is slow, and what stops


def a_pair(limits=SHORT):
    """Two ends of a connection."""
    one, other = socket.socketpair()
    return SocketConnection(one, "one", limits), other


def test_a_message_that_stops_in_the_middle_breaks_the_connection_and_is_no_silence():
    """Whoever took it for silence would read the rest of it as the beginning of the next one."""
    letter = b"".join(map(bytes, stream.encode(a_read(1, 2))))
    for end in (1, 50, 88, 90, len(letter) - 1):
        connection, other = a_pair()
        other.sendall(letter[:end])
        with pytest.raises(ConnectionAbortedError, match="stopped in the middle"):
            connection.receive(0.0)
        connection.close()
        other.close()


def drip(other, letter, pieces, pause_s):
    """Send it in so many pieces, with pauses."""
    size = -(-len(letter) // pieces)
    for start in range(0, len(letter), size):
        time.sleep(pause_s)
        try:
            other.sendall(letter[start : start + size])
        except OSError:
            return


def dripped(limits, pieces, pause_s):
    """The outcome of a message that comes so."""
    connection, other = a_pair(limits)
    letter = b"".join(map(bytes, stream.encode(a_read(*range(2000)))))
    sender = threading.Thread(target=drip, args=(other, letter, pieces, pause_s))
    sender.start()
    try:
        return connection.receive(10.0)
    finally:
        connection.close()
        sender.join()
        other.close()


def test_who_keeps_to_the_rate_is_not_cut_however_long_it_takes():
    began = time.monotonic()
    got = dripped(Limits(stall_s=0.5, bytes_per_second=10_000), 15, 0.1)
    assert np.frombuffer(got.buffers[0], np.int64).tolist() == list(range(2000))
    assert time.monotonic() - began > 1.0  # more than the grace


def test_who_sends_a_little_now_and_then_is_cut_long_before_the_whole_would_be_due():
    """16 KB at a rate that would allow 160 s: each pause is short enough, all of them are not."""
    with pytest.raises(ConnectionAbortedError, match="stopped in the middle"):
        dripped(Limits(stall_s=0.5, bytes_per_second=100_000), 1000, 0.2)


def test_room_that_comes_late_does_not_make_a_message_late():
    """While there is no memory for a message its bytes can't come."""
    connection, other = a_pair(Limits(stall_s=0.2, bytes_per_second=1 << 20))
    letter = b"".join(map(bytes, stream.encode(ask(Write(0, 1, 0, []), b"", bytes(4 * MB)))))
    sender = threading.Thread(target=other.sendall, args=(letter,))
    sender.start()
    got = connection.receive(10.0, lambda _: time.sleep(0.6) or True)
    assert got.buffers[1].nbytes == 4 * MB
    sender.join()
    connection.close()
    other.close()


def test_a_message_without_room_is_dropped_and_the_next_one_is_read():
    connection, other = a_pair(LIMITS)
    sender = threading.Thread(
        target=lambda: [
            other.sendall(b"".join(map(bytes, stream.encode(message))))
            for message in (ask(Write(0, 1, 0, []), b"", bytes(MB), request=1), a_read(3, request=2))
        ]
    )
    sender.start()
    with pytest.raises(stream.DroppedError) as dropped:
        connection.receive(10.0, lambda head: head.request != 1)
    assert (dropped.value.head.request, dropped.value.head.num_bytes > MB) == (1, True)
    assert connection.receive(10.0).request == 2
    sender.join()
    connection.close()
    other.close()


def test_who_takes_nothing_is_given_up_in_time():
    connection, other = a_pair()
    send = lambda: [connection.send(ask(Rows(0), bytes(MB - 100)), 0.1) for _ in range(100)]  # noqa: E731
    with pytest.raises(TimeoutError, match="nothing was taken"):
        send()
    connection.close()
    other.close()


def test_who_takes_it_too_slowly_is_given_up_too():
    connection, other = a_pair(Limits(bytes_per_second=1 << 40))
    stop = threading.Event()

    def take():
        while not stop.wait(0.01):
            other.recv(MB // 20)

    taker = threading.Thread(target=take)
    taker.start()
    with pytest.raises(TimeoutError, match="nothing was taken"):
        connection.send(ask(Rows(0), bytes(60 * MB)), 0.2)  # else it would take some twelve seconds
    stop.set()
    taker.join()
    connection.close()
    other.close()


def test_an_interrupt_from_another_thread_ends_the_wait(on_sockets):
    with on_sockets(doubling) as (connect, _):
        connection = connect()
        timer = threading.Timer(0.05, connection.interrupt)
        timer.start()
        with pytest.raises(ConnectionError):
            connection.receive(None)
        timer.join()


# Listeners


def test_a_listener_that_can_not_end_in_time_says_so_and_frees_its_port():
    release, busy = threading.Event(), threading.Event()

    def handler(peer, message):
        busy.set()
        release.wait(20)

    with listening(admitted(handler)) as listener, connected(listener.address) as connection:
        connection.send(ask(Confirm()), 10.0)
        busy.wait(10)
        with pytest.raises(DeadlineError, match=r"1 requests at .* are still being handled after 0.05 s: bagpipe-peer"):
            listener.close(timeout_s=0.05)
        Listener(listener.address, doubling).close()
        release.set()


def test_a_listener_closes_while_peers_shake_hands_and_others_are_idle():
    with listening(doubling, SERVER) as listener:
        idle = socket.create_connection(parse_address(listener.address))
        halfway = socket.create_connection(parse_address(listener.address))
        halfway.sendall(b"\x16\x03\x01\x02\x00\x01")
        with connected(listener.address, CLIENT) as connection:
            call(connection, a_read(1))
            listener.close()
            with pytest.raises(OSError):  # noqa: PT011 - however it ended
                get(connection)
        idle.close()
        halfway.close()


def test_connections_come_and_go_while_it_closes():
    """Whoever comes then is served or refused, and nothing of it stays (the fixture looks)."""
    for _ in range(10):
        with listening() as listener:
            stop = threading.Event()

            def knock(listener=listener, stop=stop):
                while not stop.is_set():
                    try:
                        with connected(listener.address) as connection:
                            call(connection, a_read(1))
                    except (OSError, WireError):
                        continue

            threads = [threading.Thread(target=knock) for _ in range(3)]
            for thread in threads:
                thread.start()
            time.sleep(0.02)
            listener.close()
            stop.set()
            for thread in threads:
                thread.join()


def test_too_many_connections_are_refused(caplog):
    with listening(limits=Limits(connections=2)) as listener:
        with connected(listener.address) as one, connected(listener.address) as two:
            call(one, a_read(1))
            call(two, a_read(1))
            with connected(listener.address) as three, pytest.raises(OSError):  # noqa: PT011
                call(three, a_read(1))
        until(lambda: "refused a connection: there are 2 connections" in caplog.text)
        assert listener.refused == 1


def test_where_no_thread_can_be_started_the_listener_goes_on(monkeypatch, caplog):
    with listening() as listener:
        start = threading.Thread.start

        def fail(thread):
            if thread.name.startswith("bagpipe-peer"):
                raise RuntimeError("can't start new thread")
            start(thread)

        monkeypatch.setattr(threading.Thread, "start", fail)
        with connected(listener.address) as connection, pytest.raises(OSError):  # noqa: PT011
            call(connection, a_read(1))
        monkeypatch.undo()
        with connected(listener.address) as connection:
            assert values(call(connection, a_read(1))) == [2]
        assert "refused a connection: can't start new thread" in caplog.text


def test_what_an_answer_took_is_let_go_of_when_it_has_left():
    made = []

    def handler(peer, message):
        rows = np.zeros(1000, np.float32)
        made.append(weakref.ref(rows))
        return Rows(0), [memoryview(b""), rows.data]

    with listening(admitted(handler)) as listener, connected(listener.address) as connection:
        call(connection, ask(Confirm()))
        until(lambda: made[0]() is None)


# Addresses and keys


@pytest.mark.parametrize("host", ["0.0.0.0", "10.1.2.3", "[::]", "example.org"])
def test_off_this_machine_keys_are_needed_unless_none_is_chosen_by_name(host):
    for make in (lambda: Listener(f"{host}:0", doubling), lambda: SocketNetwork().connect(f"{host}:1234", 1.0)):
        with pytest.raises(ConfigError, match=r"bagpipe keys new.*wire.security = \"none\""):
            make()


def test_all_interfaces_can_be_listened_on_in_the_clear_by_name_or_with_keys():
    for server, client in (("none", None), (SERVER, CLIENT)):
        listener = Listener("0.0.0.0:0", doubling, security=server)
        with connected(listener.address.replace("0.0.0.0", "127.0.0.1"), client) as connection:
            assert values(call(connection, a_read(3))) == [6]
        listener.close()


def has_ipv6():
    try:
        with socket.socket(socket.AF_INET6) as probe:
            probe.bind(("::1", 0))
    except OSError:
        return False
    return True


@pytest.mark.parametrize("name", ["localhost", "[::1]"])
@pytest.mark.parametrize("local", [False, True])
@pytest.mark.parametrize(("server", "client"), [(None, None), (SERVER, CLIENT)], ids=["plain", "tls"])
def test_this_machine_has_other_names(name, local, server, client):
    if name != "localhost" and not has_ipv6():
        pytest.skip("no IPv6 here")
    with listening(doubling, server, host=name) as listener:
        assert listener.address.startswith(f"tcp://{name}:")
        with connected(listener.address, client, local=local) as connection:
            assert connection.shares_host == local
            assert values(call(connection, a_read(3))) == [6]


def test_a_name_of_an_ipv6_address_can_be_listened_on(monkeypatch):
    if not has_ipv6():
        pytest.skip("no IPv6 here")
    real = socket.getaddrinfo
    monkeypatch.setattr(
        socket, "getaddrinfo", lambda host, *rest, **more: real("::1" if host == "six" else host, *rest, **more)
    )
    with listening(doubling, "none", host="six") as listener, connected(listener.address, "none") as connection:
        assert values(call(connection, a_read(3))) == [6]


def test_without_unix_sockets_that_tell_their_user_everybody_takes_tcp(monkeypatch):
    monkeypatch.delattr(socket, "SO_PEERCRED")
    with listening() as listener, connected(listener.address, local=True) as connection:
        assert not connection.shares_host
        assert values(call(connection, a_read(3))) == [6]


def test_a_unix_socket_whose_name_is_taken_by_another_is_not_waited_for():
    """Whoever holds the name takes nothing from its backlog: TCP does."""
    with listening() as listener:
        pass
    where = parse_address(listener.address)
    with socket.socket(socket.AF_UNIX) as squatter:
        squatter.bind(stream.unix_name(where))
        squatter.listen(0)
        queue = []
        for _ in range(4):
            queue.append(socket.socket(socket.AF_UNIX))
            queue[-1].setblocking(False)
            queue[-1].connect_ex(stream.unix_name(where))
        again = Listener(listener.address, doubling, limits=SHORT)
        with connected(again.address, local=True) as connection:
            assert not connection.shares_host
            assert values(call(connection, a_read(3))) == [6]
        again.close()
        for each in queue:
            each.close()


@pytest.mark.parametrize("security", [CLIENT, "plain", "curve", False])
def test_security_that_makes_no_sense_is_refused(security):
    with pytest.raises(ConfigError, match=r"a client|security is"):
        Listener("127.0.0.1:0", doubling, security=security)


@pytest.mark.parametrize(
    "text", ["", "host", "tcp://host", ":1", "host:x", "host:70000", "::1:5", "ipc://x:1", "a b:1", "host:-1", "host:²"]
)
def test_what_is_no_address_is_refused(text):
    with pytest.raises(ConfigError, match="address"):
        parse_address(text)


def test_an_address_needs_a_port_to_connect_to():
    with pytest.raises(ConfigError, match="has port 0"):
        SocketNetwork().connect("127.0.0.1:0", 1.0)


@pytest.mark.parametrize("host", ["a" * 64, "a..b"])
def test_a_name_that_no_host_can_have_is_refused(host):
    """Not to be tried again until the deadline, and not with an error of the codec of names."""
    with pytest.raises(ConfigError, match="can't be the name of a host"):
        SocketNetwork("none").connect(f"{host}:5000", 1.0)


def test_the_log_says_why_a_stranger_was_refused(caplog):
    def refuse(peer, message):
        raise WireError("a message of another run")

    with listening(refuse) as listener:
        with connected(listener.address) as connection:
            assert call(connection, a_read(3)).body.message == "a message of another run"
        until(lambda: "has not said who it is: it was refused: a message of another run" in caplog.text)


@pytest.mark.parametrize("host", ["203.0.113.1", "no-such-host.invalid"])
def test_an_address_that_is_not_ours_is_named(host):
    with pytest.raises(WireError, match=rf"tcp://{host}:0 can't be listened on"):
        Listener(f"{host}:0", doubling, security="none")


def test_descriptors_go_to_processes_of_this_host_only():
    taken = []

    def take(peer, message):
        descriptor = peer.take_descriptor()
        taken.append(None if descriptor is None else os.read(descriptor, 4))
        if descriptor is not None:
            assert not os.get_inheritable(descriptor)
            os.close(descriptor)
        return Written(0), ()

    for local in (True, False):
        reading, writing = os.pipe()
        os.write(writing, b"news")
        with listening(admitted(take)) as listener, connected(listener.address, local=local) as connection:
            connection.send(ask(Confirm()), 10.0, descriptor=reading)
            get(connection)
            call(connection, ask(Confirm()))
        os.close(reading)
        os.close(writing)
    assert taken == [b"news", None, None, None]
