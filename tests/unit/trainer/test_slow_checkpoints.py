"""A checkpoint may take as long as it moves on: neither who writes it nor who waits for that comes to a deadline."""

from __future__ import annotations

import threading
from types import SimpleNamespace

import pytest

from bagpipe.checkpoint.directory import Checkpoints
from bagpipe.errors import CheckpointError, DeadlineError, PipelineError
from bagpipe.trainer.background import Background
from bagpipe.trainer.checkpointer import Checkpointer
from harness.trainers import Several, World
from harness.world import assert_identical, make_batches

ROUNDS = 4
DEADLINE_S = 3.0
"""Of each exchange: a write that is held up until trainers have met so often would take all of it, if one wait did."""


class SlowDisk:
    """Trainers whose checkpoint `done` is not written until the second one was told `ROUNDS` times that it is not."""

    def __init__(self, monkeypatch, done, directory, every, error=None):
        self.may_write, self.rounds = threading.Event(), 0
        self.world = World(make_batches(3), trainers=2)
        self.several = Several(self.world, kept={"directory": directory, "every": every})
        for driver in self.several.trainers.drivers:
            driver.deadline_s = DEADLINE_S
        for loop in self.several.loops:
            loop._checkpointer._round_s = 0.02
        other = self.several.loops[1]
        monkeypatch.setattr(other, "gather", self._counting(other.gather))
        write = Checkpointer._write

        def slow(checkpointer, number, *more):
            if number == done:
                assert self.may_write.wait(30)
                if error is not None:
                    raise error
            write(checkpointer, number, *more)

        monkeypatch.setattr(Checkpointer, "_write", slow)

    def _counting(self, gather):
        def counted(number, what):
            found = gather(number, what)
            self.rounds += any(found)
            if self.rounds == ROUNDS:
                self.may_write.set()
            return found

        return counted


@pytest.mark.parametrize(("done", "every"), [(1, 1), (3, 3), (3, 5)], ids=["in the middle", "at the end", "the last"])
def test_trainers_wait_for_a_checkpoint_for_longer_than_for_each_other(tmp_path, monkeypatch, done, every):
    slow = SlowDisk(monkeypatch, done, tmp_path, every)
    found = slow.several.run()
    assert slow.rounds >= ROUNDS
    assert_identical(slow.world.reference(), found.state)
    assert [each.done for each in Checkpoints(tmp_path).list()] == list(range(1, 4) if every == 1 else [3])


def test_a_last_checkpoint_that_fails_ends_all_trainers_and_says_why(tmp_path, monkeypatch):
    slow = SlowDisk(monkeypatch, 3, tmp_path, 5, CheckpointError("the disk is full"))
    with pytest.raises((CheckpointError, PipelineError), match="the disk is full"):
        slow.several.run()


@pytest.mark.parametrize("moves", [True, False])
def test_work_may_take_longer_than_its_deadline_while_it_moves_on(monkeypatch, moves):
    clock, end = SimpleNamespace(looks=0), threading.Event()
    monkeypatch.setattr("bagpipe.trainer.background.time", SimpleNamespace(monotonic=lambda: 100.0 * clock.looks))

    def progress():
        clock.looks += 1
        if clock.looks == 5:
            end.set()
        return clock.looks if moves else 0

    background = Background("bagpipe-test", deadline_s=150.0, look_s=0.01)
    background.start("the checkpoint of iteration 7", lambda: end.wait(30), progress)
    if not moves:
        with pytest.raises(DeadlineError, match=r"the checkpoint of iteration 7 made no progress for 150 s"):
            background.wait()
        end.set()
        background._worker.is_over(30)
    background.wait()
    assert clock.looks >= 5 if moves else clock.looks == 3


def test_a_disk_that_hangs_at_a_look_holds_nobody_up():
    end = threading.Event()
    background = Background("bagpipe-test", deadline_s=0.02, look_s=0.01)
    background.start("the checkpoint of iteration 7", lambda: end.wait(30), lambda: end.wait(30))
    with pytest.raises(DeadlineError, match=r"the checkpoint of iteration 7 made no progress for 0\.02 s"):
        background.wait()
    end.set()
    background._worker.is_over(30)
    background.wait()
