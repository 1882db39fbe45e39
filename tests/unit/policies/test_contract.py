"""What every policy must keep, whatever its options: coverage, capacity, no stale read, and the reference's bits."""

from __future__ import annotations

import random
from dataclasses import asdict

import pytest
from hypothesis import given
from hypothesis import strategies as st

from bagpipe.oracle.tables import OracleTable
from bagpipe.policies import POLICIES, PolicyOptions, make_policy
from bagpipe.trainer.stages import Threads
from definitions.plan_contract import check_contract, make_plans, run_in_several_orders
from harness.examples import examples
from harness.explorer import FETCHES, INSERTS, WRITES_BACK, Seeded
from harness.trainers import DESIGNS, World, run
from harness.world import OPTIMIZERS, assert_identical, make_batches, train_prepared, train_reference

VARIANTS: dict[str, tuple[str, PolicyOptions]] = {
    **{name: (name, PolicyOptions(sample=5)) for name in POLICIES},
    "scratchpipe, least frequent": ("scratchpipe", PolicyOptions(replacement="lfu")),
    "scratchpipe, random": ("scratchpipe", PolicyOptions(replacement="random", seed=3)),
    "scratchpipe, not pipelined": ("scratchpipe", PolicyOptions(pipelined=False)),
    "static, not pipelined": ("static", PolicyOptions(pipelined=False)),
    "lookahead, not pipelined": ("lookahead", PolicyOptions(pipelined=False)),
    "windowed, one way": ("windowed", PolicyOptions(ways=1, seed=5)),
    "windowed, preloaded": ("windowed", PolicyOptions(preload=True)),
    "windowed, one way, preloaded": ("windowed", PolicyOptions(ways=1, preload=True)),
    "windowed, windows that change": ("windowed", PolicyOptions(windows="2,4:5,9:1", preload=True)),
    "frequency, one batch seen": ("frequency", PolicyOptions(sample=1)),
    "static, all batches seen": ("static", PolicyOptions(sample=4096)),
}
BATCHES = make_batches(14, last=3)
every_variant = pytest.mark.parametrize("variant", VARIANTS)


def in_turn(choices, num_choices):
    """Every variant with so many of the choices, and every choice with some variants; all with all is long."""
    return [
        pytest.param(
            variant, *choice, marks=() if (place - number) % len(choices) < num_choices else pytest.mark.long
        )
        for number, variant in enumerate(VARIANTS)
        for place, choice in enumerate(choices)
    ]  # fmt: skip


@pytest.fixture(scope="module")
def expected():
    return train_reference(BATCHES, OPTIMIZERS["adagrad"](), "wide_deep")[0]


def train(variant: str, cache: int, lookahead: int | str, driver: object):
    policy, options = VARIANTS[variant]
    return train_prepared(
        BATCHES,
        OPTIMIZERS["adagrad"](),
        "wide_deep",
        cache=10_000 if policy == "ideal" else cache,
        lookahead="auto" if policy == "nocache" else lookahead,
        policy=policy,
        policy_options=options,
        driver=driver,
        check=True,
    )[0]


@every_variant
def test_all_variants_claim_to_be_exact(variant: str) -> None:
    assert make_policy(*VARIANTS[variant]).exact


@pytest.mark.parametrize(("variant", "cache", "lookahead"), in_turn([(60, "auto"), (90, 3)], 1))
def test_training_under_the_checker_gives_the_bits_of_the_reference(expected, variant, cache, lookahead) -> None:
    assert_identical(expected, train(variant, cache, lookahead, Threads(60)))


@pytest.mark.parametrize(
    ("variant", "last", "eagerness"),
    in_turn([((), 1.0), ((WRITES_BACK,), 20.0), ((INSERTS,), 0.0), (FETCHES[:1], 3.0)], 2),
)
def test_no_schedule_changes_a_bit(expected, variant, last, eagerness) -> None:
    driver = Seeded(len(variant), eagerness, frozenset(last))
    assert_identical(expected, train(variant, 62 + len(last), 4, driver))


@every_variant
@examples(10)
@given(
    seed=st.integers(0, 2**32),
    groups=st.sampled_from([[0], [0, 0], [0, 1], [1, 0, 1]]),
    lookahead=st.sampled_from([1, 2, 5, 12, "auto"]),
    ahead=st.integers(0, 3),
    mapped=st.booleans(),
)
def test_rows_are_covered_slots_suffice_and_no_order_reads_stale_rows(
    variant: str, seed: int, groups: list[int], lookahead: int | str, ahead: int, mapped: bool
) -> None:
    policy, options = VARIANTS[variant]
    chance = random.Random(seed)
    tables = [OracleTable(f"t{t}", chance.choice([30, None]), group=group) for t, group in enumerate(groups)]
    reach, num_ids = chance.randint(4, 30), chance.randint(1, 8)
    batches = [
        [[chance.randrange(reach) for _ in range(chance.randint(0, num_ids))] for _ in tables]
        for _ in range(chance.choice([24, 12, 3, 0]))
    ]
    capacity = []
    for group in range(max(groups) + 1):
        own = [t for t, each in enumerate(groups) if each == group]
        most = max([sum(len(set(batch[t])) for t in own) for batch in batches], default=0)
        capacity.append(30 * len(own) if policy == "ideal" else max(1, most + chance.choice([0, 1, 5, 20])))
    plans = make_plans(
        tables, capacity, batches, policy=policy, options=options, lookahead=lookahead, ahead=ahead,
        rows_direct_max=0 if mapped else 100,
    )  # fmt: skip
    check_contract(plans, groups, capacity, batches)
    run_in_several_orders(plans, groups, seed)


@pytest.fixture(scope="module")
def shared():
    world = World(make_batches(10, last=3), trainers=3)
    return world, world.reference()


@every_variant
def test_several_trainers_end_with_the_bits_of_the_reference(shared, variant: str) -> None:
    world, expected = shared
    policy, options = VARIANTS[variant]
    design = DESIGNS[list(VARIANTS).index(variant) % len(DESIGNS)]
    found = run(
        world,
        seed=len(variant),
        last=(WRITES_BACK,),
        design=design,
        policy=policy,
        policy_options=asdict(options),
        cache=10_000 if policy == "ideal" else 48,
        lookahead="auto" if policy == "nocache" else 4,
    )
    assert_identical(expected, found.state)
