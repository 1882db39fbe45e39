import tempfile

import pytest

from benchmarks import load
from benchmarks import prepare as module


@pytest.mark.long
def test_the_benchmark_gives_a_rate_and_the_peak_of_memory_and_leaves_nothing_behind(tmp_path, monkeypatch):
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    monkeypatch.setattr(module, "SAMPLES_QUICK", 2000)
    monkeypatch.setattr(module, "RUNS", module.RUNS[1:2])
    (found,) = load("prepare").run(True)
    assert (found["file"], found["numbering"], found["samples"]) == ("gzip", "first", 2000)
    assert found["samples_per_second"] > 0
    assert 50 < found["peak_memory_mb"] < 2000
    assert list(tmp_path.iterdir()) == []


@pytest.mark.long
def test_a_million_lines_are_prepared_within_the_memory_that_was_given(tmp_path):
    module.write_criteo(tmp_path / "train.txt", 1_000_000)
    found = module._prepare(tmp_path / "train.txt", tmp_path / "data", ())
    assert found["samples"] == 1_000_000
    assert found["peak_memory_mb"] < 2000
