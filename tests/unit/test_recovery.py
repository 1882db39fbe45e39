"""What a supervisor asks of a crew after losses: the order of it, the point it chooses, and when it gives up."""

from __future__ import annotations

import random
from pathlib import Path

import pytest

from bagpipe.checkpoint.point import START, ResumePoint
from bagpipe.errors import CheckpointError, ClusterError, StoreError
from bagpipe.recovery import Incident, RolesLost, Supervisor

ROLES = ("trainer 0", "trainer 1", "server 0", "server 1", "oracle", "processor 0")


def after(done):
    """The point of a checkpoint after so many iterations."""
    return ResumePoint(done, Path(f"/checkpoints/{done:08d}"), f"{done:016x}")


class ScriptedCrew:
    """Does what it is asked in no time; `faults` says who is lost in which call, counted from 0."""

    def __init__(self, faults=(), checkpoints=(), damaged=None):
        """`damaged` says which points can't be returned to after all, and why."""
        self.faults, self.complete, self.damaged = dict(faults), [*map(after, checkpoints)], damaged or {}
        self.calls = []
        self.done = 0
        self.now = 0.0

    def call(self, *words):
        self.calls.append(words)
        self.now += 1
        lost = self.faults.pop(len(self.calls) - 1, None)
        if lost is not None:
            raise RolesLost(dict.fromkeys(lost, "killed"))

    def attempt(self, generation, point, went_on):
        self.call("attempt", generation, point)
        went_on()
        self.done = point.done + 10
        self.call("work on")
        return f"all of generation {generation}"

    def abandon(self, generation):
        self.call("abandon", generation)

    def restart(self, roles):
        self.call("restart", tuple(roles))

    def points(self):
        self.call("points")
        return self.complete

    def return_to(self, point):
        self.call("return", point)
        if point in self.damaged:
            raise self.damaged[point]


def supervise(crew, restarts_max=3, start=START):
    said = []
    supervisor = Supervisor(crew, restarts_max, said.append, lambda: crew.now)
    return supervisor, supervisor.run(start), said


def test_a_run_without_losses_is_one_attempt():
    crew = ScriptedCrew()
    supervisor, result, said = supervise(crew)
    assert result == "all of generation 0"
    assert crew.calls == [("attempt", 0, START), ("work on",)]
    assert (supervisor.incidents, said) == ([], [])


def test_after_a_loss_all_abandon_the_lost_one_restarts_rows_return_and_the_run_goes_on_from_there():
    crew = ScriptedCrew({1: ["trainer 1"]}, checkpoints=(3, 5))
    supervisor, result, said = supervise(crew)
    point = after(5)
    assert result == "all of generation 1"
    assert crew.calls[2:] == [
        ("abandon", 1), ("restart", ("trainer 1",)), ("points",), ("return", point), ("attempt", 1, point), ("work on",)
    ]  # fmt: skip
    assert supervisor.incidents == [Incident("trainer 1", "killed", 10, 5, 5.0)]
    assert said == [
        "trainer 1 was lost: killed",
        "going back to the checkpoint after 5 iterations",
        "went on from the checkpoint after 5 iterations after 5.0 s",
    ]


def test_two_lost_at_once_come_back_together_and_are_two_incidents():
    crew = ScriptedCrew({1: ["server 1", "trainer 0"]}, checkpoints=(5,))
    supervisor, _, said = supervise(crew)
    assert ("restart", ("server 1", "trainer 0")) in crew.calls
    assert [incident.role for incident in supervisor.incidents] == ["server 1", "trainer 0"]
    assert len(said) == 4
    assert supervisor.generation == 1


@pytest.mark.parametrize("call", [2, 3, 4, 5, 6])
def test_a_loss_during_recovery_begins_it_anew_for_all_who_are_lost(call):
    crew = ScriptedCrew({1: ["server 0"], call: ["oracle"]}, checkpoints=(5,))
    supervisor, result, _ = supervise(crew)
    assert result == "all of generation 2"
    asked = [words[1] for words in crew.calls if words[0] == "restart"]
    both, only = ("server 0", "oracle"), ("oracle",)
    assert asked[-1] == (only if call == 6 else both), "who was lost before the attempt is still missing"
    assert [(each.role, each.done_after) for each in supervisor.incidents] == [("server 0", 5), ("oracle", 5)]
    assert supervisor.incidents[0].seconds > supervisor.incidents[1].seconds


@pytest.mark.parametrize(
    ("checkpoints", "start", "expected"),
    [
        ((), START, START),
        ((2,), START, after(2)),
        ((6, 2, 4), START, after(6)),
        ((), after(40), after(40)),
        ((2, 50), after(40), after(50)),
    ],
)
def test_the_point_is_the_newest_complete_checkpoint(checkpoints, start, expected):
    crew = ScriptedCrew({0: ["server 1"]}, checkpoints)
    supervise(crew, start=start)
    assert ("return", expected) in crew.calls
    assert crew.calls[0] == ("attempt", 0, start)
    assert ("attempt", 1, expected) in crew.calls


TORN, LOST = CheckpointError("server 0: rows-0 is damaged"), StoreError("server 1 has no room")


@pytest.mark.parametrize(
    ("damaged", "expected"),
    [
        ({after(8): TORN}, [after(8), after(6)]),
        ({after(8): TORN, after(6): LOST}, [after(8), after(6), after(4)]),
        ({after(8): TORN, after(6): LOST, after(4): TORN}, [after(8), after(6), after(4), START]),
    ],
)
def test_where_a_checkpoint_is_damaged_an_earlier_one_is_used(damaged, expected):
    crew = ScriptedCrew({1: ["server 1"]}, checkpoints=(4, 6, 8), damaged=damaged)
    supervisor, result, said = supervise(crew)
    assert result == "all of generation 1"
    assert [words[1] for words in crew.calls if words[0] == "return"] == expected
    assert ("attempt", 1, expected[-1]) in crew.calls
    assert [incident.done_after for incident in supervisor.incidents] == [expected[-1].done]
    assert "the checkpoint after 8 iterations can't be returned to: server 0: rows-0 is damaged" in said


def test_a_run_that_was_resumed_never_returns_to_before_its_start():
    crew = ScriptedCrew({1: ["server 1"]}, checkpoints=(2, 6, 8), damaged={after(8): LOST, after(6): TORN})
    with pytest.raises(CheckpointError, match="rows-0 is damaged"):
        supervise(crew, start=after(6))
    assert [words[1] for words in crew.calls if words[0] == "return"] == [after(8), after(6)]


def test_a_role_is_started_again_up_to_the_limit_and_then_named():
    crew = ScriptedCrew({0: ["oracle"], 5: ["oracle"], 10: ["oracle"]})
    with pytest.raises(ClusterError, match=r"oracle was lost: killed; it was started again 2 times.*restarts_max"):
        supervise(crew, restarts_max=2)
    assert sum(words[0] == "restart" for words in crew.calls) == 2


def test_losses_of_other_roles_do_not_count_against_a_role():
    crew = ScriptedCrew({0: ["oracle"], 5: ["trainer 0"], 10: ["server 0"]})
    supervisor, _, _ = supervise(crew, restarts_max=1)
    assert supervisor.generation == len(supervisor.incidents) == 3


def test_without_restarts_a_loss_ends_the_run():
    crew = ScriptedCrew({0: ["trainer 0"]})
    with pytest.raises(ClusterError, match=r"trainer 0 was lost: killed; with recovery\.restarts_max = 0"):
        supervise(crew, restarts_max=0)
    assert len(crew.calls) == 1


def test_an_error_that_is_no_loss_ends_the_run_as_it_is():
    class Failing(ScriptedCrew):
        def attempt(self, generation, point, went_on):
            raise ZeroDivisionError("of the data")

    with pytest.raises(ZeroDivisionError, match="of the data"):
        supervise(Failing())


def test_a_loss_with_nothing_left_to_train_is_an_incident_too():
    class Brief(ScriptedCrew):
        def attempt(self, generation, point, went_on):
            self.call("attempt", generation, point)
            return "over"

    supervisor, result, said = supervise(Brief({0: ["trainer 0"]}))
    assert result == "over"
    assert [incident.role for incident in supervisor.incidents] == ["trainer 0"]
    assert said[-1].startswith("went on from the beginning")


@pytest.mark.parametrize("seed", range(50))
def test_any_losses_within_the_limit_end_well_with_one_incident_each(seed):
    chance = random.Random(seed)
    faults = {call: chance.sample(ROLES, chance.randint(1, 3)) for call in chance.sample(range(60), 12)}
    crew = ScriptedCrew(faults, checkpoints=(6, 8))
    supervisor, _, _ = supervise(crew, restarts_max=100)
    happened = [role for call in sorted(faults) if call not in crew.faults for role in faults[call]]
    assert [incident.role for incident in supervisor.incidents] == happened
    assert all(incident.done_after == 8 for incident in supervisor.incidents)
    last = [words[0] for words in crew.calls]
    assert last[-2:] == ["attempt", "work on"]
