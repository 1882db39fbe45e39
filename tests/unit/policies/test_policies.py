"""What each policy keeps and lets go; that all are exact is in tests/property/test_plans.py."""

from __future__ import annotations

import subprocess
import sys

import numpy as np
import pytest
import torch

from bagpipe.cache import RowCache
from bagpipe.errors import CapacityError, ConfigError
from bagpipe.kernels.oracle import KEEP
from bagpipe.oracle.oracle import Oracle
from bagpipe.oracle.plan import Plan
from bagpipe.oracle.slots import IdleQueue
from bagpipe.oracle.tables import OracleTable
from bagpipe.policies import POLICIES, PolicyOptions, make_policy
from bagpipe.policies.base import Lookahead
from bagpipe.policies.lookahead import AUTO_MAX, RAMP
from bagpipe.row_ops import ALIGNMENT


def plans_of(
    policy: str, batches: list[list[int]], capacity: int, lookahead: Lookahead = 4, ahead: int = 2
) -> list[Plan]:
    oracle = Oracle([OracleTable("only", 1000)], [capacity], lookahead, policy, ahead=ahead)
    return [plan for plan, _ in oracle.plans(([np.array(batch, np.int64)], None) for batch in batches)]


def fetched(plans: list[Plan]) -> list[list[int]]:
    return [plan.fetch.ids.tolist() for plan in plans]


@pytest.mark.parametrize("name", POLICIES)
def test_policies_are_made_by_name(name: str) -> None:
    assert make_policy(name).name == name


def test_an_unknown_policy_is_refused_with_the_names_there_are() -> None:
    with pytest.raises(ConfigError, match="no policy 'lifo': choose one of lookahead, belady, "):
        make_policy("lifo")


def test_nocache_fetches_everything_after_the_iteration_before() -> None:
    plans = plans_of("nocache", [[1, 2], [2, 3], [9]], capacity=9)
    assert fetched(plans) == [[1, 2], [2, 3], [9]]
    assert [plan.fetch.after.tolist() for plan in plans] == [[-1, -1], [0, 0], [1]]
    assert [plan.evict.ids.tolist() for plan in plans] == [[1, 2], [2, 3], [9]]
    assert {plan.lookahead for plan in plans} == {1}


def test_ideal_fetches_each_row_once_and_writes_all_back_at_the_end() -> None:
    plans = plans_of("ideal", [[1, 2], [2, 3], [1]], capacity=3)
    assert fetched(plans) == [[1, 2], [3], []]
    assert [plan.evict.ids.tolist() for plan in plans] == [[], [], [1, 2, 3]]


def test_ideal_needs_a_cache_for_all_rows() -> None:
    oracle = Oracle([OracleTable("only", 9)], [2], policy="ideal")
    plans = oracle.plans([([np.array([row])], None) for row in range(3)])
    assert next(plans)[0].evict.ids.tolist() == []
    assert next(plans)[0].evict.ids.tolist() == [0, 1], "everything is written back before the error"
    with pytest.raises(CapacityError, match=r"iteration 2 needs 3 rows of table 'only' by now, all of .*they have 2: "):
        next(plans)


def test_lru_lets_the_row_go_that_was_used_longest_ago() -> None:
    plans = plans_of("lru", [[1, 2, 3], [1], [4], [3], [5, 2]], capacity=3)
    assert [plan.victims.ids.tolist() for plan in plans] == [[], [], [2], [], [1, 4]]
    assert [plan.victims.evict_after for plan in plans] == [-1, -1, 0, -1, 2]
    assert fetched(plans) == [[1, 2, 3], [], [4], [], [5, 2]]
    assert plans[4].fetch.after.tolist() == [-1, 2]
    assert sorted(plans[4].evict.ids.tolist()) == [2, 3, 5]
    assert plans[2].fetch.slots.tolist() == plans[2].victims.slots.tolist()
    assert plans[2].fetch.slot_after.tolist() == [-1]


def test_lru_never_picks_a_row_of_the_batch() -> None:
    plans = plans_of("lru", [[1, 2], [3, 1], [1, 4]], capacity=2)
    assert [plan.victims.ids.tolist() for plan in plans] == [[], [2], [3]]


@pytest.mark.parametrize("name", ["scratchpipe", "windowed"])
def test_policies_that_draw_victims_draw_for_each_group_anew(name: str) -> None:
    random = np.random.default_rng(0)
    options = PolicyOptions(replacement="random")
    tables = [OracleTable(f"of group {group}", 1000, group=group, width=8 + group) for group in (0, 1)]
    oracle = Oracle(tables, [60, 60], lookahead=3, policy=name, options=options)
    batches = [random.integers(0, 1000, 8) for _ in range(60)]
    plans = [plan for plan, _ in oracle.plans(([batch, batch], None) for batch in batches)]
    pairs = [[plan.victims.of_table(table)[0].tolist() for table in (0, 1)] for plan in plans[:-1]]
    drawn = [one != other for one, other in pairs if one or other]
    assert len(drawn) > 30
    assert sum(drawn) > len(drawn) // 2, "the same ids, but other victims"


def test_lookahead_fetches_no_more_than_lru_with_the_same_cache() -> None:
    random = np.random.default_rng(4)
    batches = [(random.zipf(1.2, 20) % 300).tolist() for _ in range(200)]
    totals = {
        policy: sum(len(plan.fetch) for plan in plans_of(policy, batches, capacity=60, lookahead=50))
        for policy in ("lookahead", "lru", "nocache")
    }
    assert totals["lookahead"] < totals["lru"] < totals["nocache"]


def test_a_lookahead_given_as_a_number_lets_rows_go_although_there_is_room() -> None:
    batches = [[1], [2], [3], [1]]
    assert [plan.evict.ids.tolist() for plan in plans_of("lookahead", batches, 9, lookahead=3)] == [[1], [2], [3], [1]]
    assert [plan.evict.ids.tolist() for plan in plans_of("lookahead", batches, 9, lookahead=1)] == [[1], [2], [3], [1]]


def test_auto_fetches_each_row_once_where_all_of_them_fit() -> None:
    """Also rows that come back after more batches than the longest window holds."""
    random = np.random.default_rng(5)
    batches = [[7, *(random.zipf(1.1, 20) % 200).tolist()] for _ in range(300)]
    batches = [[900], *batches, [900]]
    assert len(batches) > AUTO_MAX + RAMP
    distinct = sorted({row for batch in batches for row in batch})
    plans = plans_of("lookahead", batches, 300, "auto")
    assert sorted(row for plan in plans for row in plan.fetch.ids.tolist()) == distinct
    assert sum(len(plan.fetch) for plan in plans_of("lru", batches, 300)) == len(distinct)


@pytest.mark.parametrize("ahead", [0, 1, 2])
def test_idle_rows_hold_up_no_prefetch(ahead: int) -> None:
    random = np.random.default_rng(1)
    batches = [random.integers(0, 900, 6).tolist() for _ in range(400)]
    plans = plans_of("lookahead", batches, 60, "auto", ahead)
    waits = [plan.iteration - plan.fetch.slot_after.max(initial=-1) for plan in plans[20:]]
    assert min(waits) > ahead
    assert not any(len(plan.victims) for plan in plans)
    used: dict[int, int] = {}
    old = 0
    for plan in plans[:-20]:
        used |= dict.fromkeys(plan.rows.ids.tolist(), plan.iteration)
        old += sum(used[row] < plan.iteration for row in plan.evict.ids.tolist())
    assert old > 100, "rows were meant to stay idle, and to leave when their slots are needed"


def test_idle_rows_leave_evenly_once_the_end_of_the_data_is_in_sight() -> None:
    batches = [[number] for number in range(80)]
    leaving = [len(plan.evict) for plan in plans_of("lookahead", batches, 200, "auto")]
    assert sum(leaving) == 80
    assert leaving[:10] == [0] * 10
    assert max(leaving) <= 3


def test_an_idle_row_that_a_batch_needs_again_stays_until_then() -> None:
    """From the moment that the batch is read, although rows idle for less long leave meanwhile."""
    batches = [[1], *([row] for row in range(100, 700)), [1]]
    plans = plans_of("lookahead", batches, AUTO_MAX + 60, "auto")
    assert [plan.iteration for plan in plans if 1 in plan.fetch.ids] == [0, 601]
    batches = [[1], *([row] for row in range(100, 380)), [1]]
    plans = plans_of("lookahead", batches, AUTO_MAX + 60, "auto")
    assert [plan.iteration for plan in plans if 1 in plan.fetch.ids] == [0]


def test_the_idle_queue_is_a_queue_of_last_uses() -> None:
    random = np.random.default_rng(8)
    queue, twin = IdleQueue(np.full(12, -1, np.int32)), dict[int, int]()
    for iteration in range(400):
        slots = random.permutation(12)[: random.integers(0, 6)].astype(np.int32)
        next_use = random.choice([3, KEEP], len(slots)).astype(np.uint16)
        queue.settle(slots, next_use, iteration)
        for slot, use in zip(slots.tolist(), next_use.tolist(), strict=True):
            twin.pop(slot, None)
            if use == KEEP:
                twin[slot] = iteration
        if random.random() < 0.3:
            woken = random.permutation(12)[:2].astype(np.int32)
            queue.wake(woken)
            for slot in woken.tolist():
                twin.pop(slot, None)
        count = int(random.integers(0, len(twin) + 1))
        popped, last = queue.pop(count)
        assert popped.tolist() == list(twin)[:count]
        assert last == max([*twin.values()][:count], default=-1)
        twin = dict(list(twin.items())[count:])
        assert len(queue) == len(twin)
        assert (queue.since >= 0).sum() == len(twin)


@pytest.mark.parametrize("capacity", [200, 420])
@pytest.mark.parametrize("threads", [1, 2])
def test_an_idle_row_that_is_needed_soon_does_not_leave_while_there_are_others(capacity: int, threads: int) -> None:
    """It would have to be fetched at once, and wait for its write-back, which holds training up."""
    random = np.random.default_rng(0)
    batches = [np.unique(random.zipf(1.3, 60) % 800) for _ in range(300)]
    near = refetched = 0
    tables = [OracleTable("first", 800), OracleTable("second", 800)]
    oracle = Oracle(tables, [capacity], "auto", "lookahead", threads=threads, ahead=0)
    for plan, _ in oracle.plans(([batch, batch[::2]], None) for batch in batches):
        waits = plan.iteration - plan.fetch.after[plan.fetch.after >= 0]
        near += np.count_nonzero(waits == 1)
        refetched += np.count_nonzero(waits < 60)
    oracle.close()
    assert refetched > 100, "rows were meant to leave though they are needed again"
    assert near == 0


def test_idle_rows_leave_room_also_where_the_window_was_short_and_grows() -> None:
    """Then more rows are seen to be on their way than there are slots, and idle rows must not take any of these."""
    batches = [[0, 6, 4, 2], [5, 0, 2, 3, 4], [6], [0], [3], [4, 7, 0], [2], [1], [5, 3, 6, 0, 1], [7, 5]]
    assert len(plans_of("lookahead", batches, 5, "auto")) == 10
    random = np.random.default_rng(0)
    for _ in range(150):
        some = [random.integers(0, 16, random.integers(1, random.choice([3, 11]))).tolist() for _ in range(30)]
        capacity = max(len(set(batch)) for batch in some) + int(random.integers(0, 6))
        oracle = Oracle([OracleTable("only", 16)], [capacity], "auto", ahead=int(random.integers(0, 5)))
        assert len(list(oracle.plans(([np.array(batch)], None) for batch in some))) == 30
        oracle.close()


GROWTH_BY_SLOTS = """
import torch
from bagpipe.cache import RowCache

def resident_bytes():
    with open("/proc/self/statm") as file:
        return int(file.read().split()[1]) * 4096

RowCache([64], [1000], torch.device("cpu"))
before = resident_bytes()
cache = RowCache([64], [2_000_000], torch.device("cpu"))
print(resident_bytes() - before)
"""


@pytest.mark.skipif(sys.platform != "linux", reason="reads /proc")
def test_slots_take_memory_when_they_are_first_used() -> None:
    """Policy `ideal` has as many as there are rows, and of most tables only a part is ever trained.

    Measured in a process of its own: in this one other tests may have freed memory that is cleared before it is used.
    """
    child = subprocess.run([sys.executable, "-c", GROWTH_BY_SLOTS], capture_output=True, text=True, check=True)
    assert int(child.stdout) < 100_000_000
    cache = RowCache([64], [2_000_000], torch.device("cpu"))
    assert cache.num_bytes == 512_000_000
    assert cache.data[0].data_ptr() % ALIGNMENT == 0
    assert cache.data[0][-1].tolist() == [0.0] * 64
    rows = np.arange(10)
    cache.insert(0, rows, rows.astype(np.int32), np.ones((10, 64), np.float32))
    assert cache.read(0, np.array([9, 10], np.int32)).sum(1).tolist() == [64, 0]


def test_slots_for_more_than_there_is_memory_are_refused_with_the_size() -> None:
    with pytest.raises(CapacityError, match=r"takes 1,024,000,000,000,000 bytes, .* smaller `cache`"):
        RowCache([256], [10**12], torch.device("cpu"))
