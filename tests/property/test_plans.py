"""Plans of every policy, executed in any order that their waits allow, give what synchronous training gives."""

from __future__ import annotations

import itertools
import random
from collections.abc import Sequence

import pytest
from hypothesis import HealthCheck, given
from hypothesis import strategies as st

from bagpipe.kernels import window_map
from bagpipe.oracle.plan import Plan
from bagpipe.oracle.reader import Reader
from bagpipe.oracle.tables import OracleTable
from bagpipe.policies import POLICIES
from bagpipe.policies.base import Policy
from definitions.plain_oracle import KNOWN, SimpleOracle
from definitions.plan_contract import Batches, check_contract, make_plans, run_in_several_orders
from definitions.plan_execution import Corruption, Execution, Waits, any_order, delaying, preferring
from harness.examples import examples

ONE_TABLE = [OracleTable("only", 8)]


def fields_of(plan: Plan) -> dict[str, object]:
    fields: dict[str, object] = {
        "iteration": plan.iteration,
        "lookahead": plan.lookahead,
        "hits": plan.hits,
        "inverse": [feature.tolist() for feature in plan.inverse],
        "after": plan.fetch.after.tolist(),
        "slot_after": plan.fetch.slot_after.tolist(),
        "evict_after": plan.victims.evict_after,
    }
    for name in ("rows", "fetch", "evict", "victims"):
        rows = getattr(plan, name)
        fields[name] = (rows.ids.tolist(), rows.slots.tolist(), rows.bounds.tolist())
    return fields


def assert_same(ours: Sequence[Plan], theirs: Sequence[Plan]) -> None:
    assert len(ours) == len(theirs)
    for one, other in zip(ours, theirs, strict=True):
        assert fields_of(one) == fields_of(other)


def subsets(num_rows: int) -> list[list[int]]:
    return [[row for row in range(num_rows) if bits >> row & 1] for bits in range(2**num_rows)]


def all_small_cases() -> list[tuple[int, list[list[int]]]]:
    """All sequences of up to 4 batches of 2 rows, 3 batches of 3 rows, and a sample of 5 batches of 4 rows."""
    cases = [(2, list(case)) for length in range(5) for case in itertools.product(subsets(2), repeat=length)]
    cases += [(3, list(case)) for case in itertools.product(subsets(3), repeat=3)]
    chance = random.Random(7)
    return cases + [(4, [chance.choice(subsets(4)) for _ in range(5)]) for _ in range(500)]


@pytest.mark.parametrize("step", [7, pytest.param(1, marks=pytest.mark.long)])
@pytest.mark.parametrize(("policy", "auto"), [*((name, False) for name in POLICIES), ("lookahead", True)])
def test_small_cases_are_exact_under_every_schedule(policy: str, auto: bool, step: int) -> None:
    """One case in so many, for each policy others."""
    first = [*POLICIES].index(policy) % step
    for seed, (num_rows, batches) in [*enumerate(all_small_cases())][first::step]:
        largest = max([len(batch) for batch in batches], default=0)
        distinct = len({row for batch in batches for row in batch})
        capacity = max(1, distinct if policy == "ideal" else largest + seed % 3)
        nested = [[batch] for batch in batches]
        lookahead = "auto" if auto else 1 + seed % 4
        plans = make_plans(
            [OracleTable("only", num_rows)], [capacity], nested, lookahead=lookahead, policy=policy, ahead=seed % 3
        )
        check_contract(plans, [0], [capacity], nested)
        run_in_several_orders(plans, [0], seed)


@st.composite
def cases(draw: st.DrawFn) -> tuple[list[OracleTable], list[int], Batches, dict[str, object]]:
    """Some tables in one or two groups, batches of several features, any policy, a cache from just enough to ample."""
    num_features = draw(st.integers(1, 2))
    groups = draw(st.sampled_from([[0], [0, 0], [0, 1], [0, 1, 0]]))
    tables = [
        OracleTable(f"t{t}", 30, tuple(f"f{t}{f}" for f in range(num_features)), group)
        for t, group in enumerate(groups)
    ]
    # Sizes and ids come from a seed: drawn one by one they would rarely fill a cache.
    chance = draw(st.randoms(use_true_random=True))
    num_ids, reach = chance.randint(1, 6), chance.randint(4, 30)
    batches = [
        [
            [chance.randrange(reach) for _ in range(chance.randint(0, num_ids))]
            for _ in range(num_features * len(tables))
        ]
        for _ in range(chance.choice([24, 16, 8, 1, 0]))
    ]
    policy = draw(st.sampled_from(["lookahead", "lookahead", *KNOWN, *POLICIES]))
    capacity = []
    for group in range(max(groups) + 1):
        unique = [
            sum(len({*itertools.chain(*batch[t * num_features : (t + 1) * num_features])}) for t in members)
            for batch in batches
            for members in [[t for t in range(len(tables)) if groups[t] == group]]
        ]
        rows = 30 * groups.count(group)
        capacity.append(rows if policy == "ideal" else max(1, max(unique, default=1) + chance.randint(0, 6)))
    options: dict[str, object] = {
        "policy": policy,
        "lookahead": draw(st.one_of(st.integers(1, 12), st.just("auto"))),
        "ahead": draw(st.integers(0, 3)),
    }
    return tables, capacity, batches, options


@pytest.fixture
def short_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    """Forget rows after three iterations, and begin with maps of four rows, so that small cases meet both."""
    monkeypatch.setattr(Policy, "horizon", 3)
    monkeypatch.setattr(window_map, "NUM_ROWS_MIN", 4)


MANY = examples(250, (HealthCheck.function_scoped_fixture,))


@MANY
@given(case=cases(), seed=st.integers(0, 2**32))
def test_plans_equal_the_simple_oracle_and_are_exact(short_memory: None, case: tuple, seed: int) -> None:
    tables, capacity, batches, options = case
    groups = [table.group for table in tables]
    plans = make_plans(tables, capacity, batches, **options)
    if options["policy"] in KNOWN:
        assert_same(plans, list(SimpleOracle(tables, capacity, **options).plans(batches)))
    check_contract(plans, groups, capacity, batches)
    run_in_several_orders(plans, groups, seed)


@MANY
@given(case=cases(), seed=st.integers(0, 2**32))
def test_plans_of_several_readings_are_exact(short_memory: None, case: tuple, seed: int) -> None:
    """The window drains in between, and rows stay."""
    tables, capacity, batches, options = case
    groups, chance = [table.group for table in tables], random.Random(seed)
    readings = sorted(chance.choices(range(len(batches)), k=2)) if batches else []
    plans = make_plans(tables, capacity, batches, readings, **options)
    check_contract(plans, groups, capacity, batches)
    run_in_several_orders(plans, groups, seed)


def test_rows_of_one_reading_are_hits_in_the_next() -> None:
    plans = make_plans(ONE_TABLE, [8], [[[0, 1]], [[2]], [[0, 1, 2]]], [2], lookahead="auto")
    assert plans[2].hits == 3
    assert not len(plans[2].fetch)


@MANY
@given(case=cases())
def test_mapped_tables_and_threads_change_no_plan(
    short_memory: None, monkeypatch: pytest.MonkeyPatch, case: tuple
) -> None:
    monkeypatch.setattr(Reader, "ids_shared_min", 0)
    tables, capacity, batches, options = case
    plans = make_plans(tables, capacity, batches, **options)
    assert_same(plans, make_plans(tables, capacity, batches, rows_direct_max=0, **options))
    assert_same(plans, make_plans(tables, capacity, batches, threads=2, **options))
    assert_same(plans, make_plans(tables, capacity, batches, threads=3, bytes_direct_max=12 * 30, **options))


def is_corrupted(batches: Batches, waits: Waits, schedule: object, **options: object) -> bool:
    plans = make_plans(ONE_TABLE, [2], batches, **options)
    Execution(plans, [0]).run(schedule)  # type: ignore[arg-type]
    try:
        Execution(plans, [0], waits).run(schedule)  # type: ignore[arg-type]
    except Corruption:
        return True
    return False


def test_copying_out_before_the_update_is_caught() -> None:
    assert is_corrupted([[[0]], [[1]]], Waits(updated=False), preferring("copy"), lookahead=1)


def test_copying_victims_out_before_their_update_is_caught() -> None:
    batches = [[[0, 1]], [[2, 3]], [[0]]]
    assert is_corrupted(batches, Waits(updated=False), delaying("update"), policy="lru")


def test_inserting_before_the_last_tenant_is_copied_out_is_caught() -> None:
    assert is_corrupted([[[0, 1]], [[2, 3]]], Waits(copied_out=False), preferring("read", "insert"), lookahead=1)


def test_fetching_before_the_write_back_is_acknowledged_is_caught() -> None:
    assert is_corrupted([[[0]], [[1]], [[0]]], Waits(acknowledged=False), delaying("write"), lookahead=1)


def test_fetching_after_the_newest_write_back_alone_is_caught() -> None:
    """Row 0's older write-back is still under way when row 1's is acknowledged."""
    batches = [[[0]], [[1]], [[0, 1]]]
    assert is_corrupted(batches, Waits(watermark=False), delaying("write"), lookahead=1)


@pytest.mark.parametrize("waits", [Waits(updated=False), Waits(copied_out=False), Waits(acknowledged=False)])
def test_random_schedules_find_every_weakened_wait(waits: Waits) -> None:
    chance = random.Random(3)
    for seed in range(200):
        batches = [[chance.sample(range(8), 2)] for _ in range(6)]
        if is_corrupted(batches, waits, any_order(random.Random(seed)), lookahead=2):
            return
    pytest.fail("no schedule was corrupted")
