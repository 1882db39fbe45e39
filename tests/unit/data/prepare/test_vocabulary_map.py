"""`KeyMap` against its twin over plain Python, in memory and in mapped files."""

import subprocess
import sys

import numpy as np
import pytest

from bagpipe.data.prepare.keymap import COUNT, MISSING, RARE, RESERVED, Clash, KeyMap
from bagpipe.data.prepare.space import Space
from bagpipe.errors import ShardError
from definitions.keymap import KeyMapByDict

IN_MEMORY, MAPPED = 1 << 30, 1 << 12


def occurrences(rng, num, num_values, share_missing=0.1):
    keys = (rng.zipf(1.3, num) % num_values).astype(np.uint64) * np.uint64(0x9E3779B97F4A7C15)
    return keys, (keys >> np.uint64(7)).astype(np.uint32), rng.random(num) < share_missing


@pytest.mark.parametrize("bytes_max", [IN_MEMORY, MAPPED])
def test_positions_counts_and_first_occurrences_are_those_of_a_dict(tmp_path, bytes_max):
    rng = np.random.default_rng(0)
    space = Space(tmp_path, bytes_max)
    ours, twin = KeyMap(space), KeyMapByDict()
    for num in (0, 1, 5, 3000, 10_000, 7):
        keys, checks, missing = occurrences(rng, num, 5000)
        found, expected = np.full(num, -7), np.full(num, -7)
        fresh = ours.admit(keys, checks, missing, found)
        assert np.array_equal(fresh, twin.admit(keys, checks, missing, expected))
        assert np.array_equal(found, expected)
    assert ours.entries[:, COUNT].tolist() == twin.counts
    assert bool(space._mapped) == (bytes_max == MAPPED)


@pytest.mark.parametrize("bytes_max", [IN_MEMORY, MAPPED])
@pytest.mark.parametrize("by_frequency", [True, False])
@pytest.mark.parametrize("min_count", [1, 3])
def test_ranks_are_those_of_a_stable_sort(tmp_path, bytes_max, by_frequency, min_count):
    keys, checks, missing = occurrences(np.random.default_rng(1), 200_000, 4000)
    keys[:70_000] = keys[0]  # more often than there are buckets
    keys[70_000:140_000] = keys[70_000]
    checks = (keys >> np.uint64(7)).astype(np.uint32)
    ids = np.empty(len(keys), np.int64)
    ours, twin = KeyMap(Space(tmp_path, bytes_max)), KeyMapByDict()
    ours.admit(keys, checks, missing, ids)
    twin.admit(keys, checks, missing, ids)
    expected = twin.rank(min_count, by_frequency)
    order = ours.rank(min_count, by_frequency)
    assert order.array.tolist() == expected
    ours.number(order.array)
    found = np.empty(len(keys), np.int64)
    ours.encode(keys, missing, found)
    row_of = {position: row + RESERVED for row, position in enumerate(expected)}
    assert found.tolist() == [row_of.get(i - RESERVED, RARE) if i != MISSING else MISSING for i in ids.tolist()]


def test_a_map_that_may_not_grow_gives_unseen_values_the_row_of_rare_ones(tmp_path):
    rng = np.random.default_rng(2)
    ours, twin = KeyMap(Space(tmp_path, IN_MEMORY)), KeyMapByDict()
    for grow, num in ((True, 100), (False, 1000)):
        keys, checks, missing = occurrences(rng, num, 500)
        found, expected = np.empty(num, np.int64), np.empty(num, np.int64)
        ours.admit(keys, checks, missing, found, grow=grow)
        twin.admit(keys, checks, missing, expected, grow=grow)
        assert np.array_equal(found, expected)
    assert RARE in found
    assert ours.entries[:, COUNT].tolist() == twin.counts


@pytest.mark.parametrize("key", [0, 1, 2**63, 2**64 - 1])
def test_any_key_is_a_key(tmp_path, key):
    ours = KeyMap(Space(tmp_path, IN_MEMORY))
    keys, ids = np.array([key, key], np.uint64), np.empty(2, np.int64)
    ours.admit(keys, np.zeros(2, np.uint32), np.zeros(2, bool), ids)
    assert ids.tolist() == [RESERVED, RESERVED]


def test_two_values_with_one_key_are_told_apart_by_their_checks(tmp_path):
    ours = KeyMap(Space(tmp_path, IN_MEMORY))
    keys, ids = np.array([7, 8, 7], np.uint64), np.empty(3, np.int64)
    with pytest.raises(Clash) as clash:
        ours.admit(keys, np.array([1, 1, 2], np.uint32), np.zeros(3, bool), ids)
    assert (clash.value.occurrence, clash.value.position) == (2, 0)


def test_a_disk_without_room_for_a_mapped_array_is_named(tmp_path, monkeypatch):
    def full(*_):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr("os.posix_fallocate", full)
    with pytest.raises(ShardError, match=f"{tmp_path} has no room.*No space left.*free space, or raise --memory"):
        Space(tmp_path, 1000).zeros((1000,), np.int64)


GROWING = """
import sys
import numpy as np
from pathlib import Path
from bagpipe.data.prepare.keymap import KeyMap
from bagpipe.data.prepare.space import Space, resident_bytes

def take(map, first, num):
    keys = np.arange(first, first + num, dtype=np.uint64) * np.uint64(0x9E3779B97F4A7C15)
    map.admit(keys, np.zeros(num, np.uint32), np.zeros(num, bool), np.empty(num, np.int64))

bound = int(sys.argv[2])
take(KeyMap(Space(Path(sys.argv[1]), bound)), 0, 40_000)  # compiled
before = resident_bytes()
map, most = KeyMap(Space(Path(sys.argv[1]), bound)), 0
for first in range(0, 1_000_000, 50_000):
    take(map, first, 50_000)
    most = max(most, resident_bytes() - before)
order = map.rank(1, True)
map.number(order.array)
print(max(most, resident_bytes() - before), map._entries.array.nbytes)
"""


def test_memory_stays_bounded_however_many_values_there_are(tmp_path):
    bound = 8 << 20
    command = [sys.executable, "-c", GROWING, str(tmp_path), str(bound)]
    ended = subprocess.run(command, capture_output=True, text=True, timeout=250, check=True)
    most, needed = map(int, ended.stdout.split())
    assert needed > 2 * bound
    assert most < bound + (16 << 20)  # the arrays of one call beside it
    assert not list(tmp_path.iterdir())
