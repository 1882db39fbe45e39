"""The oracle's benchmark runs; its figures are not looked at."""

from __future__ import annotations

from bagpipe.bench.oracle import BENCHMARK


def test_the_benchmark_measures_every_variant() -> None:
    results = BENCHMARK.run(True)
    assert {result["measure"] for result in results} == {"threads", "lookahead", "tables", "batch_size", "num_features"}
    assert all(result["samples_per_second"] > 0 and result["unique_rows"] > 0 for result in results)
    arrays, mapped = (result for result in results if result["measure"] == "tables")
    assert arrays["fetched_rows"] == mapped["fetched_rows"]
