"""When a loop is saved and in which order, what comes back, and how work beside training is waited for."""

from __future__ import annotations

import threading
import time

import pytest
import torch
from torch import nn

from bagpipe.checkpoint.directory import Checkpoints
from bagpipe.checkpoint.manifest import Facts
from bagpipe.checkpoint.point import START, ResumePoint
from bagpipe.checkpoint.tree import pack_tree, unpack_tree
from bagpipe.errors import CheckpointError, DeadlineError, StoreError, WireError
from bagpipe.trainer.background import Background
from bagpipe.trainer.checkpointer import Checkpointer, Periods, Schedule, resumed_states
from bagpipe.trainer.state import copied, generator_states, set_generator_states

FACTS = Facts(tables=())


class Loop:
    """A training loop as far as it is saved; what it does is noted."""

    def __init__(self, log, rank=0):
        self.model = nn.Linear(2, 1)
        self.done, self.log, self.rank = 0, log, rank
        self.went_on = None

    def barrier(self):
        self.log.append((self.rank, "flush"))

    def gather(self, number, what):
        self.log.append((self.rank, "meet"))
        return [float(number)]

    def progress(self):
        return {"optimizer": {"updates": self.done}, "data": {"iterations": self.done, "batches": self.done}}

    def go_on(self, progress):
        self.went_on = progress


class Store:
    """Notes what it is asked for; does not do `failing`."""

    def __init__(self, log, failing="", error=StoreError):
        self.log, self.failing, self.error = log, failing, error
        self.may_save = threading.Event()
        self.may_save.set()
        self.tokens = {}

    def mark(self, done, token=""):
        self.tokens[done] = token
        self._note("mark", done)

    def save(self, done, directory, names, *, since=None):
        assert self.may_save.wait(30)
        self._note("save", done, since)
        return []

    def saved(self, done, checkpoint):
        self._note("saved", done)

    def confirm(self):
        self._note("confirm")

    def _note(self, what, *more):
        self.log.append((what, *more))
        if what == self.failing:
            raise self.error(f"no {what}")


def iterate(checkpointer, loop, iterations):
    """As a training loop does."""
    checkpointer.between_iterations(loop)
    for _ in range(iterations):
        loop.done += 1
        checkpointer.between_iterations(loop)


def made(path, log, periods, *, attach=True, store=None, trainers=1, checkpoints=None, **options):
    """A checkpointer, with what it saves to."""
    facts = Facts(tables=(), trainers=trainers)
    store = Store(log) if store is None else store
    checkpoints = Checkpoints(path, keep=100, token="0000000a") if checkpoints is None else checkpoints
    checkpointer = Checkpointer(store, checkpoints, facts, periods, **{"threads": False} | options)
    if attach:
        checkpointer.attach({})
    return checkpointer


def test_a_mark_is_made_while_all_rest_and_its_checkpoint_is_complete_before_servers_let_go(tmp_path):
    log = []
    checkpointer = made(tmp_path, log, Periods(recovery=3))
    iterate(checkpointer, Loop(log), 7)
    assert log == [
        step
        for done, since in ((3, None), (6, 3))
        for step in (
            *((0, "flush"), (0, "meet"), ("mark", done), (0, "meet")),
            *(("save", done, since), ("confirm",), ("saved", done)),
        )
    ]
    point = ResumePoint.of(Checkpoints(tmp_path).latest())
    assert point.done == 6
    tree = resumed_states(point, 0)[0]
    assert tree["loop"] == {"optimizer": {"updates": 6}, "data": {"iterations": 6, "batches": 6}}
    assert list(tree["parameters"]) == ["weight", "bias"]
    assert point.open().manifest.token == checkpointer._store.tokens[6]


def test_recovery_and_the_user_have_periods_of_their_own(tmp_path):
    log = []
    checkpoints, loop = Checkpoints(tmp_path, keep=2), Loop(log)
    checkpointer = made(tmp_path, log, Periods(checkpoints=6, recovery=4), checkpoints=checkpoints)
    iterate(checkpointer, loop, 21)
    assert [step[1] for step in log if step[0] == "mark"] == [4, 6, 8, 12, 16, 18, 20]
    found = {each.done: each.manifest.retained for each in checkpoints.list()}
    chain = set(checkpoints.latest().chain) | set(checkpoints.open(12).chain) | set(checkpoints.open(18).chain)
    assert {done for done, retained in found.items() if retained} >= {12, 18}
    assert set(found) == chain, "the last two of the user, the last one for recovery, and what they build on"
    checkpointer.finish(loop)
    checkpointer.finish(loop)
    assert checkpoints.latest().done == 21


def test_other_trainers_write_their_own_state_and_make_no_mark(tmp_path):
    logs = [[], [], []]
    for rank in (2, 1, 0):
        checkpointer = made(tmp_path, logs[rank], Periods(checkpoints=1), trainers=3, rank=rank)
        iterate(checkpointer, Loop(logs[rank], rank), 1)
    assert logs[2] == [(2, "flush"), (2, "meet"), (2, "meet")]
    assert sorted(Checkpoints(tmp_path).latest().blobs()) == ["trainer-0", "trainer-1", "trainer-2"]


def test_a_state_that_does_not_come_is_named(tmp_path, monkeypatch):
    monkeypatch.setattr("bagpipe.checkpoint.directory.WAIT_S", 0.0)
    checkpointer = made(tmp_path, [], Periods(checkpoints=1), trainers=2)
    with pytest.raises(CheckpointError, match="trainer-1 has not written its state"):
        iterate(checkpointer, Loop([]), 1)
    assert Checkpoints(tmp_path).numbers() == []


def test_without_attached_objects_nothing_is_saved_unless_checkpoints_are_asked_for(tmp_path):
    log = []
    iterate(made(tmp_path, log, Periods(recovery=1), attach=False), Loop(log), 3)
    assert log == []
    with pytest.raises(CheckpointError, match=r"call batches\.attach"):
        iterate(made(tmp_path, log, Periods(checkpoints=1), attach=False), Loop(log), 1)


def test_a_failure_beside_training_is_raised_at_the_next_iteration_and_once(tmp_path):
    checkpointer = made(tmp_path, [], Periods(checkpoints=2), store=Store([], "save"), threads=True)
    loop = Loop([])
    iterate(checkpointer, loop, 2)
    checkpointer._writing._thread.join()
    loop.done += 1
    with pytest.raises(CheckpointError, match="StoreError: no save; the one before is still there"):
        checkpointer.between_iterations(loop)
    checkpointer.between_iterations(loop)
    with checkpointer.ending(loop):
        pass


def test_the_end_raises_what_went_wrong_unless_the_block_did(tmp_path):
    def failing():
        checkpointer = made(tmp_path, [], Periods(checkpoints=1), store=Store([], "save"), threads=True)
        iterate(checkpointer, Loop([]), 1)
        return checkpointer

    with pytest.raises(CheckpointError, match="no save"), failing().ending(Loop([])):
        pass
    with pytest.raises(ValueError, match="mine"), failing().ending(Loop([])):
        raise ValueError("mine")


@pytest.mark.parametrize("what", ["save", "confirm", "saved"])
def test_who_writes_a_checkpoint_that_fails_is_told_whether_it_is_there(tmp_path, what):
    told = "its checkpoint is complete" if what == "saved" else "the one before is still there"
    kind = WireError if what == "confirm" else StoreError
    checkpointer = made(tmp_path, [], Periods(checkpoints=1), store=Store([], what, kind))
    with pytest.raises(CheckpointError, match=f"{kind.__name__}: no {what}; {told}"):
        iterate(checkpointer, Loop([]), 1)
    assert Checkpoints(tmp_path).numbers() == ([1] if what == "saved" else [])


def test_earlier_checkpoints_stay_until_the_store_has_let_go(tmp_path):
    log = []
    checkpointer = made(tmp_path, log, Periods(recovery=1))
    loop = Loop(log)
    iterate(checkpointer, loop, 1)
    checkpointer._store.failing = "saved"
    loop.done += 1
    with pytest.raises(CheckpointError, match="no saved"):
        checkpointer.between_iterations(loop)
    assert Checkpoints(tmp_path).numbers() == [1, 2]


def saved_at(path, done, rank=0, **objects):
    """The point of a checkpoint of a loop, and the loop."""
    loop = Loop([], rank)
    checkpointer = made(path, [], Periods(recovery=1), attach=False, rank=rank, trainers=1)
    checkpointer.attach(objects)
    checkpointer.between_iterations(loop)
    loop.done = done
    checkpointer.between_iterations(loop)
    return ResumePoint.of(Checkpoints(path).latest()), loop


def test_a_loop_continues_with_what_was_saved(tmp_path):
    point, before = saved_at(tmp_path, 5)
    loop = Loop([])
    checkpointer = made(tmp_path, [], Periods(), resume=point, attach=False)
    assert checkpointer.position == {"iterations": 5, "batches": 5}
    checkpointer.restore(loop)
    assert checkpointer.position is None
    assert torch.equal(loop.model.weight, before.model.weight)
    assert loop.went_on == before.progress()
    checkpointer.attach({})
    torch.manual_seed(0)
    checkpointer.between_iterations(loop)
    drawn = torch.rand(3)
    set_generator_states(resumed_states(point, 0)[0]["generators"])
    assert torch.equal(drawn, torch.rand(3))


def test_scalers_and_schedulers_of_all_kinds_are_restored(tmp_path):
    def objects():
        optimizer = torch.optim.AdamW([nn.Parameter(torch.ones(2))], lr=0.1)
        schedulers = {
            "cosine": torch.optim.lr_scheduler.CosineAnnealingWarmRestarts(optimizer, 3),
            "steps": torch.optim.lr_scheduler.MultiStepLR(optimizer, [1, 2]),
            "one": torch.optim.lr_scheduler.OneCycleLR(optimizer, 0.1, 10),
            "plateau": torch.optim.lr_scheduler.ReduceLROnPlateau(optimizer),
            "warm": torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 0.1 * step),
        }
        return {"dense": optimizer, "scaler": torch.amp.GradScaler("cpu", init_scale=8.0)} | schedulers

    before = objects()
    before["dense"].param_groups[0]["params"][0].grad = torch.ones(2)
    before["dense"].step()
    for name in ("cosine", "steps", "one", "warm"):
        before[name].step()
    before["plateau"].step(0.5)
    before["scaler"].scale(torch.ones(1))
    before["scaler"].update(4.0)
    point, _ = saved_at(tmp_path, 5, **before)
    checkpointer, after = made(tmp_path, [], Periods(), resume=point, attach=False), objects()
    checkpointer.restore(Loop([]))
    checkpointer.attach(after)
    for name, thing in before.items():
        assert pack_tree(copied(thing.state_dict())) == pack_tree(copied(after[name].state_dict())), name


def test_a_trainer_that_is_new_continues_as_the_first_one_but_with_generators_of_its_own(tmp_path):
    point, before = saved_at(tmp_path, 5, own=torch.Generator().manual_seed(3))
    mine = torch.Generator().manual_seed(9)
    loop = Loop([], 1)
    checkpointer = made(tmp_path, [], Periods(), rank=1, resume=point, attach=False)
    checkpointer.restore(loop)
    checkpointer.attach({"own": mine})
    torch.manual_seed(4)
    checkpointer.between_iterations(loop)
    assert torch.equal(loop.model.bias, before.model.bias)
    assert torch.equal(torch.rand(2), torch.rand(2, generator=torch.Generator().manual_seed(4)))
    assert torch.equal(mine.get_state(), torch.Generator().manual_seed(9).get_state())


def with_states(path, done, blobs):
    """The point of a checkpoint with these states of trainers."""
    checkpoints = Checkpoints(path, keep=100)
    with checkpoints.begin(done) as pending:
        for name, blob in blobs.items():
            pending.write_blob(name, blob)
        return ResumePoint.of(pending.commit(FACTS))


def test_states_of_another_moment_are_refused(tmp_path):
    point, _ = saved_at(tmp_path / "a", 5)
    state = point.open().blob("trainer-0")
    for number, (blobs, told) in enumerate(
        [
            ({"trainer-0": state}, "not of 6 iterations"),
            ({"trainer-0": b"nothing"}, "use another checkpoint"),
            ({"trainer-0": pack_tree([1])}, "not of 6 iterations"),
            ({"trainer-1": state}, "no state of a trainer"),
        ]
    ):
        with pytest.raises(CheckpointError, match=told):
            resumed_states(with_states(tmp_path / f"b{number}", 6, blobs), 1)


def test_a_point_whose_checkpoint_was_written_anew_is_refused(tmp_path):
    point, _ = saved_at(tmp_path, 5)
    with_states(tmp_path, 5, {"trainer-0": b"other"})
    with pytest.raises(CheckpointError, match="written anew"):
        point.open()
    assert str(START) == "the beginning"


WRONG_PARTS = {
    "no loop": ("trainer-0", "loop", ...),
    "no position": ("trainer-0", "loop", {"optimizer": {}}),
    "no parameters": ("trainer-0", "parameters", ...),
    "parameters as a list": ("trainer-0", "parameters", [torch.zeros(2)]),
    "a parameter that is a number": ("trainer-0", "parameters", {"weight": 1}),
    "a parameter of another shape": ("trainer-0", "parameters", {"weight": torch.zeros(3), "bias": torch.zeros(1)}),
    "no states": ("trainer-0", "attached", ...),
    "a state without its class": ("trainer-0", "attached", {"dense": {"state": {}}}),
    "no generators": ("trainer-1", "generators", ...),
    "half of the generators": ("trainer-1", "generators", {"torch": torch.zeros(2)}),
    "no buffers": ("trainer-1", "buffers", ...),
    "a buffer too many": ("trainer-1", "buffers", {"mean": torch.zeros(2)}),
    "no states of its own": ("trainer-1", "own", None),
}


@pytest.mark.parametrize("wrong", WRONG_PARTS)
def test_a_state_that_lacks_something_is_refused_before_anything_changes(tmp_path, wrong):
    blobs = {}
    for rank in (0, 1):
        loop = Loop([], rank)
        loop.done = 5
        checkpointer = made(tmp_path / "a", [], Periods(recovery=1), rank=rank)
        blobs[f"trainer-{rank}"] = pack_tree(checkpointer._captured(loop))
    name, part, value = WRONG_PARTS[wrong]
    tree = unpack_tree(blobs[name])
    tree.pop(part)
    blobs[name] = pack_tree(tree if value is ... else tree | {part: value})
    loop = Loop([], rank=1)
    before = pack_tree(copied(loop.model.state_dict()))
    point = with_states(tmp_path / "b", 5, blobs)
    with pytest.raises(CheckpointError, match=r": use another checkpoint|: build the model that was trained"):
        made(tmp_path / "b", [], Periods(), rank=1, resume=point).restore(loop)
    assert pack_tree(copied(loop.model.state_dict())) == before
    assert loop.went_on is None


def test_generators_of_another_form_are_refused():
    with pytest.raises(CheckpointError, match="random generator"):
        set_generator_states(generator_states() | {"numpy": [1, 2]})


class Clock:
    now = 0.0

    def __call__(self):
        return self.now


@pytest.mark.parametrize(
    ("period_s", "iteration_s", "cost_s", "gaps"),
    [
        (0.0, 0.1, 0.02, [10, 10, 10]),  # 0.02 s are 2 % of 1 s
        (0.0, 0.1, 0.2, [80, 100, 100]),  # of 10 s, after a period of at most eight times the first
        (0.0, 0.1, 60.0, [80, 300, 300]),  # never more than 30 s
        (0.0, 0.001, 0.001, [80, 640, 1000]),  # nor less than 1 s
        (5.0, 0.5, 60.0, [10, 10, 10]),  # as the user says
        (5.0, 60.0, 60.0, [1, 1, 1]),
    ],
)
def test_seconds_become_iterations_by_how_long_they_take_and_what_the_last_one_cost(
    period_s, iteration_s, cost_s, gaps
):
    clock = Clock()
    schedule = Schedule(period_s, 100, clock)
    assert schedule.due == 110
    found = []
    for _ in gaps:
        done = schedule.due
        clock.now += iteration_s * (done - (100 if not found else done - found[-1]))
        gap = schedule.gap(done, cost_s)
        schedule.told(done, gap)
        found.append(gap)
    assert found == gaps


def test_all_trainers_save_where_the_first_one_says(tmp_path):
    class Other(Loop):
        def gather(self, number, what):
            return [7.0, float(number)]  # what the first one has decided

    marks = []
    checkpointer = made(tmp_path, [], Periods(recovery=0.0), rank=1, trainers=2)
    loop = Other([], 1)
    checkpointer.between_iterations(loop)
    checkpointer._meet = lambda *_: marks.append(loop.done)
    for _ in range(30):
        loop.done += 1
        checkpointer.between_iterations(loop)
    assert marks == [10, 17, 24]


def test_a_copy_shares_nothing_with_what_it_was_made_from():
    tensor, inner = torch.ones(2, requires_grad=True), {"a": [1, (2.5, None)]}
    copy = copied({"t": tensor, "x": inner})
    inner["a"].append(3)
    with torch.no_grad():
        tensor += 1
    assert copy["x"] == {"a": [1, (2.5, None)]}
    assert copy["t"].tolist() == [1, 1]
    assert not copy["t"].requires_grad


def test_generators_survive_being_packed():
    states = generator_states()
    set_generator_states(unpack_tree(pack_tree(states)))
    assert pack_tree(generator_states()) == pack_tree(states)


def test_work_beside_training_is_done_one_piece_after_the_other():
    background, done, may_end = Background("bagpipe-test"), [], threading.Event()

    def slow():
        assert may_end.wait(30)
        done.append("slow")

    background.start("the slow one", slow)
    threading.Timer(0.05, may_end.set).start()
    background.start("the quick one", lambda: done.append("quick"))
    background.wait()
    assert done == ["slow", "quick"]
    background.wait()


def test_work_that_hangs_is_named_when_its_time_is_over():
    background, end = Background("bagpipe-test", deadline_s=0.02), threading.Event()
    background.start("the checkpoint of iteration 7", end.wait)
    with pytest.raises(DeadlineError, match=r"the checkpoint of iteration 7 made no progress for 0\.02 s"):
        background.wait()
    end.set()
    until = time.monotonic() + 10
    while threading.active_count() > 1 and any(t.name == "bagpipe-test" for t in threading.enumerate()):
        assert time.monotonic() < until
        time.sleep(0.01)
