"""Resume with data processors: their number changes nothing, and a stopped run leaves none of them."""

from __future__ import annotations

from pathlib import Path

import pytest

from bagpipe.data import Loader
from bagpipe.data.processors import pool
from harness.kept import BATCH, DATA, EPOCHS, Run, assert_same_end, every, undisturbed
from harness.plain import nothing_left  # noqa: F401

pytestmark = pytest.mark.usefixtures("nothing_left")


@pytest.fixture
def pids(monkeypatch):
    """The processes started so far."""
    found = []
    start = pool.Processor._start

    def note(processor, group):
        process, channel = start(processor, group)
        found.append(process.pid)
        return process, channel

    monkeypatch.setattr(pool.Processor, "_start", note)
    return found


def test_a_run_read_by_processes_goes_on_after_any_stop_with_the_same_bits(pids, monkeypatch, tmp_path):
    monkeypatch.setattr(pool, "group_size", lambda _: 1)  # so that there is something to share

    def read_by(processes):
        return {"make_loader": lambda: Loader(DATA, BATCH, epochs=EPOCHS, seed=1, processes=processes)}

    expected = undisturbed(**read_by(0))
    Run(checkpoint=every(tmp_path), **read_by(2)).train(5).end()
    assert len(pids) == 2
    for processes in (0, 2):
        resumed = Run(resume=tmp_path / "00000004", **read_by(processes))
        assert_same_end(expected, resumed.train().end())
    assert len(pids) == 4
    assert not any(Path(f"/proc/{pid}").exists() for pid in pids)
