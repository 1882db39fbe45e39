"""The network in memory: a function of its seed, with the faults that were asked for and no others."""

from __future__ import annotations

import threading
import time
from collections import Counter

import pytest

from bagpipe.errors import ConfigError, WireError
from bagpipe.wire.messages import Write
from bagpipe.wire.recovery_messages import Confirm, Confirmed
from benchmarks.simulated import SimulatedNetwork
from harness.wire import a_read, answer, ask, doubling, get, values


def history(seed, **faults):
    """What a server sees and a client gets of a hundred requests, and when."""
    network = SimulatedNetwork(seed, **faults)
    seen = []

    def note(peer, message, reply):
        seen.append(message.request)
        reply(answer(message, Confirmed()))

    network.listen("server", note)
    channel = network.connect("server")
    for request in range(100):
        channel.send(ask(Confirm(), request=request))
    got = []
    while network.wait([channel], 5.0):
        message = channel.receive()
        got.append((message.request, network.now()))
    return seen, got


FAULTS = {"delay": (0.001, 0.1), "loss": 0.2, "duplicate": 0.2, "reorder": 0.2}


def test_a_run_is_a_function_of_its_seed():
    assert history(1, **FAULTS) == history(1, **FAULTS)
    assert history(1, **FAULTS) != history(2, **FAULTS)


def test_without_faults_everything_arrives_once_in_order_and_at_once():
    seen, got = history(0)
    assert seen == list(range(100))
    assert got == [(request, 0.0) for request in range(100)]


def test_delays_alone_keep_the_order():
    seen, got = history(0, delay=(0.01, 0.1))
    assert seen == [request for request, _ in got] == list(range(100))
    assert all(0.02 <= at <= 0.2 for _, at in got)


def test_some_are_lost():
    seen, got = history(0, loss=0.2)
    assert 60 < len(seen) < 95
    assert 40 < len(got) < len(seen)
    assert len(set(seen)) == len(seen)


def test_some_come_twice():
    seen, _ = history(0, duplicate=0.2)
    counts = Counter(seen)
    assert set(counts) == set(range(100))
    assert set(counts.values()) == {1, 2}


def test_some_are_overtaken():
    seen, _ = history(0, reorder=0.2, delay=(0.0, 0.01))
    assert sorted(seen) == list(range(100))
    assert seen != sorted(seen)


def test_the_link_takes_its_time_for_bytes_each_way():
    network = SimulatedNetwork(bytes_per_second=1e6, delay=(0.5, 0.5))
    network.listen("server", lambda peer, message, reply: reply(answer(message, Confirmed())))
    channels = [network.connect("server") for _ in range(2)]
    for channel in channels:
        channel.send(ask(Write(0, 1, 0, []), b"", bytes(1_000_000)))
    ends = []
    for channel in channels:
        get(network, channel)
        ends.append(network.now())
    assert ends == pytest.approx([2.0, 3.0], abs=0.01)


def test_in_real_time_the_link_takes_at_least_its_time():
    network = SimulatedNetwork(bytes_per_second=1e6, real_time=True)
    network.listen("server", lambda peer, message, reply: reply(answer(message, Confirmed())))
    channel = network.connect("server")
    start = time.monotonic()
    channel.send(ask(Write(0, 1, 0, []), b"", bytes(100_000)))
    get(network, channel)
    assert time.monotonic() - start >= 0.1
    network.close()


def test_in_real_time_threads_may_use_it_at_once():
    network = SimulatedNetwork(3, real_time=True, delay=(0.0, 0.001), reorder=0.3)
    network.listen("server", doubling)
    wrong = []

    def client(first):
        channel = network.connect("server")
        for each in range(first, first + 50):
            channel.send(a_read(each, request=each))
            got = get(network, channel)
            wrong.extend([each] if (got.request, values(got)) != (each, [2 * each]) else [])
        channel.close()

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
    channel = network.connect("nobody")
    assert network.now() == 0
    channel.send(ask(Confirm()))
    assert network.wait([channel], 3600) == []
    assert network.now() == 3600


def test_a_server_that_died_loses_what_is_sent_and_another_may_take_its_place():
    network = SimulatedNetwork()
    dead = network.listen("server", doubling)
    with pytest.raises(WireError, match="server is in use"):
        network.listen("server", doubling)
    channel = network.connect("server")
    channel.send(a_read(1))
    dead.close()
    assert network.wait([channel], 1) == []
    network.listen("server", doubling)
    channel.send(a_read(2))
    assert values(get(network, channel)) == [4]


def test_the_sender_may_use_its_buffers_again():
    network = SimulatedNetwork()
    network.listen("server", doubling)
    channel = network.connect("server")
    message = a_read(1, 2)
    channel.send(message)
    message.buffers[0][0] = 77
    assert values(get(network, channel)) == [2, 4]


@pytest.mark.parametrize(
    ("settings", "text"),
    [
        ({"loss": 1.5}, "loss is 1.5"),
        ({"reorder": -0.1}, "reorder is -0.1"),
        ({"delay": (0.2, 0.1)}, "delay is"),
        ({"bytes_per_second": 0}, "bytes_per_second is 0"),
    ],
)
def test_faults_that_make_no_sense_are_refused(settings, text):
    with pytest.raises(ConfigError, match=text):
        SimulatedNetwork(**settings)
