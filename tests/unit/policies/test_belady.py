"""Belady's rule against brute force, and against the policy that lets rows go when the window does not need them."""

from __future__ import annotations

import itertools
import random
from functools import cache

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from bagpipe.oracle.oracle import Oracle
from bagpipe.oracle.plan import Plan
from bagpipe.oracle.tables import OracleTable
from harness.examples import examples

Batches = tuple[frozenset[int], ...]


def plans_of(
    policy: str, batches: Batches, capacity: int, lookahead: int | str, ahead: int, groups: int = 1
) -> list[Plan]:
    tables = [OracleTable(f"t{g}", 100, group=g) for g in range(groups)]
    oracle = Oracle(tables, [capacity] * groups, lookahead, policy, ahead=ahead)  # type: ignore[arg-type]
    source = (([np.array(sorted(batch), np.int64)] * groups, None) for batch in batches)
    return [plan for plan, _ in oracle.plans(source)]


def moved(plans: list[Plan]) -> tuple[int, int]:
    """Rows fetched, and rows written back."""
    return sum(len(plan.fetch) for plan in plans), sum(len(plan.victims) + len(plan.evict) for plan in plans)


def least_moved(batches: Batches, capacity: int) -> int:
    """The fewest rows that any cache of this size fetches and writes back, by trying everything.

    Before each batch it may drop any rows that the batch does not use, as long as the batch fits beside the others.
    """

    @cache
    def cost(number: int, cached: frozenset[int]) -> int:
        if number == len(batches):
            return len(cached)  # written back at the end
        batch = batches[number]
        others = cached - batch
        room = capacity - len(batch)
        kept = [
            frozenset(some)
            for count in range(min(room, len(others)) + 1)
            for some in itertools.combinations(sorted(others), count)
        ]
        return len(batch - cached) + min(len(others) - len(some) + cost(number + 1, batch | some) for some in kept)

    return cost(0, frozenset())


def random_batches(seed: int, num_batches: int, reach: int, size: int) -> Batches:
    chance = random.Random(seed)
    return tuple(frozenset(chance.choices(range(reach), k=chance.randint(0, size))) for _ in range(num_batches))


def test_no_cache_of_this_size_moves_fewer_rows_where_none_are_prefetched() -> None:
    """With the whole future in the window, and no slots kept for prefetches; write-backs counted in."""
    for seed in range(150):
        batches = random_batches(seed, 3 + seed % 6, 3 + seed % 5, 3)
        most = max(1, *map(len, batches))
        for capacity in range(most, most + 3):
            assert sum(moved(plans_of("belady", batches, capacity, 50, 0))) == least_moved(batches, capacity)


@examples(80)
@given(
    seed=st.integers(0, 2**32),
    reach=st.integers(2, 30),
    size=st.integers(1, 7),
    spare=st.integers(0, 12),
    lookahead=st.sampled_from([1, 2, 3, 5, 9, 40]),
    ahead=st.integers(0, 3),
    groups=st.integers(1, 2),
)
def test_it_never_fetches_more_rows_than_lookahead_with_the_same_cache_and_window(
    seed: int, reach: int, size: int, spare: int, lookahead: int, ahead: int, groups: int
) -> None:
    batches = random_batches(seed, 25, reach, size)
    capacity = max(1, *map(len, batches)) + spare
    ours = moved(plans_of("belady", batches, capacity, lookahead, ahead, groups))
    theirs = moved(plans_of("lookahead", batches, capacity, lookahead, ahead, groups))
    assert ours[0] <= theirs[0]
    assert ours[1] == ours[0], "each row that comes is written back once"


def test_rows_that_the_window_does_not_need_leave_first_and_the_oldest_of_them() -> None:
    batches = tuple(map(frozenset, ([1], [2], [3], [4], [1], [3])))
    plans = plans_of("belady", batches, 3, 3, 0)
    assert [sorted({*plan.evict.ids.tolist(), *plan.victims.ids.tolist()}) for plan in plans[:-1]] == [
        [], [], [2], [], []
    ]  # fmt: skip


def test_slots_are_free_by_the_time_prefetching_wants_them() -> None:
    batches = random_batches(3, 200, 60, 6)
    for ahead in (0, 1, 2):
        plans = plans_of("belady", batches, 26, 20, ahead)
        waits = [plan.iteration - plan.fetch.slot_after.max(initial=-1) for plan in plans[20:]]
        assert min(waits) == ahead + 1
        assert not any(len(plan.victims) for plan in plans), "everybody left before a plan needed the slot"
