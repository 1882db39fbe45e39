"""The oracle on cases whose plans are known by hand, its errors, and what it holds."""

from __future__ import annotations

import ast
from collections.abc import Iterator, Sequence
from pathlib import Path

import numpy as np
import pytest

import bagpipe
from bagpipe.errors import BatchError, CapacityError, ConfigError, ValueRangeError
from bagpipe.oracle.oracle import Oracle
from bagpipe.oracle.plan import Plan
from bagpipe.oracle.row_list import RowList
from bagpipe.oracle.shard import is_direct
from bagpipe.oracle.tables import OracleTable
from bagpipe.policies.lookahead import AUTO_MAX, RAMP
from benchmarks.oracle import array_bytes

Batches = Sequence[Sequence[int]]


def plans_of(batches: Batches, capacity: int = 8, rows: int | None = 100, **options: object) -> list[Plan]:
    """Plans of one table with one feature."""
    oracle = Oracle([OracleTable("only", rows)], [capacity], **options)  # type: ignore[arg-type]
    return [plan for plan, _ in oracle.plans(([np.array(batch, np.int64)], None) for batch in batches)]


def ids(rows: RowList) -> list[int]:
    return rows.ids.tolist()


def test_figure_6_of_the_paper() -> None:
    """Lookahead 2, batches of 2: embedding 3 stays until its last use in batch 3, 6 until batch 4."""
    plans = plans_of([[3, 9], [3, 4], [3, 6], [6, 1]], lookahead=2)
    assert [ids(plan.fetch) for plan in plans] == [[3, 9], [4], [6], [1]]
    assert [ids(plan.evict) for plan in plans] == [[9], [4], [3], [6, 1]]
    assert [plan.hits for plan in plans] == [0, 1, 1, 1]
    assert [plan.lookahead for plan in plans] == [2, 2, 2, 1]


def test_rows_come_in_order_of_first_occurrence_and_inverse_points_to_them() -> None:
    (plan,) = plans_of([[7, 3, 7, 0, 3, 7]])
    assert ids(plan.rows) == [7, 3, 0]
    assert plan.inverse[0].tolist() == [0, 1, 0, 2, 1, 0]
    assert plan.inverse[0].dtype == np.int32
    assert plan.rows.slots.tolist() == [0, 1, 2]


def test_lookahead_1_keeps_nothing_and_names_the_write_backs() -> None:
    """The older write-back, of row 0, may be the one still under way: each fetch names its own."""
    plans = plans_of([[0], [1], [0, 1]], lookahead=1)
    assert [ids(plan.evict) for plan in plans] == [[0], [1], [0, 1]]
    assert plans[2].fetch.after.tolist() == [0, 1]


def test_a_row_used_again_at_the_edge_of_the_window_stays() -> None:
    batches = [[5], [1], [2], [5]]
    assert ids(plans_of(batches, lookahead=4)[3].fetch) == []
    beyond = plans_of(batches, lookahead=3)
    assert ids(beyond[3].fetch) == [5]
    assert ids(beyond[0].evict) == [5]
    assert beyond[3].fetch.after.tolist() == [0]


def test_a_row_evicted_and_fetched_in_the_next_iteration_waits_for_its_write_back() -> None:
    plans = plans_of([[4], [4]], lookahead=1)
    assert ids(plans[1].fetch) == [4]
    assert plans[1].fetch.after.tolist() == [0]
    assert plans[1].fetch.slots.tolist() != plans[0].evict.slots.tolist(), "a slot free for longer is taken first"


def test_free_slots_are_reused_oldest_first() -> None:
    plans = plans_of([[0], [1], [2], [3]], capacity=2, lookahead=1)
    assert [plan.fetch.slots.tolist() for plan in plans] == [[0], [1], [0], [1]]
    assert [plan.fetch.slot_after.tolist() for plan in plans] == [[-1], [-1], [0], [1]]


def test_the_window_fills_while_training_runs() -> None:
    num_read = 0

    def batches() -> Iterator[tuple[list[np.ndarray], None]]:
        nonlocal num_read
        for number in range(100):
            num_read += 1
            yield [np.array([number])], None

    oracle = Oracle([OracleTable("only", 100)], [8], lookahead=50)
    read_at = [num_read for _ in oracle.plans(batches())]
    assert read_at[:3] == [RAMP, 2 * RAMP + 1, 3 * RAMP + 2]
    assert max(read - x for x, read in enumerate(read_at)) == 50
    assert len(read_at) == 100


@pytest.mark.parametrize("policy", ["lookahead", "lru", "nocache", "ideal"])
def test_no_batches_give_no_plans_and_empty_ones_give_empty_plans(policy: str) -> None:
    assert plans_of([], policy=policy) == []
    plans = plans_of([[], [], [1], []], policy=policy)
    assert [len(plan.rows) for plan in plans] == [0, 0, 1, 0]
    assert sum(len(plan.evict) for plan in plans) == 1


def test_the_payload_travels_with_its_plan() -> None:
    oracle = Oracle([OracleTable("only", 9)], [4], lookahead=2)
    numbered = [([np.array([number])], f"batch {number}") for number in range(9)]
    assert [(plan.iteration, payload) for plan, payload in oracle.plans(numbered)] == [
        (number, f"batch {number}") for number in range(9)
    ]


def test_a_short_cache_shortens_the_lookahead_of_that_iteration_only() -> None:
    """Row 0 can't stay while batch 1 takes all three slots; afterwards the window is whole again."""
    plans = plans_of([[0], [1, 2, 3], [0], [4], [0]], capacity=3, lookahead=5, ahead=0)
    assert [ids(plan.evict) for plan in plans] == [[0], [1, 2, 3], [], [4], [0]]
    assert [plan.lookahead for plan in plans] == [2, 4, 3, 2, 1]
    assert ids(plans[2].fetch) == [0]


def test_the_longest_stays_are_given_up_first() -> None:
    plans = plans_of([[0], [1], [2], [1], [0]], capacity=2, lookahead=5, ahead=0)
    assert [ids(plan.fetch) for plan in plans] == [[0], [1], [2], [], [0]]


def test_slots_are_free_early_enough_to_prefetch() -> None:
    """With `ahead` 2 a fetch never waits for the evictions of the two iterations before its own."""
    random = np.random.default_rng(1)
    batches = [random.integers(0, 60, 6).tolist() for _ in range(300)]
    for ahead in (0, 1, 2, 3):
        plans = plans_of(batches, capacity=26, lookahead=20, ahead=ahead)
        waits = [plan.iteration - plan.fetch.slot_after.max(initial=-1) for plan in plans[20:]]
        assert min(waits) == ahead + 1
        assert min(plan.lookahead for plan in plans[20:-20]) < 20, "the cache was meant to be short"


def test_auto_grows_to_its_bound_where_everything_fits() -> None:
    plans = plans_of([[number % RAMP] for number in range(400)], lookahead="auto")
    assert max(plan.lookahead for plan in plans) == AUTO_MAX
    assert sum(len(plan.fetch) for plan in plans) == RAMP, "a row that the first window does not show again stays idle"


def test_auto_settles_where_the_cache_is_full_and_follows_the_data() -> None:
    random = np.random.default_rng(2)
    wide = [random.integers(0, 1000, 10).tolist() for _ in range(600)]
    narrow = [random.integers(0, 100, 10).tolist() for _ in range(600)]
    plans = plans_of(wide + narrow, capacity=150, rows=1000, lookahead="auto")
    windows = [plan.lookahead for plan in plans]
    assert 10 < np.mean(windows[300:600]) < 80
    assert np.mean(windows[900:1000]) > 150
    assert max(len(plan.victims) for plan in plans) == 0


def test_a_batch_larger_than_the_cache_is_an_error_after_all_plans_before_it() -> None:
    oracle = Oracle([OracleTable("user", 100), OracleTable("ad", 100)], [3], lookahead=9)
    batches = [[[1], [1]], [[1], [2]], [[1, 2, 3], [4]], [[1], [1]]]
    plans = oracle.plans(([np.array(ids) for ids in batch], None) for batch in batches)
    seen = [next(plans)[0], next(plans)[0]]
    with pytest.raises(
        CapacityError,
        match=r"iteration 2 needs 4 rows of tables 'user', 'ad'.* have 3.*`cache` .* 4 rows",
    ):
        next(plans)
    assert sorted(ids(seen[0].evict) + ids(seen[1].evict)) == [1, 1, 2], "everything is written back before the error"


@pytest.mark.parametrize("bad", [-1, 900, 2**63 - 1, -(2**63)])
def test_an_id_out_of_range_is_an_error_after_all_plans_before_it(bad: int) -> None:
    oracle = Oracle([OracleTable("ad", 900, ("clicked", "shown"))], [8], lookahead=9)
    batches = [([np.array([1]), np.array([2])], None), ([np.array([1]), np.array([2, bad])], None)]
    plans = oracle.plans(batches)
    plan, _ = next(plans)
    assert sorted(ids(plan.evict)) == [1, 2]
    with pytest.raises(ValueRangeError, match=rf"batch 1: feature 'shown' has id {bad}, .*'ad' \(900 rows\): raise"):
        next(plans)


def test_a_bad_batch_leaves_no_trace() -> None:
    oracle = Oracle([OracleTable("a", 9), OracleTable("b", 9)], [8], lookahead=4)
    oracle.read([np.array([1]), np.array([1])])
    with pytest.raises(ValueRangeError):
        oracle.read([np.array([1, 2]), np.array([9])])
    oracle.read([np.array([2]), np.array([1])])
    first, second = oracle.emit(), oracle.emit()
    assert ids(first.evict) == [1]
    assert ids(second.fetch) == [2]


@pytest.mark.parametrize("rows", [9, None])
def test_a_batch_that_does_not_fit_changes_nothing(rows: int | None) -> None:
    tables = [OracleTable("only", rows)]
    oracle, spared = Oracle(tables, [2], lookahead=5), Oracle(tables, [2], lookahead=5)
    for ids in ([1], [1, 2], [2], [1]):
        for each in (oracle, spared):
            each.read([np.array(ids)])
        with pytest.raises(CapacityError):
            oracle.read([np.array([1, 2, 3])])
    for _ in range(4):
        ours, theirs = oracle.emit(), spared.emit()
        assert ours.evict.ids.tolist() == theirs.evict.ids.tolist()
        assert ours.fetch.ids.tolist() == theirs.fetch.ids.tolist()


def test_an_error_of_the_source_comes_after_all_plans_before_it() -> None:
    def failing() -> Iterator[tuple[list[np.ndarray], None]]:
        yield [np.array([1])], None
        raise OSError("the disk is gone")

    plans = Oracle([OracleTable("only", 9)], [8]).plans(failing())
    assert ids(next(plans)[0].evict) == [1]
    with pytest.raises(OSError, match="disk"):
        next(plans)


def test_ids_that_are_not_integers_are_refused() -> None:
    oracle = Oracle([OracleTable("only", 9)], [8])
    with pytest.raises(BatchError, match="'only' are float32"):
        oracle.read([np.array([1.0], np.float32)])
    with pytest.raises(BatchError, match="2 features: give one array for each of 1"):
        oracle.read([np.array([1]), np.array([1])])


def test_ids_of_any_shape_and_integer_type_are_taken() -> None:
    oracle = Oracle([OracleTable("only", None, ("a", "b", "c"))], [8])
    oracle.read([np.array([[1, 2], [2, 3]], np.int32), np.array([], np.float64), np.arange(6)[::2]])
    plan = oracle.emit()
    assert ids(plan.rows) == [1, 2, 3, 0, 4]
    assert [part.tolist() for part in plan.inverse] == [[0, 1, 1, 2], [], [3, 1, 4]]


def test_a_table_without_a_size_takes_any_64_bit_id() -> None:
    extreme = [2**63 - 1, -(2**63), -1, 0, 2**53 + 1, 2**53]
    (plan,) = plans_of([extreme], rows=None)
    assert ids(plan.rows) == ids(plan.fetch) == ids(plan.evict) == extreme


def test_groups_have_slots_of_their_own() -> None:
    tables = [OracleTable("a", 9, group=0), OracleTable("b", 9, group=1), OracleTable("c", 9, group=0)]
    oracle = Oracle(tables, [2, 1], lookahead=1)
    oracle.read([np.array([5]), np.array([5]), np.array([5])])
    plan = oracle.emit()
    assert plan.rows.slots.tolist() == [0, 0, 1]
    assert plan.rows.bounds.tolist() == [0, 1, 2, 3]


@pytest.mark.parametrize("rows", [1000, None])
def test_what_the_oracle_holds_is_bounded(rows: int | None) -> None:
    oracle = Oracle([OracleTable("only", rows)], [400], lookahead=8)
    random = np.random.default_rng(0)
    held = []
    for plan, _ in oracle.plans(([random.integers(0, 1000, 50)], None) for _ in range(300)):
        assert array_bytes(plan) > 0
        held.append(array_bytes(oracle))
    assert max(held) == max(held[:100])


def test_a_plan_without_a_batch_is_a_mistake_of_the_caller() -> None:
    with pytest.raises(AssertionError, match="no batch was read for iteration 0"):
        Oracle([OracleTable("only", 9)], [8]).emit()


@pytest.mark.parametrize("package", ["oracle", "policies"])
def test_the_oracle_is_pure(package: str) -> None:
    """No tensors, files, sockets or clocks: its plans depend on data order and settings only."""
    impure = {
        "torch",
        "socket",
        "os",
        "io",
        "pathlib",
        "tempfile",
        "time",
        "random",
        "subprocess",
        "pickle",
        "datetime",
    }
    for path in (Path(bagpipe.__file__).parent / package).glob("*.py"):
        for node in ast.walk(ast.parse(path.read_text())):
            names = [alias.name for alias in node.names] if isinstance(node, ast.Import) else []
            names += [node.module or ""] if isinstance(node, ast.ImportFrom) else []
            assert not impure & {name.partition(".")[0] for name in names}, path


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"tables": []}, "no tables"),
        ({"capacity": [0]}, "capacity of group 0 is 0"),
        ({"capacity": [1, 1]}, "2 slot spaces"),
        ({"lookahead": 0}, "lookahead is 0"),
        ({"lookahead": 70_000}, "lookahead is 70000"),
        ({"policy": "magic"}, "no policy 'magic': choose one of lookahead, belady, "),
        ({"threads": 0}, "threads is 0"),
        ({"ahead": -1}, "ahead is -1"),
    ],
)
def test_settings_out_of_range_are_refused_by_name(options: dict[str, object], message: str) -> None:
    settings: dict[str, object] = {"tables": [OracleTable("only", 9)], "capacity": [4], **options}
    with pytest.raises(ConfigError, match=message):
        Oracle(**settings)  # type: ignore[arg-type]


def test_tables_of_impossible_shape_are_refused() -> None:
    with pytest.raises(ConfigError, match="'a' has 0 rows"):
        OracleTable("a", 0)
    with pytest.raises(ConfigError, match="'a' is in group -1"):
        OracleTable("a", 1, group=-1)


def test_the_smallest_tables_get_arrays_until_the_memory_is_spent() -> None:
    tables = [OracleTable("a", 100), OracleTable("b", None), OracleTable("c", 10), OracleTable("d", 50)]
    assert is_direct(tables, rows_max=60, bytes_max=10_000) == [False, False, True, True]
    assert is_direct(tables, rows_max=1000, bytes_max=12 * 60) == [False, False, True, True]
    assert is_direct(tables, rows_max=1000, bytes_max=12 * 59) == [False, False, True, False]
