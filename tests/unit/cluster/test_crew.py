"""What a crew of Ray actors does when it is told to leave off, to return and to end, over a Ray that is played."""

from __future__ import annotations

from pathlib import Path

import pytest

from bagpipe.checkpoint.point import ResumePoint
from bagpipe.cluster.crew import RETURN_S, TrainingCrew
from bagpipe.cluster.log import LogPlace
from bagpipe.cluster.request import Request
from bagpipe.cluster.settings import Failure
from bagpipe.cluster.watch import Watch
from bagpipe.cluster.watch import time as clock_of_watch
from bagpipe.config import parse_config
from bagpipe.errors import StoreError
from bagpipe.recovery import RolesLost
from harness.fake_ray import Actor, Call, Played, members

NEVER = 10**6


@pytest.fixture
def clock(monkeypatch):
    now = [0.0]
    monkeypatch.setattr(clock_of_watch, "monotonic", lambda: now[0])
    return now


@pytest.fixture
def crew(clock, tmp_path):
    """Two of each, all of whom are there."""
    watch = Watch(Played(clock), LogPlace.make(tmp_path / "logs"), lambda *_: None)
    watch.members = members(
        trainer_0=Actor(), trainer_1=Actor(), oracle=Actor(), processor_0=Actor(), server_0=Actor(), server_1=Actor()
    )
    for role in ("server 0", "server 1"):
        watch.members[role].address = "tcp://127.0.0.1:1"
    request = Request(parse_config({"trainers": 2}), servers=2)
    return TrainingCrew(request, watch.ray, watch, tmp_path, job=None)


def test_a_trainer_that_does_not_leave_off_in_time_is_replaced_and_was_not_lost(crew, clock):
    actor = crew.watch.members["trainer 1"].actor
    crew.working = {"trainer 0": Call(Failure("PipelineError", "it is over")), "trainer 1": Call("never", after=NEVER)}
    crew.abandon(1)
    assert actor.killed
    assert "trainer 1" not in crew.watch.members
    assert "trainer 0" in crew.watch.members
    assert crew.watch.stuck_s <= clock[0] < crew.watch.stuck_s + 5


def test_a_trainer_whose_iteration_takes_long_leaves_off_and_stays(crew):
    slow = Call(Failure("PipelineError", "it is over"), after=100)  # 20 s
    crew.working = {"trainer 0": slow}
    crew.abandon(1)
    assert "trainer 0" in crew.watch.members
    assert crew.working == {}


def test_a_trainer_that_died_meanwhile_is_lost(crew):
    crew.working = {"trainer 0": Call(Played.exceptions.RayError("its node has died"))}
    with pytest.raises(RolesLost, match=r"^trainer 0 was lost: its machine"):
        crew.abandon(1)


def test_a_server_that_could_not_leave_off_is_lost_and_never_told_to_return(crew):
    server = crew.watch.members["server 1"].actor
    server.answers["abandon"] = [Call(Failure("DeadlineError", "3 requests are still being worked on after 60 s"))]
    with pytest.raises(RolesLost) as lost:
        crew.abandon(1)
    (cause,) = lost.value.losses.values()
    assert list(lost.value.losses) == ["server 1"]
    assert cause.startswith("it could not leave off and was ended: server 1: 3 requests")
    assert server.killed
    assert "server 0" in crew.watch.members


def test_a_return_that_fails_on_one_server_is_told_when_the_others_are_done_with_it(crew, clock):
    for role, answer in (("server 0", Call(Failure("StoreError", "damaged"))), ("server 1", Call(None, after=200))):
        crew.watch.members[role].actor.answers["recover"] = [answer]
    with pytest.raises(StoreError, match=r"^server 0: damaged"):
        crew.return_to(ResumePoint(8, Path("/checkpoints/00000008"), "aa"))
    assert 30 < clock[0] < RETURN_S
    assert {"server 0", "server 1"} <= set(crew.watch.members)


def test_all_processes_of_a_run_that_failed_are_ended_at_once(crew, clock):
    actors = {role: member.actor for role, member in crew.watch.members.items()}
    crew.close()
    assert all(actor.killed for actor in actors.values())
    assert clock[0] < 1


def test_after_an_orderly_end_nobody_is_asked_again(crew):
    actors = {role: member.actor for role, member in crew.watch.members.items()}
    crew.stop()
    crew.close()
    assert all(actor.asked.count(("stop",)) == 1 and actor.killed for actor in actors.values())
