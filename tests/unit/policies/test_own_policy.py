"""A policy of somebody's own, handed to `bagpipe.Cache` as an object: the same bits, or a refusal (I1)."""

from __future__ import annotations

import threading

import numpy as np
import pytest
import torch

import bagpipe
from bagpipe.errors import ConfigError, PipelineError
from bagpipe.oracle.slots import AddressedSlots
from bagpipe.policies import (
    BeladyPolicy,
    FrequencyPolicy,
    IdealPolicy,
    LookaheadPolicy,
    LruPolicy,
    NoCachePolicy,
    Policy,
    ScratchPipePolicy,
    WindowedPolicy,
    make_policy,
)
from bagpipe.policies.base import Extra
from bagpipe.policy_options import PolicyOptions
from bagpipe.trainer.stages import Threads
from harness.flat import prepare
from harness.plain import assert_same_bits, loss_of, make_net
from harness.plain import make_batches as dicts
from harness.plain import nothing_left as nothing_left
from harness.scripts import Trainers
from harness.world import OPTIMIZERS, assert_identical, make_batches, train_prepared, train_reference

BATCHES = make_batches(14, last=3)


class MostRecent(LruPolicy):
    """The row used last leaves first."""

    def keys(self, iteration, group, count):
        return group.facts.keys(group.facts.last, largest_first=True)


class Random(Policy):
    """Rows leave in any order, and count how often they were asked for one."""

    def __init__(self, seed):
        self.seed, self.asked = seed, 0

    def keys(self, iteration, group, count):
        self.asked += 1
        values = np.random.default_rng([self.seed, iteration, group.number]).integers(0, 1000, group.capacity, np.int32)
        return group.facts.keys(values)


class Placed(Policy):
    """Takes a slot by the id, from whoever has it, unless the batch needs that one too."""

    def bind(self, groups, lookahead, ahead):
        super().bind(groups, lookahead, ahead)
        for group in groups:
            group.slots = AddressedSlots(group.capacity, freed_by=group.freed_by)

    def keys(self, iteration, group, count):
        return group.facts.keys(group.facts.last)

    def place(self, demand):
        ids, capacity = demand.misses[1], demand.group.capacity
        chosen = (ids % capacity).astype(np.int32)
        first = np.zeros(len(ids), bool)
        first[np.unique(chosen, return_index=True)[1]] = True
        return np.where(first & ~np.isin(chosen, demand.slots), chosen, -1).astype(np.int32)


class Half(LookaheadPolicy):
    """Grants at most half of the stays."""

    def grant(self, iteration, window, counts, gaps):
        super().grant(iteration, window, counts, gaps)
        gaps[:, 1 : window + 2] //= 2
        return False


def same(base):
    """What a policy of a name does, as a class of somebody's own."""
    return type(f"Own{base.__name__}", (base,), {})


OWN = {
    "keys": MostRecent(),
    "random keys": Random(4),
    "places": Placed(),
    "fewer stays": Half(),
} | {
    f"as {base.name}": same(base)() for base in (
        BeladyPolicy, FrequencyPolicy, IdealPolicy, LookaheadPolicy, LruPolicy, NoCachePolicy, ScratchPipePolicy,
        WindowedPolicy,
    )
}  # fmt: skip


@pytest.fixture(scope="module")
def expected():
    return train_reference(BATCHES, OPTIMIZERS["adagrad"](), "wide_deep")[0]


@pytest.mark.parametrize("lookahead", ["auto", 3])
@pytest.mark.parametrize("policy", OWN.values(), ids=OWN)
def test_an_own_policy_ends_with_the_bits_of_the_reference(expected, policy, lookahead):
    cache = 10_000 if isinstance(policy, IdealPolicy) else 62
    settings = {"cache": cache, "lookahead": lookahead, "driver": Threads(60), "check": True}
    found, _ = train_prepared(BATCHES, OPTIMIZERS["adagrad"](), "wide_deep", policy=policy, **settings)
    assert_identical(expected, found)


def trained(policy, epochs=2, **options):
    """Weights after two epochs, the first one broken off, and how many rows the second one has fetched."""
    model = make_net()
    dense = torch.optim.SGD(model.parameters(), 0.1)
    cache = bagpipe.Cache(40, policy=policy, **options)
    model, dense, loader = bagpipe.prepare(
        model, dense, dicts(), rows=bagpipe.optim.SGD(0.1), cache=cache, options=bagpipe.Options(check=True)
    )
    for epoch in range(epochs):
        for number, batch in enumerate(loader):
            dense.zero_grad()
            loss_of(model, batch).backward()
            dense.step()
            if not epoch and number == 4:
                break
    moved = loader.stats()["fetched_rows"]  # of the last one: how far a broken-off one was read ahead is chance
    return {name: value.clone() for name, value in model.state_dict().items()}, moved


def test_the_result_is_that_of_a_policy_with_a_name_and_the_traffic_too_if_it_does_the_same(nothing_left):
    (named, moved), (own, of_own), (other, of_other) = trained("lru"), trained(same(LruPolicy)()), trained(MostRecent())
    assert_same_bits(named, own)
    assert_same_bits(named, other)
    assert of_own == moved
    assert of_other != moved, "the policy was not asked"


def test_the_object_stays_as_it_is_and_serves_several_models_and_epochs(nothing_left):
    policy = Random(3)
    first, again = trained(policy), trained(policy)
    assert first[1] == again[1]
    assert vars(policy) == {"seed": 3, "asked": 0}


def test_a_class_has_its_own_name_or_the_one_that_it_says():
    assert MostRecent().name == "MostRecent"
    assert type("Mine", (LruPolicy,), {"name": "mine"})().name == "mine"
    assert make_policy("lru").name == "lru"


def test_options_are_those_of_the_cache():
    made = make_policy(same(ScratchPipePolicy)(), PolicyOptions(replacement="lfu"))
    assert made.options.replacement == "lfu"
    policy = same(ScratchPipePolicy)()
    policy.options = PolicyOptions(replacement="random")
    with pytest.raises(ConfigError, match=r"has options of its own.*bagpipe\.Cache\(options=\.\.\.\)"):
        make_policy(policy, PolicyOptions(replacement="lfu"))


class NotCopied(LruPolicy):
    def __init__(self):
        self.lock = threading.Lock()


@pytest.mark.parametrize(
    ("policy", "words"),
    [
        (3, r"policy is 3: give one of lookahead, .* derived from bagpipe\.policies\.Policy"),
        (None, "policy is None"),
        ("mru", "there is no policy 'mru': choose one of lookahead"),
        (MostRecent, r"policy is the class MostRecent: give an object of it, MostRecent\(\.\.\.\)"),
        (object(), "policy is <object"),
        (NotCopied(), "policy 'NotCopied' can't be copied"),
    ],
    ids=["a number", "None", "no name", "a class", "an object", "what can't be copied"],
)
def test_what_is_no_policy_is_refused_with_what_to_give(policy, words):
    with pytest.raises(ConfigError, match=words):
        trained(policy)


def test_an_object_is_refused_with_several_trainers():
    trainers = Trainers(2)

    def script(rank):
        model = make_net()
        dense = torch.optim.SGD(model.parameters(), 0.1)
        prepare(model, dense, dicts(), bagpipe.optim.SGD(0.1), policy=MostRecent(), cache=60, **trainers.options(rank))

    for error in trainers.failures(script):
        assert isinstance(error, ConfigError)
        assert "policy 'MostRecent' is an object, and 2 trainers" in str(error)


# Policies with a defect: each would give some row a wrong value, or two, if its plans were executed.


class TwoInASlot(Placed):
    def place(self, demand):
        return np.zeros(len(demand.missing), np.int32)


class TakesWhatTheBatchNeeds(Placed):
    def place(self, demand):
        chosen, slots = super().place(demand), demand.slots
        hits = slots[slots >= 0]
        if len(hits) and len(chosen):
            chosen[0] = hits[0]
        return chosen


class LeavesTwice(LruPolicy):
    def leaves(self, demand, *, ended):
        first = next(part.start for part in demand.group.parts(demand.rows.bounds) if part.stop > part.start)
        return np.array([first, first], np.int32)


class GrantsMore(Policy):
    def grant(self, iteration, window, counts, gaps):
        gaps[:, 1] += 1
        return True


class Raises(LruPolicy):
    def keys(self, iteration, group, count):
        raise KeyError("which?")


class GivesTaken(Placed):
    def place(self, demand):
        taken = np.flatnonzero(demand.group.facts.last < 0)[:1]
        return np.resize(taken, len(demand.missing)).astype(np.int32)


class SaysAll(Policy):
    def grant(self, iteration, window, counts, gaps):
        gaps[:, 1] = 0
        return True


class BringsTwice(Placed):
    def along(self, iteration):
        return [(np.zeros(2, np.int64), np.full(2, 39)) for _ in self.groups]

    def place(self, demand):
        if not isinstance(demand, Extra):
            return np.full(len(demand.missing), -1, np.int32)
        return np.flatnonzero(demand.group.facts.last < 0)[-len(demand.missing) :].astype(np.int32)


DEFECTS = {
    "two rows in a slot": (TwoInASlot(), r"'TwoInASlot' can't be followed: .* place\(\)"),
    "a slot that the batch needs": (TakesWhatTheBatchNeeds(), "'TakesWhatTheBatchNeeds' can't be followed"),
    "a row that leaves twice": (LeavesTwice(), "'LeavesTwice' can't be followed"),
    "more stays": (GrantsMore(), r"'GrantsMore' can't be followed: in iteration . its grant\(\) gives more stays"),
    "an error of its own": (Raises(), r"policy 'Raises' failed in iteration \d+, before .*: KeyError: 'which\?'"),
    "a free slot for several": (GivesTaken(), "'GivesTaken' can't be followed"),
    "says all": (SaysAll(), r"'SaysAll' can't be followed: in iteration . its grant\(\) gives fewer stays"),
    "one row in two slots": (BringsTwice(), "'BringsTwice' can't be followed"),
}


@pytest.mark.parametrize(("policy", "words"), DEFECTS.values(), ids=DEFECTS)
def test_a_defect_of_an_own_policy_ends_the_run_before_a_wrong_plan_is_executed(policy, words):
    with pytest.raises((ConfigError, PipelineError), match=words):
        train_prepared(
            BATCHES, OPTIMIZERS["adagrad"](), "wide_deep", policy=policy, cache=62, driver=Threads(60), check=False
        )
