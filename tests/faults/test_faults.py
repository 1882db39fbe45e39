"""Whatever dies, wherever it is: the run ends with the bits of an undisturbed one, and nothing stays (I2)."""

from __future__ import annotations

import random
import re

import pytest

from bagpipe.errors import ClusterError
from bagpipe.failpoints import Fault
from harness import sabotage
from harness.cluster import Crew
from harness.faults import (
    AFTERWARDS,
    BY_SCHEDULE,
    LARGE,
    RECOVERY,
    SERVER_LOST,
    SMALL,
    USUAL,
    USUALLY,
    WAITING,
    error_of,
    random_faults,
    reached_after,
    roles_at,
    run,
    survives,
)

BREAKING = {"delay": (0.0, 0.003), "breaks": 0.03}


@pytest.mark.parametrize("name", USUALLY)
def test_a_role_may_die_at_any_point(name):
    choose, world = random.Random(name), WAITING if name in BY_SCHEDULE else USUAL
    role, count = choose.choice(sorted(roles_at(world, name).items()))
    seed = 0 if name in BY_SCHEDULE else choose.randrange(1000)  # that of `roles_at`
    survives(world, Fault(name, at=choose.randint(1, count), role=role), seed=seed)


@pytest.mark.parametrize("name", AFTERWARDS)
def test_a_role_may_die_at_any_point_of_its_return(name):
    choose = random.Random(name)
    options, reached = reached_after(name)
    role, count = choose.choice(sorted(reached.items()))
    survives(USUAL, SERVER_LOST, Fault(name, at=choose.randint(1, count), role=role), **options)


@pytest.mark.parametrize(
    ("name", "victim"), [*zip(RECOVERY, ["server-0", "trainer-0", "server-1", "server-0", "server-1"], strict=True)]
)
def test_another_role_may_die_in_every_phase_of_a_recovery(name, victim):
    first = Fault("trainer.sync.critical", at=6, role="trainer-1")
    survives(USUAL, first, Fault(name), victims={name: [victim]})


@pytest.mark.parametrize("role", ["trainer-0", "server-0", "oracle", "processor-0"])
def test_the_only_one_of_its_kind_may_die(role):
    fault = Fault("wire.received", at=20, role="server-0")
    survives(SMALL, fault, victims={fault.name: [role]})


@pytest.mark.parametrize("seed", range(2))
def test_several_may_die_at_once(seed):
    roles = ["trainer-0", "trainer-1", "trainer-2", "server-0", "server-1", "oracle", "processor-0", "processor-1"]
    fault = random_faults(LARGE, seed, 1)[0]
    survives(LARGE, fault, victims={fault.name: random.Random(seed).sample(roles, 2 + seed)}, seed=seed)


def test_all_may_die_at_once():
    roles = ["trainer-0", "trainer-1", "server-0", "server-1", "oracle", "processor-0"]
    fault = Fault("trainer.step.updated", at=7, role="trainer-0")
    ended = survives(USUAL, fault, victims={fault.name: roles})
    assert {incident.role for incident in ended.incidents} == set(roles)
    (done,) = {incident.done_after for incident in ended.incidents}
    assert done in (4, 6), "the checkpoint of 6 iterations may have been on its way"


@pytest.mark.parametrize("seed", range(2))
def test_several_may_die_one_after_the_other(seed):
    faults = random_faults(LARGE, seed, 3)
    ended = run(LARGE, *faults, seed=seed)
    assert not ended.differs, f"seed {seed}: other bits after {', '.join(map(str, faults))}"
    assert ended.incidents


@pytest.mark.parametrize(
    "name",
    [
        *("trainer.evict.copied", "trainer.step.updated", "trainer.sync.delayed"),
        *("mark.flushed", "mark.written", "remote.write.begun"),
    ],
)
def test_a_trainer_that_was_thought_dead_changes_nothing_when_it_comes_back(name):
    at = roles_at(USUAL, name)["trainer-1"] // 2 + 1
    survives(USUAL, Fault(name, "pause", at, "trainer-1"))


@pytest.mark.parametrize("role", ["server-0", "oracle"])
def test_others_may_be_thought_dead_and_live_on_too(role):
    fault = Fault("server.mark.made", "pause", 3, "server-0")
    survives(LARGE, fault, victims={fault.name: [role]}, seed=3)


def test_what_a_trainer_had_sent_arrives_after_its_death_and_is_refused():
    ended = survives(USUAL, Fault("remote.write.begun", "pause", 8, "trainer-0"))
    assert ended.crew.network.num_late


@pytest.mark.parametrize("role", ["trainer-0", "server-1"])
def test_roles_may_die_while_connections_break_and_messages_are_late(role):
    fault = Fault("wire.received", at=40, role="server-0")
    survives(USUAL, fault, victims={fault.name: [role]}, **BREAKING)


def test_servers_that_keep_nothing_in_memory_read_the_checkpoint():
    fault = Fault("trainer.step.updated", at=8, role="trainer-1")
    ended = survives(USUAL, fault, rollback=False)
    assert ended.incidents[0].done_after >= 4
    assert ("server-0", "layer.dropped") not in ended.reaches


@pytest.mark.parametrize("role", ["trainer-0", "trainer-1", "server-0", "server-1"])
def test_any_role_may_die_while_a_read_waits_for_another_trainer(role):
    count = roles_at(WAITING, "server.read.parked")["server-0"]
    fault = Fault("server.read.parked", at=count // 2, role="server-0")
    survives(WAITING, fault, victims={fault.name: [role]})


def test_reads_wait_while_connections_break_and_messages_are_late():
    ended = run(WAITING, **BREAKING)
    assert not ended.differs
    assert ("server-0", "server.read.parked") in ended.reaches


def test_a_read_that_a_server_answers_one_iteration_early_is_noticed(monkeypatch):
    sabotage.answer_reads_early(monkeypatch)
    assert any(run(WAITING, seed=seed).differs for seed in range(6))


def test_a_seed_gives_the_same_steps_again():
    fault = Fault("server.write.applied", at=20, role="server-1")
    first, second = (survives(WAITING, fault, seed=5, **BREAKING) for _ in range(2))
    assert len(first.crew.steps) == 2
    assert first.crew.steps == second.crew.steps
    assert first.reaches == second.reaches
    assert ("server-0", "server.read.parked") in first.reaches


def test_servers_go_back_in_memory_where_they_have_what_leads_there():
    fault = Fault("trainer.step.updated", at=8, role="trainer-1")
    ended = survives(USUAL, fault)
    assert {("server-0", "layer.dropped"), ("server-1", "layer.dropped")} <= ended.reaches.keys()


def test_without_room_for_what_leads_back_rows_come_from_the_checkpoint():
    fault = Fault("trainer.step.updated", at=8, role="trainer-1")
    ended = survives(USUAL, fault, history=0)
    assert ended.incidents[0].done_after >= 4


def test_a_damaged_checkpoint_is_passed_over_and_an_earlier_one_taken(monkeypatch):
    start, damaged = Crew.start, []

    def damaging(crew, role):
        newest = max(crew.checkpoints.glob("0*/rows-1-00000.safetensors"), default=None)
        if newest is not None:
            content = bytearray(newest.read_bytes())
            content[len(content) // 2] ^= 1
            newest.write_bytes(content)
            damaged.append(int(newest.parent.name))
        start(crew, role)

    monkeypatch.setattr(Crew, "start", damaging)
    fault = Fault("trainer.step.updated", at=8, role="trainer-1")
    ended = survives(USUAL, fault, victims={fault.name: ["server-1"]})
    assert ended.incidents[0].done_after < damaged[0]


def test_a_trainer_that_was_cut_off_right_before_it_names_a_checkpoint_changes_nothing():
    count = roles_at(USUAL, "checkpoint.confirmed")["trainer-0"]
    for at in range(1, count + 1):
        survives(USUAL, Fault("checkpoint.confirmed", "pause", at, "trainer-0"), seed=at)


@pytest.mark.parametrize("name", ["mark.over", "checkpoint.rows.written", "checkpoint.complete"])
def test_a_run_that_is_lost_after_its_last_iteration_ends_as_it_would_have(name):
    count = roles_at(USUAL, name)["trainer-0"]
    ended = survives(USUAL, Fault(name, at=count, role="trainer-0"))
    assert ended.incidents[0].done_after >= 8
    assert ended.last_kept == 9


@pytest.mark.parametrize(
    ("name", "told"),
    [
        ("trainer.fetch.read", r"fetch-\d failed.*told to fail"),
        ("server.write.received", "server 0 at server-0.*failed inside"),
        ("server.save.begun", "checkpoint of iteration 4.*failed inside the server"),
        ("checkpoint.manifest.written", "checkpoint of iteration 4.*told to fail"),
        ("oracle.plan.made", "oracle failed inside"),
        ("data.group.read", "processor-0.*failed inside"),
        ("server.write.answered", None),
    ],
)
def test_an_error_ends_the_run_by_name_or_changes_nothing(name, told):
    role, count = min(roles_at(USUAL, name).items())
    error = error_of(USUAL, Fault(name, "fail", max(1, count // 2), role))
    assert (error is None) == (told is None)
    assert told is None or re.search(told, str(error)), error


def test_a_role_that_dies_more_often_than_allowed_ends_the_run_by_name():
    faults = [Fault("oracle.plan.made", at=at, role="oracle") for at in (2, 4, 6)]
    with pytest.raises(ClusterError, match=r"oracle was lost.*started again 2 times"):
        run(USUAL, *faults, restarts_max=2)
