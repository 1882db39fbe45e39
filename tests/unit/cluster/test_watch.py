"""The driver's end of roles over a Ray that is played: errors keep type and role, and no wait is endless."""

from __future__ import annotations

from types import SimpleNamespace

import pytest

from bagpipe.cluster import watch as module
from bagpipe.cluster.log import LogPlace
from bagpipe.cluster.settings import Failure, Report
from bagpipe.cluster.watch import Watch, reason
from bagpipe.errors import ClusterError, DataError, DeadlineError, PipelineError, StoreError

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


class RayError(Exception):
    pass


class Call:
    """An answer that is there after it was asked for so many times."""

    def __init__(self, answer, after=0):
        self.answer, self.after = answer, after


class Played:
    """As much of Ray as the watch uses; each wait is a moment."""

    exceptions = SimpleNamespace(RayError=RayError)

    def __init__(self, clock):
        self.clock = clock

    def wait(self, calls, num_returns=1, timeout=None):
        self.clock[0] += timeout or 0.0
        for call in calls:
            call.after -= 1
        done = [call for call in calls if call.after < 0]
        return done, [call for call in calls if call not in done]

    def get(self, call, timeout=None):
        if isinstance(call.answer, Exception):
            raise call.answer
        return call.answer


class Actor:
    """Gives the answers of each method in turn, the last one for ever."""

    def __init__(self, **answers):
        for name, given in answers.items():
            setattr(self, name, SimpleNamespace(remote=self._next(list(given))))

    @staticmethod
    def _next(given):
        return lambda *_: given.pop(0) if len(given) > 1 else Call(given[0].answer, given[0].after)


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
    return made


def reports(role, line, printed=b""):
    return Call({role: Report(line, printed)})


def test_answers_are_gathered_by_role_however_long_each_takes(watch):
    calls = {"server 0": Call("a", after=5), "server 1": Call("b")}
    assert watch.gather(calls, "start", 60.0) == {"server 0": "a", "server 1": "b"}


def test_a_role_that_does_not_answer_is_named_after_the_deadline(watch, tmp_path):
    calls = {"server 0": Call("a"), "server 1": Call("b", after=10**6)}
    with pytest.raises(DeadlineError, match=r"^server 1 did not start within 60 s: see .*logs"):
        watch.gather(calls, "start", 60.0)


def test_an_error_of_a_role_is_raised_as_what_it_is_with_the_role(watch):
    with pytest.raises(DataError, match=r"^processor 0: the shard is damaged"):
        watch.gather({"processor 0": Call(Failure("DataError", "the shard is damaged"))}, "start", 60.0)


@pytest.mark.parametrize("kind", ["ClusterError", "SystemExit", "errors", "__class__"])
def test_an_error_that_nobody_foresaw_points_to_the_log(watch, kind):
    with pytest.raises(ClusterError, match=r"^trainer 0 failed with ValueError: x; see .*trainer-0.log"):
        watch.take("trainer 0", Call(Failure(kind, "trainer 0 failed with ValueError: x")))


def test_a_role_that_was_lost_ends_the_wait_for_another(watch):
    watch.actors = {
        "trainer 0": Actor(),
        "server 0": Actor(report=[reports("server 0", "1 row"), Call(RayError(DIED))]),
    }
    with pytest.raises(ClusterError, match=r"^server 0 was lost: its process ended .*; see .*server-0.log"):
        watch.follow({"trainer 0": Call("never", after=10**6)})
    assert ("server 0", "1 row") in watch.shown


def test_the_role_that_was_lost_is_blamed_and_not_the_one_that_missed_it(watch):
    watch.actors = {"trainer 0": Actor(), "server 1": Actor(report=[Call(RayError(DIED), after=10)])}
    with pytest.raises(ClusterError, match=r"^server 1 was lost"):
        watch.follow({"trainer 0": Call(Failure("StoreError", "server 1 did not answer"), after=20)})


def test_an_error_of_the_trainer_is_its_own_where_all_others_are_well(watch):
    watch.actors = {"trainer 0": Actor(), "server 1": Actor(report=[reports("server 1", "fine")])}
    with pytest.raises(StoreError, match=r"^trainer 0: the disk is full"):
        watch.follow({"trainer 0": Call(Failure("StoreError", "the disk is full"), after=20)})


def test_answers_of_trainers_come_in_their_order_whoever_is_done_first(watch):
    watch.actors = {role: Actor(report=[reports(role, "is done")]) for role in ("trainer 0", "trainer 1")}
    calls = {"trainer 0": Call("a", after=9), "trainer 1": Call("b", after=3)}
    assert list(watch.follow(calls).items()) == [("trainer 0", "a"), ("trainer 1", "b")]


MISSED = Failure("PipelineError", "trainer 0 can't exchange gradients of iteration 3: trainer 1 has stopped")


@pytest.mark.parametrize("first", ["trainer 0", "trainer 1"])
def test_the_trainer_that_failed_is_blamed_and_not_those_that_missed_it(watch, first):
    watch.actors = {"trainer 0": Actor(), "trainer 1": Actor()}
    failed = Failure("ClusterError", "trainer 1 failed with ValueError: odd")
    calls = {"trainer 0": Call(MISSED, after=4), "trainer 1": Call(failed, after=4)}
    calls[first].after = 2
    with pytest.raises(ClusterError, match=r"^trainer 1 failed with ValueError: odd; see "):
        watch.follow(calls)


@pytest.mark.parametrize("first", ["trainer 0", "trainer 1"])
def test_the_trainer_that_was_lost_is_blamed_whoever_else_says_so_first(watch, first):
    watch.actors = {"trainer 0": Actor(), "trainer 1": Actor()}
    calls = {"trainer 0": Call(MISSED, after=4), "trainer 1": Call(RayError(DIED), after=4)}
    calls[first].after = 2
    with pytest.raises(ClusterError, match=r"^trainer 1 was lost: its process ended"):
        watch.follow(calls)


def test_a_trainer_that_fails_while_others_know_nothing_of_it_does_not_wait_for_them(watch, clock):
    watch.actors = {"trainer 0": Actor(), "trainer 1": Actor()}
    calls = {"trainer 0": Call("never", after=10**6), "trainer 1": Call(Failure("StoreError", "the disk is full"))}
    with pytest.raises(StoreError, match=r"^trainer 1: the disk is full"):
        watch.follow(calls)
    assert clock[0] < 10


def test_where_all_only_missed_another_the_first_one_tells_it(watch):
    watch.actors = {"trainer 0": Actor(), "trainer 1": Actor()}
    calls = {"trainer 0": Call(MISSED, after=3), "trainer 1": Call(Failure("PipelineError", "the same"), after=9)}
    with pytest.raises(PipelineError, match=r"^trainer 0: trainer 0 can't exchange gradients"):
        watch.follow(calls)


def test_what_roles_elsewhere_printed_is_in_their_logs_and_echoed_while_they_work(watch):
    echoed = []
    watch.echo = echoed.append
    watch.actors = {
        "trainer 0": Actor(report=[reports("trainer 0", "is done", b"ende\n"), reports("trainer 0", "is done")]),
        "server 0": Actor(
            report=[
                Call({"trainer 0": Report("iteration 1", b"gr\xc3"), "server 0": Report("2 rows", b"hi\n")}),
                Call({"trainer 0": Report("iteration 2", b"\xbc\xc3\x9f\n"), "server 0": Report("3 rows", b"")}),
                Call({"trainer 0": Report("iteration 3", b""), "server 0": Report("3 rows", b"")}),
            ]
        ),
    }
    assert watch.follow({"trainer 0": Call("summary", after=60)}) == {"trainer 0": "summary"}
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
        ("strange\nand long", "strange"),
        ("", "Ray does not say why"),
    ],
)
def test_the_reason_of_a_loss_is_one_line(text, words):
    assert reason(text) == words
