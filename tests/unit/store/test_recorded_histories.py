"""Any history of writes, marks, returns, snapshots and crashes, against a plain dict."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import numpy as np
from bagpipe.store.snapshot import Snapshot
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from bagpipe.errors import StoreError
from bagpipe.store.journal import Journal
from bagpipe.store.recorded import Recorded
from harness.disk import SimulatedDisk
from harness.examples import examples
from harness.recorded_rows import WIDTHS, Table, contents, memory, plain, rows_of


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
        is_rebuilt = self.done not in self.store._history.marks()
        self.store.return_to(self.done)
        self.marks = {mark: kept for mark, kept in self.marks.items() if mark <= self.done}
        self.rows = [dict(table) for table in self.marks[self.done][1]]
        for reading in self.readings:
            reading.is_lost |= is_rebuilt or reading.snapshot.done > self.done

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


class BoundedRows(LoggedRows):
    """The same with hardly any memory for old values: no write loses a snapshot for that, and none a mark."""

    def open(self) -> Recorded:
        store = Recorded(memory(), Journal(Path("/journal"), self.disk), 200)
        store._history.place = None
        return store

    @invariant()
    def memory_is_bounded(self) -> None:
        assert self.store.history_bytes <= 200


for machine in (MarkedRows, LoggedRows, BoundedRows):
    machine.TestCase.settings = examples(100, stateful_step_count=40)
TestMarkedRows = MarkedRows.TestCase
TestLoggedRows = LoggedRows.TestCase
TestBoundedRows = BoundedRows.TestCase
