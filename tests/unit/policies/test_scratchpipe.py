"""ScratchPipe: the paper's example, its hazards provoked and absent, the least cache, and the variant not pipelined."""

from __future__ import annotations

import random
from collections.abc import Sequence

import numpy as np
import pytest

from bagpipe.oracle.oracle import Oracle
from bagpipe.oracle.plan import Plan
from bagpipe.oracle.slots import HELD
from bagpipe.oracle.tables import OracleTable
from bagpipe.policies import PolicyOptions, scratchpipe
from bagpipe.policies.scratchpipe import FUTURE, HOLD, PAST, ScratchPipePolicy
from definitions.lockstep import Hazard, Lockstep
from definitions.plan_execution import Corruption, Execution, Waits, delaying

REPLACEMENTS = ("lru", "lfu", "random")


def least_cache_rows(batches) -> int:
    """The slots with which no held row ever has to leave: the largest number of different rows in six batches in a row.

    Proof. When batch x is planned, the slots that must not be taken are those of rows that batches x - 3 to x + 2 use,
    one slot a row. The rows that x lacks are among these, and have no slot yet. So with as many slots as these six
    batches have rows, at least as many are free or not held as x lacks. In the worst case all ids differ, which gives
    six times the ids of a batch (section VI-D).
    """
    window: list[set[int]] = []
    most = 0
    for batch in batches:
        window = [*window[-(PAST + FUTURE) :], set(batch)]
        most = max(most, len(set().union(*window)))
    return most


def plans_of(batches: Sequence[Sequence[int]], capacity: int, **options: object) -> list[Plan]:
    chosen = PolicyOptions(**options)  # type: ignore[arg-type]
    oracle = Oracle([OracleTable("only", 10_000)], [capacity], policy="scratchpipe", options=chosen)
    return [plan for plan, _ in oracle.plans(([np.array(batch, np.int64)], None) for batch in batches)]


def some_batches(seed: int, num_batches: int = 40) -> list[list[int]]:
    chance = random.Random(seed)
    reach, size = chance.randint(8, 40), chance.randint(1, 5)
    return [chance.choices(range(reach), k=size) for _ in range(num_batches)]


FIGURE_11 = [[7089, 2021], [3010, 7089], [5170, 3010], [1040, 6120], [8333, 7089], [6120, 3010], [1040, 9001]]
"""The ids of the first two batches, and that row 2021 leaves in the fifth cycle, are the paper's; the others ours."""


def test_figure_11_of_the_paper() -> None:
    plans = plans_of(FIGURE_11, capacity=6)
    assert [plan.fetch.ids.tolist() for plan in plans[:2]] == [[7089, 2021], [3010]], "7089 hits already"
    assert [plan.victims.ids.tolist() for plan in plans[:4]] == [[]] * 4
    assert plans[4].victims.ids.tolist() == [2021]
    assert plans[4].victims.slots.tolist() == plans[4].fetch.slots.tolist() == plans[0].rows.slots.tolist()[1:]
    assert plans[4].victims.evict_after == 0


def test_the_hold_mask_shows_three_past_and_two_future_batches() -> None:
    assert (PAST, FUTURE) == (3, 2), "section IV-C"
    oracle = Oracle([OracleTable("only", 10_000)], [12], policy="scratchpipe")
    policy = oracle.policy
    assert isinstance(policy, ScratchPipePolicy)
    batches = [np.array(batch) for batch in FIGURE_11]
    for batch in batches[:3]:
        oracle.read([batch])
    slot_of: dict[int, int] = {}
    for x in range(5):
        if x:
            worth = policy.keys(x, oracle.groups[0], 0)
            held = (worth >= HOLD) & (worth < HELD)
            around = {row for batch in FIGURE_11[max(0, x - 3) : x] for row in batch}
            around |= {row for batch in FIGURE_11[x + 1 : x + 3] for row in batch if row in slot_of}
            of_batch = {row for row in FIGURE_11[x] if row in slot_of}
            assert {row for row, slot in slot_of.items() if held[slot]} == around | of_batch
        plan = oracle.emit()
        slot_of |= dict(zip(plan.rows.ids.tolist(), plan.rows.slots.tolist(), strict=True))
        if x + 3 < len(batches):
            oracle.read([batches[x + 3]])


def test_the_hold_mask_is_as_wide_as_that_and_no_wider() -> None:
    """As batch 6 is planned, row 2 was used four batches ago, and of the others only row 1 is older."""
    past = [[1], [1], [2], [3], [4], [5], [6]]
    assert plans_of([*past, [7], [1]], 5)[6].victims.ids.tolist() == [2], "row 1 is held: needed in two batches"
    assert plans_of([*past, [7], [8], [1]], 5)[6].victims.ids.tolist() == [1], "not held: needed in three"
    often = [[1], [2], [2], [3], [4], [5], [6], [1], [7]]
    assert plans_of(often, 5, replacement="lfu")[6].victims.ids.tolist() == [2], "row 3 is held: used three ago"


@pytest.mark.parametrize("replacement", REPLACEMENTS)
def test_held_rows_never_leave_a_cache_of_the_least_size(replacement: str) -> None:
    for seed in range(40):
        batches = some_batches(seed)
        for plan in plans_of(batches, least_cache_rows(batches), replacement=replacement, seed=seed):
            x = plan.iteration
            held = {row for batch in batches[max(0, x - 3) : x + 3] for row in batch}
            assert held.isdisjoint(plan.victims.ids.tolist())


def test_with_one_slot_less_a_held_row_must_leave() -> None:
    batches = [[number % 6] for number in range(12)]
    assert least_cache_rows(batches) == 6
    assert not any(len(plan.victims) for plan in plans_of(batches, 6))
    for replacement in REPLACEMENTS:
        victims = plans_of(batches, 5, replacement=replacement)[5].victims.ids.tolist()
        assert victims == [0], "all five are held, and row 0 was used longest ago"
    assert least_cache_rows([]) == 0


def test_a_cache_that_is_too_small_is_told_its_least_size_once(caplog: pytest.LogCaptureFixture) -> None:
    batches = [[number % 6] for number in range(24)]
    plans_of(batches, 6)
    plans_of(batches, 5, pipelined=False)
    assert not caplog.messages
    plans_of(batches, 5)
    (message,) = caplog.messages
    assert (
        "holds 6 rows of table 'only' for the six batches around iteration 5, and the cache has places for 5" in message
    )
    assert f"raise `cache` to at least {least_cache_rows(batches)} rows of this width; 6 have room for any" in message
    for seed in range(20):
        caplog.clear()
        batches = some_batches(seed)
        plans_of(batches, least_cache_rows(batches))
        assert not caplog.messages


@pytest.mark.parametrize("replacement", REPLACEMENTS)
def test_six_stages_in_lockstep_are_right_without_waits(replacement: str) -> None:
    for seed in range(30):
        batches = some_batches(seed)
        Lockstep(plans_of(batches, least_cache_rows(batches), replacement=replacement, seed=seed)).run()


TRACES = [some_batches(seed) for seed in range(50)]
LEAST = [least_cache_rows(batches) for batches in TRACES]


def hazards_met(update_late: bool = False) -> set[int]:
    """In caches of the least size, with victims drawn at random: LRU would rarely touch rows just used."""
    met = set()
    for seed, (batches, capacity) in enumerate(zip(TRACES, LEAST, strict=True)):
        try:
            Lockstep(plans_of(batches, capacity, replacement="random", seed=seed), update_late).run()
        except Hazard as hazard:
            met.add(hazard.number)
    return met


@pytest.mark.parametrize(
    ("past", "future", "hazard"),
    [(2, 2, 2), (0, 2, 3), (3, 1, 4)],
    ids=["RAW-2: a victim is read before its update", "RAW-3: or before it is there", "RAW-4: or fetched too early"],
)
def test_a_narrower_hold_mask_brings_the_hazards_back(
    monkeypatch: pytest.MonkeyPatch, past: int, future: int, hazard: int
) -> None:
    monkeypatch.setattr(scratchpipe, "PAST", past)
    monkeypatch.setattr(scratchpipe, "FUTURE", future)
    assert hazard in hazards_met()


def test_training_in_two_stages_brings_the_first_hazard_back() -> None:
    """RAW-1: the forward pass before the last update; it is why training is one stage."""
    assert 1 in hazards_met(update_late=True)
    assert hazards_met() == set()


@pytest.mark.parametrize("waits", [Waits(updated=False), Waits(acknowledged=False)], ids=["RAW-2", "RAW-4"])
def test_on_our_executor_the_waits_keep_the_hazards_out_whatever_the_cache(waits: Waits) -> None:
    corrupted = False
    for seed in range(15):
        batches = some_batches(seed, 16)
        plans = plans_of(batches, max(len(set(batch)) for batch in batches))
        for schedule in (delaying("write"), delaying("update")):
            Execution(plans, [0]).run(schedule)
            try:
                Execution(plans, [0], waits).run(schedule)
            except Corruption:
                corrupted = True
    assert corrupted


def test_without_a_pipeline_every_fetch_waits_for_the_iteration_before() -> None:
    batches = some_batches(3)
    plans = plans_of(batches, 8, pipelined=False)
    assert all(plan.fetch.after.tolist() == [plan.iteration - 1] * len(plan.fetch) for plan in plans)
    assert sum(len(plan.victims) for plan in plans) > 0
    pipelined = plans_of(batches, 8)
    assert any((plan.fetch.after < plan.iteration - 1).any() for plan in pipelined)


def test_without_a_pipeline_no_row_is_held() -> None:
    batches = [[row] for row in (0, 1, 2, 3, 4, 5, 6, 0)]
    assert plans_of(batches, 6)[6].victims.ids.tolist() == [1], "the next batch holds row 0"
    assert plans_of(batches, 6, pipelined=False)[6].victims.ids.tolist() == [0], "used longest ago"


def test_random_victims_depend_on_the_seed_only() -> None:
    batches = some_batches(5)
    victims = [
        [plan.victims.ids.tolist() for plan in plans_of(batches, 22, replacement="random", seed=seed)]
        for seed in (1, 1, 2)
    ]
    assert victims[0] == victims[1] != victims[2]
