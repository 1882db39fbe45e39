"""A cache whose rows have several widths, and batches that need more of one than the first ones said: the slots are
divided anew, within the same bytes, on all trainers, and no bit differs."""

from __future__ import annotations

import random
import re

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import nn

from bagpipe.cache import divide, num_bytes
from bagpipe.config import cache_size
from bagpipe.errors import CapacityError
from bagpipe.oracle.capacity import make_oracle
from bagpipe.oracle.plan_shape import PlanShape
from bagpipe.policies import POLICIES
from bagpipe.policy_options import PolicyOptions
from bagpipe.types import Batch, Ids, Table
from bagpipe.wire.plan_messages import PlannedTable, PlansDescribed
from definitions.plan_contract import check_contract, run_in_several_orders
from harness.examples import examples
from harness.explorer import FETCHES, INSERTS, SYNCS, WRITES_BACK
from harness.trainers import DESIGNS, World, run, run_alone
from harness.world import assert_identical

TABLES = (Table("wide", 60), Table("narrow", 60), Table("word", None))
NAMES = [name for table in TABLES for name in table.features]
WIDTHS = (8, 3, 3)
CHANGING = sorted(set(POLICIES) - {"ideal"})


def turning(chance, num_batches):
    """Batches that now use more of one table and now of another: (12, 2, 1), (2, 12, 1) or (2, 2, 11) ids of each."""
    kinds = [(12, 2, 1), (2, 12, 1), (2, 2, 11)]
    kind = chance.choice(kinds)
    for _ in range(num_batches):
        kind = chance.choice([kind, kind, *kinds])
        yield [[chance.randrange(60) for _ in range(most)] for most in kind]


@examples(30)
@given(
    policy=st.sampled_from(CHANGING), lookahead=st.sampled_from([1, 3, "auto"]), preload=st.booleans(),
    cache=st.sampled_from([45, 60, "460B", "500B", "700B"]), seed=st.integers(0, 2**32),
)  # fmt: skip
def test_plans_that_divide_anew_are_exact_under_any_schedule(policy, lookahead, preload, cache, seed):
    chance = random.Random(seed)
    batches = list(turning(chance, 12))
    source = [([np.array(ids, np.int64) for ids in batch], number) for number, batch in enumerate(batches)]
    first = dict(zip(NAMES, source[0][0], strict=True))
    oracle = make_oracle(
        TABLES, WIDTHS, cache_size(cache), first, lookahead=lookahead, policy=policy,
        options=PolicyOptions(preload=preload, sample=3, ways=2),
    )  # fmt: skip
    groups, capacity = [table.group for table in oracle.tables], oracle.capacity
    plans = [plan for plan, _ in oracle.plans(source)]
    assert len(plans) == len(batches)
    announced = int(cache[:-1]) if isinstance(cache, str) else num_bytes(capacity, (8, 3))
    for plan in plans:
        if plan.capacity:
            assert num_bytes(plan.capacity, (8, 3)) <= announced, "not more than was announced"
            assert isinstance(cache, str) or sum(plan.capacity) <= cache
    check_contract(plans, groups, capacity, batches)
    run_in_several_orders(plans, groups, seed)


def test_the_slots_are_divided_anew_only_when_a_batch_has_no_room():
    source = [([np.arange(wide), np.arange(narrow), np.arange(0)], None) for wide, narrow in [(10, 2)] * 6 + [(2, 10)]]
    oracle = make_oracle(
        TABLES, WIDTHS, 13, dict(zip(NAMES, source[0][0], strict=True)), lookahead=3, policy="lookahead"
    )
    plans = [plan for plan, _ in oracle.plans(source)]
    assert [bool(plan.capacity) for plan in plans] == [False] * 6 + [True]
    assert len(plans[5].evict) + len(plans[4].evict) >= 12, "nothing stays"
    assert plans[6].hits == 0


@pytest.mark.parametrize("policy", CHANGING)
def test_the_first_batch_may_be_another_than_the_cache_was_divided_by(policy):
    """As with accumulated batches, of which the first one tells."""
    batches = [[np.arange(12), np.arange(3), np.arange(2)] for _ in range(4)]
    first = {"wide": np.arange(1), "narrow": np.arange(9), "word": np.arange(9)}
    oracle = make_oracle(
        TABLES, WIDTHS, cache_size("700B"), first, lookahead="auto", policy=policy, options=PolicyOptions(sample=2)
    )
    capacity = oracle.capacity
    assert capacity[0] < 12
    plans = [plan for plan, _ in oracle.plans((batch, None) for batch in batches)]
    assert [bool(plan.capacity) for plan in plans] == [True, False, False, False]
    check_contract(plans, [table.group for table in oracle.tables], capacity, batches)


def test_what_has_no_room_in_any_division_is_refused_after_the_plans_before_it():
    """Nine rows of eight floats and nine of three take 396 bytes."""
    source = [([np.arange(wide), np.arange(narrow), np.arange(0)], wide) for wide, narrow in [(2, 8), (8, 2), (9, 9)]]
    first = dict(zip(NAMES, source[0][0], strict=True))
    oracle = make_oracle(TABLES, WIDTHS, cache_size("340B"), first, lookahead="auto", policy="lookahead")
    done = []
    with pytest.raises(CapacityError, match="iteration 2 needs 9 rows") as caught:
        done.extend(wide for _, wide in oracle.plans(source))
    assert done == [2, 8]
    rows, size = re.search(r"at least (\d+) rows, or (\d+KB)", str(caught.value)).groups()
    for cache in (int(rows), cache_size(size)):
        oracle = make_oracle(TABLES, WIDTHS, cache, first, lookahead="auto", policy="lookahead")
        assert len(list(oracle.plans(source))) == 3


def test_a_batch_that_takes_every_byte_of_the_cache_has_room():
    source = [([np.arange(wide), np.arange(narrow), np.arange(0)], None) for wide, narrow in [(1, 9), (9, 1)]]
    first = dict(zip(NAMES, source[0][0], strict=True))
    oracle = make_oracle(TABLES, WIDTHS, cache_size("300B"), first, lookahead=3, policy="lookahead")
    capacity = oracle.capacity
    assert num_bytes(capacity, (8, 3)) < 300, "divisions round down"
    plans = [plan for plan, _ in oracle.plans(source)]
    assert plans[1].capacity == (9, 1)
    tables = [
        PlannedTable(table.name, table.rows, list(table.features), width)
        for table, width in zip(TABLES, WIDTHS, strict=True)
    ]
    shape = PlanShape.of(PlansDescribed(tables, capacity, 3, "lookahead", 1, ""))
    assert shape.divided_anew(plans[1].capacity, "plan 1").capacity == (9, 1), "trainers elsewhere accept it"


def test_several_oracles_have_what_the_first_batch_needs_of_each_width():
    """Every oracle has a place of each width at least, and the size that is named has room for all."""
    first = {"wide": np.arange(1), "narrow": np.arange(0), "word": np.arange(2)}
    options = PolicyOptions(oracles=2)
    for size, named in ((1, "cache=4"), (3, "cache=4"), (cache_size("60B"), "cache='1KB'")):
        with pytest.raises(CapacityError, match=f"needs 1 row of 8 floats, 3 rows of 3 floats: give at least {named}"):
            make_oracle(TABLES, WIDTHS, size, first, lookahead=3, policy="lookahead", options=options)
    oracle = make_oracle(TABLES, WIDTHS, 4, first, lookahead=3, policy="lookahead", options=options)
    assert oracle.capacity == [1, 3]
    source = [(list(first.values()), None), ([np.arange(1), np.arange(0), np.arange(3)], None)]
    with pytest.raises(
        CapacityError, match=r"they have 2: raise `cache` .*, or let one oracle plan \(policy option orac"
    ):
        list(oracle.plans(source))


@pytest.mark.parametrize("size", [20, 40, "1KB"])
def test_other_batches_tell_what_to_divide_by_as_far_as_there_is_room(size):
    few, many = ({"wide": np.arange(w), "narrow": np.arange(n), "word": np.arange(0)} for w, n in ((4, 4), (4, 16)))
    capacity = make_oracle(TABLES, WIDTHS, cache_size(size), few, [many], lookahead=3, policy="lookahead").capacity
    assert capacity[0] >= 4
    assert capacity[1] >= 16
    both = {"wide": np.arange(60), "narrow": np.arange(60), "word": np.arange(60)}
    alone = make_oracle(TABLES, WIDTHS, cache_size(size), few, lookahead=3, policy="lookahead").capacity
    assert make_oracle(TABLES, WIDTHS, cache_size(size), few, [both], lookahead=3, policy="lookahead").capacity == alone


@given(rows=st.integers(0, 200), needed=st.lists(st.integers(0, 30), min_size=3, max_size=3), share=st.floats(0.2, 1.2))
@examples(100)
def test_a_division_keeps_to_its_bytes_and_gives_what_is_needed(rows, needed, share):
    least = sum(map(int, needed)) + 2
    slots = divide(least + rows, WIDTHS, needed, [None] * 3)
    limit = int(share * num_bytes(slots, (8, 3)))
    floor = [max(1, needed[0]), max(1, needed[1] + needed[2])]
    if num_bytes(floor, (8, 3)) > limit:
        with pytest.raises(CapacityError):
            divide(least + rows, WIDTHS, needed, [None] * 3, bytes_max=limit)
        return
    within = divide(least + rows, WIDTHS, needed, [None] * 3, bytes_max=limit)
    assert num_bytes(within, (8, 3)) <= limit
    assert all(few <= some <= many for few, some, many in zip(floor, within, slots, strict=True))


class Model(nn.Module):
    """Rows of six floats and of two; the optimizer adds its state."""

    def __init__(self):
        super().__init__()
        self.wide = nn.EmbeddingBag(60, 6, mode="sum", device="meta")
        self.narrow = nn.EmbeddingBag(60, 2, mode="sum", device="meta")
        self.word = nn.EmbeddingBag(60, 2, mode="sum", device="meta")
        with torch.random.fork_rng():
            torch.manual_seed(5)
            self.top = nn.Linear(10, 1)

    def forward(self, dense, sparse):
        del dense
        found = [getattr(self, name)(sparse[name].values, sparse[name].offsets) for name in NAMES]
        return self.top(torch.cat(found, 1)).squeeze(1)


def world_of(trainers, seed=3):
    chance, samples, batches = random.Random(seed), 4, []
    for number, ids in enumerate(turning(chance, 14)):
        sparse = {}
        for name, own in zip(NAMES, ids, strict=True):
            starts = torch.tensor([len(own) * sample // samples for sample in range(samples)])
            sparse[name] = Ids(torch.tensor(own, dtype=torch.int64), starts)
        labels = torch.tensor([float(chance.random() < 0.5) for _ in range(samples)])
        batches.append(Batch(torch.zeros(samples, 1), sparse, labels, number=number))
    tables = (TABLES[0], TABLES[1], Table("word", 60))
    return World(batches, "adagrad", Model, tables, trainers=trainers)


@pytest.mark.parametrize("policy", ["lookahead", "lru", "windowed", "static", "belady"])
def test_one_trainer_gives_the_bits_of_the_reference(policy):
    world = world_of(1)
    found = run_alone(world, cache=45, policy=policy, policy_options={"sample": 3})
    assert_identical(world.reference(), found.state)


@pytest.mark.parametrize(
    ("design", "delayed", "policy", "last"),
    [
        ("owned", True, "lookahead", ()), ("owned", True, "lru", (WRITES_BACK,)),
        ("owned", False, "lookahead", FETCHES),
        ("partitioned", True, "frequency", (SYNCS,)), ("partitioned", True, "lookahead", (INSERTS,)),
        ("replicated", True, "lookahead", ((1, WRITES_BACK),)), ("replicated", False, "windowed", (SYNCS,)),
        ("lrpp", True, "lookahead", (WRITES_BACK,)), ("lrpp", True, "belady", ()),
    ],
)  # fmt: skip
def test_several_trainers_give_the_bits_of_the_reference(design, delayed, policy, last):
    world = world_of(3)
    found = run(world, last=last, cache=45, design=design, delayed=delayed, policy=policy, policy_options={"sample": 3})
    assert_identical(world.reference(), found.state)


@pytest.mark.parametrize("design", DESIGNS)
def test_hot_rows_are_brought_along_for_several_trainers(design):
    world = world_of(2)
    found = run(world, cache=60, design=design, policy="frequency", policy_options={"sample": 3})
    assert_identical(world.reference(), found.state)
