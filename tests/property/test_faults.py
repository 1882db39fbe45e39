"""Whatever dies, wherever it is: the run ends with the bits of an undisturbed one, and nothing stays (I2)."""

from __future__ import annotations

import random

import pytest
import torch

from bagpipe.errors import ClusterError
from bagpipe.failpoints import NAMES, Fault
from faults import LARGE, RECOVERY, SMALL, USUAL, random_faults, roles_at, run, survives


@pytest.fixture(autouse=True)
def one_torch_thread():
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


@pytest.mark.parametrize("world", [SMALL, USUAL], ids=["small", "usual"])
@pytest.mark.parametrize("name", [name for name in NAMES if name not in RECOVERY])
def test_any_role_may_die_at_any_point(world, name):
    choose = random.Random(name)
    for role, count in roles_at(world, name).items():
        survives(world, Fault(name, at=choose.randint(1, count), role=role), seed=choose.randrange(1000))


@pytest.mark.parametrize("victim", ["trainer-0", "trainer-1", "server-0", "server-1", "oracle", "processor-0"])
@pytest.mark.parametrize("name", RECOVERY)
def test_any_role_may_die_in_every_phase_of_a_recovery(name, victim):
    first = Fault("trainer.sync.critical", at=6, role="trainer-1")
    survives(USUAL, first, Fault(name), victims={name: [victim]})


@pytest.mark.parametrize("seed", range(4))
def test_two_may_die_at_once(seed):
    roles = ["trainer-0", "trainer-1", "trainer-2", "server-0", "server-1", "oracle", "processor-0", "processor-1"]
    victims = random.Random(seed).sample(roles, 2)
    fault = random_faults(LARGE, seed, 1)[0]
    survives(LARGE, fault, victims={fault.name: victims}, seed=seed)


@pytest.mark.parametrize("seed", range(4))
def test_several_may_die_one_after_the_other(seed):
    faults = random_faults(LARGE, seed, 3)
    ended = run(LARGE, *faults, seed=seed)
    assert not ended.differs, f"seed {seed}: other bits after {', '.join(map(str, faults))}"


@pytest.mark.parametrize("name", [name for name in NAMES if name.startswith(("trainer.", "mark.", "remote."))])
def test_a_trainer_that_was_thought_dead_changes_nothing_when_it_comes_back(name):
    count = roles_at(USUAL, name).get("trainer-1", 0)
    if count:
        survives(USUAL, Fault(name, "pause", count // 2 + 1, "trainer-1"))


@pytest.mark.parametrize("role", ["trainer-0", "server-1", "oracle"])
def test_roles_may_die_while_messages_are_lost_doubled_and_late(role):
    fault = Fault("wire.received", at=9, role="server-0")
    survives(
        USUAL, fault, victims={fault.name: [role]},
        delay=(0.0, 0.003), loss=0.05, duplicate=0.1, reorder=0.2,
    )  # fmt: skip


def test_a_role_that_dies_more_often_than_allowed_ends_the_run_by_name():
    faults = [Fault("oracle.plan.made", at=at, role="oracle") for at in (2, 4, 6)]
    with pytest.raises(ClusterError, match=r"oracle was lost.*started again 2 times"):
        run(USUAL, *faults, restarts_max=2)
