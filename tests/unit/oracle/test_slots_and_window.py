"""Rings: free slots of a group, and the arrays of the window."""

from __future__ import annotations

from collections import deque

import numpy as np
import pytest

from bagpipe.oracle.slots import AddressedSlots, Group, Slots
from bagpipe.oracle.window import Window


@pytest.mark.parametrize("capacity", [1, 2, 7])
def test_slots_are_a_queue(capacity: int) -> None:
    random = np.random.default_rng(capacity)
    slots, twin, used = Slots(capacity), deque((slot, -1) for slot in range(capacity)), []
    for plan in range(200):
        count = int(random.integers(0, len(twin) + 1))
        taken, freed_by = np.empty((2, count), np.int32)
        slots.take(taken, freed_by)
        expected = [twin.popleft() for _ in range(count)]
        assert list(zip(taken.tolist(), freed_by.tolist(), strict=True)) == expected
        used += taken.tolist()
        random.shuffle(used)
        leaving, used = used[: len(used) // 2 + 1], used[len(used) // 2 + 1 :]
        slots.free(np.array(leaving, np.int32), plan)
        twin.extend((slot, plan) for slot in leaving)
        assert slots.num_free == len(twin)
        assert slots.num_resident == len(used)


@pytest.mark.parametrize("first", [0, 5, 17, 20])
def test_addressed_slots_that_were_freed_longest_ago_come_first(first: int) -> None:
    random = np.random.default_rng(first)
    slots, freed_by, used = AddressedSlots(20), dict.fromkeys(range(20), -1), set[int]()
    for plan in range(200):
        free = sorted(set(range(20)) - used, key=lambda slot: (slot < first, freed_by[slot], slot))
        for count in range(len(free) + 1):
            assert slots.oldest(count, first).tolist() == free[:count]
        chosen = slots.oldest(int(random.integers(0, len(free) + 1)), first)
        assert chosen.dtype == np.int32
        assert slots.claim(chosen).tolist() == [freed_by[slot] for slot in chosen.tolist()]
        used |= set(chosen.tolist())
        leaving = random.permutation(sorted(used))[: random.integers(0, len(used) + 1)].astype(np.int32)
        slots.free(leaving, plan // 3)
        used -= set(leaving.tolist())
        freed_by |= dict.fromkeys(leaving.tolist(), plan // 3)


def test_a_group_collects_and_spreads_the_parts_of_its_tables() -> None:
    bounds, values = np.array([0, 2, 3, 3, 6]), np.array([10, 11, 20, 40, 41, 42])
    for tables, expected in ([0, 1, 2, 3], values), ([0, 3], [10, 11, 40, 41, 42]), ([2], []), ([1, 2], [20]):
        group = Group(0, tables, 1)
        own = group.collect(values, bounds)
        assert own.tolist() == list(expected)
        copied = np.zeros_like(values)
        group.spread(own, copied, bounds)
        assert group.collect(copied, bounds).tolist() == own.tolist()
        assert copied.sum() == own.sum()


def test_a_window_keeps_its_batches_through_wraps_and_growth() -> None:
    random = np.random.default_rng(5)
    window, twin, value = Window(2, 6, first=3), deque[tuple[list[int], list[int]]](), 0
    for _ in range(3000):
        if len(twin) == 6 or (twin and random.random() < 0.5):
            bounds, entries, stays = window.oldest()
            counts, content = twin.popleft()
            assert np.diff(bounds).tolist() == counts
            assert entries.tolist() == stays.tolist() == content
            window.pop()
        else:
            counts = (random.integers(0, 40, 2) * (random.random(2) < 0.8)).tolist()
            window.push(np.array(counts), ())
            column = (window.first + len(window) - 1) & window.mask
            here = slice(window.begins[0, column], window.begins[-1, column])
            content = [(value + i) % 50_000 for i in range(sum(counts))]
            value += sum(counts)
            window.entries[here] = window.stays[here] = content
            twin.append((counts, content))
        assert window.num_rows == sum(sum(counts) for counts, _ in twin)
    assert len(window.entries) < 2 * 6 * 80
    assert window.nbytes > 0


def test_a_full_window_takes_no_more() -> None:
    window = Window(1, 1, first=0)
    window.push(np.array([1]), ())
    with pytest.raises(AssertionError, match="emit a plan first"):
        window.push(np.array([1]), ())
