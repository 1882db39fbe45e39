"""Resume with data processors: their number changes nothing, and a stopped run leaves none of them."""

from __future__ import annotations

from pathlib import Path

import pytest

from bagpipe.data import Loader, generated
from bagpipe.data.processors import pool
from harness.plain import nothing_left  # noqa: F401
from harness.resumed import BATCH, EPOCHS, SAMPLES, Session, assert_same_end

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


def test_a_run_read_by_processes_goes_on_after_any_stop_with_the_same_bits(pids, monkeypatch):
    monkeypatch.setattr(pool, "group_size", lambda _: 1)  # so that there is something to share
    data = generated("tiny", SAMPLES)

    def loader(processes):
        return Loader(data, BATCH, epochs=EPOCHS, seed=1, processes=processes)

    undisturbed = Session(loader(0))
    undisturbed.train()
    expected = undisturbed.end()
    first = Session(loader(2))
    saved = first.train(4)[-1]
    first.end()
    assert len(pids) == 2
    for processes in (0, 2):
        resumed = Session(loader(processes), saved)
        assert len(resumed.train()) == 5
        assert_same_end(expected, resumed.end())
    assert len(pids) == 4
    assert not any(Path(f"/proc/{pid}").exists() for pid in pids)
