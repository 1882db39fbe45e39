"""When marks are made, what is kept with them and in which order, and how work beside training is waited for."""

from __future__ import annotations

import threading
import time

import pytest
import torch
from torch import nn

from bagpipe.checkpoint.directory import Checkpoints
from bagpipe.checkpoint.manifest import Facts
from bagpipe.checkpoint.tree import pack_tree, unpack_tree
from bagpipe.errors import CheckpointError, DeadlineError, StoreError
from bagpipe.trainer.background import Background
from bagpipe.trainer.keeping import Keeping, Start
from bagpipe.trainer.keeping import Writer as CheckpointWriter
from bagpipe.trainer.kept import copied, generator_states, set_generator_states


class Loop:
    """A training loop as far as it is kept; what it does is noted."""

    def __init__(self, log, rank=0):
        self.model = nn.Linear(2, 1)
        self.done, self.log, self.rank = 0, log, rank
        self.went_on = None

    def barrier(self):
        self.log.append((self.rank, "flush"))

    def meet(self, what):
        self.log.append((self.rank, "meet"))

    def anywhere(self, flag, what):
        self.meet(what)
        return flag

    def progress(self):
        return {"optimizer": {"updates": self.done}, "data": {"iterations": self.done, "batches": self.done}}

    def go_on(self, progress):
        self.went_on = progress


class Store:
    """Notes what it is asked for."""

    def __init__(self, log):
        self.log, self.blobs = log, {}

    def mark(self, done):
        self.log.append(("mark", done))

    def keep(self, done, name, blob):
        self.log.append(("keep", done, name))
        self.blobs.setdefault(done, {})[name] = blob

    def kept(self, done):
        return self.blobs.get(done, {})

    def forget(self, before):
        self.log.append(("forget", before))


class Writer:
    """Notes what it is to write."""

    def __init__(self, log, error=None):
        self.log, self.error, self.blobs = log, error, None
        self.may_end = threading.Event()
        self.may_end.set()

    def progress(self):
        return None

    def write(self, done, blobs):
        assert self.may_end.wait(30)
        self.log.append(("write", done, sorted(blobs)))
        self.blobs = blobs
        if self.error is not None:
            raise self.error


def iterate(keeping, loop, iterations):
    """As a training loop does."""
    keeping.between(loop)
    for _ in range(iterations):
        loop.done += 1
        keeping.between(loop)


def test_a_mark_is_made_while_all_rest_and_older_ones_are_forgotten_once_it_can_be_used():
    log = []
    store, loop = Store(log), Loop(log)
    keeping = Keeping(store, marks_every=3, threads=False)
    keeping.attach({})
    iterate(keeping, loop, 7)
    a_mark = [(0, "flush"), (0, "meet"), ("mark", 0), (0, "meet"), ("keep", 0, "trainer-0"), ("forget", 0)]
    assert log == [
        (step[0], done, *step[2:]) if isinstance(step[0], str) else step for done in (3, 6) for step in a_mark
    ]
    tree = unpack_tree(store.blobs[6]["trainer-0"])
    assert tree["done"] == 6
    assert tree["loop"] == {"optimizer": {"updates": 6}, "data": {"iterations": 6, "batches": 6}}
    assert list(tree["parameters"]) == ["weight", "bias"]


def test_other_trainers_send_what_they_keep_before_the_mark_and_make_none():
    log = []
    keeping = Keeping(Store(log), rank=2, trainers=3, marks_every=2, threads=False)
    keeping.attach({})
    iterate(keeping, Loop(log, 2), 3)
    assert log == [(2, "flush"), ("keep", 2, "trainer-2"), (2, "meet"), (2, "meet")]


def test_marks_and_checkpoints_have_periods_of_their_own():
    log = []
    store, loop = Store(log), Loop(log)
    writer = Writer(log)
    keeping = Keeping(store, marks_every=4, checkpoints_every=6, writer=writer, threads=False)
    keeping.attach({})
    iterate(keeping, loop, 12)
    assert [step[1] for step in log if step[0] == "mark"] == [4, 6, 8, 12]
    assert [step[1] for step in log if step[0] == "write"] == [6, 12]
    log.clear()
    keeping.end(loop)
    assert log == []  # the last iteration is in a checkpoint already
    loop.done = 13
    keeping.end(loop)
    assert [step for step in log if step[0] == "write"] == [("write", 13, ["trainer-0"])]


def test_a_checkpoint_holds_what_all_trainers_kept():
    log = []
    store = Store(log)
    for rank in (2, 1, 0):
        writer = Writer(log) if rank == 0 else None
        loop = Loop([], rank)
        keeping = Keeping(store, rank=rank, trainers=3, checkpoints_every=1, writer=writer, threads=False)
        keeping.attach({})
        iterate(keeping, loop, 1)
    assert log[-1] == ("write", 1, ["trainer-0", "trainer-1", "trainer-2"])
    alone = Keeping(Store(log), trainers=2, checkpoints_every=1, writer=Writer(log), threads=False)
    alone.attach({})
    with pytest.raises(CheckpointError, match=r"lacks what \['trainer-1'\] should have kept"):
        iterate(alone, Loop(log), 1)


def test_what_is_being_written_is_not_forgotten():
    log = []
    store, loop, writer = Store(log), Loop([]), Writer([])
    writer.may_end.clear()
    keeping = Keeping(store, marks_every=1, checkpoints_every=5, writer=writer)
    keeping.attach({})
    iterate(keeping, loop, 8)
    keeping._sending.wait()
    assert [step[1] for step in log if step[0] == "forget"] == [1, 2, 3, 4, 5, 5, 5, 5]
    writer.may_end.set()
    keeping._writing.wait()
    loop.done += 1
    keeping.between(loop)
    keeping._sending.wait()
    assert log[-1] == ("forget", 9)


def test_without_attached_objects_nothing_is_kept_unless_checkpoints_are_asked_for():
    log = []
    iterate(Keeping(Store(log), marks_every=1), Loop(log), 3)
    assert log == []


def test_a_failure_beside_training_is_raised_at_the_next_iteration_and_once():
    keeping = Keeping(Store([]), checkpoints_every=2, writer=Writer([], CheckpointError("full")))
    keeping.attach({})
    loop = Loop([])
    iterate(keeping, loop, 2)
    keeping._writing._thread.join()
    loop.done += 1
    with pytest.raises(CheckpointError, match="full"):
        keeping.between(loop)
    keeping.between(loop)
    with keeping.ending(loop):
        pass


def test_the_end_raises_what_went_wrong_unless_the_block_did():
    def failing():
        keeping = Keeping(Store([]), checkpoints_every=1, writer=Writer([], CheckpointError("full")))
        keeping.attach({})
        iterate(keeping, Loop([]), 1)
        return keeping

    with pytest.raises(CheckpointError, match="full"), failing().ending(Loop([])):
        pass
    with pytest.raises(ValueError, match="mine"), failing().ending(Loop([])):
        raise ValueError("mine")


def kept_at(done, rank=0, **objects):
    """The blob of a trainer, and its loop."""
    store, loop = Store([]), Loop([], rank)
    keeping = Keeping(store, rank=rank, marks_every=1, threads=False)
    keeping.attach(objects)
    keeping.between(loop)
    loop.done = done
    keeping.between(loop)
    return store.blobs[done], loop


def test_a_loop_goes_on_with_what_was_kept():
    blobs, before = kept_at(5)
    loop = Loop([])
    keeping = Keeping(Store([]), start=Start(5, blobs), marks_every=1, threads=False)
    assert keeping.start.position == {"iterations": 5, "batches": 5}
    keeping.restore(loop)
    assert keeping.start is None
    assert torch.equal(loop.model.weight, before.model.weight)
    assert loop.went_on == before.progress()
    keeping.attach({})
    torch.manual_seed(0)
    keeping.between(loop)
    drawn = torch.rand(3)
    set_generator_states(unpack_tree(blobs["trainer-0"])["generators"])
    assert torch.equal(drawn, torch.rand(3))


def test_scalers_and_schedulers_of_all_kinds_are_restored():
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
    blobs, _ = kept_at(5, **before)
    keeping, after = Keeping(Store([]), start=Start(5, blobs)), objects()
    keeping.restore(Loop([]))
    keeping.attach(after)
    for name, thing in before.items():
        assert pack_tree(copied(thing.state_dict())) == pack_tree(copied(after[name].state_dict())), name


def test_a_trainer_that_is_new_goes_on_as_the_first_one_but_with_generators_of_its_own():
    generator = torch.Generator().manual_seed(3)
    blobs, before = kept_at(5, own=generator)
    mine = torch.Generator().manual_seed(9)
    loop = Loop([], 1)
    keeping = Keeping(Store([]), rank=1, trainers=2, start=Start(5, blobs), marks_every=100)
    keeping.restore(loop)
    keeping.attach({"own": mine})
    torch.manual_seed(4)
    keeping.between(loop)
    assert torch.equal(loop.model.bias, before.model.bias)
    assert torch.equal(torch.rand(2), torch.rand(2, generator=torch.Generator().manual_seed(4)))
    assert torch.equal(mine.get_state(), torch.Generator().manual_seed(9).get_state())


def test_blobs_of_another_moment_are_refused():
    blobs, _ = kept_at(5)
    with pytest.raises(CheckpointError, match="not of 6 iterations"):
        Start(6, blobs).of(0)
    with pytest.raises(CheckpointError):
        Start(5, {"trainer-0": b"nothing"}).of(0)
    with pytest.raises(CheckpointError, match="not of 5 iterations"):
        Start(5, {"trainer-0": pack_tree([1])}).of(0)
    with pytest.raises(CheckpointError, match="nothing of the first trainer"):
        Start(5, {}).of(1)


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
def test_a_blob_that_lacks_something_is_refused_before_anything_changes(wrong):
    blobs = kept_at(5)[0] | kept_at(5, rank=1)[0]
    name, part, value = WRONG_PARTS[wrong]
    tree = unpack_tree(blobs[name])
    tree.pop(part)
    blobs[name] = pack_tree(tree if value is ... else tree | {part: value})
    loop = Loop([], rank=1)
    before = pack_tree(copied(loop.model.state_dict()))
    keeping = Keeping(Store([]), rank=1, trainers=2, start=Start(5, blobs), marks_every=1, threads=False)
    with pytest.raises(CheckpointError, match=r": use another checkpoint|: build the model that was trained"):
        keeping.restore(loop)
    assert pack_tree(copied(loop.model.state_dict())) == before
    assert loop.went_on is None


def test_generators_of_another_form_are_refused():
    with pytest.raises(CheckpointError, match="random generators"):
        set_generator_states(generator_states() | {"numpy": [1, 2]})


def test_state_that_no_server_takes_is_refused_before_the_first_batch(monkeypatch):
    monkeypatch.setattr("bagpipe.trainer.keeping.BLOB_BYTES_MAX", 100)
    keeping = Keeping(Store([]), marks_every=1, threads=False)
    keeping.attach({})
    with pytest.raises(CheckpointError, match=r"trainer 0 have .* keeps 100 of one .*recovery\.restarts_max = 0"):
        keeping.between(Loop([]))
    keeping = Keeping(Store([]), checkpoints_every=1, writer=Writer([]), threads=False)  # goes to files
    keeping.attach({})
    keeping.between(Loop([]))


class Failing(Store):
    """Does not do one of the things that a checkpoint needs."""

    def __init__(self, what):
        super().__init__([])
        self._what = what

    def save(self, *_, **__):
        self._fail("save")
        return []

    def settle(self, _):
        self._fail("settle")

    def forget(self, _):
        self._fail("forget")

    def _fail(self, what):
        if what == self._what:
            raise StoreError(f"no {what}")


@pytest.mark.parametrize("what", ["save", "settle", "forget"])
def test_who_writes_a_checkpoint_that_fails_is_told_whether_it_is_there(tmp_path, what):
    checkpoints = Checkpoints(tmp_path)
    told = "the one before is still there" if what == "save" else "its checkpoint is complete"
    with pytest.raises(CheckpointError, match=f"StoreError: no {what}; {told}"):
        CheckpointWriter(checkpoints, Failing(what), Facts(tables=(), trainers=1, servers=0)).write(7, {})
    assert checkpoints.numbers() == ([] if what == "save" else [7])


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


@pytest.mark.parametrize(("is_checkpoint", "written"), [(False, [5]), (True, [])])
def test_a_run_that_returns_to_its_last_iteration_still_gets_its_last_checkpoint(is_checkpoint, written):
    blobs, _ = kept_at(5)
    log = []
    loop = Loop(log)
    start = Start(5, blobs, is_checkpoint)
    keeping = Keeping(Store(log), start=start, checkpoints_every=100, writer=Writer(log), threads=False)
    keeping.restore(loop)
    keeping.attach({})
    loop.done = 5
    keeping.between(loop)
    keeping.end(loop)
    assert [step[1] for step in log if step[0] == "write"] == written
