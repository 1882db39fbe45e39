"""`bagpipe verify` with data processors: the reference and the system are read to by processes, and agree."""

from __future__ import annotations

from bagpipe.config import load_config
from bagpipe.data.processors import pool
from bagpipe.job import prepare
from bagpipe.training import train, verify

SETTINGS = ["data.preset=tiny", "data.samples=3000", "data.shuffle=true", "batch_size=512", "epochs=2", "model.dim=4"]


def test_a_run_read_by_processes_has_the_bits_of_one_read_by_threads(tmp_path, monkeypatch):
    started = []
    start = pool.Processor._start

    def note(processor, group):
        found = start(processor, group)
        started.append(found[0])
        return found

    monkeypatch.setattr(pool.Processor, "_start", note)
    quiet = [*SETTINGS, "model.name=wide_deep", "cache=20000", "threads=1"]
    one = train(prepare(load_config(None, quiet), tmp_path / "threads"), lambda *_: None)
    assert started == []
    found = verify(prepare(load_config(None, [*quiet, "data.processes=1"]), tmp_path / "processes"), lambda *_: None)
    assert found["identical"]
    assert found["parameters_sha256"] == one["parameters_sha256"]
    assert len(started) == 2  # for the reference and for the system
    assert all(process.returncode is not None for process in started)
