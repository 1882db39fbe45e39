"""Rows on servers that die and return to marks: a replay gives the bits of a run that nothing disturbed."""

from __future__ import annotations

import random

import numpy as np
import pytest
from hypothesis import HealthCheck, given
from hypothesis import strategies as st

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
    world = Marking(path, seed=seed, journal=False)
    stores = [world.store(trainer=trainer, trainers=2) for trainer in range(2)]
    for iteration in range(iterations):
        iterate(stores, iteration, seed)
    found = world.rows()
    world.close()
    return found


def crashed(disk, rng):
    """What is left of a disk: anything that was not synced may be gone."""
    length = len(disk.log)
    return disk.crashed(length, frozenset(number for number in disk.unsynced(length) if rng.random() < 0.5))


class Trained:
    """A run of two trainers over two servers that dies and comes back as a seed says."""

    def __init__(self, path, seed, shared, counted_on, network):
        self.rng, self.seed, self.shared, self.counted_on = random.Random(seed), seed, shared, counted_on
        disks = {} if shared else {"disks": {number: SimulatedDisk() for number in range(2)}}
        self.world = Marking(path, seed=seed, disk=SimulatedDisk() if shared else None, **disks, **network)
        self.done = self.base = 0
        self.saved = None
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
        done, first = self.done, self.stores[0]
        first.keep(done, "trainer-0", b"%d" % done)
        first.mark(done)
        if self.shared and self.rng.random() < 0.5:
            self.world.save(first, done)
            self.saved = done
        first.forget(done - EVERY)

    def suffer(self):
        """Some servers die; then all go back to a point that all can go back to, and trainers begin anew."""
        world, rng = self.world, self.rng
        for number in rng.choice([[0], [1], [0, 1], []]):
            world.kill(number)
            if not self.shared:  # its whole machine died
                world.disks[number] = crashed(world.disks[number], rng)
            world.start(number)
        common = set.intersection(*(set(server.marks()) for server in world.servers))
        point, files = max(common, default=None), None
        if self.saved is not None and (point is None or rng.random() < 0.3):
            point, files = self.saved, world.directory
        elif point is not None:
            assert world.servers[0].kept(point) == {"trainer-0": b"%d" % point}
        world.recover(point, files)
        world.checkpoints.continue_from(point if point == self.saved else None)
        self.done = point or 0
        self.base = 0 if self.counted_on else self.done
        late = {"passed": self.done - 1} if self.counted_on else {}
        options = {"generation": world.generation, "trainers": 2, **late}
        self.stores = [world.store(trainer=trainer, **options) for trainer in range(2)]


@examples(25, tuple(HealthCheck))
@given(
    seed=st.integers(0, 10**6), shared=st.booleans(), trouble=st.sampled_from([{}, TROUBLE]), counted_on=st.booleans()
)
def test_after_any_deaths_a_return_and_a_replay_give_the_same_bits(tmp_path_factory, seed, shared, trouble, counted_on):
    expected = run_undisturbed(tmp_path_factory.mktemp("expected"), seed, 20)
    assert Trained(tmp_path_factory.mktemp("run"), seed, shared, counted_on, trouble).run(20) == expected


@pytest.mark.long
@pytest.mark.parametrize("seed", range(100))
def test_after_many_deaths_returns_and_replays_give_the_same_bits(tmp_path_factory, seed):
    expected = run_undisturbed(tmp_path_factory.mktemp("expected"), seed, 60)
    network = [{}, TROUBLE][seed // 4 % 2]
    run = Trained(tmp_path_factory.mktemp("run"), seed, seed % 2 == 1, seed // 2 % 2 == 1, network)
    assert run.run(60, num_faults=15) == expected
