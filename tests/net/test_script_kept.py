"""A script on several trainers writes checkpoints, resumes, and goes on from what a lost run left (I2)."""

from __future__ import annotations

import re

import pytest
import torch
from torch import nn

import bagpipe
from bagpipe.errors import CheckpointError, ConfigError, PipelineError
from bagpipe.state import of_store
from harness.flat import prepare
from harness.kept import resuming
from harness.scripts import Trainers
from harness.seams import Checkpoints, ResumePoint
from harness.world import TABLES, assert_identical, initial, make_batches, make_model

BATCHES = make_batches(6, last=3)


class Script:
    """What a user's script does on each trainer."""

    def __init__(self, *settings, register=True, store=None, **launch):
        self.trainers = Trainers(2, *settings, store=store, recorded=True, **launch)
        self.models = [make_model("wide_deep") for _ in range(2)]
        self.register, self.trained = register, [0, 0]

    def run(self, stop=None, **options):
        """Train on both; the state."""
        self.trainers.run(lambda rank: self.train(rank, stop, options))
        return of_store(self.models[0], [table.name for table in TABLES], self.trainers.store)

    def train(self, rank, stop, options):
        """The script."""
        model, rows = self.models[rank], bagpipe.optim.Adam(0.05)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
        options = {"cache": 300, "features": TABLES, "initial": initial} | options | self.trainers.options(rank)
        checkpoint = resuming(options.pop("checkpoint", None), options.pop("resume", None))
        _, _, loader = prepare(model, optimizer, BATCHES, rows, checkpoint=checkpoint, **options)
        if self.register:
            loader.register_for_checkpointing()
        for _ in range(loader.epoch, 1):
            for batch in loader:
                loss = nn.functional.binary_cross_entropy_with_logits(model(batch.dense, batch.sparse), batch.labels)
                optimizer.zero_grad()
                loss.backward()
                optimizer.step()
                self.trained[rank] += 1
                if self.trained[rank] == stop:
                    raise KeyError("lost")


@pytest.fixture(scope="module")
def expected():
    return {assign: Script(f"assign={assign}").run() for assign in ("contiguous", "aware")}


@pytest.mark.parametrize("assign", ["contiguous", "aware"])
def test_a_script_on_two_trainers_resumes_at_any_iteration(tmp_path, expected, assign):
    checkpoint = bagpipe.Checkpointing(tmp_path, every=1, keep=99)
    settings = f"assign={assign}"
    assert_identical(expected[assign], Script(settings).run(checkpoint=checkpoint))
    assert [each.done for each in Checkpoints(tmp_path).list()] == [1, 2, 3, 4, 5, 6]
    for done in (1, 4, 6):
        script = Script(settings)
        assert_identical(expected[assign], script.run(resume=tmp_path / f"{done:08d}"))
        assert script.trained == [6 - done] * 2


def test_a_script_that_was_lost_goes_on_from_its_last_checkpoint_for_recovery(tmp_path, expected):
    where = {"recovers": True, "checkpoints": (str(tmp_path),)}
    lost = Script("recovery.every=2", **where)
    with pytest.raises((KeyError, PipelineError)):
        lost.run(stop=5)
    point = ResumePoint.of(Checkpoints(tmp_path).latest())
    assert point.done in (2, 4)
    assert sorted(point.open().blobs()) == ["trainer-0", "trainer-1"]
    lost.trainers.store.restore(point, [table.name for table in TABLES])
    again = Script("recovery.every=2", store=lost.trainers.store, resume=point, generation=1, **where)
    assert_identical(expected["contiguous"], again.run())
    assert again.trained == [6 - point.done] * 2


def test_it_goes_on_from_the_newest_of_its_own_where_nobody_else_knows_it(tmp_path, expected):
    """Those that lay in the directory before are another launch's."""
    place = tmp_path / "own"
    lost = Script("recovery.every=1", recovers=True, checkpoints=(str(tmp_path),), name="this")
    with pytest.raises((KeyError, PipelineError)):
        lost.run(stop=5, checkpoint=bagpipe.Checkpointing(place, every=2))
    done = Checkpoints(place).latest().done
    again = Script(recovers=True, checkpoints=(str(tmp_path),), name="this", generation=1)
    assert_identical(expected["contiguous"], again.run(checkpoint=bagpipe.Checkpointing(place, every=2)))
    assert again.trained == [6 - done] * 2
    assert [each.done for each in Checkpoints(place).list() if each.manifest.retained][-1] == 6


def test_a_directory_that_servers_would_refuse_is_refused_before_anything_is_trained(tmp_path):
    script = Script(checkpoints=(str(tmp_path / "run"), str(tmp_path / "kept")))
    with pytest.raises(ConfigError, match=r"in or below .*run, .*kept: start bagpipe launch with --checkpoints DIR"):
        script.run(checkpoint=bagpipe.Checkpointing(tmp_path / "kept" / ".." / "elsewhere"))
    assert script.trained == [0, 0]
    assert not [*tmp_path.iterdir()]
    Script(checkpoints=(str(tmp_path / "run"),)).run(checkpoint=bagpipe.Checkpointing(tmp_path / "run" / "below"))
    assert Checkpoints(tmp_path / "run" / "below").latest().done == 6


def test_a_script_that_registered_nothing_is_not_saved(tmp_path, expected):
    script = Script("recovery.every=1", register=False, recovers=True, checkpoints=(str(tmp_path),))
    assert_identical(expected["contiguous"], script.run())
    assert not [*tmp_path.iterdir()]
    with pytest.raises(
        (CheckpointError, PipelineError), match=r"checkpointing|left the training loop"
    ):  # or its peer's
        Script(register=False).run(checkpoint=bagpipe.Checkpointing("unused", every=1))


def test_a_run_that_has_no_mark_left_goes_on_from_its_own_checkpoint(tmp_path, expected):
    checkpoint = bagpipe.Checkpointing(tmp_path, every=2)
    lost = Script("recovery.every=100", recovers=True)
    with pytest.raises((KeyError, PipelineError)):
        lost.run(stop=5, checkpoint=checkpoint)
    again = Script(recovers=True, generation=1)  # servers that have lost everything
    assert_identical(expected["contiguous"], again.run(checkpoint=checkpoint))
    assert again.trained == [2, 2]


@pytest.mark.parametrize("written", [False, True])
def test_a_launch_that_goes_back_takes_after_a_fault_only_a_checkpoint_of_its_own(tmp_path, expected, written):
    """Nothing else tells them from those of the future that it has left."""
    Script(name="one").run(checkpoint=bagpipe.Checkpointing(tmp_path, every=1, keep=99))
    checkpoint = bagpipe.Checkpointing(tmp_path, every=3)
    if written:
        lost = Script("recovery.every=100", name="other", recovers=True)
        with pytest.raises((KeyError, PipelineError)):
            lost.run(stop=3, checkpoint=checkpoint, resume=tmp_path / "00000002")
        assert Checkpoints(tmp_path).numbers() == [1, 2, 3]
    again = Script(name="other", recovers=True, generation=1)  # servers that have lost everything
    assert_identical(expected["contiguous"], again.run(checkpoint=checkpoint, resume=tmp_path / "00000002"))
    assert again.trained == ([3, 3] if written else [4, 4])
    assert [each.done for each in Checkpoints(tmp_path).list()][-2:] == [3, 6]


@pytest.mark.parametrize("resume", [None, False])
def test_a_launch_that_begins_anew_does_not_take_checkpoints_of_others_after_a_fault(tmp_path, resume):
    checkpoint = bagpipe.Checkpointing(tmp_path, every=2)
    Script(name="one").run(checkpoint=checkpoint)
    again = Script(name="other", recovers=True, generation=1)
    with pytest.raises((ConfigError, PipelineError), match="holds checkpoints of a run already"):
        again.run(checkpoint=checkpoint, resume=resume)
    assert Checkpoints(tmp_path).numbers() == [2, 4, 6]


@pytest.mark.parametrize("other", ["older", "of another run"])
def test_trainers_that_find_different_checkpoints_are_refused_before_anything_is_trained(tmp_path, other):
    """As where a machine still sees an old listing of a network file system."""
    for name in ("one", "other"):
        Script().run(checkpoint=bagpipe.Checkpointing(tmp_path / name, every=3))
    paths = tmp_path / "one" / "00000006", tmp_path / ("one/00000003" if other == "older" else "other/00000006")
    script = Script()
    failures = script.trainers.failures(lambda rank: script.train(rank, None, {"resume": paths[rank]}))
    words = r"trainer 0 would go on from .* after 6 iterations .*, trainer 1 from .* after {} iterations with checksum"
    assert all(isinstance(failure, CheckpointError) for failure in failures), failures
    assert re.search(words.format(3 if other == "older" else 6), str(failures[1]))
    assert script.trained == [0, 0]
