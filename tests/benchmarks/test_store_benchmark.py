"""The benchmark runs, and says what it measured."""

from __future__ import annotations

from benchmarks.store import BENCHMARK


def test_each_store_and_width_is_measured() -> None:
    results = BENCHMARK.run(True)
    assert [(result["store"], result["floats_per_row"]) for result in results] == [
        (store, width) for width in (48, 96) for store in ("memory", "mapped", "mapped")
    ]
    for result in results:
        assert all(result[f"{work}_rows_per_second"] > 0 for work in ("read", "written", "exchanged"))
