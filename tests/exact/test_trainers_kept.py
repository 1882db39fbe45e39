"""Several trainers that go on from a checkpoint at any iteration end with the bits of the reference (I1, I2)."""

from __future__ import annotations

import threading

import pytest
import torch
from torch import nn

from bagpipe import Checkpointing
from bagpipe.errors import CheckpointError, PipelineError
from bagpipe.reference import Reference
from bagpipe.state import of_reference
from harness.plain import threads_left
from harness.seams import SAVE, Assigner, Checkpoints
from harness.trainers import DESIGNS, Several, World, loss_of, plain_loop, run, run_alone, small_model
from harness.world import assert_identical, make_batches

BATCHES = make_batches(7, last=2)


@pytest.mark.parametrize("delayed", [True, False])
@pytest.mark.parametrize(
    ("design", "optimizer", "trainers", "assign"),
    [
        ("owned", "adam", 2, "contiguous"),
        ("partitioned", "adagrad", 3, "aware"),
        ("replicated", "sgd", 2, "round_robin"),
        ("lrpp", "adagrad", 3, "contiguous"),
    ],
)
def test_trainers_resumed_at_any_iteration_end_as_the_reference(tmp_path, design, optimizer, trainers, assign, delayed):
    world = World(BATCHES, optimizer, trainers=trainers, assign=assign, dense=momentum)
    expected = world.reference()
    options = {"design": design, "delayed": delayed, "cache": 60}
    found = run(world, kept={"directory": tmp_path, "every": 1}, **options)
    assert_identical(expected, found.state)
    assert [each.done for each in Checkpoints(tmp_path).list()] == list(range(1, 8))
    for done in range(1, 8):
        resumed = run(world, seed=done, kept={"directory": tmp_path, "resume": done}, lookahead=1 + done % 3, **options)
        assert_identical(expected, resumed.state)
        assert resumed.updates == len(BATCHES)
        assert len(resumed.losses[0]) == len(BATCHES) - done


def momentum(parameters):
    """A dense optimizer with a state."""
    return torch.optim.SGD(parameters, lr=0.1, momentum=0.9)


def test_trainers_in_threads_resume_at_any_iteration(tmp_path):
    world = World(BATCHES, "adam", dense=momentum)
    expected = world.reference()
    before = threading.active_count()
    assert_identical(expected, Several(world, kept={"directory": tmp_path, "every": 1}).run().state)
    for done in range(1, 8):
        found = Several(world, kept={"directory": tmp_path, "resume": done}).run()
        assert_identical(expected, found.state)
    assert threading.active_count() == before


@pytest.mark.parametrize("design", DESIGNS)
def test_iterations_of_several_batches_resume(tmp_path, design):
    world = World(BATCHES, "adagrad", trainers=2, dense=momentum)

    def loop(one):
        for batch in one.batches():
            (loss_of(one.model, batch) / 2).backward()
            if one.loader.step_due:
                one.step()
                one.optimizer.zero_grad()

    options = {"design": design, "accumulate": 2, "loop": loop}
    expected = run(world, **options)
    assert_identical(expected.state, run(world, kept={"directory": tmp_path, "every": 1}, **options).state)
    for done in range(1, 5):
        found = run(world, seed=done, kept={"directory": tmp_path, "resume": done}, **options)
        assert_identical(expected.state, found.state)
        assert found.updates == 4


class Noisy(nn.Module):
    """Has buffers, and a generator of its own."""

    def __init__(self):
        super().__init__()
        self.norm = nn.BatchNorm1d(3)
        self.inner = small_model("wide_deep")
        self.own = torch.Generator()

    def forward(self, dense, sparse):
        """Noise on what is dense."""
        return self.inner(self.norm(dense) * torch.rand(dense.shape, generator=self.own), sparse)


def test_each_trainer_goes_on_with_its_own_generator_and_buffers(tmp_path):
    world = World(make_batches(7, size=8), "adagrad", Noisy, dense=momentum)

    def before(one):
        one.model.own.manual_seed(7 + one.rank)
        one.loader.register_for_checkpointing(own=one.model.own)

    def train(**kept):
        several = Several(world, kept={"directory": tmp_path, **kept} if kept else None)
        found = several.run(before=before)
        drawn = [torch.rand((), generator=one.model.own).item() for one in several.ones]
        buffers = [[value.numpy().tobytes() for value in one.model.buffers()] for one in several.ones]
        assert buffers[0] != buffers[1]
        assert drawn[0] != drawn[1]
        return found, drawn, buffers

    expected, *others = train()
    found, *rest = train(every=1)
    assert_identical(expected.state, found.state)
    assert rest == others
    for done in (1, 3, 6, 7):
        found, *rest = train(resume=done)
        assert_identical(expected.state, found.state)
        assert rest == others


@pytest.mark.parametrize("numbers", [(1, 2), (2, 1), (2, 3), (3, 2)])
@pytest.mark.parametrize("done", [2, 5])
def test_another_number_of_trainers_goes_on_as_the_reference_that_changed_it_there(tmp_path, numbers, done):
    def world(trainers):
        return World(BATCHES, "adam", trainers=trainers, dense=momentum)

    first, second = numbers
    reference = Reference(*world(first).make()[:3], momentum, first)
    for batch in BATCHES[:done]:
        reference.step(batch)
    reference.trainers, reference.assign = second, Assigner("contiguous", second)
    reference.random_states = reference.random_states[:1] * second
    for batch in BATCHES[done:]:
        reference.step(batch)

    run_any(world(first), kept={"directory": tmp_path, "every": 1})
    found = run_any(world(second), kept={"directory": tmp_path, "resume": done})
    assert_identical(of_reference(reference), found)


def run_any(world, kept):
    """The state after a run with any number of trainers."""
    if world.trainers > 1:
        return run(world, kept=kept).state
    return alone(world, **kept)


def alone(world, directory, every=None, resume=None):
    """A run with one trainer."""
    checkpoint = (
        Checkpointing(directory, every=every, keep=100)
        if resume is None
        else Checkpointing(None, resume=directory / f"{resume:08d}")
    )

    def loop(one):
        one.loader.register_for_checkpointing()
        assert one.loader.epoch == 0
        plain_loop(one)

    return run_alone(world, loop=loop, checkpoint=checkpoint).state


def test_what_goes_wrong_with_a_checkpoint_ends_all_trainers(tmp_path, monkeypatch):
    def save(self, *args, **options):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(*SAVE, save)
    world = World(BATCHES, "adagrad", trainers=3)
    with pytest.raises(CheckpointError, match="No space left"):
        run(world, kept={"directory": tmp_path, "every": 2})
    with pytest.raises((CheckpointError, PipelineError), match="No space left"):
        Several(world, kept={"directory": tmp_path, "every": 2}).run()
    assert Checkpoints(tmp_path).list() == []
    assert threads_left() == []


def test_a_trainer_that_leaves_alone_at_a_mark_is_an_error_on_all(tmp_path):
    def loop(one):
        for number, batch in enumerate(one.loader):
            one.train(batch)
            if one.rank == 1 and number == 2:
                break

    with pytest.raises(PipelineError):
        run(World(BATCHES, "adagrad"), loop=loop, kept={"directory": tmp_path, "every": 3})
    assert Checkpoints(tmp_path).list() == []
