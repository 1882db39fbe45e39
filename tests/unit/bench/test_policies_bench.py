"""The benchmark of policies, small: all of them train the same, and what moves depends on the policy."""

from __future__ import annotations

import numpy as np
import pytest

from bagpipe.bench import policies
from bagpipe.data import find_preset


@pytest.fixture(scope="module")
def results():
    return policies.BENCHMARK.run(True)


def test_every_policy_is_measured_and_trains_the_same(results):
    rows = [row for row in results if row.get("trace") == "criteo-kaggle-like"]
    assert [row["policy"] for row in rows] == list(policies.SYSTEMS)
    assert all(row["loss_difference_max"] == 0 for row in rows)
    assert all(row["iteration_ms"] > 0 for row in rows)
    fetched = {row["policy"]: row["fetched_rows"] for row in rows}
    assert all(fetched["ideal"] <= fetched[name] < fetched["nocache"] for name in policies.SYSTEMS if name != "nocache")
    assert all(row["hit_rate"] == pytest.approx(1 - row["fetched_rows"] / fetched["nocache"]) for row in rows)


def test_no_cache_is_measured_once_a_trace_and_ideal_beside_every_cache_size(results):
    assert {row["policy"] for row in results if row.get("cache_share", 0) is None} == {"nocache"}
    sizes = {(row["trace"], row["cache_share"]) for row in results if row.get("cache_share")}
    assert sizes == {(row["trace"], row["cache_share"]) for row in results if row.get("policy") == "ideal"}
    assert all(row["time_ratio_to_ideal"] == 1 for row in results if row.get("policy") == "ideal")


def test_claims_stand_beside_what_was_measured(results):
    claims = [row for row in results if "claim" in row]
    assert [row["paper"] for row in claims] == [2.8, 4.2, 1.0, 1.13, 7.2]
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
    assert [row["measured"] for row in policies.claims(times)] == [3.0, 4.0, 1.5, 1.1, 5.0]


@pytest.mark.parametrize(("locality", "top"), [("random", 0.02), ("low", 0.085), ("medium", 0.45), ("high", 0.88)])
def test_a_shrunk_trace_is_as_local_as_the_whole(locality, top):
    small = policies.shrunk(find_preset(f"scratchpipe-{locality}"), 1 / 20)
    rows = small.tables[0].rows
    assert rows == 500_000
    masses = small.features["T0"].popularity.masses(np.array([0, rows // 50, rows]))
    assert masses[0] == pytest.approx(top, abs=0.01), "of the accesses, by the top 2 % of the rows"
