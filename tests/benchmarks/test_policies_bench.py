"""The benchmark of policies, small: all of them train the same, and what moves depends on the policy."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

from bagpipe.data import find_preset
from bagpipe.policies.lookahead import AUTO_MAX, RAMP
from benchmarks import idle, policies


@pytest.fixture(scope="module")
def results():
    with pytest.MonkeyPatch.context() as patch:  # no time is looked at, and a busy machine is never idle
        patch.setattr(idle, "SETTLE_S", 0.01)
        patch.setattr(idle, "IDLE_SHARE", 1.0)
        return policies.BENCHMARK.run(True)


def test_every_policy_is_measured_and_trains_the_same(results):
    small, large = policies.QUICK.criteo_caches
    all_rows = [row for row in results if row.get("trace") == "criteo-kaggle-like"]
    assert [row["policy"] for row in all_rows if row["cache_share"] != large] == list(policies.SYSTEMS)
    rows = [row for row in all_rows if row["cache_share"] in (small, None)]
    assert all(row["loss_difference_max"] == 0 for row in all_rows)
    assert all(row["iteration_ms"] > 0 for row in rows)
    fetched = {row["policy"]: row["fetched_rows"] for row in rows}
    assert all(fetched["ideal"] <= fetched[name] < fetched["nocache"] for name in policies.SYSTEMS if name != "nocache")
    assert all(row["hit_rate"] == pytest.approx(1 - row["fetched_rows"] / fetched["nocache"]) for row in rows)


def test_no_cache_is_measured_once_a_trace_and_ideal_beside_every_cache_size(results):
    assert {row["policy"] for row in results if row.get("cache_share", 0) is None} == {"nocache"}
    sizes = {(row["trace"], row["cache_share"]) for row in results if row.get("cache_share")}
    assert sizes == {(row["trace"], row["cache_share"]) for row in results if row.get("policy") == "ideal"}
    assert all(row["time_ratio_to_ideal"] == 1 for row in results if row.get("policy") == "ideal")


def test_a_cache_has_as_many_rows_as_its_share_says(results):
    caches = {
        (row["trace"], row["cache_share"], row["cache_rows"]) for row in results if row.get("policy") == "lookahead"
    }
    num_rows = {
        trace.name: sum(table.rows for table in trace.preset.tables) for trace in policies.traces(policies.QUICK)
    }
    assert caches == {(trace, share, round(share * num_rows[trace])) for trace, share, _ in caches}


@pytest.mark.parametrize("name", ["scratchpipe-high", "criteo-kaggle-like", "criteo, skew 0.9"])
def test_so_many_different_rows_occur_that_the_largest_cache_is_not_cut(name):
    (trace,) = (trace for trace in policies.traces(policies.FULL) if trace.name == name)
    work, num_rows = policies.prepare(trace, policies.FULL)
    assert max(trace.caches) * num_rows <= sum(table.rows for table in work.tables)


@pytest.mark.parametrize("name", ["lookahead", "belady"])
def test_no_plan_that_is_timed_sees_the_end_of_the_data(name):
    """It would let rows go that are not used again, although there is room for all of them."""
    scale = replace(policies.QUICK, warm_up=AUTO_MAX // RAMP)  # until windows have their full length
    (trace,) = (trace for trace in policies.traces(scale) if trace.name == "criteo-kaggle-like")
    work, num_rows = policies.prepare(trace, scale)
    plans = policies.timed_plans(work, scale, name, num_rows)
    assert [plan.iteration for plan in plans] == list(scale.timed)
    assert [plan.lookahead for plan in plans] == [AUTO_MAX] * len(plans)
    assert sum(len(plan.evict) + len(plan.victims) for plan in plans) == 0


def test_claims_stand_beside_what_was_measured(results):
    claims = [row for row in results if "claim" in row]
    assert [row["paper"] for row in claims] == [2.8, 4.2, 1.0, 1.13, 7.2]
    assert all(row["measured"] > 0 for row in claims), "the quick run measures all of them"
    times = [
        {
            "trace": trace,
            "policy": policy,
            "cache_share": share,
            "time_ratio_to_ideal": ratio,
            "speedup_over_static": speed,
        }
        for trace, policy, share, ratio, speed in (
            ("scratchpipe-low", "scratchpipe", 0.02, 10, 2.0),
            ("scratchpipe-high", "scratchpipe", 0.1, 10, 4.0),
            ("criteo-kaggle-like", "frequency", 0.015, 30, 1.0),
            ("criteo-kaggle-like", "frequency", 0.1, 20, 1.0),
            ("criteo, skew 0.9", "lookahead", 0.03, 10, 1.0),
            ("criteo, skew 0.01", "lookahead", 0.03, 11, 1.0),
            ("criteo, skew 0.9", policies.PUBLISHED_STATIC, 0.03, 10, 1.0),
            ("criteo, skew 0.01", policies.PUBLISHED_STATIC, 0.03, 50, 1.0),
        )
    ]
    assert [row["measured"] for row in policies.claims(times, policies.FULL)] == [3.0, 4.0, 1.5, 1.1, 5.0]


@pytest.mark.parametrize(("locality", "top"), [("random", 0.02), ("low", 0.085), ("medium", 0.45), ("high", 0.88)])
def test_a_shrunk_trace_is_as_local_as_the_whole(locality, top):
    small = policies.shrunk(find_preset(f"scratchpipe-{locality}"), 1 / 20)
    rows = small.tables[0].rows
    assert rows == 500_000
    masses = small.features["T0"].popularity.masses(np.array([0, rows // 50, rows]))
    assert masses[0] == pytest.approx(top, abs=0.01), "of the accesses, by the top 2 % of the rows"
