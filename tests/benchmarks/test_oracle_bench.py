"""The oracle's benchmark runs; its figures are not looked at."""

from __future__ import annotations

from benchmarks.oracle import BENCHMARK


def test_the_benchmark_measures_every_variant() -> None:
    results = BENCHMARK.run(True)
    measures = {"threads", "trainers", "lookahead", "tables", "oracles", "batch_size", "num_features"}
    assert {result["measure"] for result in results} == measures
    assert all(result["samples_per_second"] > 0 and result["unique_rows"] > 0 for result in results)
    one, eight = (result for result in results if result["measure"] == "trainers")
    assert (one["unique_rows"], one["fetched_rows"]) == (eight["unique_rows"], eight["fetched_rows"])
    assert "parts_time_ratio_to_first" not in one
    assert eight["parts_time_ratio_to_first"] > 0
    arrays, mapped = (result for result in results if result["measure"] == "tables")
    assert arrays["fetched_rows"] == mapped["fetched_rows"]
