"""cDLRM: sets and ways, collisions, the victim table, pinned rows, and the stale mode, which is really stale."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import pytest
import torch

from bagpipe import optim
from bagpipe.cache import RowCache
from bagpipe.config import parse_config
from bagpipe.errors import ConfigError
from bagpipe.initial import Constant
from bagpipe.layout import RowLayout
from bagpipe.oracle.oracle import Oracle
from bagpipe.oracle.plan import Plan
from bagpipe.oracle.slots import Group
from bagpipe.oracle.tables import OracleTable
from bagpipe.policies import PolicyOptions, make_policy
from bagpipe.policies.windowed import SetLayout, WindowedPolicy, next_prime
from bagpipe.store import MemoryStore
from bagpipe.trainer.pipeline import Pipeline
from bagpipe.types import Table
from harness.explorer import WRITES_BACK, Seeded
from harness.flat import prepare
from harness.world import OPTIMIZERS, dense_sgd, make_batches, make_model

STALE = PolicyOptions(mode="stale")


def made(capacity: int, lookahead: int, **options: object) -> Oracle:
    return Oracle([OracleTable("only")], [capacity], lookahead, "windowed", PolicyOptions(**options))  # type: ignore[arg-type]


def layout_of(capacity: int, ways: int, used: int, batch: int) -> SetLayout:
    """Of one table, of which the first window has so many rows, and its largest batch."""
    return SetLayout(Group(0, [0], capacity), ways, np.array([used]), batch)


def plans_of(oracle: Oracle, batches: Sequence[Sequence[int]]) -> list[Plan]:
    return [plan for plan, _ in oracle.plans(([np.array(batch, np.int64)], None) for batch in batches)]


def test_the_number_of_sets_is_prime() -> None:
    assert [next_prime(number) for number in (0, 2, 3, 4, 8, 90, 7919)] == [2, 2, 3, 5, 11, 97, 7919]


def test_small_tables_are_there_whole_and_large_ones_share_the_rest_in_sets() -> None:
    group = Group(0, [0, 1, 2], 1000, rows=[30, 100_000, None])
    layout = SetLayout(group, 4, np.array([30, 400, 800]), 125)
    assert layout.sets[0] == 30
    assert layout.ways.tolist() == [1, 4, 4]
    assert layout.sets[1] == layout.sets[2] == next_prime(int(layout.sets[1]))
    assert layout.firsts.tolist() == [0, 30, 30 + 4 * layout.sets[1]]
    assert layout.end == 30 + 8 * layout.sets[1] <= 1000 - 1000 // 8
    assert 30 + 8 * next_prime(int(layout.sets[1]) + 1) > 1000 - 1000 // 8, "as many sets as fit"


def test_a_cache_too_small_for_sets_is_all_victim_table() -> None:
    assert SetLayout(Group(0, [0, 1], 3), 16, np.array([3, 3]), 3).end == 0
    assert layout_of(8, 16, used=8, batch=4).ways.tolist() == [2], "fewer ways before none"


@pytest.mark.parametrize(
    ("capacity", "used", "batch", "places"),
    [(1000, 500, 90, 90), (1000, 500, 400, 400), (1000, 800, 400, 200), (1000, 950, 400, 125), (1000, 5000, 60, 60)],
)
def test_the_victim_table_holds_a_batch_if_a_window_fits_beside_it(
    capacity: int, used: int, batch: int, places: int
) -> None:
    layout = layout_of(capacity, 1, used, batch)
    assert capacity - layout.end >= places
    assert next_prime(layout.end + 1) > capacity - places, "the sets take the rest"


def test_sets_are_laid_out_by_what_the_first_window_has_of_each_table() -> None:
    tables = [OracleTable("few"), OracleTable("many")]
    oracle = Oracle(tables, [3000], 4, "windowed", PolicyOptions(ways=4))
    batches = [[np.arange(10) + 10 * n, np.arange(90) + 90 * n] for n in range(8)]
    list(oracle.plans((batch, None) for batch in batches))
    assert isinstance(oracle.policy, WindowedPolicy)
    few, many = oracle.policy.layouts[0].sets.tolist()
    assert 8 < many / few < 10
    assert 3000 - oracle.policy.layouts[0].end >= 100, "the victim table holds a batch"


def test_rows_of_one_set_collide_and_the_losers_go_through_the_victim_table() -> None:
    oracle, layout = made(64, lookahead=3, ways=2), layout_of(64, 2, used=4, batch=4)
    sets = int(layout.sets[0])
    rivals = [5, 5 + sets, 5 + 2 * sets, 5 + 3 * sets]
    plans = plans_of(oracle, [rivals, rivals, rivals])
    stay = set(rivals) - set(plans[0].evict.ids.tolist())
    assert 1 <= len(stay) <= 2, "two ways for four rows, and two rows may have drawn the same"
    ways = {layout.firsts[0] + 5 * 2, layout.firsts[0] + 5 * 2 + 1}
    first = dict(zip(plans[0].rows.ids.tolist(), plans[0].rows.slots.tolist(), strict=True))
    assert {first[row] for row in stay} <= ways
    assert all(first[row] >= layout.end for row in set(rivals) - stay)
    for plan in plans[1:]:
        again = set(plan.fetch.ids.tolist())
        assert again == set(rivals) - stay
        stay |= again - set(plan.evict.ids.tolist())
        assert len(stay) <= 2
    assert plans[1].fetch.after.tolist() == [0] * len(plans[1].fetch), "a conflict victim was written back just before"


def test_rows_of_other_sets_do_not_collide() -> None:
    oracle, layout = made(400, lookahead=2, ways=4), layout_of(400, 4, used=50, batch=50)
    rows = list(range(50))
    assert layout.sets[0] == 83
    plans = plans_of(oracle, [rows, rows])
    assert len(plans[0].evict) == 0
    assert len(plans[1].fetch) == 0


def test_nothing_that_the_window_uses_leaves_before_its_end_while_the_victim_table_has_room() -> None:
    random = np.random.default_rng(0)
    batches = [random.integers(0, 60, 6).tolist() for _ in range(60)]
    oracle = made(40, lookahead=5, ways=2)
    gone = 0
    for plan in plans_of(oracle, batches):
        start = plan.iteration - plan.iteration % 5
        window = {row for batch in batches[start : start + 5] for row in batch}
        assert window.isdisjoint(plan.victims.ids.tolist())
        gone += len(plan.victims)
    assert gone > 50


def test_a_window_ends_before_the_first_batch_of_the_next() -> None:
    oracle, layout = made(64, lookahead=2, ways=1), layout_of(64, 1, used=2, batch=1)
    rival = 5 + int(layout.sets[0])
    taken = plans_of(oracle, [[1], [5], [2], [rival], [5], [1]])[3]
    assert taken.victims.ids.tolist() == [5], "its next use is in the window after this one"
    assert (taken.rows.slots < layout.end).all()
    oracle = made(64, lookahead=2, ways=1)
    kept = plans_of(oracle, [[1], [5], [rival], [5], [2], [1]])[2]
    assert kept.victims.ids.tolist() == [], "its next use is the last batch of this window"
    assert (kept.rows.slots >= layout.end).all()


def test_every_iteration_draws_anew() -> None:
    oracle, layout = made(400, lookahead=1, ways=8), layout_of(400, 8, used=2, batch=1)
    sets = int(layout.sets[0])
    plans = plans_of(oracle, [[5 + number * sets] for number in range(40)])
    first = int(layout.firsts[0]) + 5 * 8
    assert {int(slot) for plan in plans for slot in plan.rows.slots} == set(range(first, first + 8)), "all ways"


def test_conflicts_that_exceed_the_victim_table_take_what_is_needed_last() -> None:
    oracle, layout = made(16, lookahead=6, ways=1), layout_of(16, 1, used=19, batch=13)
    sets = int(layout.sets[0])
    assert (sets, layout.end) == (13, 13), "so the victim table has three places"
    rivals = [3 + number * sets for number in range(1, 7)]
    plans = plans_of(oracle, [list(range(sets)), rivals, [0, 1, 3, 4], [5, 6, 7, 8], [9, 10], [11, 12]])
    assert plans[1].fetch.ids.tolist() == rivals
    assert plans[1].victims.ids.tolist() == [2, 11, 12], "2 is not needed again, and 11 and 12 are by the last batch"
    assert sorted(plans[1].fetch.slots.tolist()) == sorted([13, 14, 15, *plans[1].victims.slots.tolist()])
    assert plans[1].evict.ids.tolist() == rivals


CROWDED = [[0, 1], [2, 3], [0, 2], [1, 3], [0, 1]]


def trained(
    options: PolicyOptions, seed: int, batches: Sequence[Sequence[int]] = CROWDED, capacity: int = 4
) -> tuple[list[float], list[float]]:
    """Every row counts its uses, with write-backs as late as can be; what the store has, and what it should have."""
    num_rows = 1 + max(row for batch in batches for row in batch)
    oracle = Oracle([OracleTable("only")], [capacity], 2, "windowed", options)
    plans = oracle.plans(([np.array(batch)], None) for batch in batches)
    store = MemoryStore([RowLayout(Table("only"), (2,), optim.SGD(0.1), Constant(0.0))])
    cache = RowCache([2], [capacity], torch.device("cpu"))
    driver = Seeded(seed, eagerness=20.0, last=frozenset([WRITES_BACK]))
    pipeline = Pipeline(cache, store, driver)
    pipeline.begin((plan, None) for plan, _ in plans)
    counted = np.zeros(num_rows)
    while pipeline.wait():
        plan, _ = pipeline.take()
        ids, slots = plan.rows.of_table(0)
        cache.data[0].numpy()[slots] += 1
        counted[ids] += 1
        cache.mark_updated(0, slots)
        pipeline.updated(plan)
    pipeline.close()
    values = np.empty((num_rows, 2), np.float32)
    store.read(0, np.arange(num_rows), values)
    return values[:, 0].tolist(), counted.tolist()


def test_the_stale_mode_loses_updates_and_the_strict_one_does_not() -> None:
    lost = 0
    for seed in range(10):
        found, expected = trained(PolicyOptions(mode="strict"), seed)
        assert found == expected == [3, 3, 2, 2]
        found, expected = trained(STALE, seed)
        assert all(a <= b for a, b in zip(found, expected, strict=True))
        lost += found != expected
    assert lost > 0


def test_a_row_of_every_other_window_can_come_back_stale() -> None:
    """Section 5.3 of the paper: in windows w and w + 2, and evicted in w + 1 by a row of its set."""
    row, rival = 5, 18
    batches = [[row], [1], [2], [rival], [row], [3]]
    fetched: dict[str, int] = {}
    for mode in ("strict", "stale"):
        assert rival % layout_of(16, 1, used=2, batch=1).sets[0] == row
        plans = plans_of(made(16, lookahead=2, ways=1, mode=mode), batches)
        assert plans[3].victims.ids.tolist() == [row]
        assert plans[4].fetch.ids.tolist() == [row]
        fetched[mode] = int(plans[4].fetch.after[0])
    assert fetched == {"strict": 3, "stale": -1}, "the iteration that evicts it, or no wait"
    lost = 0
    for seed in range(10):
        found, expected = trained(PolicyOptions(mode="strict", ways=1), seed, batches, 16)
        assert found == expected
        found, expected = trained(PolicyOptions(mode="stale", ways=1), seed, batches, 16)
        assert found[:row] + found[row + 1 :] == expected[:row] + expected[row + 1 :]
        lost += int(expected[row] - found[row])
    assert lost > 0, "the first use of the row, by the second"


def test_the_stale_mode_is_marked_inexact() -> None:
    assert make_policy("windowed", PolicyOptions(mode="strict")).exact
    assert not make_policy("windowed", STALE).exact
    assert make_policy("lru", STALE).exact, "it is an option of windowed only"


def test_the_stale_mode_is_refused_with_the_checker_and_with_several_trainers() -> None:
    stale = {"policy": "windowed", "policy_options": {"mode": "stale"}}
    parse_config(stale)
    for more, message in (({"check": True}, "check stops there"), ({"trainers": 2}, "is for one trainer, not 2")):
        with pytest.raises(ConfigError, match=message):
            parse_config(stale | more)
    model = make_model()
    with pytest.raises(ConfigError, match="'windowed' with these options reads old rows"):
        prepare(
            model, dense_sgd(list(model.parameters())), make_batches(), OPTIMIZERS["sgd"](), policy="windowed",
            policy_options=STALE, check=True,
        )  # fmt: skip
