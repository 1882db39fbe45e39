"""Hundreds of deaths of every role in one process, under seeds: the bits are those of an undisturbed run (I2)."""

from __future__ import annotations

import random

import pytest

from bagpipe.failpoints import Fault
from harness.faults import (
    AFTERWARDS,
    LARGE,
    RECOVERY,
    SEED,
    SERVER_LOST,
    SMALL,
    USUAL,
    USUALLY,
    World,
    error_of,
    random_faults,
    reached_after,
    roles_at,
    run,
    undisturbed,
)

pytestmark = [pytest.mark.long, pytest.mark.timeout(1800)]

WORLDS = {
    "one trainer": SMALL,
    "three trainers": LARGE,
    "rows of all, at every trainer": World(2, 2, 1, ("sync.design=replicated",)),
    "rows of slots": World(2, 1, 1, ("sync.design=partitioned",)),
    "no cache": World(2, 2, 1, ("policy=nocache", "lookahead=auto")),
    "samples by rows": World(2, 2, 1, ("assign=aware",)),
    "adam": World(2, 2, 1, ("row_optimizer.name=adam", "dense_optimizer.name=adam")),
}


@pytest.fixture
def trial(ledger):
    """Runs a world with faults and takes note of it; what has gone wrong so far is in `trial.wrong`."""

    class Trial:
        def __init__(self):
            self.wrong = []

        def __call__(self, kind, world, *faults, seed=0, **options):
            ended = run(world, *faults, seed=seed, **options)
            ledger(kind, len(ended.happened), len(ended.incidents), ended.seconds, ended.differs)
            if ended.differs:
                self.wrong.append(f"{', '.join(map(str, faults))} with seed {seed} and {options}")

    made = Trial()
    yield made
    assert not made.wrong, f"other bits after (BAGPIPE_CHAOS_SEED={SEED}): " + "; ".join(made.wrong)


@pytest.mark.parametrize("name", USUALLY)
def test_any_role_may_die_at_any_point_at_any_time(trial, name):
    choose = random.Random(f"{SEED}/{name}")
    for role, count in roles_at(USUAL, name).items():
        for at in sorted({1, count, choose.randint(1, count)}):
            trial("a role at a point", USUAL, Fault(name, at=at, role=role), seed=choose.randrange(1000))


@pytest.mark.parametrize("world", WORLDS.values(), ids=WORLDS)
def test_a_role_may_die_at_any_point_in_every_configuration(trial, world):
    choose = random.Random(f"{SEED}/{world}")
    for name in USUALLY:
        reached = sorted(roles_at(world, name).items())
        if reached:  # one trainer exchanges nothing
            role, count = choose.choice(reached)
            fault = Fault(name, at=choose.randint(1, count), role=role)
            trial("a role at a point, other configurations", world, fault, seed=choose.randrange(1000))


@pytest.mark.parametrize("name", USUALLY)
def test_any_role_may_be_cut_off_at_any_point_and_come_back(trial, name):
    choose = random.Random(f"{SEED}/{name}")
    for role, count in roles_at(LARGE, name).items():
        fault = Fault(name, "pause", choose.randint(1, count), role)
        trial("a role that is cut off and comes back", LARGE, fault, seed=choose.randrange(1000))


@pytest.mark.parametrize("name", USUALLY)
def test_an_error_anywhere_ends_the_run_by_name_or_changes_nothing(name):
    choose = random.Random(f"{SEED}/{name}")
    for role, count in roles_at(USUAL, name).items():
        error_of(USUAL, Fault(name, "fail", choose.randint(1, count), role), seed=choose.randrange(1000))


@pytest.mark.parametrize("name", AFTERWARDS)
def test_any_role_may_die_at_any_point_of_its_return(trial, name):
    options, reached = reached_after(name)
    for role, count in reached.items():
        for at in sorted({1, count}):
            trial("a role on its return", USUAL, SERVER_LOST, Fault(name, at=at, role=role), **options)


@pytest.mark.parametrize("name", RECOVERY)
def test_any_two_may_die_one_before_and_one_in_a_recovery(trial, name):
    choose = random.Random(f"{SEED}/{name}")
    victims = sorted({role for role, _ in undisturbed(LARGE) if role})
    for victim in victims:
        for first in random_faults(LARGE, choose.random(), 2):
            trial("a role in a recovery", LARGE, first, Fault(name), victims={name: [victim]})


@pytest.mark.parametrize("number", range(20))
def test_any_number_may_die_at_random(trial, number):
    choose = random.Random(f"{SEED}/{number}")
    world = choose.choice([USUAL, *WORLDS.values()])
    roles = sorted({role for role, _ in undisturbed(world) if role})
    for _ in range(10):
        faults = random_faults(world, choose.random(), choose.randint(1, 4))
        victims = {faults[0].name: choose.sample(roles, min(len(roles), choose.randint(1, 3)))}
        lossy = (
            {"delay": (0.0, 0.003), "loss": 0.03, "duplicate": 0.05, "reorder": 0.1} if choose.random() < 0.3 else {}
        )
        seed, grace = choose.randrange(10_000), choose.choice([0, 5, 20, 100])
        trial("several at random", world, *faults, victims=victims, seed=seed, grace=grace, **lossy)
