"""Old values beyond the bound of memory: which marks are given up for it, what goes to a disk, and that it is exact."""

from __future__ import annotations

import threading
from pathlib import Path

import numpy as np
import pytest

from bagpipe.errors import StoreError
from bagpipe.store import MappedStore, MemoryStore
from bagpipe.store.journal import Journal
from bagpipe.store.recorded import HISTORY_BYTES, Recorded
from harness.recorded_rows import TABLES, Ids, contents, memory, rows_of, write

TEN = range(10)
NOWHERE = Path("/no/such/directory")


def mapped_kb(directory: Path) -> int:
    """Memory that mapped files of a directory take."""
    kb, inside = 0, False
    for line in Path("/proc/self/smaps").read_text().splitlines():
        if "-" in line.split()[0]:
            inside = str(directory) in line
        elif inside and line.startswith("Rss:"):
            kb += int(line.split()[1])
    return kb


def bounded(bytes_max: int, place: Path | None = None) -> Recorded:
    store = Recorded(memory(), None, bytes_max)
    store._history.place = place
    return store


def test_old_values_are_bounded_unless_somebody_says_otherwise() -> None:
    assert Recorded(memory())._history.bytes_max == HISTORY_BYTES == 1_000_000_000


def test_above_the_bound_the_oldest_marks_are_given_up(caplog: pytest.LogCaptureFixture) -> None:
    store = bounded(10 * 40)  # a block has room for one row
    for row in TEN:
        write(store, 0, {row: 0})
    store.mark(0)
    write(store, 0, dict.fromkeys(range(5), 1.0))
    store.mark(1)
    write(store, 0, dict.fromkeys(range(5), 2.0))
    assert store.marks() == [0, 1]
    assert not caplog.records
    write(store, 0, {5: 2})
    assert store.marks() == [1]
    assert "mark 0 take more than the 400 B" in caplog.text
    with pytest.raises(StoreError, match="no mark 0"):
        store.return_to(0)
    assert store.history_bytes == 400
    store.return_to(1)
    assert dict(rows_of(store)) == dict.fromkeys(range(5), 1.0) | dict.fromkeys(range(5, 10), 0.0)
    write(store, 0, dict.fromkeys(TEN, 2.0))
    assert store.marks() == [1]
    assert store.history_bytes == 400


def test_a_write_larger_than_the_bound_goes_to_a_disk_and_the_last_mark_stays(tmp_path: Path) -> None:
    store = bounded(100, tmp_path)
    write(store, 0, dict.fromkeys(TEN, 1.0))
    store.mark(0)
    before = store.stats().bytes_on_disk
    write(store, 0, dict.fromkeys(TEN, 2.0))
    assert store.marks() == [0]
    assert store.history_bytes <= 100
    assert store.stats().bytes_on_disk > before
    assert list(tmp_path.iterdir()) == [], "the files have no names, and are gone with the process"
    store.return_to(0)
    assert dict(rows_of(store)) == dict.fromkeys(TEN, 1.0)
    assert store.stats().bytes_on_disk == before


def test_without_a_disk_a_write_larger_than_the_bound_leaves_no_mark_and_is_done() -> None:
    store = bounded(100, NOWHERE)
    write(store, 0, dict.fromkeys(TEN, 1.0))
    store.mark(0)
    write(store, 0, dict.fromkeys(TEN, 2.0))
    assert store.marks() == []
    assert store.history_bytes == 0
    assert dict(rows_of(store)) == dict.fromkeys(TEN, 2.0)
    store.mark(1)
    assert store.marks() == [1]


def test_a_snapshot_whose_old_values_are_given_up_says_so_and_what_to_do() -> None:
    store = bounded(100, NOWHERE)
    write(store, 0, dict.fromkeys(TEN, 1.0))
    store.mark(0)
    with store.snapshot(0) as snapshot:
        chunks = snapshot.iterate(0, None, 5)
        write(store, 0, dict.fromkeys(TEN, 2.0))
        with pytest.raises(StoreError, match=r"mark 0 can't be read any more.*100 B.*recovery\.history.*in /no/such"):
            next(chunks)


@pytest.mark.parametrize("num_marks", [0, 3])
@pytest.mark.parametrize("kind", ["memory", "mapped"])
def test_a_snapshot_is_never_given_up_however_much_is_written(kind: str, num_marks: int, tmp_path: Path) -> None:
    inner = memory() if kind == "memory" else MappedStore(TABLES, tmp_path / "rows")
    with Recorded(inner, None, 400) as store:
        write(store, 0, dict.fromkeys(TEN, 1.0))
        write(store, 1, dict.fromkeys(TEN, 1.0))
        store.mark(1)
        with store.snapshot(1, tmp_path) as snapshot:
            chunks = snapshot.iterate(0, None, 3)
            next(chunks)
            for done in range(2, 2 + num_marks):
                for table in (0, 1):
                    write(store, table, dict.fromkeys(range(3 * done), 10.0 * done))
                store.mark(done)
            for table in (0, 1):
                write(store, table, dict.fromkeys(range(20), 99.0))
            assert store.history_bytes <= 400
            assert contents(snapshot.iterate(0)) == contents(snapshot.iterate(1)) == [(row, 1.0) for row in TEN]
        assert store.marks() == [1], "for it later marks are given up"
        store.return_to(1)
        assert rows_of(store) == rows_of(store, 1) == [(row, 1.0) for row in TEN]


def test_what_a_snapshot_needs_of_later_marks_takes_room_once_a_row(tmp_path: Path) -> None:
    store = bounded(400, tmp_path)
    write(store, 0, dict.fromkeys(range(1000), 1.0))
    store.mark(1)
    sizes = []
    with store.snapshot(1) as snapshot:
        for done in range(2, 12):
            write(store, 0, dict.fromkeys(range(1000), float(done)))
            sizes.append(sum(block.used for mark in store._history._marks for block in mark.blocks))
            store.mark(done)
        assert sizes[1:] == [sizes[0]] * 9
        assert contents(snapshot.iterate(0)) == [(row, 1.0) for row in range(1000)]
    write(store, 0, {0: 0.0})
    assert store.marks() == [11], "which is given up itself once nobody reads it"


def test_a_mark_that_only_the_journal_leads_to_has_no_snapshot(tmp_path: Path) -> None:
    with Recorded(memory(), Journal(tmp_path / "journal"), 400) as store:
        write(store, 0, dict.fromkeys(TEN, 1.0))
        store.mark(1)
        with store.snapshot(1):
            write(store, 0, dict.fromkeys(range(5), 2.0))
            store.mark(2)
            write(store, 0, dict.fromkeys(range(20), 3.0))
        assert store.marks() == [1, 2]
        assert (store.has_snapshot(1), store.has_snapshot(2)) == (True, False)
        store.return_to(2)
        assert dict(rows_of(store)) == dict.fromkeys(TEN, 1.0) | dict.fromkeys(range(5), 2.0)


def test_blocks_on_a_disk_are_exact_while_threads_write_and_snapshots_are_read(tmp_path: Path) -> None:
    num_rows, width = 20_000, 16
    store = Recorded(MemoryStore([Ids(width)]), None, 100_000)
    ids = np.random.default_rng(0).permutation(num_rows)
    problems: list[BaseException] = []

    def lines(some: np.ndarray, value: float) -> np.ndarray:
        return np.full((len(some), width), value, np.float32)

    def write_half(half: int, value: float) -> None:
        try:
            for some in np.array_split(ids[half::2], 20):
                store.write(0, some, lines(some, value))
        except BaseException as error:
            problems.append(error)

    store.write(0, ids, lines(ids, 0.0))
    for done in range(1, 4):
        store.mark(done)
        with store.snapshot(done, tmp_path) as snapshot:
            threads = [threading.Thread(target=write_half, args=(half, float(done))) for half in (0, 1)]
            for thread in threads:
                thread.start()
            rows = np.concatenate([values for _, values in snapshot.iterate(0, None, 700)])
            for thread in threads:
                thread.join(60)
            again = np.concatenate([values for _, values in snapshot.iterate(0, None, 700)])
        assert (rows == done - 1).all()
        assert (again == done - 1).all()
        assert store.history_bytes <= 100_000
        assert mapped_kb(tmp_path) < 1000, "of what was read of the files nothing stays in memory"
        assert store.stats().bytes_on_disk > 0
        store.forget(done + 1)
        assert store.stats().bytes_on_disk == 0
    assert problems == []
