import tempfile

import pytest

from benchmarks import load


@pytest.fixture(scope="module")
def results():
    return load("generator").run(True)


def test_the_generator_benchmark_gives_rates(results):
    assert [found["workers"] for found in results if found["measure"] == "rate"] == [1, 2]


def test_the_generator_benchmark_counts_what_the_laws_promise(results):
    counts = [found for found in results if "expected" in found]
    names = ["unique_rows", "unique_rows", "top_0.1_percent_share", "rows_needed_by_next_batch"]
    assert [found["measure"] for found in counts] == names
    for found in counts:
        assert found["value"] == pytest.approx(found["expected"], rel=0.03)


def test_the_generator_benchmark_shows_the_best_auc_and_the_drift_of_avazu(results):
    values = {(found["measure"], found.get("day")): found.get("value") for found in results}
    assert values["best_auc", None] == pytest.approx(0.81, abs=0.01)
    assert values["avazu_top_0.05_percent_share", 1] == pytest.approx(0.91, abs=0.02)
    assert values["avazu_top_0.05_percent_share", 9] == pytest.approx(0.82, abs=0.03)


def test_the_reader_benchmark_gives_rates_and_leaves_nothing_behind(tmp_path, monkeypatch):
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    results = load("reader").run(True)
    reads = [(found["shuffled"], found["workers"]) for found in results if found["measure"] == "read"]
    assert reads == [(False, 1), (False, 2), (True, 1), (True, 2)]
    assert all(found["samples_per_second"] > 0 for found in results)
    assert list(tmp_path.iterdir()) == []
