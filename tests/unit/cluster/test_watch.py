"""The driver's end of roles over a Ray that is played: errors keep type and role, and no wait is endless."""

from __future__ import annotations

import os
import signal
import subprocess

import pytest

from bagpipe.cluster import watch as module
from bagpipe.cluster.log import LogPlace
from bagpipe.cluster.role import machine
from bagpipe.cluster.settings import Failure, Introduction, Report
from bagpipe.cluster.watch import Watch, reason
from bagpipe.errors import BagpipeError, ClusterError, DataError, PipelineError, StoreError
from bagpipe.recovery import RolesLost
from harness.fake_ray import Actor, Call, Played, RayError, members, reports

DIED = """The actor died unexpectedly before finishing this task.
\tclass_name: ServerRole
\tactor_id: 1d8ba3
\tpid: 4711
The actor is dead because its worker process has died. Worker exit type: SYSTEM_ERROR Worker exit detail: Worker \
unexpectedly exits with a connection error code 2. End of file. There are some potential root causes. (1) The process \
is killed by SIGKILL by OOM killer due to high memory usage. (2) ray stop --force is called."""
NO_BAGPIPE = """The actor died because of an error raised in its creation task, ray::TrainerRole.__init__()
ModuleNotFoundError: No module named 'bagpipe'"""
NODE = """The actor died unexpectedly before finishing this task.
The actor died because its node has died. Node Id: 03f4
\tthe actor's node was terminated unexpectedly: health check failed due to missing too many heartbeats"""


@pytest.fixture
def clock(monkeypatch):
    now = [0.0]
    monkeypatch.setattr(module.time, "monotonic", lambda: now[0])
    return now


@pytest.fixture
def watch(clock, tmp_path):
    shown = []
    made = Watch(Played(clock), LogPlace.make(tmp_path / "logs"), lambda role, line: shown.append((role, line)))
    made.shown = shown
    made.members = members(server_0=Actor(report=[reports("server 0", "fine")]))
    return made


def quiet_trainers(watch, number):
    """Trainers that leave word with server 0."""
    words = {f"trainer {rank}": Report("works", b"") for rank in range(number)}
    board = Actor(report=[Call(words | {"server 0": Report("fine", b"")})])
    trainers = {f"trainer_{rank}": Actor(report=[reports(f"trainer {rank}", "is done")]) for rank in range(number)}
    watch.members = members(server_0=board, **trainers)
    return board


def test_answers_are_gathered_by_role_however_long_each_takes(watch):
    calls = {"server 0": Call("a", after=5), "server 1": Call("b")}
    assert watch.gather(calls, "start", 60.0) == {"server 0": "a", "server 1": "b"}


def test_a_role_that_does_not_answer_is_ended_and_lost_after_the_deadline(watch):
    watch.members = members(server_0=Actor(), server_1=Actor())
    stuck = watch.members["server 1"].actor
    calls = {"server 0": Call("a"), "server 1": Call("b", after=10**6)}
    with pytest.raises(RolesLost) as lost:
        watch.gather(calls, "start", 60.0)
    assert lost.value.losses == {"server 1": "it did not start within 60 s"}
    assert stuck.killed
    assert list(watch.members) == ["server 0"]


def test_an_error_of_a_role_is_raised_as_what_it_is_with_the_role(watch):
    with pytest.raises(DataError, match=r"^processor 0: the shard is damaged"):
        watch.gather({"processor 0": Call(Failure("DataError", "the shard is damaged"))}, "start", 60.0)


@pytest.mark.parametrize("kind", ["ClusterError", "SystemExit", "errors", "__class__"])
def test_an_error_that_nobody_foresaw_points_to_the_log(watch, kind):
    with pytest.raises(ClusterError, match=r"^trainer 0 failed with ValueError: x; see .*trainer-0.log"):
        watch.take("trainer 0", Call(Failure(kind, "trainer 0 failed with ValueError: x")))


def test_a_role_that_was_lost_ends_the_wait_for_another(watch):
    watch.members = members(
        trainer_0=Actor(), server_0=Actor(report=[reports("server 0", "1 row"), Call(RayError(DIED))])
    )
    with pytest.raises(RolesLost, match=r"^server 0 was lost: its process ended"):
        watch.follow({"trainer 0": Call("never", after=10**6)}, "server 0")
    assert ("server 0", "1 row") in watch.shown
    assert list(watch.members) == ["trainer 0"]


def test_a_process_of_this_machine_that_ended_is_lost_before_ray_tells_it(watch):
    quiet_trainers(watch, 1)
    child = subprocess.Popen(["sleep", "60"])
    watch.members["trainer 0"].introduced(Introduction("1", "here", machine(), "127.0.0.1", child.pid))
    watch.check()
    child.kill()
    child.wait()
    with pytest.raises(RolesLost, match=r"^trainer 0 was lost: its process ended without a word"):
        watch.follow({"trainer 0": Call("never", after=10**6)}, "server 0")


def test_a_stopped_process_of_this_machine_is_gone_when_it_was_ended(watch):
    quiet_trainers(watch, 1)
    child = subprocess.Popen(["sleep", "60"])
    os.kill(child.pid, signal.SIGSTOP)
    watch.members["trainer 0"].introduced(Introduction("1", "here", machine(), "127.0.0.1", child.pid))
    with pytest.raises(RolesLost, match="trainer 0 was lost: it was slow"):
        watch.end(["trainer 0"], "it was slow")
    assert child.poll() == -signal.SIGKILL


def test_a_role_that_says_nothing_for_long_is_ended_but_not_one_that_pauses(watch, clock):
    silent = Actor(report=[reports("server 1", "fine"), Call({}, after=10**6)])
    quiet_trainers(watch, 1)
    watch.members |= members(server_1=silent)
    with pytest.raises(RolesLost, match=r"^server 1 was lost: it said nothing for 30 s and was ended"):
        watch.follow({"trainer 0": Call("never", after=10**6)}, "server 0")
    assert silent.killed
    assert 30 < clock[0] < 35
    pausing = Actor(report=[reports("server 1", "fine"), Call({"server 1": Report("fine", b"")}, after=100)])
    watch.members |= members(server_1=pausing)
    assert watch.follow({"trainer 0": Call("over", after=1000)}, "server 0") == {"trainer 0": "over"}
    assert not pausing.killed


def test_a_trainer_that_leaves_no_word_is_ended_as_long_as_it_could(watch):
    quiet_trainers(watch, 2)
    watch.members["server 0"].actor.answers["report"] = [
        Call({"trainer 0": Report("works", b""), "server 0": Report("fine", b"")})
    ]
    calls = {f"trainer {rank}": Call("never", after=10**6) for rank in range(2)}
    with pytest.raises(RolesLost, match=r"^trainer 1 was lost: it said nothing"):
        watch.follow(calls, "server 0")


def test_when_the_one_that_keeps_word_is_silent_trainers_are_not_blamed(watch):
    quiet_trainers(watch, 2)
    watch.members["server 0"].actor.answers["report"] = [Call({}, after=10**6)]
    with pytest.raises(RolesLost) as lost:
        watch.follow({f"trainer {rank}": Call("never", after=10**6) for rank in range(2)}, "server 0")
    assert list(lost.value.losses) == ["server 0"]


def test_nobody_is_late_while_the_driver_itself_was_stopped(watch, clock, monkeypatch):
    quiet_trainers(watch, 1)
    wait, stopped = watch.ray.wait, []

    def stopping(calls, num_returns=1, timeout=None):
        if len(stopped) == 20:
            clock[0] += 500
        stopped.append(1)
        return wait(calls, num_returns, timeout)

    monkeypatch.setattr(watch.ray, "wait", stopping)
    assert watch.follow({"trainer 0": Call("over", after=100)}, "server 0") == {"trainer 0": "over"}


def test_it_is_told_once_that_a_run_went_on(watch):
    quiet_trainers(watch, 1)
    watch.members["server 0"].actor.answers["report"] = [
        Call({"trainer 0": Report("works", b"", done), "server 0": Report("fine", b"")}) for done in (0, 7, 8, 9)
    ]
    went_on = []
    watch.follow({"trainer 0": Call("over", after=60)}, "server 0", done=7, went_on=lambda: went_on.append(watch.done))
    assert went_on == [8]
    assert watch.done == 9


def test_the_role_that_was_lost_is_blamed_and_not_the_one_that_missed_it(watch):
    watch.members |= members(trainer_0=Actor(), server_1=Actor(report=[Call(RayError(DIED), after=10)]))
    with pytest.raises(RolesLost, match=r"^server 1 was lost"):
        watch.follow({"trainer 0": Call(Failure("StoreError", "server 1 did not answer"), after=20)}, "server 0")


def test_an_error_of_the_trainer_is_its_own_where_all_others_are_well(watch):
    watch.members |= members(trainer_0=Actor(), server_1=Actor(report=[reports("server 1", "fine")]))
    with pytest.raises(StoreError, match=r"^trainer 0: the disk is full"):
        watch.follow({"trainer 0": Call(Failure("StoreError", "the disk is full"), after=20)}, "server 0")


def test_answers_of_trainers_come_in_their_order_whoever_is_done_first(watch):
    quiet_trainers(watch, 2)
    calls = {"trainer 0": Call("a", after=9), "trainer 1": Call("b", after=3)}
    assert list(watch.follow(calls, "server 0").items()) == [("trainer 0", "a"), ("trainer 1", "b")]


def test_who_dies_when_all_is_over_is_not_needed_any_more(watch):
    quiet_trainers(watch, 1)
    watch.members |= members(oracle=Actor(report=[Call(RayError(DIED), after=10)]))
    assert watch.follow({"trainer 0": Call("a", after=2)}, "server 0") == {"trainer 0": "a"}


MISSED = Failure("PipelineError", "trainer 0 can't exchange gradients of iteration 3: trainer 1 has stopped")


@pytest.mark.parametrize("first", ["trainer 0", "trainer 1"])
def test_the_trainer_that_failed_is_blamed_and_not_those_that_missed_it(watch, first):
    board = quiet_trainers(watch, 2)
    failed = Failure("ClusterError", "trainer 1 failed with ValueError: odd")
    calls = {"trainer 0": Call(MISSED, after=4), "trainer 1": Call(failed, after=4)}
    calls[first].after = 2
    with pytest.raises(ClusterError, match=r"^trainer 1 failed with ValueError: odd; see "):
        watch.follow(calls, "server 0", generation=3)
    assert ("end_generation", 3) in board.asked


@pytest.mark.parametrize("first", ["trainer 0", "trainer 1"])
def test_the_trainer_that_was_lost_is_blamed_whoever_else_says_so_first(watch, first):
    quiet_trainers(watch, 2)
    calls = {"trainer 0": Call(MISSED, after=4), "trainer 1": Call(RayError(DIED), after=4)}
    calls[first].after = 2
    with pytest.raises(RolesLost, match=r"^trainer 1 was lost: its process ended"):
        watch.follow(calls, "server 0")


@pytest.mark.parametrize("heed", [True, False])
def test_a_trainer_that_others_miss_and_that_does_not_answer_is_lost_unless_it_runs_a_script(watch, heed):
    quiet_trainers(watch, 2)
    calls = {"trainer 0": Call(MISSED, after=4), "trainer 1": Call("never", after=10**6)}
    expected, words = (RolesLost, "trainer 1 was lost: it did not answer") if heed else (PipelineError, "trainer 0: ")
    with pytest.raises(expected, match=rf"^{words}"):
        watch.follow(calls, "server 0", heed=heed)


def test_a_trainer_that_fails_while_others_know_nothing_of_it_does_not_wait_for_them(watch, clock):
    quiet_trainers(watch, 2)
    calls = {"trainer 0": Call("never", after=10**6), "trainer 1": Call(Failure("StoreError", "the disk is full"))}
    with pytest.raises(StoreError, match=r"^trainer 1: the disk is full"):
        watch.follow(calls, "server 0")
    assert clock[0] < 10


def test_where_all_only_missed_another_the_first_one_tells_it(watch):
    quiet_trainers(watch, 2)
    calls = {"trainer 0": Call(MISSED, after=3), "trainer 1": Call(Failure("PipelineError", "the same"), after=9)}
    with pytest.raises(PipelineError, match=r"^trainer 0: trainer 0 can't exchange gradients"):
        watch.follow(calls, "server 0")


BROKE = "trainer {} can't exchange gradients of iteration 40: the connection to trainer {} broke: 10.0.0.1:439"


def broke(here, there):
    """What one of two trainers says of the connection between them."""
    return Failure("PeerLostError", BROKE.format(here, there), {"rank": there})


OVER = Failure("GenerationOverError", "server 0 is not waited for", {"generation": 3})


@pytest.mark.parametrize("first", [0, 1])
@pytest.mark.parametrize("other", ["PeerLostError", "GenerationOverError"])
def test_where_only_the_connection_of_two_trainers_broke_the_one_that_is_missed_is_lost(watch, first, other):
    quiet_trainers(watch, 2)
    last = 1 - first
    calls = {
        f"trainer {first}": Call(broke(first, last), after=3),
        f"trainer {last}": Call(broke(last, first) if other == "PeerLostError" else OVER, after=9),
    }
    actor = watch.members[f"trainer {last}"].actor
    with pytest.raises(RolesLost, match=rf"^trainer {last} was lost: its connection to another trainer broke .*439"):
        watch.follow(calls, "server 0", generation=3)
    assert actor.killed
    assert f"trainer {first}" in watch.members


@pytest.mark.parametrize(
    ("other", "told"),
    [
        (Failure("ClusterError", "trainer 1 failed with ValueError: odd"), r"^trainer 1 failed with ValueError"),
        (Failure("GradientError", "iteration 4: not finite"), r"^trainer 1: iteration 4"),
        (Failure("GenerationOverError", "an earlier one", {"generation": 2}), r"^trainer 1: an earlier one"),
        (Failure("StoreError", "generation 3 is over"), r"^trainer 1: generation 3 is over"),
        (Failure("PipelineError", "the fetch-0 thread failed: KeyError: 3"), r"^trainer 0: trainer 0 can't exchange"),
        (Failure("PipelineError", "trainer 1 left the training loop after iteration 4 and did not meet the others: " +
                 BROKE.format(1, 0)), r"^trainer 0: trainer 0 can't exchange"),
        (Failure("PipelineError", "trainers are out of step: trainer 1 is at iteration 4"), r"^trainer 0"),
        (3, r"^trainer 0: trainer 0 can't exchange"),
    ],
)  # fmt: skip
def test_what_a_trainer_itself_did_ends_the_run_though_the_other_has_lost_contact(watch, other, told):
    quiet_trainers(watch, 2)
    calls = {
        "trainer 0": Call(broke(0, 1), after=3),
        "trainer 1": Call(other, after=9),
    }
    with pytest.raises(BagpipeError, match=told):
        watch.follow(calls, "server 0", generation=3, heed=False)
    assert {"trainer 0", "trainer 1"} <= set(watch.members)


def test_what_roles_elsewhere_printed_is_in_their_logs_and_echoed_while_they_work(watch):
    echoed = []
    watch.echo = echoed.append
    watch.members = members(
        trainer_0=Actor(report=[reports("trainer 0", "is done", b"ende\n"), reports("trainer 0", "is done")]),
        server_0=Actor(
            report=[
                Call({"trainer 0": Report("iteration 1", b"gr\xc3"), "server 0": Report("2 rows", b"hi\n")}),
                Call({"trainer 0": Report("iteration 2", b"\xbc\xc3\x9f\n"), "server 0": Report("3 rows", b"")}),
                Call({"trainer 0": Report("iteration 3", b""), "server 0": Report("3 rows", b"")}),
            ]
        ),
    )
    assert watch.follow({"trainer 0": Call("summary", after=60)}, "server 0") == {"trainer 0": "summary"}
    assert watch.logs.path("trainer 0").read_text() == "grüß\nende\n"
    assert watch.logs.path("server 0").read_text() == "hi\n"
    assert "".join(echoed) == "grüß\nende\n"
    said = [line for role, line in watch.shown if role == "trainer 0"]
    assert list(dict.fromkeys(said)) == ["iteration 1", "iteration 2", "iteration 3", "is done"]
    assert said[-1] == "is done"


@pytest.mark.parametrize(
    ("text", "words"),
    [
        (DIED, "its process ended without a word: it was killed, maybe for lack of memory, or crashed"),
        (NO_BAGPIPE, "No module named 'bagpipe'"),
        (NODE, "its machine, or Ray there, is gone"),
        ("x\nWorker exit detail: Owner's node has crashed. More.", "Worker exit detail: Owner's node has crashed"),
        (
            "The actor 84 is unavailable: RPC error: Socket closed",
            "its process can't be reached any more: it, its machine, or Ray there is gone",
        ),
        ("strange\nand long", "strange"),
        ("", "Ray does not say why"),
    ],
)
def test_the_reason_of_a_loss_is_one_line(text, words):
    assert reason(text) == words
