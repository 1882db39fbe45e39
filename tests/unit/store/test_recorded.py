"""Rows that are returned to marks and read as they were at one, against a plain dict."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from bagpipe.errors import StoreError
from bagpipe.store import MappedStore, MemoryStore
from bagpipe.store.base import Marked
from bagpipe.store.blocks import BLOCK_BYTES
from bagpipe.store.journal import Journal
from bagpipe.store.local import LocalStore
from bagpipe.store.recorded import Recorded
from bagpipe.store.snapshot import Snapshot
from simulated_disk import SimulatedDisk

WIDTHS = (3, 1)


class Ids:
    """A row that was never written is its id."""

    def __init__(self, width: int) -> None:
        self.width = width

    def initialise(self, ids: np.ndarray, out: np.ndarray) -> None:
        out[:] = ids[:, None]


TABLES = tuple(map(Ids, WIDTHS))
Table = dict[int, tuple[float, int]]
"""By id in order of first write: the value of a row, in all columns, and when it was written."""


def memory() -> MemoryStore:
    return MemoryStore(TABLES, chunk_bytes=64)


def write(store: Recorded | LocalStore, table: int, rows: dict[int, float]) -> None:
    ids = np.array(list(rows), np.int64)
    store.write(table, ids, np.repeat(np.array(list(rows.values()), np.float32)[:, None], WIDTHS[table], 1))


def contents(chunks: Iterator[tuple[np.ndarray, np.ndarray]]) -> list[tuple[int, float]]:
    found = []
    for ids, values in chunks:
        assert len(ids)
        assert (values == values[:, :1]).all()
        found += list(zip(ids.tolist(), values[:, 0].tolist(), strict=True))
    return found


def rows_of(store: Recorded, table: int = 0) -> list[tuple[int, float]]:
    return contents(store.iterate(table))


def plain(table: Table) -> list[tuple[int, float]]:
    return [(row, value) for row, (value, _) in table.items()]


class Reading:
    """A snapshot that is read bit by bit, and what it must give."""

    def __init__(self, snapshot: Snapshot, table: int, chunks: Iterator, expected: list[tuple[int, float]]) -> None:
        self.snapshot, self.table, self.chunks, self.expected = snapshot, table, chunks, expected
        self.found: list[tuple[int, float]] = []
        self.is_lost = False


class MarkedRows(RuleBasedStateMachine):
    """Any order of writes, marks, returns, forgets and snapshots."""

    def __init__(self) -> None:
        super().__init__()
        self.store = self.make()
        self.rows: list[Table] = [{}, {}]
        self.now = self.done = 0
        self.marks: dict[int, tuple[int, list[Table]]] = {}
        """Of all that rows can have been written since: when it was, and the rows."""
        self.forgotten = 0
        self.readings: list[Reading] = []

    def make(self) -> Recorded:
        return Recorded(memory())

    def there(self) -> list[int]:
        return [mark for mark in self.marks if mark >= self.forgotten]

    @rule(data=st.data())
    def write(self, data: st.DataObject) -> None:
        self.now += 1
        parts = []
        for table in data.draw(st.sampled_from([[0], [1], [0, 1], [1, 0]])):
            ids = data.draw(st.lists(st.integers(0, 12), unique=True, max_size=8))
            for row in ids:
                self.rows[table][row] = (self.now * 100.0 + row, self.now)
            values = np.array([[self.now * 100.0 + row] * WIDTHS[table] for row in ids], np.float32)
            parts.append((table, np.array(ids, np.int64), values.reshape(-1, WIDTHS[table])))
        self.store.write_many(parts)

    @rule(step=st.integers(1, 3))
    def mark(self, step: int) -> None:
        self.done += step
        self.now += 1
        self.store.mark(self.done)
        self.marks[self.done] = (self.now, [dict(table) for table in self.rows])

    @precondition(lambda self: self.there())
    @rule(data=st.data())
    def return_to(self, data: st.DataObject) -> None:
        self.done = data.draw(st.sampled_from(self.there()))
        self.store.return_to(self.done)
        self.marks = {mark: kept for mark, kept in self.marks.items() if mark <= self.done}
        self.rows = [dict(table) for table in self.marks[self.done][1]]
        for reading in self.readings:
            reading.is_lost |= reading.snapshot.done > self.done

    @rule(data=st.data())
    def forget(self, data: st.DataObject) -> None:
        before = data.draw(st.integers(0, self.done + 1))
        self.store.forget(before)
        self.forgotten = max(self.forgotten, before)

    @precondition(lambda self: self.store._history.marks())
    @rule(data=st.data(), table=st.integers(0, 1), rows_per_chunk=st.integers(1, 5))
    def begin_to_read(self, data: st.DataObject, table: int, rows_per_chunk: int) -> None:
        done = data.draw(st.sampled_from(self.store._history.marks()))
        since = data.draw(st.sampled_from([None, *(mark for mark in self.marks if mark <= done)]))
        snapshot = self.store.snapshot(done)
        rows = self.marks[done][1][table]
        assert snapshot.num_rows(table) == len(rows)
        after = -1 if since is None else self.marks[since][0]
        expected = [(row, value) for row, (value, time) in rows.items() if time > after]
        chunks = snapshot.iterate(table, since, rows_per_chunk)
        self.readings.append(Reading(snapshot, table, chunks, expected))

    @precondition(lambda self: self.readings)
    @rule(data=st.data())
    def read_on(self, data: st.DataObject) -> None:
        reading = data.draw(st.sampled_from(self.readings))
        try:
            ids, values = next(reading.chunks)
            reading.found += contents(iter([(ids, values)]))
        except StopIteration:
            assert reading.found == reading.expected
        except StoreError:
            assert reading.is_lost
        else:
            return
        reading.snapshot.close()
        self.readings.remove(reading)

    @invariant()
    def rows_are_those_of_the_dict(self) -> None:
        for table in (0, 1):
            assert rows_of(self.store, table) == plain(self.rows[table])
            assert self.store.num_rows(table) == len(self.rows[table])
        assert self.store.marks() == self.there()

    def teardown(self) -> None:
        for reading in self.readings:
            if not reading.is_lost:
                assert reading.found + contents(reading.chunks) == reading.expected
            reading.snapshot.close()
        self.store.forget(self.done + 1)
        assert self.store.history_bytes == 0
        self.store.close()


def started_again(disk: SimulatedDisk) -> SimulatedDisk:
    """The same files, all on the disk, so that it can crash once more."""
    fresh = SimulatedDisk()
    for path, data in sorted(disk.contents().items()):
        if data is None:
            fresh.make_directory(Path(path))
        else:
            with fresh.create(Path(path)) as file:
                file.write(data)
                file.sync()
        fresh.sync_directory(Path(path).parent)
    return fresh


class LoggedRows(MarkedRows):
    """The same with a journal, and a machine that crashes now and then and loses whatever was not synced."""

    def make(self) -> Recorded:
        self.disk = SimulatedDisk()
        return self.open()

    def open(self) -> Recorded:
        return Recorded(memory(), Journal(Path("/journal"), self.disk))

    @precondition(lambda self: self.marks)
    @rule(data=st.data())
    def crash(self, data: st.DataObject) -> None:
        for reading in self.readings:
            reading.snapshot.close()
        self.readings.clear()
        length = len(self.disk.log)
        lost = data.draw(st.sets(st.sampled_from(self.disk.unsynced(length) or [-1])))
        self.disk = started_again(self.disk.crashed(length, lost))
        self.store = self.open()
        self.forgotten = 0
        assert self.store.marks() == list(self.marks)
        self.return_to(data)


for machine in (MarkedRows, LoggedRows):
    machine.TestCase.settings = settings(
        max_examples=100, stateful_step_count=40, deadline=None, suppress_health_check=[HealthCheck.too_slow]
    )
TestMarkedRows = MarkedRows.TestCase
TestLoggedRows = LoggedRows.TestCase


def test_a_recorded_store_is_marked() -> None:
    marked: Marked = Recorded(memory())
    assert marked.marks() == []


@pytest.fixture(params=["memory", "mapped"])
def store(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[Recorded]:
    made = memory() if request.param == "memory" else MappedStore.create(tmp_path / "rows", TABLES, keep=True)
    with Recorded(made) as recorded:
        yield recorded


def test_rows_come_back_to_each_of_several_marks(store: Recorded) -> None:
    write(store, 0, {1: 1, 2: 2})
    store.mark(0)
    write(store, 0, {2: 22, 3: 33})
    store.mark(10)
    write(store, 0, {1: 111, 2: 222, 4: 444})
    write(store, 1, {7: 7})
    store.return_to(10)
    assert rows_of(store) == [(1, 1), (2, 22), (3, 33)]
    assert store.num_rows(1) == 0
    write(store, 0, {4: 4, 3: 3})
    store.return_to(0)
    assert rows_of(store) == [(1, 1), (2, 2)]
    assert store.marks() == [0]
    out = np.empty((2, 3), np.float32)
    store.read(0, np.array([3, 2]), out)
    assert out[:, 0].tolist() == [3, 2]  # row 3 has its initial value again


def test_rows_that_were_there_before_they_were_recorded_come_back_too() -> None:
    inner = memory()
    write(inner, 0, {5: 5})
    store = Recorded(inner)
    store.mark(0)
    write(store, 0, {5: 50, 6: 60})
    store.return_to(0)
    assert rows_of(store) == [(5, 5)]


def test_writes_to_the_store_below_are_recorded(store: Recorded) -> None:
    store.mark(0)
    write(store._store, 0, {1: 1})
    store.return_to(0)
    assert rows_of(store) == []


def test_a_mark_that_is_not_there_is_named_and_nothing_changes(store: Recorded) -> None:
    store.mark(3)
    write(store, 0, {1: 1})
    for action in (store.return_to, store.snapshot):
        with pytest.raises(StoreError, match=r"no mark 2: there are \[3\]"):
            action(2)
    with pytest.raises(StoreError, match="mark 3 comes after mark 3"):
        store.mark(3)
    with pytest.raises(StoreError, match="mark 1 comes after mark 3"):
        store.mark(1)
    with pytest.raises(StoreError, match="mark -1"):
        store.mark(-1)
    assert rows_of(store) == [(1, 1)]
    assert store.marks() == [3]


def test_a_mark_that_is_made_again_before_anything_is_written_changes_nothing(store: Recorded) -> None:
    store.mark(3)
    store.mark(3)
    write(store, 0, {1: 1})
    store.return_to(3)
    store.mark(3)
    store.forget(4)
    store.mark(3)
    assert store.marks() == [3]


def test_without_a_mark_old_values_take_nothing(store: Recorded) -> None:
    write(store, 0, dict.fromkeys(range(100), 1.0))
    assert store.history_bytes == 0
    store.mark(0)
    write(store, 0, dict.fromkeys(range(100), 2.0))
    assert store.history_bytes == BLOCK_BYTES
    used = store._history._marks[0].blocks[0].used
    assert 100 * 24 <= used <= 100 * 24 + 16
    write(store, 0, dict.fromkeys(range(200), 3.0))  # known already, or new
    assert store._history._marks[0].blocks[0].used == used
    store.forget(1)
    assert store.history_bytes == 0
    write(store, 0, dict.fromkeys(range(100), 4.0))
    assert store.history_bytes == 0


def test_old_values_count_as_memory() -> None:
    store = Recorded(memory())
    write(store, 0, {1: 1})
    before = store.stats().bytes_in_memory
    store.mark(0)
    write(store, 0, {1: 2})
    assert store.stats().bytes_in_memory == before + BLOCK_BYTES


def test_above_the_bound_the_oldest_marks_are_given_up(caplog: pytest.LogCaptureFixture) -> None:
    store = Recorded(memory(), None, 10 * 40)  # a block has room for one row
    for row in range(10):
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
    write(store, 0, dict.fromkeys(range(10), 2.0))
    assert store.marks() == [1]
    assert store.history_bytes == 400


def test_a_write_larger_than_the_bound_leaves_no_mark_and_is_done() -> None:
    store = Recorded(memory(), None, 100)
    write(store, 0, dict.fromkeys(range(10), 1.0))
    store.mark(0)
    write(store, 0, dict.fromkeys(range(10), 2.0))
    assert store.marks() == []
    assert store.history_bytes == 0
    assert dict(rows_of(store)) == dict.fromkeys(range(10), 2.0)
    store.mark(1)
    assert store.marks() == [1]


def test_a_snapshot_whose_old_values_are_given_up_says_so_and_what_to_do() -> None:
    store = Recorded(memory(), None, 100)
    write(store, 0, dict.fromkeys(range(10), 1.0))
    store.mark(0)
    with store.snapshot(0) as snapshot:
        chunks = snapshot.iterate(0, None, 5)
        next(chunks)
        write(store, 0, dict.fromkeys(range(10), 2.0))
        with pytest.raises(StoreError, match=r"mark 0 can't be read any more.*100 B.*recovery\.history"):
            next(chunks)


def test_a_snapshot_outlives_that_its_mark_is_forgotten(store: Recorded) -> None:
    write(store, 0, {1: 1, 2: 2})
    store.mark(0)
    snapshot = store.snapshot(0)
    store.forget(1)
    assert store.marks() == []
    write(store, 0, {1: 10})
    store.mark(1)
    write(store, 0, {1: 100, 2: 200})
    store.forget(2)
    assert contents(snapshot.iterate(0)) == [(1, 1), (2, 2)]
    snapshot.close()
    snapshot.close()
    assert store.history_bytes == 0
    with pytest.raises(StoreError, match="snapshot of mark 0 is closed"):
        snapshot.num_rows(0)


@pytest.mark.parametrize("since", [None, 0])
def test_a_snapshot_of_a_mark_that_was_left_behind_says_so(store: Recorded, since: int | None) -> None:
    store.mark(0)
    write(store, 0, {1: 1})
    store.mark(1)
    with store.snapshot(1) as snapshot, store.snapshot(1) as other:
        store.return_to(0)
        with pytest.raises(StoreError, match="mark 1 can't be read any more: rows were returned to mark 0"):
            list(snapshot.iterate(0, since))
        store.clear()
        with pytest.raises(StoreError, match="mark 1 can't be read any more"):
            list(other.iterate(0, since))


def test_what_was_written_since_a_mark_that_is_not_remembered_is_all(store: Recorded) -> None:
    write(store, 0, {1: 1})
    store.mark(5)
    with store.snapshot(5) as snapshot:
        assert contents(snapshot.iterate(0, 4)) == [(1, 1)]
        assert contents(snapshot.iterate(0, 5)) == []
        with pytest.raises(StoreError, match="since mark 6: give an earlier mark"):
            snapshot.iterate(0, 6)
        with pytest.raises(StoreError, match="rows_per_chunk is 0"):
            snapshot.iterate(0, None, 0)
        with pytest.raises(StoreError, match="no table 2"):
            snapshot.iterate(2)


def test_a_mark_in_the_middle_of_a_write_is_refused() -> None:
    class Slow(MemoryStore):
        def _scatter(self, written, found) -> None:
            with pytest.raises(StoreError, match="a mark while 1 writes are under way"):
                recorded.mark(1)
            with pytest.raises(StoreError, match="a return while 1 writes are under way"):
                recorded.return_to(0)
            super()._scatter(written, found)

    recorded = Recorded(Slow(TABLES))
    recorded.mark(0)
    write(recorded, 0, {1: 1})
    recorded.mark(1)


def test_a_write_whose_old_values_find_no_memory_is_refused_and_changes_nothing(
    store: Recorded, monkeypatch: pytest.MonkeyPatch
) -> None:
    write(store, 0, {1: 1})
    store.mark(0)

    def fail(*args: object) -> None:
        raise MemoryError

    with monkeypatch.context() as patched:
        patched.setattr(store._store, "gather", fail)
        with pytest.raises(MemoryError):
            write(store, 0, {1: 2, 3: 3})
    assert rows_of(store) == [(1, 1)]
    write(store, 0, {1: 2, 3: 3})
    store.mark(1)
    store.return_to(0)
    assert rows_of(store) == [(1, 1)]


@pytest.mark.parametrize("step", ["put_back", "truncate"])
@pytest.mark.parametrize("is_logged", [True, False])
def test_a_return_that_fails_halfway_is_refused_until_it_is_done_again(
    step: str, is_logged: bool, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    store = Recorded(memory(), Journal(tmp_path) if is_logged else None)
    write(store, 0, {1: 1, 2: 2})
    store.mark(0)
    write(store, 0, {1: 10, 3: 30})
    store.mark(1)
    write(store, 0, {1: 100, 2: 20})

    def fail(*args: object) -> None:
        raise MemoryError

    with monkeypatch.context() as patched:
        patched.setattr(store.store, step, fail)
        with pytest.raises(MemoryError):
            store.return_to(0)
    with pytest.raises(StoreError, match="half returned to mark 0: return to it again"):
        store.num_rows(0)
    with pytest.raises(StoreError, match="half returned"):
        write(store, 0, {1: 1})
    store.return_to(0)
    assert rows_of(store) == [(1, 1), (2, 2)]
    store.close()


def test_a_mapped_store_that_was_returned_is_kept_and_opened_as_it_is_then(tmp_path: Path) -> None:
    inner = MappedStore.create(tmp_path / "rows", TABLES, keep=True)
    with Recorded(inner) as store:
        write(store, 0, {1: 1, 2: 2})
        store.mark(0)
        write(store, 0, {2: 20, 3: 30, 4: 40})
        store.sync()
        store.return_to(0)
        write(store, 0, {9: 90})
        expected = rows_of(store)
    assert expected == [(1, 1), (2, 2), (9, 90)]
    with MappedStore.open(tmp_path / "rows", TABLES) as opened:
        assert contents(opened.iterate(0)) == expected


def test_what_is_kept_goes_with_its_mark(store: Recorded) -> None:
    store.keep(1, "trainer-1", b"before the mark")
    store.mark(1)
    store.keep(1, "trainer-0", b"after it")
    assert store.kept(1) == {"trainer-1": b"before the mark", "trainer-0": b"after it"}
    store.keep(1, "trainer-0", b"again")
    assert store.kept(1)["trainer-0"] == b"again"
    store.keep(2, "trainer-0", b"two")
    store.mark(3)
    assert store.kept(2) == {}, "mark 2 was never made"
    with pytest.raises(StoreError, match=r"'trainer-0' can't be kept with mark 2, which is gone: there are \[1, 3\]"):
        store.keep(2, "trainer-0", b"late")
    store.keep(3, "trainer-0", b"three")
    store.keep(4, "trainer-0", b"four")
    store.return_to(3)
    assert [store.kept(mark) for mark in (3, 4)] == [{"trainer-0": b"three"}, {}]
    store.forget(3)
    assert store.kept(1) == {}
    assert store.kept(3) == {"trainer-0": b"three"}


def test_the_very_beginning_can_be_returned_to(store: Recorded) -> None:
    write(store, 0, {1: 1})
    store.mark(0)
    store.keep(0, "a", b"a")
    snapshot = store.snapshot(0)
    store.clear()
    assert store.marks() == []
    assert store.kept(0) == {}
    assert rows_of(store) == []
    with pytest.raises(StoreError, match="all rows were replaced"):
        list(snapshot.iterate(0))
    write(store, 0, {2: 2})
    store.mark(0)
    write(store, 0, {2: 3})
    store.return_to(0)
    assert rows_of(store) == [(2, 2)]


def test_a_closed_store_refuses_everything_but_close() -> None:
    store = Recorded(memory())
    store.mark(0)
    store.close()
    store.close()
    for action in (
        lambda: store.mark(1),
        lambda: write(store, 0, {1: 1}),
        lambda: store.num_rows(0),
        lambda: store.snapshot(0),
        lambda: store.keep(0, "a", b""),
    ):
        with pytest.raises(StoreError, match="closed"):
            action()


@pytest.mark.parametrize("kind", ["memory", "mapped"])
def test_snapshots_are_exact_while_two_threads_write_and_marks_go_on(kind: str, tmp_path: Path) -> None:
    """Every row has one number in all columns, so that half a row would be seen too."""
    num_rows, num_marks, width = 20_000, 6, 64
    tables = (Ids(width), Ids(width))
    inner = MemoryStore(tables) if kind == "memory" else MappedStore.create(tmp_path / "rows", tables)
    store = Recorded(inner)
    ids = np.random.default_rng(0).permutation(num_rows)
    store.write_many([(table, ids[: num_rows // 2], _lines(ids[: num_rows // 2], width, 0)) for table in (0, 1)])
    problems: list[BaseException] = []
    readers: list[threading.Thread] = []
    expected = dict.fromkeys(ids[: num_rows // 2].tolist(), 0.0)

    def watched(work, *args) -> threading.Thread:
        def run() -> None:
            try:
                work(*args)
            except BaseException as error:
                problems.append(error)

        thread = threading.Thread(target=run)
        thread.start()
        return thread

    def write_half(half: int, generation: int) -> None:
        random = np.random.default_rng(10 * generation + half)
        mine = ids[half::2]
        for _ in range(6):
            some = random.choice(mine, 1500, replace=False)
            store.write_many([(table, some, _lines(some, width, generation)) for table in (0, 1)])

    def read(snapshot: Snapshot, rows: dict[int, float]) -> None:
        with snapshot:
            for table in (0, 1):
                found: dict[int, float] = {}
                for chunk_ids, values in snapshot.iterate(table, None, 700):
                    assert (values == values[:, :1]).all()
                    found.update(zip(chunk_ids.tolist(), (values[:, 0] - chunk_ids % 1000).tolist(), strict=True))
                assert found == rows

    for generation in range(1, num_marks + 1):
        store.mark(generation)
        readers.append(watched(read, store.snapshot(generation), dict(expected)))
        store.forget(generation)
        for thread in [watched(write_half, half, generation) for half in (0, 1)]:
            thread.join()
        for half in (0, 1):
            random = np.random.default_rng(10 * generation + half)
            for _ in range(6):
                expected.update(
                    dict.fromkeys(random.choice(ids[half::2], 1500, replace=False).tolist(), 1000.0 * generation)
                )
    for thread in readers:
        thread.join()
    assert not problems
    store.forget(num_marks + 1)
    assert store.history_bytes == 0
    store.close()


def _lines(ids: np.ndarray, width: int, generation: int) -> np.ndarray:
    return np.repeat((ids % 1000 + 1000.0 * generation).astype(np.float32)[:, None], width, 1)
