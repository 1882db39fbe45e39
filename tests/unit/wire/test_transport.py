"""Channels, listeners and networks: one contract for sockets, with and without keys, and for the simulation."""

from __future__ import annotations

import logging
import threading
from contextlib import contextmanager

import numpy as np
import pytest
from bagpipe.wire.endpoint import parse_address
from bagpipe.wire.sockets import SocketNetwork

from bagpipe.errors import ConfigError, DeadlineError, WireError
from bagpipe.wire.keys import new_keys
from bagpipe.wire.limits import Limits
from bagpipe.wire.listener import Listener
from bagpipe.wire.messages import AskStats, Failed, Message, Rows, Write
from bagpipe.wire.recovery_messages import Confirm, Confirmed
from benchmarks.simulated import SimulatedNetwork
from harness.wire import (
    RUN,
    SHORT,
    a_read,
    answer,
    ask,
    connected,
    doubling,
    get,
    listening,
    nothing_left_behind,
    until,
    values,
)

SERVER, CLIENT = new_keys()
LIMITS = Limits(buffer_bytes=1 << 20, message_bytes=1 << 20)


@pytest.fixture(autouse=True)
def _nothing_left_behind():
    with nothing_left_behind():
        yield


@contextmanager
def sockets(handler, keys=(None, None)):
    with listening(handler, keys[0], LIMITS) as listener:
        network = SocketNetwork(keys[1], LIMITS)
        channels = []

        def connect():
            channels.append(network.connect(listener.address))
            return channels[-1]

        yield network, connect, listener
        for channel in channels:
            channel.close()
        network.close()


@contextmanager
def simulation(handler, real_time=False):
    network = SimulatedNetwork(real_time=real_time, limits=LIMITS)
    listener = network.listen("server", handler)
    yield network, lambda: network.connect("server"), listener
    listener.close()
    network.close()


KINDS = {
    "sockets": sockets,
    "curve": lambda handler: sockets(handler, (SERVER, CLIENT)),
    "simulated": simulation,
    "simulated in real time": lambda handler: simulation(handler, real_time=True),
}


@pytest.fixture(params=KINDS)
def transport(request):
    return KINDS[request.param]


def test_requests_are_answered(transport):
    with transport(doubling) as (network, connect, _):
        channel = connect()
        assert network.wait([channel], 0) == []
        assert channel.receive() is None
        channel.send(a_read(1, 2, 3, request=5))
        got = get(network, channel)
        assert (got.run, got.request, values(got)) == (RUN, 5, [2, 4, 6])


def test_large_buffers_travel_unaltered(transport):
    with transport(doubling) as (network, connect, _):
        channel = connect()
        ids = np.arange(100_000)
        channel.send(a_read(*ids))
        assert values(get(network, channel)) == (2 * ids).tolist()


def test_several_requests_are_in_flight_and_each_answer_has_its_number(transport):
    with transport(doubling) as (network, connect, _):
        channel = connect()
        for request in range(20):
            channel.send(a_read(request, request=request))
        answers = [get(network, channel) for _ in range(20)]
        assert {each.request: values(each) for each in answers} == {each: [2 * each] for each in range(20)}


def test_only_channels_with_something_to_receive_are_named(transport):
    with transport(doubling) as (network, connect, _):
        silent, asking = connect(), connect()
        asking.send(a_read(4))
        assert network.wait([silent, asking], 10) == [asking]
        assert network.wait([silent], 0.05) == []


def test_each_connection_is_a_peer_of_its_own_also_after_a_fresh_start(transport):
    peers = []

    def note(peer, message, reply):
        peers.append(peer)
        reply(answer(message, Confirmed()))

    with transport(note) as (network, connect, _):
        one, other = connect(), connect()
        for channel in (one, one, other):
            channel.send(ask(Confirm()))
            get(network, channel)
        one.reconnect()
        one.send(ask(Confirm()))
        get(network, one)
    assert peers[0] == peers[1]
    assert len(set(peers)) == 3


def test_what_was_under_way_is_lost_with_a_fresh_start(transport):
    parked = []

    def park(peer, message, reply):
        parked.append((message, reply)) if message.request == 1 else reply(answer(message, Confirmed()))

    with transport(park) as (network, connect, _):
        channel = connect()
        channel.send(ask(Confirm(), request=1))
        network.wait([channel], 0.1)
        until(lambda: bool(parked))
        channel.reconnect()
        message, reply = parked[0]
        reply(answer(message, Confirmed()))
        channel.send(ask(Confirm(), request=2))
        assert get(network, channel).request == 2


def test_an_answer_may_come_later_and_from_the_thread_of_another_request(transport):
    parked = []

    def park(peer, message, reply):
        if message.request == 1:
            parked.append((message, reply))
            return
        reply(answer(message, Confirmed()))
        for waiting, late_reply in parked:
            late_reply(answer(waiting, Confirmed()))

    with transport(park) as (network, connect, _):
        reader, writer = connect(), connect()
        reader.send(ask(Confirm(), request=1))
        assert network.wait([reader], 0.1) == []
        until(lambda: bool(parked))
        writer.send(ask(Confirm(), request=2))
        assert get(network, writer).request == 2
        assert get(network, reader).request == 1


def test_what_a_handler_raises_on_purpose_is_told(transport):
    with transport(doubling) as (network, connect, _):
        channel = connect()
        channel.send(ask(AskStats()))
        assert get(network, channel).body == Failed("BagpipeError", "no statistics today")


def test_what_goes_wrong_inside_is_logged_and_not_told(transport, caplog):
    with transport(doubling) as (network, connect, _), caplog.at_level(logging.ERROR):
        channel = connect()
        channel.send(ask(Failed("", "")))
        got = get(network, channel).body
        assert got.error == "BagpipeError"
        assert "failed inside" in got.message
        assert "secret" not in got.message
        assert "a secret of memory" in caplog.text
        channel.send(a_read(1))
        assert values(get(network, channel)) == [2]


def test_an_answer_that_is_too_long_fails_for_its_own_request_only(transport, caplog):
    parked = []

    def park(peer, message, reply):
        if message.request == 1:
            parked.append((message, reply))
            return
        for waiting, late_reply in parked:
            late_reply(answer(waiting, Rows(0), bytes(2 << 20)))
        reply(answer(message, Confirmed()))

    with transport(park) as (network, connect, _):
        reader, writer = connect(), connect()
        reader.send(ask(Confirm(), request=1))
        network.wait([reader], 0.1)
        until(lambda: bool(parked))
        writer.send(ask(Confirm(), request=2))
        assert get(network, writer).body == Confirmed()
        got = get(network, reader).body
        assert got.error == "WireError"
        assert "buffer 0 has 2097152 bytes" in got.message


def test_a_message_that_is_too_long_is_not_sent(transport):
    with transport(doubling) as (_, connect, _listener), pytest.raises(WireError, match="ask for fewer rows"):
        connect().send(ask(Rows(0), bytes(2 << 20)))


def test_a_second_close_does_nothing(transport):
    with transport(doubling) as (_, connect, listener):
        channel = connect()
        channel.close()
        channel.close()
        listener.close()
        listener.close()


@pytest.mark.parametrize(("server", "client"), [(None, None), (SERVER, CLIENT)], ids=["plain", "curve"])
def test_a_buffer_of_exactly_the_allowed_length_travels_both_ways(server, client):
    limits = Limits(buffer_bytes=1 << 20, message_bytes=2 << 20)
    echo = lambda peer, message, reply: reply(answer(message, Rows(0), message.buffers[0]))  # noqa: E731
    with listening(echo, server, limits) as listener, connected(listener.address, client, limits) as (network, channel):
        channel.send(ask(Rows(0), bytes(1 << 20)))
        assert get(network, channel).buffers[0].nbytes == 1 << 20


def test_all_threads_of_a_listener_work_at_once_and_the_free_one_takes_the_next():
    both, release = threading.Barrier(2), threading.Event()

    def handler(peer, message, reply):
        if message.request < 2:
            both.wait(10)
        if message.request == 0:
            release.wait(10)
        reply(answer(message, Confirmed()))

    with listening(handler) as listener, connected(listener.address) as (network, channel):
        for request in range(10):
            channel.send(ask(Confirm(), request=request))
        assert sorted(get(network, channel).request for _ in range(9)) == list(range(1, 10))
        release.set()
        assert get(network, channel).request == 0


def test_a_busy_listener_reads_no_more_than_its_queue_so_that_clients_wait():
    release = threading.Event()

    def handler(peer, message, reply):
        release.wait(20)
        reply(answer(message, Confirmed()))

    limits = Limits(queue_messages=2, send_wait_s=0.3, buffer_bytes=8 << 20, message_bytes=8 << 20)
    rows = bytes(7 << 20)
    with listening(handler, limits=limits, threads=1) as listener, connected(listener.address, limits=limits) as ends:
        network, channel = ends
        sent = 0
        try:
            while sent < 50:
                channel.send(ask(Write(0, 1, 0, []), b"", rows, request=sent))
                sent += 1
        except DeadlineError as error:
            refusal = str(error)
        release.set()
        assert get(network, channel).request == 0
    assert sent < 20  # sockets buffer some, as the kernel sees fit
    assert "2 messages to tcp://" in refusal
    assert "were not taken within 0.3 s" in refusal


def test_a_reply_from_any_thread_arrives_and_wakes_whoever_waits():
    replies = []
    keep = lambda peer, message, reply: replies.append((message, reply))  # noqa: E731
    with listening(keep) as listener, connected(listener.address) as (network, channel):
        for request in range(200):
            channel.send(ask(Confirm(), request=request))
            until(lambda: bool(replies))
            message, reply = replies.pop()
            sender = threading.Thread(target=reply, args=(answer(message, Confirmed()),))
            sender.start()
            sender.join()
            assert get(network, channel).request == request


def test_many_clients_in_threads_of_their_own_are_answered():
    failures = []

    def client(address, first):
        with connected(address, limits=LIMITS) as (network, channel):
            for each in range(first, first + 100):
                channel.send(a_read(each, request=each))
                got = get(network, channel)
                if (got.request, values(got)) != (each, [2 * each]):
                    failures.append(each)

    with listening(limits=LIMITS) as listener:
        threads = [threading.Thread(target=client, args=(listener.address, 1000 * each)) for each in range(6)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
    assert failures == []


def test_replies_after_the_end_go_nowhere():
    replies = []
    keep = lambda peer, message, reply: replies.append((message, reply))  # noqa: E731
    with listening(keep) as listener, connected(listener.address) as (_, channel):
        channel.send(ask(Confirm()))
        until(lambda: bool(replies))
    message, reply = replies[0]
    reply(answer(message, Confirmed()))


def test_a_listener_that_can_not_end_in_time_says_which_thread_is_busy():
    release, busy = threading.Event(), threading.Event()

    def handler(peer, message, reply):
        busy.set()
        release.wait(20)

    with listening(handler, threads=1) as listener, connected(listener.address) as (_, channel):
        channel.send(ask(Confirm()))
        busy.wait(10)
        with pytest.raises(DeadlineError, match="bagpipe-listener-0"):
            listener.close(timeout_s=0.05)
        release.set()


def test_a_server_that_comes_back_is_found_again():
    with listening() as listener:
        address = listener.address
        with connected(address) as (network, channel):
            channel.send(a_read(1))
            get(network, channel)
            listener.close()
            until(lambda: channel.receive() is None and channel.trouble != "")
            again = Listener(address, doubling, limits=SHORT)
            channel.reconnect()
            channel.send(a_read(2))
            assert values(get(network, channel)) == [4]
            assert channel.trouble == ""
            again.close()


def test_trouble_says_that_nobody_is_there():
    with listening() as listener:
        address = listener.address
    with connected(address) as (network, channel):
        channel.send(a_read(1))
        assert network.wait([channel], 0.3) == []
        assert "is not running, or not at this address" in channel.trouble


def test_a_network_whose_channels_are_open_is_not_closed():
    network = SocketNetwork()
    channel = network.connect("127.0.0.1:9")
    with pytest.raises(WireError, match=r"tcp://127.0.0.1:9 are still open"):
        network.close()
    channel.close()
    network.close()


@pytest.mark.parametrize("host", ["0.0.0.0", "10.1.2.3", "[::]", "example.org"])
def test_off_this_machine_keys_are_needed_unless_none_is_chosen_by_name(host):
    network = SocketNetwork()
    for make in (lambda: Listener(f"{host}:0", doubling), lambda: network.connect(f"{host}:1234")):
        with pytest.raises(ConfigError, match=r"bagpipe keys new.*wire.security = \"none\""):
            make()
    network.close()


def test_all_interfaces_can_be_listened_on_in_the_clear_by_name_or_with_keys():
    for server, client in (("none", None), (SERVER, CLIENT)):
        listener = Listener("0.0.0.0:0", doubling, security=server)
        with connected(listener.address.replace("0.0.0.0", "127.0.0.1"), client) as (network, channel):
            channel.send(a_read(3))
            assert values(get(network, channel)) == [6]
        listener.close()


@pytest.mark.parametrize("name", ["localhost", "[::1]"])
def test_this_machine_has_other_names(name):
    try:
        listener = Listener(f"{name}:0", doubling)
    except WireError:
        pytest.skip("no IPv6 here")
    with connected(listener.address) as (network, channel):
        channel.send(a_read(3))
        assert values(get(network, channel)) == [6]
    listener.close()


@pytest.mark.parametrize("security", [CLIENT, "plain", False])
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
    network = SocketNetwork()
    with pytest.raises(ConfigError, match="has port 0"):
        network.connect("127.0.0.1:0")
    network.close()


def test_a_listener_without_threads_is_refused():
    with pytest.raises(ConfigError, match="0 threads"):
        Listener("127.0.0.1:0", doubling, threads=0)


def test_an_address_that_is_not_ours_is_named():
    with pytest.raises(WireError, match=r"tcp://203.0.113.1:0 can't be used"):
        Listener("203.0.113.1:0", doubling, security="none")


def test_message_numbers_reach_their_ends():
    with listening() as listener, connected(listener.address) as (network, channel):
        channel.send(Message(b"\xff" * 16, (1 << 32) - 1, (1 << 64) - 1, Confirm()))
        got = get(network, channel)
        assert (got.run, got.generation, got.request) == (b"\xff" * 16, (1 << 32) - 1, (1 << 64) - 1)
