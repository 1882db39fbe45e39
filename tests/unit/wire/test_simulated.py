"""The network in memory: a function of its seed, with the faults that were asked for and no others."""

from __future__ import annotations

import threading
import time

import pytest

from bagpipe.errors import ConfigError, DeadlineError, WireError
from bagpipe.wire.messages import Write
from bagpipe.wire.recovery_messages import Confirm, Confirmed
from benchmarks.simulated import SimulatedNetwork
from harness.wire import a_read, ask, call, doubling, get, values


def connect(network, address="server"):
    return network.connect(address, 1.0)


def history(seed, **faults):
    """What a server sees and a client gets of a hundred requests on as many connections as it takes, and when."""
    network = SimulatedNetwork(seed, **faults)
    seen, got = [], []

    def note(peer, message):
        seen.append(message.request)
        return Confirmed(), ()

    network.listen("server", note)
    connection = connect(network)
    for request in range(100):
        try:
            connection.send(ask(Confirm(), request=request), 1.0)
            got.append((connection.receive(5.0).request, network.now()))
        except OSError:
            connection.close()
            connection = connect(network)
    return seen, got


def test_a_run_is_a_function_of_its_seed():
    faults = {"delay": (0.001, 0.1), "breaks": 0.2}
    assert history(1, **faults) == history(1, **faults)
    assert history(1, **faults) != history(2, **faults)


def test_without_faults_everything_arrives_once_in_order_and_at_once():
    assert history(0) == (list(range(100)), [(request, 0.0) for request in range(100)])


def test_delays_alone_keep_the_order_of_what_is_sent_at_once():
    network = SimulatedNetwork(0, delay=(0.01, 0.1))
    network.listen("server", doubling)
    connection = connect(network)
    for request in range(100):
        connection.send(ask(Confirm(), request=request), 1.0)
    assert [get(connection).request for _ in range(100)] == list(range(100))
    assert 0.02 <= network.now() <= 0.2


def test_a_connection_that_breaks_loses_what_was_under_way_or_delivers_it_late():
    """A request may have arrived though its connection broke: its sender can't know."""
    seen, got = history(0, breaks=0.2)
    answered = {request for request, _ in got}
    assert len(seen) == len(set(seen))
    assert 50 < len(answered) < len(seen) < 100


def test_what_an_old_connection_sent_may_arrive_after_what_a_new_one_did():
    overtaken = 0
    for seed in range(50):
        network, seen = SimulatedNetwork(seed, delay=(0.0, 1.0), breaks=0.3), []

        def note(peer, message, seen=seen):
            seen.append(message.request)
            return Confirmed(), ()

        network.listen("server", note)
        for request in range(2):
            connection = connect(network)
            try:
                connection.send(ask(Confirm(), request=request), 1.0)
            except OSError:
                continue
        network.pause(5.0)
        overtaken += seen == [1, 0]
    assert 0 < overtaken < 50


def test_a_broken_connection_is_an_error_for_both_and_its_state_is_closed():
    network, closed = SimulatedNetwork(), []

    class State:
        def close(self):
            closed.append(1)

    def handler(peer, message):
        peer.state = State()
        return Confirmed(), ()

    network.listen("server", handler)
    connection = connect(network)
    call(connection, ask(Confirm()))
    network.cut(connection)
    assert closed == [1]
    with pytest.raises(ConnectionError):
        connection.send(ask(Confirm()), 1.0)
    with pytest.raises(ConnectionError):
        connection.receive(1.0)


def test_the_link_takes_its_time_for_bytes_each_way():
    network = SimulatedNetwork(bytes_per_second=1e6, delay=(0.5, 0.5))
    network.listen("server", lambda peer, message: (Confirmed(), ()))
    connections = [connect(network) for _ in range(2)]
    for connection in connections:
        connection.send(ask(Write(0, 1, 0, []), b"", bytes(1_000_000)), 1.0)
    ends = []
    for connection in connections:
        get(connection)
        ends.append(network.now())
    assert ends == pytest.approx([2.0, 3.0], abs=0.01)


def test_in_real_time_the_link_takes_at_least_its_time():
    network = SimulatedNetwork(bytes_per_second=1e6, real_time=True)
    network.listen("server", lambda peer, message: (Confirmed(), ()))
    start = time.monotonic()
    call(connect(network), ask(Write(0, 1, 0, []), b"", bytes(100_000)))
    assert time.monotonic() - start >= 0.1
    network.close()


def test_in_real_time_threads_may_use_it_at_once():
    network = SimulatedNetwork(3, real_time=True, delay=(0.0, 0.001))
    network.listen("server", doubling)
    wrong = []

    def client(first):
        connection = connect(network)
        for each in range(first, first + 50):
            got = call(connection, a_read(each, request=each))
            wrong.extend([each] if (got.request, values(got)) != (each, [2 * each]) else [])
        connection.close()

    threads = [threading.Thread(target=client, args=(100 * each,)) for each in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    network.close()
    assert wrong == []
    assert "bagpipe-simulated" not in [thread.name for thread in threading.enumerate()]


def test_time_passes_only_by_waiting():
    network = SimulatedNetwork()
    network.listen("server", lambda peer, message: None)
    connection = connect(network)
    assert network.now() == 0
    connection.send(ask(Confirm()), 1.0)
    with pytest.raises(TimeoutError):
        connection.receive(3600)
    assert network.now() == 3600


def test_handlers_that_wait_let_others_go_on_in_an_order_of_the_seed():
    """One waits for what another does, on the clock that only waiting moves."""
    orders = set()
    for seed in range(10):
        network, arrived, order = SimulatedNetwork(seed), [], []

        def meet(peer, message, network=network, arrived=arrived, order=order):
            arrived.append(message.request)
            network.waits.until("the others", lambda: len(arrived) == 4, 60.0)
            order.append(message.request)
            return Confirmed(), ()

        network.listen("server", meet)
        connections = [connect(network) for _ in range(4)]
        for request, connection in enumerate(connections):
            connection.send(ask(Confirm(), request=request), 1.0)
        assert [get(each).request for each in connections] == list(range(4))
        assert network.now() == 0
        orders.add(tuple(order))
    assert len(orders) > 1


def test_a_handler_that_waits_for_what_never_comes_fails_at_its_deadline():
    network, told = SimulatedNetwork(), []

    def wait(peer, message):
        try:
            network.waits.until("nothing", lambda: False, 30.0)
        except DeadlineError as error:
            told.append((str(error), network.now()))
        return Confirmed(), ()

    network.listen("server", wait)
    connection = connect(network)
    connection.send(ask(Confirm()), 1.0)
    assert connection.receive(60.0).body == Confirmed()
    assert told == [("waited 30 s for nothing", 30.0)]


def test_no_thread_of_a_handler_outlives_the_network():
    network = SimulatedNetwork()
    network.listen("server", lambda peer, message: network.waits.until("nothing", lambda: False, 30.0))
    connection = connect(network)
    connection.send(ask(Confirm()), 1.0)
    with pytest.raises(TimeoutError):
        connection.receive(1.0)
    assert "bagpipe-handler" in [thread.name for thread in threading.enumerate()]
    network.close()
    assert "bagpipe-handler" not in [thread.name for thread in threading.enumerate()]


def test_a_server_that_died_breaks_its_connections_and_another_may_take_its_place():
    network = SimulatedNetwork()
    dead = network.listen("server", doubling)
    with pytest.raises(WireError, match="server is in use"):
        network.listen("server", doubling)
    connection = connect(network)
    connection.send(a_read(1), 1.0)
    dead.close()
    with pytest.raises(ConnectionError):
        connection.receive(1.0)
    with pytest.raises(ConnectionRefusedError):
        connect(network)
    network.listen("server", doubling)
    assert values(call(connect(network), a_read(2))) == [4]


def test_the_sender_may_use_its_buffers_again():
    network = SimulatedNetwork()
    network.listen("server", doubling)
    connection, message = connect(network), a_read(1, 2)
    connection.send(message, 1.0)
    message.buffers[0][0] = 77
    assert values(get(connection)) == [2, 4]


@pytest.mark.parametrize(
    ("settings", "text"),
    [
        ({"breaks": 1.5}, "breaks is 1.5"),
        ({"breaks": -0.1}, "breaks is -0.1"),
        ({"delay": (0.2, 0.1)}, "delay is"),
        ({"bytes_per_second": 0}, "bytes_per_second is 0"),
    ],
)
def test_faults_that_make_no_sense_are_refused(settings, text):
    with pytest.raises(ConfigError, match=text):
        SimulatedNetwork(**settings)
