"""When a loop is saved and in which order, what comes back, and how work beside training is waited for."""

from __future__ import annotations

import gc
import threading

import numpy as np
import pytest
import torch
from torch import nn

from bagpipe.checkpoint.directory import Checkpoints
from bagpipe.checkpoint.disk import Disk
from bagpipe.checkpoint.manifest import RunFacts
from bagpipe.checkpoint.point import START, ResumePoint
from bagpipe.checkpoint.tree import unpack_tree
from bagpipe.errors import CheckpointError, DeadlineError, StoreError, WireError
from bagpipe.trainer.background import Background
from bagpipe.trainer.checkpointer import Checkpointer, Periods, Schedule, resumed_states
from bagpipe.trainer.state import Copies, generator_states, set_generator_states
from harness.checkpointed import pack_tree

FACTS = RunFacts(tables=())


class Loop:
    """A training loop as far as it is saved; what it does is noted."""

    def __init__(self, log, rank=0):
        self.model = nn.Linear(2, 1)
        self.done, self.log, self.rank = 0, log, rank
        self.went_on = None

    def flush(self):
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
    facts = RunFacts(tables=(), trainers=trainers)
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
    with pytest.raises(CheckpointError, match=r"call loader\.register_for_checkpointing"):
        iterate(made(tmp_path, log, Periods(checkpoints=1), attach=False), Loop(log), 1)


def test_a_failure_beside_training_is_raised_at_the_next_iteration_and_once(tmp_path):
    checkpointer = made(tmp_path, [], Periods(checkpoints=2), store=Store([], "save"), threads=True)
    loop = Loop([])
    iterate(checkpointer, loop, 2)
    assert checkpointer._writing._worker.is_over(30)
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
        assert pack_tree(thing.state_dict()) == pack_tree(after[name].state_dict()), name


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
    before = pack_tree(loop.model.state_dict())
    point = with_states(tmp_path / "b", 5, blobs)
    with pytest.raises(CheckpointError, match=r": use another checkpoint|: build the model that was trained"):
        made(tmp_path / "b", [], Periods(), rank=1, resume=point).restore(loop)
    assert pack_tree(loop.model.state_dict()) == before
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
    copy = Copies().copied({"t": tensor, "x": inner})
    inner["a"].append(3)
    with torch.no_grad():
        tensor += 1
    assert copy["x"] == {"a": [1, (2.5, None)]}
    assert copy["t"].tolist() == [1, 1]
    assert not copy["t"].requires_grad


class Counts:
    """Attached: something of each kind, as many as there were iterations, so that shapes change too."""

    def __init__(self):
        self.array, self.plain, self.same = np.zeros(3), {"seen": [0]}, torch.zeros(5)

    def state_dict(self):
        return {
            "array": self.array, "plain": self.plain, "same": self.same, "growing": torch.full(self.array.shape, 2.0),
            "number": torch.tensor(float(self.plain["seen"][0])), "nothing": torch.zeros(0, 2),
        }  # fmt: skip

    def load_state_dict(self, state):
        raise AssertionError(state)


class HeldDisk(Disk):
    """A file of a trainer is begun when it may be, one at a time; `failing` ones fail then."""

    def __init__(self):
        self.may_write, self.failing = threading.Semaphore(0), False

    def create(self, path):
        if path.name.startswith("trainer-"):
            assert self.may_write.acquire(timeout=30)
            if self.failing:
                raise OSError(5, "the disk is broken")
        return super().create(path)


class Changing(Loop):
    """Every tensor of it tells after how many iterations it was saved."""

    def __init__(self, log, rank=0):
        super().__init__(log, rank)
        self.model = nn.Sequential(nn.Linear(300, 200), nn.BatchNorm1d(200))
        self.optimizer = torch.optim.SGD(self.model.parameters(), lr=0.1, momentum=0.5)
        self.counts = Counts()
        for value in self.model.parameters():
            self.optimizer.state[value]["momentum_buffer"] = torch.zeros_like(value)

    def iterate(self):
        """All is changed in place, where it was."""
        self.done += 1
        done, counts = self.done, self.counts
        with torch.no_grad():
            moments = [state["momentum_buffer"] for state in self.optimizer.state.values()]
            for value in (*self.model.parameters(), *self.model.buffers(), *moments, counts.same):
                value.fill_(done)
        counts.plain["seen"][0] = done
        counts.array = np.full(done % 3 + 2, float(done))
        self.optimizer.param_groups[0]["lr"] = float(done)

    @staticmethod
    def check(tree, done):
        """This is the state after so many iterations, in all that it has."""
        count = tree["attached"]["counts"]["state"]
        dense = tree["attached"]["dense"]["state"]
        moments = [state["momentum_buffer"] for state in dense["state"].values()]
        assert len(moments) == 4
        for value in (*tree["parameters"].values(), *tree["buffers"].values(), *moments, count["same"]):
            assert (value == done).all()
        assert count["array"].tolist() == [done] * (done % 3 + 2)
        assert count["growing"].tolist() == [2.0] * (done % 3 + 2)
        assert (count["plain"], count["number"].item(), count["nothing"].shape) == ({"seen": [done]}, done, (0, 2))
        assert dense["param_groups"][0]["lr"] == done
        assert tree["loop"]["optimizer"] == {"updates": done}


def held(path, rank=0, trainers=1, **options):
    """A checkpointer after every iteration, its loop, and the disk that holds it up."""
    disk, loop = HeldDisk(), Changing([], rank)
    checkpoints = Checkpoints(path, keep=100, token="0000000a", disk=disk)
    periods = Periods(checkpoints=1)
    checkpointer = made(
        path, [], periods, attach=False, checkpoints=checkpoints, rank=rank, trainers=trainers, threads=True, **options
    )
    checkpointer.attach({"dense": loop.optimizer, "counts": loop.counts})
    checkpointer.between_iterations(loop)
    return checkpointer, loop, disk


@pytest.mark.parametrize("rank", [0, 1])
def test_what_is_written_is_the_state_of_its_mark_however_long_that_takes(tmp_path, monkeypatch, rank):
    """Copies lie in the same memory at every mark: the next one must wait until the files of this one are written."""
    checkpointer, loop, disk = held(tmp_path, rank, rank + 1, round_s=0.01)
    written, monkeypatched = [], Checkpoints.write_state

    def note(checkpoints, done, name, *parts):
        monkeypatched(checkpoints, done, name, *parts)
        written.append((done, unpack_tree(b"".join(parts))))

    monkeypatch.setattr(Checkpoints, "write_state", note)
    for done in range(1, 6):
        loop.iterate()
        if done > 1:  # only in the next mark may the one before be written, after all that it was copied from changed
            release = threading.Timer(0.03, disk.may_write.release)
            release.start()
        checkpointer.between_iterations(loop)
    loop.iterate()
    disk.may_write.release()
    with checkpointer.ending(loop):
        pass
    if rank == 0:
        written = [
            (done, resumed_states(ResumePoint.of(Checkpoints(tmp_path).open(done)), 0)[0]) for done in range(1, 6)
        ]
    assert [done for done, _ in written] == [1, 2, 3, 4, 5]
    for done, tree in written:
        if rank == 0:
            Changing.check(tree, done)
        else:
            assert all((value == done).all() for value in tree["buffers"].values())


def test_a_write_that_fails_leaves_earlier_and_later_checkpoints_as_they_are(tmp_path):
    checkpointer, loop, disk = held(tmp_path, round_s=0.01)
    for done in range(1, 7):
        disk.failing = done in (2, 3, 5)
        disk.may_write.release()
        loop.iterate()
        checkpointer.between_iterations(loop)
        if disk.failing:
            with pytest.raises(CheckpointError, match="check the disk"):
                checkpointer._writing.wait()
        else:
            checkpointer._writing.wait()
    loop.iterate()
    checkpointer._end_writing()
    assert Checkpoints(tmp_path).numbers() == [1, 4, 6]
    for done in (1, 4, 6):
        Changing.check(resumed_states(ResumePoint.of(Checkpoints(tmp_path).open(done)), 0)[0], done)


def test_copies_are_made_in_the_same_memory_again_and_what_is_not_needed_is_given_back():
    copies, random = Copies(), np.random.default_rng(0)
    tensor = torch.ones(4, 3)
    kinds = [
        lambda n: torch.full((n,), float(n)), lambda n: torch.arange(6 * n).reshape(2, 3 * n).T,
        lambda n: torch.full((n, 2), n, dtype=torch.bfloat16), lambda n: torch.tensor(n),
        lambda n: torch.zeros(0, n), lambda n: np.full((2, n), n), lambda n: np.array(n), lambda n: np.float32(n),
        lambda n: np.arange(8.0 * n).reshape(4, -1)[::2, ::2], lambda n: torch.nn.Parameter(torch.full((2, n), 7.0)),
        lambda _: tensor, lambda n: torch.tensor([True, False] * n), lambda n: "text" * n,
    ]  # fmt: skip
    for _ in range(50):
        chosen = [(kind, int(random.integers(1, 5))) for kind in random.choice(kinds, 18)]
        tree = {number: [kind(size), (kind(size),)] for number, (kind, size) in enumerate(chosen)}
        before = pack_tree(tree)
        copies.begin()
        copy = copies.copied(tree)
        assert pack_tree(copy) == before
        values = [value for one, (other,) in copy.values() for value in (one, other)]
        used = places(values)
        assert len(set(used)) == len(used)
        kept = sum(map(len, copies._used.values()))
        assert kept == sum(isinstance(value, torch.Tensor | np.ndarray) for value in values)
        tensor += 1
    copies.begin()
    again = [value for one, (other,) in copies.copied(tree).values() for value in (one, other)]
    assert sorted(places(again)) == sorted(used)


def places(values):
    """Where in memory these are."""
    found = [value.data_ptr() for value in values if isinstance(value, torch.Tensor) and value.numel()]
    return found + [value.ctypes.data for value in values if isinstance(value, np.ndarray)]


def test_sparse_tensors_are_refused_by_name_when_they_are_packed():
    with pytest.raises(CheckpointError, match=r"\['x'\] is a torch.sparse_coo tensor"):
        pack_tree(Copies().copied({"x": torch.eye(2).to_sparse()}))


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
    background.close()
    assert not named("bagpipe-test")


def test_the_thread_of_work_ends_with_whoever_holds_it():
    background = Background("bagpipe-test")
    background.start("nothing", lambda: None)
    background.wait()
    assert len(named("bagpipe-test")) == 1
    (thread,) = named("bagpipe-test")
    del background
    gc.collect()
    thread.join(10)
    assert not thread.is_alive()


def named(name):
    return [thread for thread in threading.enumerate() if thread.name == name]


def test_work_that_hangs_is_named_when_its_time_is_over():
    background, end = Background("bagpipe-test", deadline_s=0.02), threading.Event()
    background.start("the checkpoint of iteration 7", end.wait)
    with pytest.raises(DeadlineError, match=r"the checkpoint of iteration 7 made no progress for 0\.02 s"):
        background.wait()
    (thread,) = named("bagpipe-test")
    background.close()
    end.set()
    thread.join(10)
    assert not thread.is_alive()
