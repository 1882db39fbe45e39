"""The benchmarks of whole runs, in small: they end, and say what they promise."""

import mmap
import os
from types import SimpleNamespace

import pytest

from benchmarks import MODULES, load
from benchmarks.start import Recorder
from benchmarks.terabyte import LIMIT_BYTES, memory_group, memory_of

MB = 1 << 20


def test_every_benchmark_can_be_loaded_and_bears_its_name():
    assert [load(name).name for name in MODULES] == list(MODULES)


def test_the_memory_of_a_process_has_the_pages_of_files_that_it_has_mapped(tmp_path):
    path = tmp_path / "rows"
    path.write_bytes(bytes(64 * MB))
    before = memory_of(os.getpid())
    with path.open("rb") as file, mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as pages:
        assert sum(pages[:: mmap.PAGESIZE]) == 0
        with_file = memory_of(os.getpid())
    files = {now["resident"] - now["anonymous"] for now in (before, with_file)}
    assert max(files) - min(files) >= 64 * MB
    assert memory_of(2**22 + 1) == {"anonymous": 0, "resident": 0}


def test_no_control_group_outlives_its_use():
    with memory_group(LIMIT_BYTES) as group:
        assert group is None or group.is_dir()
    assert group is None or not group.exists()


def test_compile_time_of_a_function_is_without_that_of_those_it_calls(monkeypatch):
    ticks = iter(range(9))
    monkeypatch.setattr("benchmarks.start.time.perf_counter", lambda: next(ticks))
    outer, inner = (SimpleNamespace(data={"dispatcher": SimpleNamespace(py_func=f)}) for f in (os.path.join, os.walk))
    recorder = Recorder()
    recorder.on_start(outer)
    recorder.on_start(inner)
    recorder.on_end(inner)
    recorder.on_end(outer)
    assert recorder.seconds == {"os.walk": 1, "posixpath.join": 2}


@pytest.mark.long
def test_training_is_measured_against_both_peers_on_equal_losses():
    results = load("train").run(True)
    assert [(row["model"], row["data"]) for row in results] == [
        ("wide_deep", "prepared"), ("wide_deep", "prepared"), ("wide_deep", "live"), ("wide_deep", "live"),
        ("wide_deep", "shards"), ("dlrm", "prepared"),
    ]  # fmt: skip
    for row in results:
        peer = "ideal" if "time_ratio_to_ideal" in row else "pytorch"
        assert row[f"time_ratio_to_{peer}"] > 0
        assert min(row[f"{name}_ms"] for name in ("training_forward", "evaluation", "evaluation_unprepared")) > 0
        assert row["loss_difference_max"] <= (0 if peer == "ideal" else 1e-4)


@pytest.mark.long
def test_terabyte_trains_within_its_limit_and_leaves_nothing(tmp_path, monkeypatch):
    monkeypatch.setenv("TMPDIR", str(tmp_path))
    monkeypatch.setattr("tempfile.tempdir", None)
    (row,) = load("terabyte").run(True)
    assert row["rows_touched"] * 64 <= row["disk_bytes"]
    assert 0 < row["peak_memory_bytes"] < row["limit_bytes"]
    assert list(tmp_path.glob("bagpipe*")) == []


@pytest.mark.long
def test_a_soak_goes_on_from_its_last_complete_checkpoint():
    (row,) = load("soak").run(True)
    assert row["resumed_from"] in (16, 24)  # the third may be on its way
    assert 0 < row["rows_before_kill"] <= row["rows"]


@pytest.mark.long
def test_a_second_start_compiles_nothing():
    warm, empty = load("start").run(True)
    assert warm["kernels_compiled"] == 0 < empty["kernels_compiled"]
