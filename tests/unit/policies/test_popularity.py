"""Policies that count: frequency and static by a sample, LFU as it goes."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import pytest

from bagpipe.config import parse_config
from bagpipe.errors import CapacityError, ConfigError
from bagpipe.oracle.oracle import Oracle
from bagpipe.oracle.plan import Plan
from bagpipe.oracle.reader import CutIds
from bagpipe.oracle.slots import NEVER, Group
from bagpipe.oracle.tables import OracleTable
from bagpipe.policies import PolicyOptions
from bagpipe.policies.sampled import Sample, StaticPolicy
from bagpipe.policy_options import as_options
from definitions.plan_contract import check_contract


def plans_of(
    policy: str,
    batches: Sequence[Sequence[int]],
    capacity: int,
    *,
    ahead: int = 0,
    rows: int | None = 100,
    **options: int,
) -> tuple[list[Plan], Oracle]:
    chosen = PolicyOptions(**options)
    oracle = Oracle([OracleTable("only", rows)], [capacity], policy=policy, options=chosen, ahead=ahead)
    return [plan for plan, _ in oracle.plans(([np.array(batch, np.int64)], None) for batch in batches)], oracle


def test_rows_are_ranked_over_the_tables_of_a_group_by_their_occurrences() -> None:
    sample = Sample([1, 1, 2])
    sample.count([np.array([7, 9, 7, 7, 7]), np.array([7] * 9), np.array([-5, -5, 1]), np.array([-5])])
    tables, ids = sample.rank([Group(0, [0, 2], 10), Group(1, [1], 10)])[0]
    assert list(zip(tables.tolist(), ids.tolist(), strict=True)) == [(0, 7), (2, -5), (0, 9), (2, 1)]
    assert sample.ranks(np.array([2, 0, 0]), np.array([-5, 9, 8])).tolist() == [1, 2, NEVER]
    assert sample.ranks(np.array([1]), np.array([7])).tolist() == [0]


@pytest.mark.parametrize("rows", [100, None])
def test_frequency_warms_the_cache_with_the_hottest_rows_of_the_sample(rows: int | None) -> None:
    batches = [[1, 2, 2], [3, 3, 3], [3, 4], [5, 2], [9]]
    plans, _ = plans_of("frequency", batches, 4, rows=rows, sample=4)
    assert plans[0].fetch.ids.tolist() == [1, 2, 3, 4], "its own rows, then from hot to cold while there is room"
    assert plans[0].hits == 0
    assert plans[1].hits == 1
    assert plans[3].victims.ids.tolist() == [4], "1, 4 and 5 occur once: the last of them is coldest"


def test_frequency_lets_the_coldest_row_go_and_of_unknown_ones_the_oldest() -> None:
    batches = [[1, 1, 2], [1, 2], [7], [8], [2], [9], [1]]
    plans, _ = plans_of("frequency", batches, 4, sample=2)
    assert [plan.victims.ids.tolist() for plan in plans] == [[], [], [], [], [], [7], []]
    assert sum(len(plan.fetch) for plan in plans) == 5


def test_a_sample_of_the_future_is_read_before_the_first_plan_only() -> None:
    read = []

    def batches():
        for number in range(20):
            read.append(number)
            yield [np.array([number])], None

    oracle = Oracle([OracleTable("only", 100)], [8], policy="static", options=PolicyOptions(sample=6))
    ahead = [len(read) - plan.iteration for plan, _ in oracle.plans(batches())]
    assert ahead[:8] == [6, 5, 4, 3, 2, 2, 2, 2]


def test_static_keeps_pinned_rows_for_good_and_others_for_their_batch() -> None:
    batches = [[1, 2, 1], [1, 2, 5], [1, 6, 2], [7, 1], [2, 8], [1, 2]]
    plans, oracle = plans_of("static", batches, 3, sample=3)
    assert isinstance(oracle.policy, StaticPolicy)
    assert oracle.policy.num_pinned == [2]
    assert [plan.evict.ids.tolist() for plan in plans[:-1]] == [[], [5], [6], [7], [8]]
    assert [plan.fetch.ids.tolist() for plan in plans] == [[1, 2], [5], [6], [7], [8], []]
    assert not any(len(plan.victims) for plan in plans)


@pytest.mark.parametrize("ahead", [0, 1, 2])
def test_static_leaves_room_for_prefetches(ahead: int) -> None:
    random = np.random.default_rng(ahead)
    batches = [(random.zipf(1.3, 8) % 90).tolist() for _ in range(120)]
    plans, oracle = plans_of("static", batches, 40, ahead=ahead, sample=120)
    assert isinstance(oracle.policy, StaticPolicy)
    assert oracle.policy.num_pinned[0] > 10
    assert not any(len(plan.victims) for plan in plans)
    assert min(plan.iteration - plan.fetch.slot_after.max(initial=-1) for plan in plans[5:]) >= ahead + 1


def test_static_gives_up_its_coldest_rows_where_a_batch_needs_the_room() -> None:
    plans, oracle = plans_of("static", [[1, 1, 2, 3], [1, 2, 3], [4, 5, 6], [1, 2, 3]], 4, sample=2)
    assert isinstance(oracle.policy, StaticPolicy)
    assert oracle.policy.num_pinned == [4]
    assert plans[2].victims.ids.tolist() == [2, 3]
    assert plans[3].fetch.ids.tolist() == [2, 3]


def test_static_pins_nothing_where_one_batch_fills_the_cache_and_a_smaller_cache_is_refused_by_name() -> None:
    batches = [[1, 2, 3], [4, 5, 6], [1, 2, 7], [4, 5, 1]]
    plans, oracle = plans_of("static", batches, 3, sample=4)
    assert isinstance(oracle.policy, StaticPolicy)
    assert oracle.policy.num_pinned == [0]
    assert [plan.fetch.ids.tolist() for plan in plans] == batches, "all rows pass"
    check_contract(plans, [0], [3], [[batch] for batch in batches])
    with pytest.raises(CapacityError, match=r"iteration 0 needs 3 rows of table 'only' .* 2: raise `cache` .* 3 rows"):
        plans_of("static", batches, 2, sample=4)


def some_batches(seed: int, num_batches: int = 40, rows: int = 30) -> list[list[int]]:
    chance = np.random.default_rng(seed)
    return [(chance.zipf(1.4, chance.integers(0, 7)) % rows).tolist() for _ in range(num_batches)]


def prepare_cache(cached: list[int], ids: Sequence[int], idx_map: dict[int, int], capacity: int) -> list[int]:
    """Algorithm 1 of the paper, line by line: which rows of `cached`, known by their place from hot to cold, leave."""
    cpu_row_idxs = sorted({idx_map[row] for row in ids})
    missing = [index for index in cpu_row_idxs if index not in cached]
    evict_num = len(missing) - (capacity - len(cached))
    others = [index for index in cached if index not in cpu_row_idxs]  # the batch's own are masked
    evicted = sorted(others, reverse=True)[: max(0, evict_num)]
    cached[:] = [index for index in cached if index not in evicted] + missing
    return evicted


@pytest.mark.parametrize("seed", range(20))
def test_frequency_is_algorithm_1_of_its_paper(seed: int) -> None:
    batches, capacity = some_batches(seed), 9
    rows, counts = np.unique(np.concatenate(batches).astype(np.int64), return_counts=True)
    by_index = rows[np.argsort(-counts, kind="stable")].tolist()
    idx_map = {row: index for index, row in enumerate(by_index)}
    plans, _ = plans_of("frequency", batches, capacity, sample=len(batches))
    cached: list[int] = []
    num_evicted = 0
    for plan, batch in zip(plans, batches, strict=True):
        evicted = prepare_cache(cached, batch, idx_map, capacity)
        assert sorted(plan.victims.ids.tolist()) == sorted(by_index[index] for index in evicted)
        num_evicted += len(evicted)
        if plan.iteration == 0:  # warm-up: the hottest rows fill what is free
            cached += [index for index in range(len(by_index)) if index not in cached][: capacity - len(cached)]
            assert sorted(plan.fetch.ids.tolist()) == sorted(by_index[index] for index in cached)
    assert num_evicted > 0


@pytest.mark.parametrize("seed", range(20))
def test_lfu_is_its_twin_with_dictionaries(seed: int) -> None:
    batches, capacity = some_batches(seed), 9
    uses: dict[int, int] = {}
    last: dict[int, int] = {}
    slot_of: dict[int, int] = {}
    num_victims = 0
    for plan in plans_of("lfu", batches, capacity)[0]:
        batch = set(batches[plan.iteration])
        lacking = len(batch - set(slot_of)) - (capacity - len(slot_of))
        others = sorted(set(slot_of) - batch, key=lambda row: (uses[row], last[row], slot_of[row]))
        victims = others[: max(0, lacking)]
        assert sorted(plan.victims.ids.tolist()) == sorted(victims)
        num_victims += len(victims)
        for row in victims:
            del slot_of[row], uses[row]
        slot_of |= dict(zip(plan.rows.ids.tolist(), plan.rows.slots.tolist(), strict=True))
        for row in batch:
            uses[row], last[row] = uses.get(row, 0) + 1, plan.iteration
    assert num_victims > 0


def test_several_trainers_get_rows_beyond_their_batches_each_with_an_owner() -> None:
    oracle = Oracle([OracleTable("only", 9)], [8], policy="frequency", options=PolicyOptions(sample=3), trainers=2)
    batches = [CutIds([np.array([1, 2])], np.array([[0, 1, 2]])), CutIds([np.array([3, 4])], np.array([[0, 1, 2]]))]
    plans = [plan for plan, _ in oracle.plans((batch, None) for batch in batches)]
    assert [plan.fetch.ids.tolist() for plan in plans] == [[1, 2, 3, 4], []]
    assert plans[0].sharing is not None
    assert plans[0].sharing.homes.tolist() == [0, 1, 0, 1]
    assert [plan.hits for plan in plans] == [0, 2]


def test_lfu_lets_the_row_go_that_the_fewest_batches_have_used() -> None:
    plans, _ = plans_of("lfu", [[1, 2, 3], [1], [3], [4], [4], [5], [2]], 3)
    assert [plan.victims.ids.tolist() for plan in plans] == [[], [], [], [2], [], [1], [5]]
    assert [plan.victims.evict_after for plan in plans] == [-1, -1, -1, 0, -1, 1, 5]


def test_options_are_checked_by_name() -> None:
    assert as_options(None) == PolicyOptions()
    assert as_options({"sample": 3}).sample == 3
    for wrong, message in (
        ({"samples": 3}, "no policy option 'samples': choose from sample, replacement"),
        ({"sample": -1}, "sample is -1: give a whole number, at least 0"),
        ({"sample": 5000}, "at most 4096, as its batches lie in memory, or 0 for all data"),
        ({"ways": True}, "ways is True"),
        ({"ways": 2**62}, f"ways is {2**62}: give at most 4096"),
        ({"seed": 2**63}, f"seed is {2**63}: give at most {2**63 - 1}"),
        ("foo", "the options of the policy are 'foo': give a mapping"),
        ({"replacement": "fifo"}, "replacement is 'fifo': choose one of lru, lfu, random"),
        ({"mode": "lazy"}, "mode is 'lazy'"),
        ({"pipelined": 1}, "pipelined is 1"),
    ):
        with pytest.raises(ConfigError, match=message):
            as_options(wrong)  # type: ignore[arg-type]
    with pytest.raises(ConfigError, match=r"policy_options\.ways: .*4096"):
        parse_config({"policy_options": {"ways": 4097}})
