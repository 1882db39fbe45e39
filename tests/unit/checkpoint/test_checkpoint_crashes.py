"""Whatever happens to the disk at whatever moment, loading gives the old or the new state, or says what is wrong."""

from __future__ import annotations

import errno
import os
import random

import pytest

from bagpipe.checkpoint.point import directory_name
from bagpipe.errors import CheckpointError
from harness.checkpointed import DIRECTORY, World, load, opened, save
from harness.disk import Fault, SimulatedDisk


def visible(disk):
    """All that a name without a dot leads to."""
    return tuple(sorted((path, data) for path, data in disk.contents().items() if "/." not in path))


class Written:
    """Some checkpoints on one disk; how many operations each took, and the rows that belong to it."""

    def __init__(self, dones, full_every=100, **options):
        self.disk, self.options, self.full_every = SimulatedDisk(), options, full_every
        self.checkpoints = opened(disk=self.disk, **options)
        self.world = World(rows=6)
        self.world.train(0, share=1)
        self.ends, self.states = [], {}
        for done in dones:
            self.save(done)

    def save(self, done):
        self.world.train(done, share=0.3)
        self.states[done] = self.world.state()
        save(self.checkpoints, self.world, servers=2, full=len(self.ends) % self.full_every == 0)
        self.ends.append(len(self.disk.log))

    def check(self, disk, allowed):
        """Loading finds one of the allowed states, and nothing that is not whole."""
        checkpoints = opened(disk=disk, **self.options)
        assert [found.problem for found in checkpoints.scan()] == [None] * len(checkpoints.scan())
        for checkpoint in checkpoints.list():
            checkpoint.verify()
            assert load(checkpoint) == self.states[checkpoint.done]
            assert checkpoint.blob("trainer-0") == b"blob of %d" % checkpoint.done
        latest = checkpoints.latest()
        assert (None if latest is None else latest.done) in allowed
        return checkpoints


@pytest.mark.parametrize("options", [{"keep": 1, "full_every": 2}, {"keep": 2, "full_every": 1}], ids=str)
def test_every_crash_leaves_the_old_or_the_new_state(options, caplog):
    try_crashes(options, at_most=256)
    assert not [record for record in caplog.records if "compiling kernels" not in record.message]


@pytest.mark.long
@pytest.mark.parametrize("full_every", [1, 2, 3])
@pytest.mark.parametrize("keep", [1, 2])
def test_every_crash_leaves_the_old_or_the_new_state_in_thousands_of_ways(keep, full_every, caplog):
    try_crashes({"keep": keep, "full_every": full_every}, at_most=1024)
    assert not [record for record in caplog.records if "compiling kernels" not in record.message]


def try_crashes(options, at_most):
    """Four checkpoints; a crash after each operation, which loses many choices of what was not synced."""
    written = Written([10, 20, 30, 40], **options)
    generator, tried, seen, left = random.Random(0), 0, set(), set()
    for length in range(len(written.disk.log) + 1):
        passed = sum(end <= length for end in written.ends)
        allowed = (None, 10, 20, 30, 40)[passed : passed + 2]
        for crashed in written.disk.crashes(length, generator, at_most):
            tried += 1
            if (key := (visible(crashed), allowed)) not in seen:
                seen.add(key)
                written.check(crashed, allowed)
            if (key := frozenset(crashed.contents().items())) not in left and generator.random() < 0.04:
                left.add(key)
                goes_on(written, crashed)
    assert tried > 900
    assert len(left) > 10
    assert len(seen) > 9


def goes_on(written, disk):
    """The next run finds its way from what a crash has left."""
    checkpoints = opened(disk=disk, **written.options)
    latest = checkpoints.latest()
    world = World(rows=6)
    world.train(50, share=1)
    checkpoints.continue_from(None if latest is None else latest.done)
    checkpoint = save(checkpoints, world)
    assert load(checkpoint) == world.state()
    assert not [path for path in disk.contents() if "/." in path]


def test_the_disk_of_these_tests_loses_what_was_not_synced():
    disk, generator = SimulatedDisk(), random.Random(0)
    disk.make_directory(DIRECTORY)
    disk.sync_directory(DIRECTORY.parent)
    with disk.create(DIRECTORY / "a") as file:
        file.write(b"xy")
        file.write(b"z")
    states = [crashed.contents() for crashed in disk.crashes(len(disk.log), generator)]
    contents = {state.get("/checkpoints/a", "missing") for state in states}
    assert contents == {"missing", b"", b"xy", b"\0\0z", b"xyz"}
    file.sync()
    disk.sync_directory(DIRECTORY)
    disk.rename(DIRECTORY / "a", DIRECTORY / "b")
    states = [crashed.contents() for crashed in disk.crashes(len(disk.log), generator)]
    assert states == [{"/checkpoints": None, f"/checkpoints/{name}": b"xyz"} for name in "ba"]


@pytest.mark.parametrize("left_out", ["sync", "sync_directory"])
def test_a_checkpoint_without_its_syncs_would_be_found_out(left_out):
    """The test above can fail."""
    written = Written([10], keep=1, full_every=1)
    disk, start = written.disk, len(written.disk.log)
    if left_out == "sync":
        disk.create = lambda path, create=disk.create: _unsynced(create(path))
    else:
        disk.sync_directory = lambda path: None
    written.save(20)
    with pytest.raises((AssertionError, CheckpointError)):
        check_crashes(written, start)


def check_crashes(written, start):
    generator, end = random.Random(0), len(written.disk.log)
    for length in range(start, end + 1):
        for crashed in written.disk.crashes(length, generator, at_most=64):
            written.check(crashed, (10, 20) if length < end else (20,))


def _unsynced(file):
    file.sync = lambda: None
    return file


FULL, BROKEN = errno.ENOSPC, errno.EIO


@pytest.mark.parametrize(
    "in_turn", [(FULL, BROKEN), *(pytest.param((each,), marks=pytest.mark.long) for each in (FULL, BROKEN))]
)
def test_whatever_operation_fails_the_state_is_old_or_new_and_the_next_checkpoint_works(in_turn, caplog):
    said = set()
    for at in range(10_000):
        written = Written([10, 20], keep=1, full_every=2)
        disk = written.disk
        disk.fault = Fault(at, in_turn[at % len(in_turn)])
        try:
            written.save(30)
        except CheckpointError as error:
            said.add(str(error))
            allowed = (20, 30)
        else:
            allowed = (30,)
        over, disk.fault = len(disk.fault.seen) <= at, None
        written.check(disk, allowed)
        for crashed in (disk.crashed(len(disk.log)), disk.crashed(len(disk.log), disk.unsynced(len(disk.log)))):
            written.check(crashed, allowed)
        written.save(40)
        written.check(disk, (40,))
        assert not [path for path in disk.contents() if "/." in path]
        if over:
            break
    assert at > 60
    assert len(said) > 15
    for message in said:
        assert str(DIRECTORY) in message
        assert any(os.strerror(number) in message for number in in_turn)


def test_a_failed_sync_is_never_tried_again():
    """After one, the operating system may have dropped what was not written: the files must be given up."""
    for at in range(100):
        written = Written([10], keep=2)
        disk = written.disk
        disk.fault = Fault(at, errno.EIO, frozenset(["sync", "sync_directory"]))
        try:
            written.save(20)
        except CheckpointError:
            pass
        else:
            break
        assert opened(disk=disk).latest().done == 10
        assert len(disk.fault.seen) == at + 1
        written.states.pop(20)
        assert [checkpoint.done for checkpoint in written.check(disk, (10,)).list()] == [10]
    assert at > 5


@pytest.mark.parametrize("step", [7, pytest.param(1, marks=pytest.mark.long)])
def test_a_flipped_bit_or_a_cut_anywhere_is_detected_by_verifying_and_by_loading(step):
    written = Written([10, 20], keep=2)
    disk, generator = written.disk, random.Random(0)
    checked = 0
    for path, data in disk.contents().items():
        if data is None:
            continue
        path = DIRECTORY / path.removeprefix(f"{DIRECTORY}/")
        for place in range(0, len(data), step):
            flipped = bytearray(data)
            flipped[place] ^= 1 << generator.randrange(8)
            for damaged in (bytes(flipped), data[:place]):
                disk.write_file(path, damaged)
                refused(disk, path)
                checked += 1
        disk.write_file(path, data + b"\0")
        refused(disk, path)
        disk.write_file(path, data)
    assert checked > 3000 // step
    assert load(opened(disk=disk).open(20)) == written.states[20]


def refused(disk, path):
    checkpoints = opened(disk=disk)
    with pytest.raises(CheckpointError, match=path.name):
        checkpoints.open(20).verify()
    if path.name.startswith("trainer"):
        with pytest.raises(CheckpointError, match=path.name):
            checkpoints.open(int(path.parent.name)).blob("trainer-0")
        return
    with pytest.raises(CheckpointError, match=path.name):
        list(checkpoints.open(20).in_order())  # which is what is loaded


def test_a_missing_file_is_named():
    for path in [path for path, data in Written([10, 20]).disk.contents().items() if data is not None]:
        written = Written([10, 20])
        path = DIRECTORY / path.removeprefix(f"{DIRECTORY}/")
        written.disk.unlink(path)
        with pytest.raises(CheckpointError, match=f"{path.parent.name}/{path.name}"):
            opened(disk=written.disk).open(20).verify()


def test_a_damaged_newest_one_is_passed_over_with_a_warning(caplog):
    written = Written([10, 20, 30], keep=3, full_every=1)
    written.disk.write_file(DIRECTORY / directory_name(30) / "manifest.json", b"{}")
    assert opened(disk=written.disk).latest().done == 20
    assert "00000030/manifest.json is damaged" in caplog.text
    assert [found.problem is None for found in opened(disk=written.disk).scan()] == [True, True, False]
