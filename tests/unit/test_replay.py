"""The replay against the oracle itself, against sets, and against published counts."""

from itertools import pairwise

import numpy as np
import pytest

from bagpipe.data import generated
from bagpipe.errors import ConfigError, DataError, ValueRangeError
from bagpipe.oracle.oracle import Oracle
from bagpipe.oracle.tables import OracleTable
from bagpipe.replay import AHEAD, advised, forecast, replay, saving

TABLES = [OracleTable("user", 60), OracleTable("ad", 30, ("shown", "clicked")), OracleTable("word")]
LOOKAHEADS = (1, 2, 3, 5, 8, 20, 60)


def some_batches(seed, count=40, size=12):
    """Skewed ids of four features; batches of different sizes, one of them empty."""
    random = np.random.default_rng(seed)
    batches = []
    for number in range(count):
        sizes = random.integers(0, size, 4) * (number != 7)
        ids = [(random.random(n) ** 2 * rows).astype(np.int64) for n, rows in zip(sizes, (60, 30, 30, 50), strict=True)]
        ids[3] *= 2**40 + 1
        batches.append(ids)
    return batches


def plans_of(batches, lookahead, capacity=10_000):
    oracle = Oracle(TABLES, [capacity], lookahead=lookahead)
    return [plan for plan, _ in oracle.plans((ids, None) for ids in batches)]


def rows_of(batch):
    """The (table, id) pairs of a batch."""
    owner = [0, 1, 1, 2]
    return {(table, row) for table, ids in zip(owner, batch, strict=True) for row in ids.tolist()}


def keys_of(rows):
    """The (table, id) pairs of a list of a plan."""
    return {(t, row) for t in range(len(TABLES)) for row in rows.of_table(t)[0].tolist()}


@pytest.mark.parametrize("seed", range(5))
def test_one_pass_finds_what_an_oracle_of_each_lookahead_fetches(seed):
    batches = some_batches(seed)
    for each in replay(batches, TABLES, LOOKAHEADS):
        plans = plans_of(batches, each.lookahead)
        assert each.fetched_rows * len(plans) == pytest.approx(sum(len(plan.fetch) for plan in plans))
        assert each.shared_rows * len(plans) == pytest.approx(sum(len(plan.rows) - len(plan.evict) for plan in plans))
        assert each.unique_rows * len(plans) == pytest.approx(sum(len(plan.rows) for plan in plans))
        assert each.hit_rate == sum(plan.hits for plan in plans) / sum(len(plan.rows) for plan in plans)
        by_table = sum(np.diff(plan.fetch.bounds) for plan in plans)
        assert [t.fetched_rows * len(plans) for t in each.tables] == pytest.approx(by_table.tolist())


@pytest.mark.parametrize("seed", range(5))
def test_the_cache_is_the_peak_of_rows_held_and_on_their_way(seed):
    batches = some_batches(seed)
    for each in replay(batches, TABLES, LOOKAHEADS):
        plans = plans_of(batches, each.lookahead)
        held, peak = set(), 0
        for number, plan in enumerate(plans):
            held |= keys_of(plan.fetch)
            coming = [keys_of(later.fetch) for later in plans[number + 1 : number + 1 + AHEAD]]
            peak = max(peak, len(held.union(*coming)))
            held -= keys_of(plan.evict)
        assert each.cache_rows == peak <= len(set().union(*map(rows_of, batches)))


@pytest.mark.parametrize("seed", range(5))
def test_an_oracle_with_that_cache_never_shortens_its_lookahead(seed):
    batches = some_batches(seed)
    for each in replay(batches, TABLES, LOOKAHEADS):
        ample, fitting = plans_of(batches, each.lookahead), plans_of(batches, each.lookahead, each.cache_rows)
        assert [plan.lookahead for plan in fitting] == [plan.lookahead for plan in ample]
        assert [plan.fetch.ids.tolist() for plan in fitting] == [plan.fetch.ids.tolist() for plan in ample]
        if each.lookahead > AHEAD:
            last = [int(plan.fetch.slot_after.max(initial=-1)) for plan in fitting]
            assert all(freed < max(0, plan.iteration - AHEAD) for plan, freed in zip(fitting, last, strict=True))


def test_critical_rows_are_those_that_the_next_batch_needs():
    batches = some_batches(3)
    sets = [rows_of(batch) for batch in batches]
    expected = sum(len(one & other) for one, other in pairwise(sets)) / len(batches)
    assert {each.critical_rows for each in replay(batches, TABLES, (1, 4))} == {expected}
    assert replay(batches, TABLES, (1,))[0].critical_rows == expected


def test_window_rows_are_the_union_of_a_window():
    batches = some_batches(4)
    sets = [rows_of(batch) for batch in batches]
    for each in replay(batches, TABLES, (1, 3, 10)):
        windows = [set().union(*sets[at : at + each.lookahead]) for at in range(len(sets) - each.lookahead + 1)]
        assert each.window_rows == pytest.approx(np.mean([len(window) for window in windows]))
    (longer,) = replay(batches, TABLES, (99,))
    assert longer.window_rows == len(set().union(*sets))


def test_steady_means_leave_out_the_iterations_without_a_whole_window_behind_them():
    batches = [[np.array([number % 6])] for number in range(60)]
    short, whole, beyond = replay(batches, [OracleTable("only", 6)], (6, 7, 100))
    assert (short.fetched_rows, short.steady_fetched_rows) == (1.0, 1.0)
    assert whole.steady_fetched_rows == 0.0
    assert 0 < whole.fetched_rows < 0.2
    assert beyond.steady_fetched_rows is None


def test_the_generated_criteo_data_has_the_papers_counts():
    one, five = forecast(generated("criteo-kaggle-like"), 16_384, (1, 5), iterations=8)
    assert one.unique_rows == pytest.approx(65_000, rel=0.01)
    assert five.critical_rows * 8 / 7 == pytest.approx(22_700, rel=0.03)
    assert five.window_rows * 192 == pytest.approx(39.6e6, rel=0.01)


def test_all_batches_are_counted_and_reported():
    seen = []
    (each,) = forecast(generated("tiny", 1000), 300, (2,), report=seen.append)
    assert seen == [1, 2, 3, 4]
    assert each.unique_rows > 0


@pytest.mark.parametrize("lookaheads", [(), (0,), (1, 65_535)])
def test_lookaheads_that_make_no_sense_are_refused(lookaheads):
    with pytest.raises(ConfigError, match="lookahead"):
        replay([], TABLES, lookaheads)


def test_empty_data_and_ids_out_of_range_are_refused():
    with pytest.raises(DataError, match="empty"):
        replay([], TABLES, (1,))
    with pytest.raises(ValueRangeError, match="id 60"):
        replay([[np.array([60]), *[np.array([0])] * 3]], TABLES, (1,))


def test_the_advice_is_the_longest_lookahead_that_pays_and_fits():
    batches = [[np.array([number % 12, 100 + number])] for number in range(400)]
    forecasts = replay(batches, [OracleTable("only", 1000)], (1, 4, 16, 64))
    assert saving(forecasts[1], forecasts[2]) > 0.25  # the cycle of twelve rows
    assert saving(forecasts[2], forecasts[3]) < 0.01
    assert advised(forecasts).lookahead == 16
    assert advised(forecasts, cache_rows=forecasts[2].cache_rows).lookahead == 16
    assert advised(forecasts, cache_rows=forecasts[2].cache_rows - 1).lookahead < 16
    assert advised(forecasts, cache_rows=1).cache_rows == min(each.cache_rows for each in forecasts)
