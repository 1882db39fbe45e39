"""What replaces a role that is lost: a process that takes on any role, one that is kept ready, an attempt that ends."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace

import pytest

from bagpipe import failpoints
from bagpipe.checkpoint.point import START, ResumePoint
from bagpipe.cluster import spare as module
from bagpipe.cluster.attempt import Attempt
from bagpipe.cluster.post import POSTS, Post
from bagpipe.cluster.request import Request
from bagpipe.cluster.settings import Wiring
from bagpipe.cluster.spare import SETTLE_S, Spare
from bagpipe.config import parse_config
from bagpipe.errors import ConfigError, GenerationOverError
from bagpipe.resuming import Resumed


def test_a_process_takes_on_the_role_that_it_is_given(monkeypatch):
    monkeypatch.setattr(failpoints, "_process", "")
    post = Post()
    post.take_on("oracle")
    assert post.ask("line") == "starts"
    assert failpoints.acting() == "oracle"
    post = Post("server 1")
    assert list(post.ask("report")) == ["server 1"]
    assert failpoints.acting() == "server-1"
    assert {kind.__name__ for kind in POSTS.values()} == {"TrainerPost", "OraclePost", "ProcessorPost", "ServerPost"}


class RayError(Exception):
    pass


class Played:
    """As much of Ray as a spare needs; what it makes is never quite ready, unless it is lost."""

    exceptions = SimpleNamespace(RayError=RayError)

    def __init__(self):
        self.made, self.killed, self.lost = [], [], False

    def remote(self, kind):
        return SimpleNamespace(options=lambda **options: SimpleNamespace(remote=lambda: self._make(kind, options)))

    def _make(self, kind, options):
        assert options["num_cpus"] == 0
        actor = SimpleNamespace(roles=[])
        actor.get_ready = SimpleNamespace(remote=lambda: actor)
        actor.take_on = SimpleNamespace(remote=actor.roles.append)
        self.made.append(actor)
        return actor

    def wait(self, calls, timeout):
        return (calls, []) if self.lost else ([], calls)

    def get(self, call):
        raise RayError

    def kill(self, actor, no_restart):
        self.killed.append(actor)


@pytest.fixture
def clock(monkeypatch):
    now = [100.0]
    monkeypatch.setattr(module.time, "monotonic", lambda: now[0])
    return now


def test_a_process_is_kept_ready_once_a_run_has_gone_on_for_a_while_and_again_when_it_was_taken(clock):
    ray = Played()
    spare = Spare(ray, wanted=True)
    assert spare.take("oracle") is None
    for _ in range(3):
        spare.keep()
        assert ray.made == []
        clock[0] += SETTLE_S / 2 - 0.1
    clock[0] += 1
    spare.keep()
    spare.keep()
    assert len(ray.made) == 1
    actor = spare.take("server 1")
    assert actor is ray.made[0]
    assert actor.roles == ["server 1"]
    assert spare.take("server 0") is None
    spare.keep()
    clock[0] += SETTLE_S + 1
    spare.keep()
    spare.close()
    spare.close()
    assert ray.killed == ray.made[1:2]


def test_a_process_that_was_kept_ready_and_died_is_not_taken(clock):
    ray = Played()
    spare = Spare(ray, wanted=True)
    spare.keep()
    clock[0] += SETTLE_S + 1
    spare.keep()
    ray.lost = True
    assert spare.take("oracle") is None


def test_none_is_kept_where_it_could_not_be_used(clock):
    ray = Played()
    spare = Spare(ray, wanted=False)
    for _ in range(3):
        spare.keep()
        clock[0] += SETTLE_S + 1
    assert ray.made == []
    config = parse_config({})
    assert Request(config).keeps_spare
    assert not Request(config, address="10.0.0.1:6379").keeps_spare
    assert not Request(parse_config({"recovery": {"restarts_max": 0}})).keeps_spare
    assert not Request(parse_config({"recovery": {"spare": False}})).keeps_spare


def test_an_attempt_ends_once_and_tells_all_also_those_who_come_later_or_fail():
    attempt, told = Attempt(), []

    def failing(_):
        raise OSError("gone")

    for end in (failing, told.append):
        attempt.on_end(end)
    attempt.gone(0)
    attempt.abandon(3)
    attempt.abandon(4)
    attempt.on_end(told.append)
    assert [(str(error), error.generation) for error in told] == [("generation 3 is over", 3)] * 2
    with pytest.raises(GenerationOverError, match="server 1 is not waited for, since generation 3 is over") as ended:
        attempt.gone(1)
    assert ended.value.generation == 3


def test_every_generation_has_a_name_of_its_own_for_its_sessions():
    names = {Wiring(bytes(16), None, None).session(generation) for generation in range(100)}
    assert len(names) == 100
    assert bytes(16) not in names
    assert all(len(name) == 16 for name in names)


def test_a_resumed_run_begins_at_its_checkpoint(tmp_path):
    config, script = parse_config({}), tmp_path / "script.py"
    script.touch()
    point = ResumePoint(300, Path("run/checkpoints/00000300"), "aa")
    resumed = Resumed(tmp_path, config, point, [])
    assert Request(config, resumed=resumed).start == point
    assert Request(config, resumed=Resumed(tmp_path, config, START, [])).start == START
    assert Request(config).start == START
    with pytest.raises(ConfigError, match=r"a script goes on from its own checkpoints"):
        Request(config, resumed=resumed, script=script)
