"""The client of every service: it asks again until the deadline, and knows silence from work, on a simulated clock."""

from __future__ import annotations

from collections import Counter

import pytest

from bagpipe.errors import DeadlineError, PipelineError, ShardError, StoreError, WireError
from bagpipe.wire.client import Client, Patience, Series, named_error
from bagpipe.wire.messages import Failed, Message, NotYet, Written
from bagpipe.wire.plan_messages import GetBatch
from bagpipe.wire.recovery_messages import Confirm, Confirmed
from benchmarks.simulated import SimulatedNetwork
from harness.raw_socket import frames_of

RUN = bytes(range(16))


class Servers:
    """Answer number n with Written(n), or as they are told, and count what they are asked."""

    def __init__(self, network, names=("a",), answer=None):
        self.asked, self.places = Counter(), {}
        self.answer = answer or (lambda number: Written(number))
        for name in names:
            network.listen(name, lambda peer, message, name=name: self.handle(name, message))

    def handle(self, name, message):
        number = message.body.number
        self.asked[number] += 1
        self.places.setdefault(number, set()).add(name)
        body = self.answer(number)
        return None if body is None else (body, ())


def client(network, name="a", **options):
    return Client(network, name, name, run=RUN, **options)


def series(network, names=("a",), patience=None, **options):
    clients = [client(network, name, patience=patience) for name in names]
    return Series(clients, lambda number: GetBatch(number, ""), lambda number: f"thing {number}", **options)


def after(network, seconds):
    """A handler's work."""
    end = network.now() + seconds
    network.waits.until("its work", lambda: network.now() >= end, seconds + 1)


@pytest.mark.parametrize("seed", range(20))
def test_answers_come_in_order_whatever_the_network_does(seed):
    network = SimulatedNetwork(seed, delay=(0.0, 0.5), breaks=0.3)
    servers = Servers(network, "abc")
    answers = series(network, "abc", Patience(1.0, 900.0, 900.0), place=lambda number: number // 2 % 3, stop=30)
    assert [answers.take().body for _ in range(30)] == [Written(number) for number in range(30)]
    assert servers.places == {number: {"abc"[number // 2 % 3]} for number in range(30)}
    assert network.num_broken > 0


def test_no_more_is_asked_than_was_allowed_and_nothing_twice_on_a_good_network():
    network = SimulatedNetwork()
    servers = Servers(network)
    answers = series(network, ahead=3, stop=6)
    for number in range(6):
        answers.take()
        network.pause(1000.0)  # while nobody listens nobody is late
        assert max(servers.asked) == min(number + 3, 5)
    assert set(servers.asked.values()) == {1}
    assert answers.next == 6


def test_what_is_not_answered_is_asked_again_later_and_later():
    network = SimulatedNetwork()
    lost = Counter({0: 3})

    def answer(number):
        lost[number] -= 1
        return None if lost[number] >= 0 else Written(number)

    servers = Servers(network, answer=answer)
    answers = series(network, ahead=1, patience=Patience(retry_s=2.0))
    assert answers.take().body == Written(0)
    assert servers.asked[0] == 4
    assert network.now() == pytest.approx(2 + 4 + 8, abs=1.0)


def test_a_server_that_is_not_there_is_named_after_the_deadline_with_what_was_asked_and_why():
    network = SimulatedNetwork()
    answers = series(network, ["nowhere"], Patience(deadline_s=45.0))
    with pytest.raises(DeadlineError, match=r"nowhere did not answer for 45\.\d s, asked for thing 0 \(it is not run"):
        answers.take()
    assert 45 <= network.now() < 47


def test_a_server_that_is_connected_and_says_nothing_is_lost_after_the_deadline():
    network = SimulatedNetwork()
    Servers(network, answer=lambda number: None)
    answers = series(network, patience=Patience(deadline_s=45.0))
    with pytest.raises(DeadlineError, match=r"asked for thing 0 \(it is connected, and says nothing"):
        answers.take()


def test_a_server_that_works_on_it_is_waited_for_longer_but_not_for_ever():
    network = SimulatedNetwork()

    def work(peer, message):
        while True:
            after(network, 2.0)
            peer.still_waiting("reads a slow disk")

    network.listen("a", work)
    asking = client(network, patience=Patience(retry_s=5.0, deadline_s=45.0, work_s=300.0))
    with pytest.raises(DeadlineError, match=r"waited 30\d s for a thing from a, which reads a slow disk"):
        asking.call(GetBatch(0, ""), what="a thing")
    network.close()


def test_a_server_that_makes_progress_is_waited_for_as_long_as_it_does():
    network = SimulatedNetwork()

    def work(peer, message):
        for step in range(1000):
            after(network, 2.0)
            peer.still_waiting("saves", progress=step)
        return Confirmed(), ()

    network.listen("a", work)
    asking = client(network, patience=Patience(work_s=30.0))
    assert asking.call(Confirm(), what="a save").body == Confirmed()
    assert network.now() > 1900


def test_a_request_that_breaks_every_connection_is_not_asked_for_ever():
    """Each hello is answered, so the server is not lost; the request never is."""
    network = SimulatedNetwork()

    def cut(peer, message):
        if not isinstance(message.body, Confirm):
            network.cut(peer.other)
        return Confirmed(), ()

    network.listen("a", cut)
    hello = lambda asking, connection: asking.ask_first(connection, Confirm(), "a hello")  # noqa: E731
    asking = client(network, hello=hello, patience=Patience(deadline_s=20.0, work_s=100.0))
    with pytest.raises(DeadlineError, match="waited 100 s for a thing from a, the connection broke"):
        asking.call(GetBatch(0, ""), what="a thing")


def test_a_server_that_comes_back_is_asked_again():
    network = SimulatedNetwork()
    answers = series(network, stop=5)
    with pytest.raises(DeadlineError):
        answers.take()
    Servers(network)
    clean = series(network, stop=5)
    assert [clean.take().body for _ in range(5)] == [Written(number) for number in range(5)]


def test_a_server_that_dies_and_is_started_again_is_found():
    network = SimulatedNetwork()
    first = network.listen("a", lambda peer, message: (Written(1), ()))
    asking = client(network)
    assert asking.call(GetBatch(0, ""), what="a thing").body == Written(1)
    first.close()
    asking.send(lambda: (GetBatch(1, ""), ()), "a thing")
    assert asking.poll(1.0) is None
    network.listen("a", lambda peer, message: (Written(2), ()))
    assert asking.receive().body == Written(2)


def test_a_server_that_nothing_was_asked_of_is_not_late():
    network = SimulatedNetwork()

    def slow(peer, message):
        for _ in range(30):
            after(network, 2.0)
            peer.still_waiting("reads")
        return Written(0), ()

    network.listen("a", slow)
    Servers(network, "b")
    answers = series(network, "ab", Patience(deadline_s=20.0), place=lambda number: number, ahead=2, stop=2)
    assert [answers.take().body for _ in range(2)] == [Written(0), Written(1)]
    assert network.now() >= 60


def test_who_is_asked_to_come_again_does_so_with_all_that_is_under_way_and_in_order():
    network = SimulatedNetwork()
    full = Counter({0: 3, 2: 2})

    def answer(number):
        full[number] -= 1
        return NotYet("has no room for requests", again=True) if full[number] >= 0 else Written(number)

    Servers(network, answer=answer)
    answers = series(network, ahead=3, stop=5)
    assert [answers.take().body for _ in range(5)] == [Written(number) for number in range(5)]


def test_an_answer_of_another_run_is_refused():
    network = SimulatedNetwork()
    network.listen("a", lambda peer, message: peer._network.post(peer.other, _stray(message.request)))
    with pytest.raises(WireError, match="a answered for another run: check the addresses"):
        series(network).take()


def _stray(request):
    return frames_of(Message(bytes(16), 0, request, Confirmed()))


def test_an_answer_to_something_else_is_refused():
    network = SimulatedNetwork()
    letter = frames_of(Message(RUN, 0, 77, Confirmed()))
    network.listen("a", lambda peer, message: peer._network.post(peer.other, letter))
    with pytest.raises(WireError, match="a answered request 77 where 1 was due"):
        series(network).take()


def test_who_is_cut_is_told_why_and_does_not_ask_again():
    network = SimulatedNetwork()
    letter = frames_of(Message(bytes(16), 0, 0, Failed("WireError", "a body of 9 bytes: 8 are allowed")))
    network.listen("a", lambda peer, message: peer._network.post(peer.other, letter))
    with pytest.raises(WireError, match="a: a body of 9 bytes"):
        series(network).take()


def test_who_knows_that_the_server_is_gone_is_not_waited_for():
    network = SimulatedNetwork()
    asking = client(network, watch=lambda: "has died", lost=StoreError)
    with pytest.raises(StoreError, match="a has died"):
        asking.call(Confirm(), what="a thing")
    assert network.now() < 1


def test_what_can_not_be_sent_leaves_nothing_under_way():
    network = SimulatedNetwork()
    Servers(network)
    asking = client(network)
    asking.call(GetBatch(0, ""), what="a thing")
    with pytest.raises(WireError, match="ask for fewer rows"):
        asking.call(GetBatch(1, ""), [memoryview(bytes(65 << 20))], what="too much")
    assert not asking.is_under_way
    assert asking.call(GetBatch(2, ""), what="a thing").body == Written(2)


def test_after_a_failure_the_next_request_gets_its_own_answer():
    network = SimulatedNetwork()
    Servers(network, answer=lambda number: Failed("ShardError", "damaged") if number == 1 else Written(number))
    asking = client(network)
    for number in range(3):
        asking.send(lambda number=number: (GetBatch(number, ""), ()), "a thing")
    assert asking.receive().body == Written(0)
    with pytest.raises(ShardError, match="a: damaged"):
        asking.receive()
    assert asking.failed == Failed("ShardError", "damaged")
    assert asking.call(GetBatch(7, ""), what="a thing").body == Written(7)


def test_an_interrupted_wait_ends_without_an_answer():
    network = SimulatedNetwork()
    answers = series(network, ["nowhere"])
    answers.interrupt()
    assert answers.take() is None
    answers.close()
    answers.close()


def test_failures_are_raised_as_what_they_are():
    assert isinstance(named_error(Failed("ShardError", "damaged"), "a"), ShardError)
    for nonsense in ("SystemExit", "KeyboardInterrupt", "annotations", "__doc__", ""):
        assert isinstance(named_error(Failed(nonsense, "damaged"), "a"), PipelineError)
    assert str(named_error(Failed("WireError", "damaged"), "a")) == "a: damaged"


# Writes that are applied exactly once


class Once:
    """Applies numbered writes once, as servers do: what came before is answered and not applied again."""

    def __init__(self):
        self.applied = []

    def handle(self, peer, message):
        if message.body.number == len(self.applied) + 1:
            self.applied.append(message.body.number)
        return Written(message.body.number), ()


@pytest.mark.parametrize("seed", range(30))
def test_eighty_writes_are_applied_once_while_a_third_of_all_messages_break_their_connection(seed):
    network = SimulatedNetwork(seed, delay=(0.0, 0.2), breaks=1 / 3)
    once = Once()
    network.listen("a", once.handle)
    asking = client(network, patience=Patience(1.0, 900.0, 900.0))
    for number in range(1, 81):
        assert asking.call(GetBatch(number, ""), what="a write").body == Written(number)
    assert once.applied == list(range(1, 81))
    assert network.num_broken > 20
