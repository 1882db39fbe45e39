"""How long windows are: as the lookahead says, as a list says, or by times; and the list of a run repeats its plans."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import pytest
import torch

from bagpipe import optim
from bagpipe.cache import RowCache
from bagpipe.cluster.request import Request
from bagpipe.config import parse_config
from bagpipe.errors import ConfigError
from bagpipe.initial import Constant
from bagpipe.layout import RowLayout
from bagpipe.oracle.oracle import Oracle
from bagpipe.oracle.plan import Plan
from bagpipe.oracle.tables import OracleTable
from bagpipe.policies import PolicyOptions
from bagpipe.policies.windowed import WindowedPolicy
from bagpipe.policies.windows import WINDOW, WINDOW_MAX, Windows
from bagpipe.store import MemoryStore
from bagpipe.trainer.pipeline import READERS, Counters, Pipeline
from bagpipe.trainer.stages import Threads
from bagpipe.types import Table
from harness.flat import prepare
from harness.wire import until
from harness.world import (
    OPTIMIZERS,
    TABLES,
    assert_identical,
    dense_sgd,
    make_batches,
    make_model,
    train_prepared,
    train_reference,
)


@dataclass(slots=True)
class Timed(Counters):
    """Whose time passes when it trains."""

    now: float = 0.0

    def seconds(self) -> float:
        return self.now

    def train(self, iterations: int, seconds: float, stalled: float = 0.0) -> None:
        self.now += iterations * (seconds + stalled)
        self.iterations += iterations
        self.stall_s += iterations * stalled


def measured(lookahead: int = WINDOW) -> tuple[Windows, Timed]:
    windows, times = Windows("measured", lookahead), Timed()
    windows.times = times
    windows.advance(lookahead, crowded=False)
    return windows, times


def test_a_list_says_from_which_iteration_on_a_window_has_which_length() -> None:
    windows = Windows("4,10:2,20:7", 99)
    assert (windows.length, windows.most) == (4, 7)
    lengths = []
    begin = 4
    while begin < 40:
        windows.advance(begin, crowded=False)
        lengths.append(windows.length)
        begin += windows.length
    assert lengths == [4, 4, 2, 2, 2, 2, 7, 7, 7]


@pytest.mark.parametrize(
    "text", ["x", "4,5", "4,0:3", "0", "4,9:0", "4,9:3,9:4", "4:3:2", "-4", "4,70000:65535", " ", 5]
)
def test_what_is_no_list_is_refused(text: str) -> None:
    with pytest.raises(ConfigError, match="policy option windows is"):
        PolicyOptions(windows=text)


def test_the_first_choice_goes_by_the_ratio_of_prefetching_and_training() -> None:
    windows, times = measured()
    times.train(WINDOW, seconds=0.010)
    times.plan_s, times.fetch_s = WINDOW * 0.020, WINDOW * 0.015
    windows.advance(32, crowded=False)
    assert windows.length == int(WINDOW * 3.5)
    assert times.windows == "16,32:56"


def test_nothing_is_chosen_before_a_window_was_trained_nor_where_prefetching_is_faster() -> None:
    windows, times = measured()
    times.train(WINDOW - 1, seconds=0.010)
    times.plan_s = 9.0
    windows.advance(32, crowded=False)
    assert windows.length == WINDOW
    times.plan_s = 0.01
    times.train(1, seconds=0.010)
    windows.advance(48, crowded=False)
    assert windows.length == WINDOW
    assert times.windows == "16"


def test_windows_grow_while_training_stalls_unless_they_are_crowded() -> None:
    windows, times = measured(20)
    found = []
    for number, (stalled, crowded) in enumerate([(0.5, 0), (0.0, 0), (0.001, 0), (0.1, 0), (0.1, 1), (0.1, 0)] * 3):
        times.train(windows.length, seconds=0.1, stalled=stalled)
        windows.advance(1000 * (number + 1), crowded=bool(crowded))
        found.append(windows.length)
    assert found[:6] == [20, 20, 20, 30, 30, 45], "the first one is a choice by times"
    assert found[-1] == WINDOW_MAX


def plans_of(oracle: Oracle, batches: list[np.ndarray]) -> list[Plan]:
    return [plan for plan, _ in oracle.plans(([batch], None) for batch in batches)]


def test_what_was_measured_can_be_repeated_plan_by_plan() -> None:
    random, times = np.random.default_rng(1), Timed()
    batches = [random.integers(0, 900, 40) for _ in range(150)]

    def made(windows: str) -> Oracle:
        options = PolicyOptions(windows=windows, preload=True)
        return Oracle([OracleTable("only", 900)], [1500], 6, "windowed", options)

    oracle = made("measured")
    assert isinstance(oracle.policy, WindowedPolicy)
    oracle.measure(times)
    first = []
    for plan, _ in oracle.plans(([batch], None) for batch in batches):
        times.train(1, 0.01, stalled=0.01 if plan.iteration > 30 else 0.0)
        first.append(plan)
    assert times.windows.startswith("6,")
    assert len(times.windows.split(",")) > 3
    again = plans_of(made(times.windows), batches)
    for one, other in zip(first, again, strict=True):
        for name in ("rows", "fetch", "evict", "victims"):
            ours, theirs = getattr(one, name), getattr(other, name)
            np.testing.assert_array_equal(ours.ids, theirs.ids)
            np.testing.assert_array_equal(ours.slots, theirs.slots)
        assert one.lookahead == other.lookahead


def test_a_window_is_preloaded_with_its_first_plan() -> None:
    batches = [np.arange(10) + 5 * number for number in range(12)]
    for preload in (False, True):
        oracle = Oracle([OracleTable("only", 200)], [400], 4, "windowed", PolicyOptions(preload=preload))
        fetched = [len(plan.fetch) for plan in plans_of(oracle, batches)]
        assert sum(fetched) == 65
        if preload:
            assert [number for number, rows in enumerate(fetched) if rows > 5] == [0, 4, 8]
            assert fetched[0] >= 20, "collisions apart"


def test_rows_that_collide_are_not_preloaded_and_come_with_their_batch() -> None:
    oracle = Oracle([OracleTable("only", 10_000)], [64], 4, "windowed", PolicyOptions(preload=True, ways=1))
    batches = [np.array([number, 5000]) for number in range(0, 9000, 300)]
    fetched: set[int] = set()
    for plan, batch in zip(plans_of(oracle, batches), batches, strict=True):
        fetched |= set(plan.fetch.ids.tolist())
        assert set(batch.tolist()) <= fetched


def test_a_measured_run_tells_its_windows_and_has_the_bits_of_the_reference() -> None:
    batches = make_batches(40)
    optimizer = OPTIMIZERS["sgd"]
    expected, _ = train_reference(batches, optimizer())
    found, _ = train_prepared(
        batches, optimizer(), cache=200, policy="windowed", lookahead=3, policy_options={"windows": "measured"}
    )
    assert_identical(expected, found)


def test_measuring_is_refused_where_it_could_not_be_repeated() -> None:
    with pytest.raises(ConfigError, match="'measured' and mode is 'stale'"):
        PolicyOptions(windows="measured", mode="stale")
    with pytest.raises(ConfigError, match="'measured' and oracles is 2"):
        PolicyOptions(windows="measured", oracles=2)
    PolicyOptions(windows="4,8:2", mode="stale")
    config = parse_config({"policy": "windowed", "policy_options": {"windows": "measured"}})
    with pytest.raises(ConfigError, match="measure with bagpipe train"):
        Request(config)
    Request(parse_config({"policy": "windowed", "policy_options": {"windows": "16,48:24"}}))


def test_rows_of_the_stale_mode_are_read_a_window_ahead() -> None:
    stale = PolicyOptions(mode="stale")
    assert WindowedPolicy.lead("auto", stale) == WINDOW > READERS
    assert WindowedPolicy.lead(40, stale) == 40
    assert WindowedPolicy.lead(40, PolicyOptions()) == 0
    assert WindowedPolicy.lead(40, PolicyOptions(mode="stale", windows="8,40:12")) == 12


@pytest.mark.parametrize("ahead", [READERS, 6])
def test_rows_of_so_many_plans_are_read_before_one_is_trained(ahead: int) -> None:
    oracle = Oracle([OracleTable("only")], [200], 4, "windowed", PolicyOptions(mode="stale"))
    plans = ((plan, None) for plan, _ in oracle.plans(([np.array([number])], None) for number in range(20)))
    store = MemoryStore([RowLayout(Table("only"), (2,), optim.SGD(0.1), Constant(0.0))])
    pipeline = Pipeline(RowCache([2], [200], torch.device("cpu")), store, Threads(60), 1, ahead=ahead)
    pipeline.begin(plans)
    assert pipeline.wait()
    # The first is ready; the second is in its slots and waits for its turn.
    until(lambda: pipeline._num_taken == 2 + ahead, 60)
    while pipeline.wait():
        pipeline.updated(pipeline.take()[0])
    pipeline.close()


def test_the_stale_mode_of_a_script_reads_a_window_ahead() -> None:
    for mode, ahead in (("stale", WINDOW), ("strict", READERS)):
        options = {"mode": mode}
        model = make_model()
        _, _, loader = prepare(
            model, dense_sgd(list(model.parameters())), make_batches(), OPTIMIZERS["sgd"](), features=TABLES,
            policy="windowed", policy_options=options, cache=200,
        )  # fmt: skip
        with loader:
            assert loader.loop._pipeline._ahead == ahead
