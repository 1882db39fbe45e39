"""Rows on servers that die and return to checkpoints: a replay gives the bits of a run that nothing disturbed."""

from __future__ import annotations

import random
from pathlib import Path

import numpy as np
import pytest
from hypothesis import HealthCheck, given
from hypothesis import strategies as st

from bagpipe.checkpoint.point import START
from harness.disk import SimulatedDisk
from harness.examples import examples
from harness.marked import Marking, read, rows, some_rows
from harness.remote_world import TROUBLE

EVERY = 4


def iterate(stores, iteration, seed):
    """One iteration of two trainers, who write rows of their own; what it writes depends on its number alone."""
    for trainer, store in enumerate(stores):
        rng = np.random.default_rng([seed, iteration, trainer])
        parts = [(table, ids * 2 + trainer, values) for table, ids, values in some_rows(rng)]
        store.write_many(parts, passed=iteration)


def iterate_from(stores, done, base, seed):
    """As `iterate`; the trainers' own count of iterations begins at `base`."""
    for trainer, store in enumerate(stores):
        rng = np.random.default_rng([seed, done, trainer])
        parts = [(table, ids * 2 + trainer, values) for table, ids, values in some_rows(rng)]
        store.write_many(parts, passed=done - base)
    if done > base:  # what every trainer has passed is read at once
        read(stores[0], rows(1, 2), after=done - base)
        read(stores[1], rows(1, 2), after=done - base - 1)


def run_undisturbed(path, seed, iterations):
    world = Marking(path, seed=seed)
    stores = [world.store(trainer=trainer, trainers=2) for trainer in range(2)]
    for iteration in range(iterations):
        iterate(stores, iteration, seed)
    found = world.rows()
    world.close()
    return found


def crash(disk, rng):
    """The machine of the disk dies: anything that was not synced may be gone, and what is left is there for good."""
    length = len(disk.log)
    left = disk.crashed(length, frozenset(number for number in disk.unsynced(length) if rng.random() < 0.5))
    back = SimulatedDisk()
    for path, data in left.contents().items():
        if data is None:
            back.make_directory(Path(path))
        else:
            with back.create(Path(path)) as file:
                file.write(data)
                file.sync()
        back.sync_directory(Path(path).parent)
    disk.root, disk.log = back.root, back.log


class Trained:
    """A run of two trainers over two servers that dies and comes back as a seed says."""

    def __init__(self, path, seed, counted_on, network):
        self.rng, self.seed, self.counted_on = random.Random(seed), seed, counted_on
        safety = self.rng.choice([{"rollback": True}, {"rollback": False}, {"history_bytes_max": 3000}])
        self.world = Marking(path, seed=seed, disk=SimulatedDisk(), safety=safety, **network)
        self.done = self.base = 0
        self.complete = {}
        """By number of iterations, the last checkpoint that was given its name."""
        self.stores = [self.world.store(trainer=trainer, trainers=2) for trainer in range(2)]

    def run(self, iterations, num_faults=3):
        faults = sorted(self.rng.randrange(1, iterations) for _ in range(num_faults))
        while self.done < iterations:
            if faults and self.done >= faults[0]:
                faults.pop(0)
                self.suffer()
            iterate_from(self.stores, self.done, self.base, self.seed)
            self.done += 1
            if self.done % EVERY == 0:
                self.mark()
        found = self.world.rows()
        self.world.close()
        return found

    def mark(self):
        """A checkpoint; or whoever writes it dies before it is begun, or before servers are told that it is there."""
        done, first = self.done, self.stores[0]
        fate = self.rng.choice(["lost", "untold", "told", "told"])
        if fate == "lost":
            first.mark(done, "ff")
            self.suffer()
        else:
            self.complete[done] = self.world.save(first, done, tell=fate == "told")
            if fate == "untold":
                self.suffer()

    def suffer(self):
        """Some servers die; then all go back to the newest complete checkpoint, and trainers begin anew."""
        world, rng = self.world, self.rng
        for number in rng.choice([[0], [1], [0, 1], []]):
            world.kill(number)
            world.start(number)
        if rng.random() < 0.3:
            crash(world.checkpoints.disk, rng)
        point = max(world.points(), key=lambda each: each.done, default=START)
        assert point.done == max(self.complete, default=0), "what was complete stays so"
        assert point == self.complete.get(point.done, START)
        if point != START and rng.random() < 0.2:  # an older one, if it is still there
            point = rng.choice(world.points())
            world.checkpoints.discard_after(point.done)
            self.complete = {done: each for done, each in self.complete.items() if done <= point.done}
        world.recover(point)
        world.checkpoints.continue_from(None if point == START else point.done)
        self.done = point.done
        self.base = 0 if self.counted_on else self.done
        late = {"passed": self.done - 1} if self.counted_on else {}
        options = {"generation": world.generation, "trainers": 2, **late}
        self.stores = [world.store(trainer=trainer, **options) for trainer in range(2)]


@examples(25, tuple(HealthCheck))
@given(seed=st.integers(0, 10**6), trouble=st.sampled_from([{}, TROUBLE]), counted_on=st.booleans())
def test_after_any_deaths_a_return_and_a_replay_give_the_same_bits(tmp_path_factory, seed, trouble, counted_on):
    expected = run_undisturbed(tmp_path_factory.mktemp("expected"), seed, 20)
    assert Trained(tmp_path_factory.mktemp("run"), seed, counted_on, trouble).run(20) == expected


@pytest.mark.long
@pytest.mark.parametrize("seed", range(100))
def test_after_many_deaths_returns_and_replays_give_the_same_bits(tmp_path_factory, seed):
    expected = run_undisturbed(tmp_path_factory.mktemp("expected"), seed, 60)
    run = Trained(tmp_path_factory.mktemp("run"), seed, seed // 2 % 2 == 1, [{}, TROUBLE][seed // 4 % 2])
    assert run.run(60, num_faults=15) == expected
