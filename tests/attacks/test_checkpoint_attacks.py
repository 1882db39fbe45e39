"""Checkpoints with one file damaged: no way of damaging one is accepted, and the one before it is still found."""

from __future__ import annotations

import random

import pytest

from bagpipe.checkpoint.point import ResumePoint
from bagpipe.errors import CheckpointError
from harness.checkpointed import World, load, opened, save

TIMES = 43


def flip(data, dice):
    """One bit."""
    at = dice.randrange(len(data))
    return data[:at] + bytes([data[at] ^ (1 << dice.randrange(8))]) + data[at + 1 :]


def cut(data, dice):
    """The end is missing."""
    return data[: dice.randrange(len(data))]


def extend(data, dice):
    """Something follows the end."""
    return data + dice.choice([b"\0", b"\n", data[-1:], dice.randbytes(dice.randrange(1, 600)), data])


def zero(data, dice):
    """A range is all zeros, as after a crash that lost a page."""
    start, count = dice.randrange(len(data)), dice.choice([1, 8, 512, 4096])
    return data[:start] + bytes(len(data[start : start + count])) + data[start + count :]


def swap(data, dice):
    """Two ranges have changed places."""
    size = dice.randrange(1, len(data) // 2)
    first = dice.randrange(len(data) - 2 * size + 1)
    second = dice.randrange(first + size, len(data) - size + 1)
    one, other = data[first : first + size], data[second : second + size]
    return data[:first] + other + data[first + size : second] + one + data[second + size :]


def insert(data, dice):
    """Bytes come in between."""
    at = dice.randrange(len(data) + 1)
    return data[:at] + dice.randbytes(dice.choice([1, 4, 100])) + data[at:]


def delete(data, dice):
    """Bytes in the middle are missing."""
    at = dice.randrange(len(data))
    return data[:at] + data[at + dice.choice([1, 4, 100]) :]


@pytest.fixture(scope="module")
def chain(tmp_path_factory):
    """A full checkpoint and two that build on it, their states, and the point of the last one."""
    checkpoints, world, states = opened(tmp_path_factory.mktemp("c")), World(rows=60), {}
    world.train(10, share=1)
    for done in (10, 20, 30):
        states[done] = world.state()
        newest = save(checkpoints, world, servers=2)
        world.train(done + 10, share=0.2)
    assert newest.chain == [10, 20, 30]
    return checkpoints, states, ResumePoint.of(newest)


def read_all(checkpoint):
    """Its rows, and what the trainer left."""
    return load(checkpoint), checkpoint.blob("trainer-0")


@pytest.mark.parametrize("damage", [flip, cut, extend, zero, swap, insert, delete], ids=lambda each: each.__name__)
def test_no_damaged_file_is_accepted(damage, chain):
    checkpoints, states, point = chain
    files = sorted(path for path in checkpoints.directory.rglob("*") if path.is_file())
    assert len(files) == 12, "two of rows, one of a trainer and a manifest for each"
    dice, times = random.Random(damage.__name__), 0
    while times < TIMES:
        path = files[times % len(files)]
        whole = path.read_bytes()
        damaged = damage(whole, dice)
        if damaged == whole:
            continue  # equal ranges swapped, or zeros that were there
        times += 1
        done = int(path.parent.name)
        path.write_bytes(damaged)
        try:
            with pytest.raises(CheckpointError):
                checkpoints.open(30).verify()
            with pytest.raises(CheckpointError):
                # A blob of an earlier one is not read to continue from the last: its own point has to find out.
                read_all(point.open() if done == 30 or "trainer" not in path.name else checkpoints.open(done))
            latest = checkpoints.latest(verify=True)
            assert (None if latest is None else latest.done) == {10: None, 20: 10, 30: 20}[done]
            if latest is not None:
                assert read_all(latest) == (states[latest.done], b"blob of %d" % latest.done)
        finally:
            path.write_bytes(whole)
    checkpoints.open(30).verify()
    assert read_all(point.open()) == (states[30], b"blob of 30")


def test_files_that_have_changed_places_are_not_accepted(chain):
    checkpoints, _, point = chain
    for first, second in (
        ("00000030/rows-0-00000.safetensors", "00000030/rows-1-00000.safetensors"),
        ("00000020/rows-0-00000.safetensors", "00000030/rows-0-00000.safetensors"),
        ("00000020/manifest.json", "00000030/manifest.json"),
        ("00000020/trainer-0.safetensors", "00000030/trainer-0.safetensors"),
    ):
        one, other = (checkpoints.directory / name for name in (first, second))
        contents = one.read_bytes(), other.read_bytes()
        assert contents[0] != contents[1]
        one.write_bytes(contents[1])
        other.write_bytes(contents[0])
        try:
            with pytest.raises(CheckpointError):
                checkpoints.open(30).verify()
            with pytest.raises(CheckpointError):
                read_all(point.open())
        finally:
            one.write_bytes(contents[0])
            other.write_bytes(contents[1])
    checkpoints.open(30).verify()
