"""Several oracles, each with some of the tables and its part of the cache: their plans, side by side, are plans."""

from __future__ import annotations

import random
import re

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from bagpipe.config import cache_size
from bagpipe.errors import CapacityError, ConfigError, ValueRangeError
from bagpipe.oracle.capacity import make_oracle
from bagpipe.oracle.reader import CutIds, Reader
from bagpipe.policies import POLICIES
from bagpipe.policy_options import PolicyOptions
from bagpipe.types import Table
from definitions.plan_contract import check_contract, run_in_several_orders
from harness.examples import examples
from harness.world import OPTIMIZERS, TABLES, assert_identical, make_batches, train_prepared, train_reference

WIDTHS = (4, 8, 4, 4, 8)
FEATURES = (("a", "b"), ("c", "d"), ("e", "f"), ("g", "h"), ("i", "j"))
NAMES = [name for own in FEATURES for name in own]


def make(count, cache=200, policy="lookahead", lookahead="auto", trainers=1, first=None, **options):
    tables = [Table(f"t{t}", 30, own) for t, own in enumerate(FEATURES)]
    return make_oracle(
        tables, WIDTHS, cache, first or dict.fromkeys(NAMES, np.arange(3)), lookahead=lookahead, policy=policy,
        options=PolicyOptions(oracles=count, **options), trainers=trainers,
    )  # fmt: skip


@examples(60)
@given(
    count=st.integers(2, 5), policy=st.sampled_from(sorted(POLICIES)), lookahead=st.sampled_from([1, 3, "auto"]),
    seed=st.integers(0, 2**32),
)  # fmt: skip
def test_plans_side_by_side_are_exact_under_any_schedule(count, policy, lookahead, seed):
    chance = random.Random(seed)
    batches = [
        [[chance.randrange(chance.randint(1, 30)) for _ in range(chance.randint(0, 4))] for _ in NAMES]
        for _ in range(chance.choice([0, 1, 9, 16]))
    ]
    needed = {name: np.arange(8) for name in NAMES}  # no batch has more of a table
    oracle = make(count, 60 + chance.randint(0, 60), policy, lookahead, first=needed)
    source = [([np.array(ids, np.int64) for ids in batch], number) for number, batch in enumerate(batches)]
    plans = []
    for plan, number in oracle.plans(source):
        assert plan.iteration == number
        assert len(plan.inverse) == len(NAMES)
        plans.append(plan)
    groups = [table.group for table in oracle.tables]
    check_contract(plans, groups, oracle.capacity, batches)
    run_in_several_orders(plans, groups, seed)


@pytest.mark.parametrize("count", [1, 2, 3, 5])
def test_oracles_share_all_slots_by_what_their_tables_need(count):
    oracle = make(count, 90)
    assert sum(oracle.capacity) == 90
    assert [table.name for table in oracle.tables] == ["t0", "t1", "t2", "t3", "t4"]
    assert [table.group for table in oracle.tables] == [1, 0, 1, 1, 0]


@pytest.mark.parametrize("count", [1, 2, 4])
@pytest.mark.parametrize("at", [0, 3])
def test_a_bad_batch_ends_the_data_after_the_plans_before_it(count, at):
    batches = [[np.arange(3) for _ in NAMES] for _ in range(6)]
    batches[4][at] = np.array([30])
    found = []
    with pytest.raises(ValueRangeError, match=f"batch 4: feature '{NAMES[at]}' has id 30"):
        found.extend(number for _, number in make(count).plans(zip(batches, range(6), strict=True)))
    assert found == [0, 1, 2, 3]


@pytest.mark.parametrize("count", [1, 2, 4])
def test_an_error_of_the_data_is_not_lost(count):
    def source():
        yield from (([np.arange(3) for _ in NAMES], number) for number in range(7))
        raise OSError("the disk is gone")

    found = []
    with pytest.raises(OSError, match="the disk is gone"):
        found.extend(number for _, number in make(count).plans(source()))
    assert found == list(range(7))


def test_what_trainers_share_is_the_same_but_for_who_gets_new_rows():
    chance = np.random.default_rng(3)
    batches = [[chance.integers(0, 30, 6) for _ in NAMES] for _ in range(12)]
    cuts = np.tile(np.array([0, 2, 6]), (len(NAMES), 1))
    one, several = (
        [plan for plan, _ in make(count, 150, trainers=2).plans((CutIds(ids, cuts), None) for ids in batches)]
        for count in (1, 3)
    )
    for ours, theirs in zip(several, one, strict=True):
        for name in ("users", "cuts", "inverse", "before"):
            np.testing.assert_array_equal(getattr(ours.sharing, name), getattr(theirs.sharing, name))
        np.testing.assert_array_equal(ours.rows.ids, theirs.rows.ids)
        assert len(ours.sharing.homes) == len(ours.fetch)


@pytest.mark.parametrize(("count", "too_small"), [(1, 77), (2, 90)])
def test_a_cache_that_the_first_batch_has_divided_badly_is_told_the_size_that_will_do(count, too_small):
    """The first batch needs few rows of four floats, and a later one many: 60, and 18 of eight. One oracle divides the
    cache anew, if that helps; several do not."""
    few, many = ([np.arange(n) if name in "cdij" else np.arange(m) for name in NAMES] for n, m in ((9, 1), (9, 20)))
    first = dict(zip(NAMES, few, strict=True))
    batches = [(few, 0), (many, 1)]
    with pytest.raises(
        CapacityError, match=rf"iteration 1 needs .* cache('s| has) {too_small} (places|rows)"
    ) as caught:
        list(make(count, too_small, first=first).plans(batches))
    rows, size = re.search(r"raise `cache` to at least ([\d,]+) rows, or ([\d,]+KB)", str(caught.value)).groups()
    for cache in (int(rows.replace(",", "")), cache_size(size.replace(",", ""))):
        assert len(list(make(count, cache, first=first).plans(batches))) == 2


def test_more_oracles_than_tables_are_refused():
    with pytest.raises(ConfigError, match="oracles is 6, and there are 5 tables"):
        make(6)
    with pytest.raises(ConfigError, match="oracles"):
        make(0)


@pytest.mark.parametrize(("policy", "oracles", "threads"), [
    ("lookahead", 1, 2), ("lookahead", 2, 1), ("lookahead", 3, 2), ("frequency", 2, 2), ("windowed", 3, 1),
])  # fmt: skip
def test_the_number_of_oracles_and_threads_changes_no_bit(monkeypatch, policy, oracles, threads):
    monkeypatch.setattr(Reader, "ids_shared_min", 0)
    batches = make_batches(14, last=3)
    expected, losses = train_reference(batches, OPTIMIZERS["adagrad"]())
    options = {"oracles": min(oracles, len(TABLES)), "threads": threads, "sample": 4}
    found, own = train_prepared(batches, OPTIMIZERS["adagrad"](), policy=policy, cache=120, policy_options=options)
    assert_identical(expected, found)
    assert own == losses
