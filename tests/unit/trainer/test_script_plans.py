"""The first trainer of a script serves the others their parts; what does not fit is refused before it is used (I8)."""

from __future__ import annotations

from contextlib import ExitStack
from dataclasses import replace
from threading import Thread

import pytest
import torch

from bagpipe.cluster.context import Launch
from bagpipe.config import load_config
from bagpipe.data.tree_wire import Trees, pack_trees, types_in
from bagpipe.errors import ConfigError, PipelineError, WireError
from bagpipe.oracle.assign import Assigner
from bagpipe.oracle.capacity import make_oracle
from bagpipe.oracle.partition import Partition
from bagpipe.oracle.sent_plan import SentPart
from bagpipe.oracle.service import PlanSettings
from bagpipe.together import run_threads
from bagpipe.trainer.agreement import check_same, tell_all
from bagpipe.trainer.collective import memory_groups
from bagpipe.trainer.pipeline import Counters
from bagpipe.trainer.script_plans import ScriptPlans, ServedPlans, SharedLoader
from bagpipe.trainer.stages import Threads
from bagpipe.types import Table
from bagpipe.wire.codec import pack, unpack
from bagpipe.wire.messages import Message
from bagpipe.wire.plan_messages import DescribePlans, GetBatch, NextPlan, Planned
from benchmarks.simulated import SimulatedNetwork
from harness.calls import ask_once

RUN = bytes(range(16))
TABLE = Table("user", 50, ("user",))


def make_batches(count=5):
    random = torch.Generator().manual_seed(0)
    return [
        {"user": torch.randint(50, (6, 2), generator=random), "y": torch.rand(6, generator=random)}
        for _ in range(count)
    ]


class Tampered:
    """A peer that gets other answers than it is given."""

    def __init__(self, peer, message, tamper):
        self._peer, self._message, self._tamper = peer, message, tamper

    def __getattr__(self, name):
        return getattr(self._peer, name)

    def reply(self, body, buffers=()):
        asked = self._message
        answer = self._tamper(Message(asked.run, asked.generation, asked.request, body, buffers))
        self._peer.reply(answer.body, answer.buffers)


class Served:
    """Two trainers on a network in memory; `tamper` changes what the first one answers."""

    def __init__(self, tamper=lambda message: message, count=5):
        self.network = SimulatedNetwork(0, real_time=True)
        self.source = SharedLoader(make_batches(count), 1)
        self.source.tables = (TABLE,)
        self.source.adapter.require(["user"])
        self.source.share([], Assigner("contiguous", 2))
        settings = PlanSettings((TABLE,), (4,), 200, trainers=2)
        oracle = make_oracle([TABLE], [4], 200, self.source.first_ids(), lookahead=2, policy="lookahead", trainers=2)
        partition = Partition(2, oracle.tables, oracle.places.capacity, oracle.places.guests)

        def listen(handler):
            return self.network.listen("first", lambda peer, message: handler(Tampered(peer, message, tamper), message))

        self.served = ServedPlans(
            listen, self.source, oracle, partition, settings.described(list(oracle.places.capacity)), run=RUN
        )

    def other(self):
        """The plans of the second trainer."""
        example = make_batches(1)[0]
        return ScriptPlans(self.network, "first", self.source.adapter, types_in(example), run=RUN, trainer=1)

    def __enter__(self):
        return self

    def __exit__(self, *_):
        self.served.interrupt()
        self.served.close()
        self.network.close()


def read_all(plans, into):
    try:
        into.extend(plans.epoch(Counters()))
    except Exception as error:
        into.append(error)


def read_both(world):
    """What both trainers get."""
    first, second = [], []
    with ExitStack() as stack:
        other = world.other()
        stack.callback(other.close)
        thread = Thread(target=read_all, args=(world.served, first))
        thread.start()
        read_all(other, second)
        world.served.interrupt()
        thread.join()
    return first, second


def test_each_trainer_gets_its_part_of_every_batch():
    with Served() as world:
        first, second = read_both(world)
    assert [plan.iteration for plan, _ in first] == [plan.iteration for plan, _ in second] == list(range(5))
    for (_, (own,)), (_, (others,)), batch in zip(first, second, make_batches(), strict=True):
        assert torch.equal(torch.cat([own.batch["y"], others.batch["y"]]), batch["y"])
        assert torch.equal(torch.cat([own.batch["user"], others.batch["user"]]), batch["user"])


def test_a_trainer_that_asks_after_the_first_one_has_left_is_told_so():
    with Served() as world:
        other = world.other()
        world.served.interrupt()
        with pytest.raises(PipelineError, match="trainer 0 has left the training loop"):
            next(other.epoch(Counters()))
        other.close()


def changed(change):
    """Does so to what is sent of a plan."""

    def tamper(message):
        if not isinstance(message.body, Planned):
            return message
        sent = change(unpack(message.buffers[0], message.buffers[1:], SentPart))
        body, buffers = pack(sent)
        return Message(message.run, message.generation, message.request, message.body, [memoryview(body), *buffers])

    return tamper


def without_buffers(message):
    if not isinstance(message.body, Planned):
        return message
    return Message(message.run, message.generation, message.request, message.body, [])


def with_batches(batches):
    example = make_batches(1)[0]
    packed = pack_trees(batches, [("user",)], types_in(example))
    return changed(lambda sent: replace(sent, batches=packed))


def with_sizes(**parts):
    return changed(lambda sent: replace(sent, sizes=(replace(sent.sizes[0], **parts),)))


GOOD = {"user": torch.zeros(3, 2, dtype=torch.int64), "y": torch.ones(3)}


@pytest.mark.parametrize(
    ("tamper", "said"),
    [
        (without_buffers, "has no buffers: it needs at least 1"),
        (
            changed(lambda sent: replace(sent, batches=Trees(sent.batches.description[:0], sent.batches.raw))),
            "the description of batches is none",
        ),
        (with_sizes(num_ids=(5,)), r"places of ids: \[6\] by feature, where batches have \[5\]"),
        (with_sizes(num_ids=()), "places of ids"),
        (with_sizes(num_samples=4), "has a batch of 4 samples, and says that trainer 1 has 3"),
        (with_batches([]), "is for 1 batches, and 0 came"),
        (with_batches([GOOD, GOOD]), "is for 1 batches, and 2 came"),
        (with_batches([{"y": torch.ones(3)}]), "has no ids of feature 'user'"),
        (with_batches([GOOD | {"user": torch.zeros(3, 1, dtype=torch.int64)}]), r"has \[6\] ids, its batch \[3\]"),
    ],
)
def test_batches_that_do_not_fit_their_plan_are_refused(tamper, said):
    with Served(tamper) as world:
        _, second = read_both(world)
    assert len(second) == 1
    with pytest.raises(WireError, match=said):
        raise second[0]


@pytest.mark.parametrize(
    ("run", "body", "said"),
    [
        (bytes(16), DescribePlans(1), "another run"),
        (RUN, GetBatch(0, ""), "it gives plans only"),
        (RUN, NextPlan(0, 0, -1), "trainer 0 asks trainer 0 for plans: 1 to 1 may"),
        (RUN, NextPlan(2, 0, -1), "trainer 2 asks trainer 0"),
    ],
)
def test_the_first_trainer_refuses_what_is_no_request_of_another(run, body, said):
    with Served() as world, pytest.raises(WireError, match=said):
        ask_once(world.served.handle, body, run)


def test_trainers_tell_each_other_texts_of_any_length():
    drivers = [Threads(20) for _ in range(3)]
    groups = memory_groups(3, lambda: [driver.notify() for driver in drivers])
    texts = ["", "gr\u00fcezi", "x" * 1001]

    def loop(rank):
        return lambda: tell_all(groups[rank], drivers[rank], texts[rank], "hello")

    assert run_threads([loop(rank) for rank in range(3)]) == [texts] * 3


def test_what_differs_between_trainers_is_named():
    check_same([{"a": 1, "b": [2]}, {"a": 1, "b": [2]}])
    with pytest.raises(ConfigError, match=r"b differs between trainers: \[2\] on trainer 0, \[3\] on trainer 1"):
        check_same([{"a": 1, "b": [2]}, {"a": 1, "b": [3]}])
    with pytest.raises(ConfigError, match="c differs between trainers: None on trainer 0, 4 on trainer 2"):
        check_same([{"a": 1}, {"a": 1}, {"a": 1, "c": 4}])


def test_meetings_of_a_launch_are_numbered():
    launch = Launch(load_config(None, []), (), RUN, None)
    assert [next(launch.meetings), next(launch.meetings)] == [0, 1]
    assert replace(launch) == launch
