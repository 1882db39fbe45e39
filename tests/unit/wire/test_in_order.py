"""Requests that go out ahead and are answered in order, on a network whose clock the tests move."""

from __future__ import annotations

from collections import Counter

import pytest
from bagpipe.wire.in_order import InOrder, Patience, named_error

from bagpipe.errors import DeadlineError, PipelineError, ShardError, WireError
from bagpipe.wire.messages import Failed, Message, Written
from bagpipe.wire.plan_messages import GetBatch, NotYet
from bagpipe.wire.recovery_messages import Confirmed
from benchmarks.simulated import SimulatedNetwork

RUN = bytes(range(16))


class Servers:
    """Answer number n with Written(n), and count what they are asked."""

    def __init__(self, network, names=("a",), answer=None):
        self.asked = Counter()
        self.places = {}
        self.answer = answer or (lambda number: Written(number))
        for name in names:
            network.listen(name, lambda peer, message, reply, name=name: self.handle(name, message, reply))

    def handle(self, name, message, reply):
        number = message.body.number
        self.asked[number] += 1
        self.places.setdefault(number, set()).add(name)
        body = self.answer(number)
        if body is not None:
            reply(Message(message.run, message.generation, message.request, body))


def in_order(network, names=("a",), **options):
    options.setdefault("what", lambda number: f"thing {number}")
    return InOrder(network, names, lambda number: GetBatch(number, ""), run=RUN, **options)


@pytest.mark.parametrize("seed", range(20))
def test_answers_come_in_order_whatever_the_network_does(seed):
    network = SimulatedNetwork(seed, delay=(0.0, 0.5), loss=0.3, duplicate=0.3, reorder=0.5)
    servers = Servers(network, "abc")
    answers = in_order(
        network, "abc", place=lambda number: number // 2 % 3, stop=30, patience=Patience(1.0, 900.0, 900.0)
    )
    assert [answers.take().body for _ in range(30)] == [Written(number) for number in range(30)]
    assert servers.places == {number: {"abc"[number // 2 % 3]} for number in range(30)}


def test_no_more_is_asked_than_was_allowed_and_nothing_twice_on_a_good_network():
    network = SimulatedNetwork()
    servers = Servers(network)
    answers = in_order(network, ahead=3, stop=6)
    for number in range(6):
        answers.take()
        network.wait([], 1000.0)  # while nobody listens nobody is late
        assert max(servers.asked) == min(number + 3, 5)
    assert set(servers.asked.values()) == {1}
    assert answers.next == 6


def test_what_is_lost_is_asked_again_later_and_later():
    network = SimulatedNetwork()
    lost = Counter({0: 3})

    def answer(number):
        lost[number] -= 1
        return None if lost[number] >= 0 else Written(number)

    servers = Servers(network, answer=answer)
    answers = in_order(network, ahead=1, patience=Patience(retry_s=2.0))
    assert answers.take().body == Written(0)
    assert servers.asked[0] == 4
    assert network.now() == pytest.approx(2 + 4 + 8)
    assert answers.waited_s == pytest.approx(14)


def test_a_silent_server_is_named_after_the_deadline_with_what_was_asked():
    network = SimulatedNetwork()
    answers = in_order(network, ["nowhere"], patience=Patience(deadline_s=45.0))
    with pytest.raises(DeadlineError, match="waited 45 s for thing 0 from nowhere, which gave no sign of life"):
        answers.take()


def test_a_server_that_works_on_it_is_waited_for_longer_but_not_for_ever():
    network = SimulatedNetwork()
    Servers(network, answer=lambda number: NotYet("reads a slow disk"))
    answers = in_order(network, patience=Patience(deadline_s=45.0, work_s=300.0))
    with pytest.raises(DeadlineError, match="waited 300 s for thing 0 from a, which reads a slow disk"):
        answers.take()


def test_a_server_that_comes_back_is_asked_again():
    network = SimulatedNetwork()
    answers = in_order(network, stop=5)
    with pytest.raises(DeadlineError):
        answers.take()
    Servers(network)
    assert [answers.take().body for _ in range(5)] == [Written(number) for number in range(5)]


def test_a_server_that_nothing_was_asked_of_is_not_late():
    network = SimulatedNetwork()
    working = iter(range(30))
    Servers(network, "ab", lambda number: Written(number) if number or next(working, 30) == 30 else NotYet("reads"))
    answers = in_order(network, "ab", place=lambda number: number, ahead=1, stop=2, patience=Patience(deadline_s=20.0))
    assert [answers.take().body for _ in range(2)] == [Written(0), Written(1)]
    assert network.now() > 60


def test_an_answer_of_another_run_is_refused():
    network = SimulatedNetwork()
    network.listen("a", lambda peer, message, reply: reply(Message(bytes(16), 0, message.request, Confirmed())))
    with pytest.raises(WireError, match="thing 0 from a came from another run"):
        in_order(network).take()


def test_an_interrupted_wait_ends_without_an_answer():
    network = SimulatedNetwork()
    answers = in_order(network, ["nowhere"])
    answers.interrupt()
    assert answers.take() is None
    answers.close()
    answers.close()


def test_failures_are_raised_as_what_they_are():
    assert isinstance(named_error(Failed("ShardError", "damaged"), "a"), ShardError)
    assert isinstance(named_error(Failed("SystemExit", "damaged"), "a"), PipelineError)
    assert str(named_error(Failed("WireError", "damaged"), "a")) == "a: damaged"
