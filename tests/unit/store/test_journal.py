"""The log of writes: who may open it, what it refuses, and rows of many threads and tables that come back."""

from __future__ import annotations

import signal
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import numpy as np
import pytest

from bagpipe.checkpoint import disk as disk_module
from bagpipe.errors import StoreError
from bagpipe.server.storage import Width
from bagpipe.store.journal import Journal
from bagpipe.store.journal_record import START
from bagpipe.store.memory import MemoryStore
from bagpipe.store.recorded import Recorded
from harness.disk import SimulatedDisk
from harness.journaled import batch, opened, state


def test_marks_whose_old_values_took_too_much_memory_are_returned_to_by_the_journal() -> None:
    disk = SimulatedDisk()
    states = {}
    with opened(disk, history_bytes_max=100) as store:
        for done in range(4):
            for parts in batch(done):
                store.write_many(parts)
            store.mark(done)
            states[done] = state(store)
        store.write_many(batch(4)[0])
        assert store._history.marks() == []
        assert store.marks() == [0, 1, 2, 3]
        for done in (3, 1, 0):
            store.return_to(done)
            assert state(store) == states[done]
            assert store.marks() == list(range(done + 1))
        store.write_many(batch(1)[0])
        store.forget(1)
        assert store.marks() == []
        store.mark(5)
        assert store.marks() == [5]


def test_a_journal_is_open_once_and_outlives_the_kill_of_its_process(tmp_path: Path) -> None:
    directory = tmp_path / "a" / "b"
    journal = Journal(directory)
    with pytest.raises(StoreError, match=r"a/b is in use: end the process"):
        Journal(directory)
    script = f"""
import os, signal
import numpy as np
from bagpipe.errors import StoreError
from bagpipe.server.storage import Width
from bagpipe.store.journal import Journal
from bagpipe.store.memory import MemoryStore
from bagpipe.store.recorded import Recorded
try:
    Journal({str(directory)!r})
except StoreError as error:
    print(error, flush=True)
input()
store = Recorded(MemoryStore([Width(3)]), Journal({str(directory)!r}))
store.write(0, np.arange(5), np.ones((5, 3), np.float32))
store.mark(1)
store.write(0, np.arange(9), np.zeros((9, 3), np.float32))
os.kill(os.getpid(), signal.SIGKILL)
"""
    with subprocess.Popen(
        [sys.executable, "-c", script], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    ) as process:
        assert process.stdout is not None
        assert "is in use: end the process" in process.stdout.readline()
        journal.close()
        journal.close()
        process.communicate("go\n", timeout=120)
    assert process.returncode == -signal.SIGKILL
    with pytest.raises(StoreError, match="is closed: open it again"):
        journal.mark(0)
    with Recorded(MemoryStore([Width(3)]), Journal(directory)) as store:
        assert store.marks() == [1]
        store.return_to(1)
        assert [rows.tolist() for _, rows in store.iterate(0)] == [[[1, 1, 1]] * 5]


def test_a_journal_is_waited_for_until_the_process_before_is_gone(tmp_path: Path, monkeypatch) -> None:
    before, pauses = Journal(tmp_path), []

    def pause(seconds: float) -> None:
        pauses.append(seconds)
        if len(pauses) == 3:
            before.close()

    monkeypatch.setattr("bagpipe.store.journal.time.sleep", pause)
    Journal(tmp_path, wait_s=60.0).close()
    assert len(pauses) == 3


def test_two_threads_write_at_once_and_everything_comes_back(tmp_path: Path) -> None:
    widths, num_ids = [16, 1], 4000

    def write(store: Recorded, half: int, done: int) -> None:
        generator = np.random.default_rng(10 * done + half)
        for _ in range(10):
            ids = generator.permutation(num_ids // 2)[:300] * 2 + half
            store.write_many(
                [
                    (table, ids, generator.standard_normal((300, width), np.float32))
                    for table, width in enumerate(widths)
                ]
            )

    with Recorded(MemoryStore(list(map(Width, widths))), Journal(tmp_path)) as store:
        for done in range(3):
            with ThreadPoolExecutor(2) as pool:
                for written in [pool.submit(write, store, half, done) for half in (0, 1)]:
                    written.result()
            store.mark(done)
        expected = [sorted_rows(store, table) for table in (0, 1)]
    with Recorded(MemoryStore(list(map(Width, widths))), Journal(tmp_path)) as found:
        found.return_to(2)
        assert [sorted_rows(found, table) for table in (0, 1)] == expected


def sorted_rows(store: Recorded, table: int) -> list[tuple[int, bytes]]:
    return sorted(
        (key, row.tobytes()) for ids, rows in store.iterate(table) for key, row in zip(ids, rows, strict=True)
    )


def test_writes_of_other_tables_are_refused_by_name(tmp_path: Path) -> None:
    with Recorded(MemoryStore([Width(3)]), Journal(tmp_path)) as store:
        store.write(0, np.arange(2), np.zeros((2, 3), np.float32))
        store.mark(0)
    journal = Journal(tmp_path)
    assert journal.widths == [3]
    assert journal.starts == [START]
    with pytest.raises(StoreError, match=r"has writes of rows of \[3\] floats by table, and \[4\] are asked for"):
        Recorded(MemoryStore([Width(4)]), journal)
    journal.close()


@pytest.mark.parametrize("name", ["", "a/b", "../a", ".hidden", "a b", "x" * 65, "a\n"])
def test_names_that_could_lead_elsewhere_are_refused(name: str, tmp_path: Path) -> None:
    with Recorded(MemoryStore([Width(3)]), Journal(tmp_path / "journal")) as store:
        store.mark(0)
        with pytest.raises(StoreError, match="can't be the name of something kept"):
            store.keep(0, name, b"")
        assert store.kept(0) == {}


def test_large_writes_of_many_tables_come_back(tmp_path: Path) -> None:
    widths = list(range(1, 41))
    generator = np.random.default_rng(0)
    with Recorded(MemoryStore(list(map(Width, widths))), Journal(tmp_path)) as store:
        for _ in range(2):
            counts = generator.integers(0, 3000, len(widths))
            store.write_many(
                [
                    (table, generator.permutation(5000)[:count], generator.standard_normal((count, width), np.float32))
                    for table, (width, count) in enumerate(zip(widths, counts, strict=True))
                ]
            )
        store.mark(7)
        expected = [[(ids.tolist(), rows.tobytes()) for ids, rows in store.iterate(table)] for table in range(40)]
    with Recorded(MemoryStore(list(map(Width, widths))), Journal(tmp_path)) as found:
        found.return_to(7)
        assert [[(i.tolist(), r.tobytes()) for i, r in found.iterate(table)] for table in range(40)] == expected


def test_a_long_log_goes_to_the_disk_before_its_mark_waits_for_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked: list[int] = []
    monkeypatch.setattr(disk_module, "start_writing", lambda fd: asked.append(fd))
    with Recorded(MemoryStore([Width(256)]), Journal(tmp_path)) as store:
        for _ in range(40):
            store.write(0, np.arange(1024), np.ones((1024, 256), np.float32))
    assert len(asked) == 2
