"""The benchmark runs, and says what it measured."""

from __future__ import annotations

from benchmarks.store import BENCHMARK


def test_each_store_and_width_is_measured_and_its_peers_or_why_not() -> None:
    results = BENCHMARK.run(True)
    stores, marks, peers = results[:6], results[6], results[7:]
    assert [(result["store"], result["floats_per_row"]) for result in stores] == [
        (store, width) for width in (48, 96) for store in ("memory", "mapped", "mapped")
    ]
    for result in stores:
        assert all(result[f"{work}_rows_per_second"] > 0 for work in ("read", "written", "exchanged"))
    assert marks["store"] == "marks"
    assert all(marks[f"{work}_time_ratio_to_plain"] > 0 for work in ("read", "written"))
    assert [result["store"] for result in peers] == ["rocksdb", "lmdb", "memmap", "fio"]
    for result in peers:
        assert "installed" in result.get("skipped", "") or result["read_cold_rows_per_second"] > 0
    assert "skipped" not in peers[2]
