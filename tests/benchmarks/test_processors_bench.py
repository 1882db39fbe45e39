import tempfile

from benchmarks import load


def test_the_benchmark_of_data_processors_gives_rates_and_leaves_nothing_behind(tmp_path, monkeypatch):
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    results = load("processors").run(True)
    assert [(found["shuffled"], found["processes"]) for found in results] == [(True, 0), (True, 2)]
    assert all(found["samples_per_second"] > 0 < found["first_batch_seconds"] for found in results)
    assert list(tmp_path.iterdir()) == []
