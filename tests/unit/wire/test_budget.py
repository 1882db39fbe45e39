"""No write waits behind a read that waits for it: real servers and budgets, thousands of interleavings by their seeds.

Every connection is a `Visitor` that serves in a task of its own; a trainer is one more task for each of its reads and
writes. Whenever one of them waits another goes on that can, as the seed says, and time passes only when none can. So
time that has passed is a wait that nobody could end.
"""

from __future__ import annotations

import threading
from collections import deque

import numpy as np
import pytest

from bagpipe.errors import DeadlineError
from bagpipe.server.server import EmbeddingServer
from bagpipe.waits import Waits
from bagpipe.wire.connection import Connection, DroppedError
from bagpipe.wire.frames import HEADER_BYTES, encode, read_head
from bagpipe.wire.limits import Limits
from bagpipe.wire.listener import Budget, Budgets, Visitor
from bagpipe.wire.messages import Message, NotYet, Open, Opened, Part, Read, Rows, Write, Written
from bagpipe.wire.recovery_messages import Confirm, Confirmed
from benchmarks.simulated import SimulatedNetwork, Task

RUN = bytes(range(16))
ROWS = 40
LIMITS = Limits(memory_bytes=1000, memory_wait_s=30.0)
"""Room for two reads, or one write, of so many rows."""
ITERATIONS, TRAINERS, AHEAD = 6, 4, 2


class End(Connection):
    """One end of a connection in memory that has no room for more than one message, as a socket with short queues."""

    shares_host = False

    def __init__(self, waits):
        self.peer, self.waits, self.arrived = "a trainer", waits, deque()
        self.other: End = None  # type: ignore[assignment]
        self.is_closed = False

    def send(self, message, timeout_s, descriptor=None):
        self.waits.until("room at the other end", lambda: not self.other.arrived, timeout_s)
        self.other.arrived.append(message)

    def receive(self, timeout_s, admit=lambda _: True, whole_s=0.0):
        self.waits.until("a message", lambda: self.arrived or self.is_closed, 1e6)
        if self.is_closed:
            raise ConnectionResetError("closed")
        message = self.arrived[0]  # it stays at the sender until there is room
        has_room = admit(read_head(encode(message)[0][:HEADER_BYTES]))
        self.arrived.popleft()
        if not has_room:
            raise DroppedError(read_head(encode(message)[0][:HEADER_BYTES]))
        return message

    def close(self):
        self.is_closed = True


def pair(waits):
    one, other = End(waits), End(waits)
    one.other, other.other = other, one
    return one, other


class OneBudget(Budgets):
    """Reads and writes of one kind."""

    def of(self, kind):
        return super().of("")


class Keeping(Visitor):
    """A read keeps its memory while it waits for trainers."""

    def give_back(self):
        if self._request is None:
            super().give_back()


class World:
    """One server, and trainers that read some iterations ahead of what they write, as a pipeline does."""

    def __init__(self, seed, budgets=Budgets, visitor=Visitor, limits=LIMITS):
        self.network = SimulatedNetwork(seed)
        self.waits = self.network.waits
        self.server = EmbeddingServer(waits=self.waits, clock=self.network.now, background=lambda run: run())
        self.budgets = budgets(limits.memory_bytes, self.waits)
        self.visitor, self.limits = visitor, limits
        self.has_read = [-1] * TRAINERS
        self.has_written = [-1] * TRAINERS
        self.failed: list[BaseException] = []
        self.ended = 0

    def start(self, run):
        self.network._tasks.append(Task(lambda: self.guard(run)))

    def guard(self, run):
        try:
            run()
        except ConnectionResetError:
            pass
        except BaseException as error:
            self.failed.append(error)
        finally:
            self.ended += 1

    def connect(self, trainer, kind):
        mine, theirs = pair(self.waits)
        visitor = self.visitor(theirs, self.limits, self.budgets, lambda: None)
        self.start(lambda: visitor.serve(self.server.handle, 1e6))
        self.ask(mine, 1, Open(trainer, TRAINERS, [1], kind), Opened)
        return mine

    def ask(self, end, number, body, expected, *buffers):
        end.send(Message(RUN, 0, number, body, buffers), 1e6)
        while True:
            answer = end.receive(1e6)
            if isinstance(answer.body, expected):
                assert answer.request == number
                return answer
            assert isinstance(answer.body, NotYet), answer.body
            if answer.body.again:
                end.send(Message(RUN, 0, number, body, buffers), 1e6)

    def reads(self, trainer):
        end = self.connect(trainer, "reads")
        ids = np.arange(ROWS)
        for iteration in range(ITERATIONS):
            self.waits.until("its turn to read", lambda i=iteration: i <= self.has_written[trainer] + AHEAD, 1e6)
            after = iteration - AHEAD + 1
            self.ask(end, iteration + 2, Read([Part(0, ROWS)], max(after, -1)), Rows, ids.data)
            self.has_read[trainer] = iteration
        end.other.close()

    def writes(self, trainer):
        end = self.connect(trainer, "writes")
        ids = np.arange(ROWS) + (trainer + 1) * ROWS
        rows = np.ones(ROWS, np.float32)
        for iteration in range(ITERATIONS):
            self.waits.until("rows to train with", lambda i=iteration: self.has_read[trainer] >= i, 1e6)
            write = Write(trainer, iteration + 1, iteration, [Part(0, ROWS)])
            self.ask(end, iteration + 2, write, Written, ids.data, rows.data)
            self.has_written[trainer] = iteration
        end.other.close()

    def run(self):
        """Seconds that nobody could use."""
        for trainer in range(TRAINERS):
            self.start(lambda trainer=trainer: self.reads(trainer))
            self.start(lambda trainer=trainer: self.writes(trainer))
        try:
            self.waits.until("all to be trained", lambda: self.ended == 4 * TRAINERS or self.failed, 3600.0)
        finally:
            self.network.close()
        assert not self.failed, self.failed
        assert self.has_written == [ITERATIONS - 1] * TRAINERS
        return self.network.now()


def stuck(seeds, **faults):
    """How many of the seeds had a wait that nobody could end."""
    count = 0
    for seed in range(seeds):
        try:
            count += World(seed, **faults).run() >= LIMITS.memory_wait_s
        except DeadlineError:
            count += 1
    return count


@pytest.mark.long
def test_nor_has_any_of_many_more():
    assert stuck(3000) == 0


def test_no_schedule_has_a_write_wait_for_a_read_that_waits_for_it():
    assert stuck(150) == 0


@pytest.mark.parametrize(
    "faults", [{"visitor": Keeping}, {"visitor": Keeping, "budgets": OneBudget}], ids=["kept", "kept of one budget"]
)
def test_with_memory_that_a_waiting_read_keeps_some_schedule_is_stuck(faults):
    assert stuck(30, **faults) > 0


# The budget alone


def test_room_is_given_in_the_order_of_those_who_came():
    """Else many small requests would keep a large one waiting for ever."""
    budget, order = Budget(100, Waits()), []
    budget.take(90, 1.0)

    def take(num_bytes):
        budget.take(num_bytes, 30.0)
        order.append(num_bytes)

    threads = []
    for num_bytes in (80, 5, 6):
        threads.append(threading.Thread(target=take, args=(num_bytes,)))
        threads[-1].start()
        while len(budget._queue) < len(threads):
            pass
    assert order == []
    budget.give(90)
    for thread in threads:
        thread.join()
    assert order[0] == 80
    assert sorted(order) == [5, 6, 80]


def test_what_is_larger_than_all_of_it_has_room_alone():
    budget = Budget(100, Waits())
    budget.take(1, 1.0)
    with pytest.raises(DeadlineError, match=r"waited 0.01 s for room for 500 B among 100 B of requests"):
        budget.take(500, 0.01)
    budget.give(1)
    budget.take(500, 1.0)
    with pytest.raises(DeadlineError):
        budget.take(1, 0.01)
    budget.give(500)
    budget.take(100, 1.0)


def test_who_gave_up_holds_up_nobody_behind():
    budget, gave_up = Budget(100, Waits()), []
    budget.take(60, 1.0)

    def give_up():
        with pytest.raises(DeadlineError):
            budget.take(50, 0.3)
        gave_up.append(1)

    ahead = threading.Thread(target=give_up)
    behind = threading.Thread(target=lambda: budget.take(40, 30.0))
    ahead.start()
    while not budget._queue:
        pass
    behind.start()
    ahead.join()
    behind.join(10)
    assert gave_up == [1]
    assert not behind.is_alive()


def test_who_waits_long_is_told_so_now_and_then():
    network, told = SimulatedNetwork(), []
    budget = Budget(100, network.waits)
    budget.take(100, 1.0)

    def wait():
        with pytest.raises(DeadlineError):
            budget.take(1, 7.0, lambda: told.append(network.now()))

    network._tasks.append(Task(wait))
    network.pause(10.0)
    assert told == [2.0, 4.0, 6.0, 7.0]


def test_a_request_counts_until_it_is_answered_though_its_peer_is_admitted_again():
    free = []

    def handler(peer, message):
        peer.admit("reads")
        free.append(budgets.of("reads")._free)
        return Confirmed(), ()

    network = SimulatedNetwork()
    budgets = Budgets(1000, network.waits)
    mine, theirs = pair(network.waits)
    visitor = Visitor(theirs, LIMITS, budgets, lambda: None)

    def ask_thrice():
        for number in range(3):
            mine.send(Message(RUN, 0, number, Confirm()), 1.0)
            mine.receive(1.0)
        theirs.close()

    def serve():
        with pytest.raises(ConnectionResetError):
            visitor.serve(handler, 1.0)

    network._tasks += [Task(serve), Task(ask_thrice)]
    network.pause(10.0)
    assert free[0] == 1000 > free[1] == free[2]
    assert budgets.of("reads")._free == 1000
