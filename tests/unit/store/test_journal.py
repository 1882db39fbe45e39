"""The log of writes: whatever happens to the disk, rows come back as they were at a mark, or an error says why not."""

from __future__ import annotations

import errno
import random
import signal
import subprocess
import sys
from collections.abc import Iterator
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
from simulated_disk import Fault, SimulatedDisk

WIDTHS = (3, 1)
DIRECTORY = Path("/journal/server-0")
State = list[dict[int, bytes]]


def opened(disk: SimulatedDisk, history_bytes_max: int | None = None) -> Recorded:
    return Recorded(MemoryStore(list(map(Width, WIDTHS)), chunk_bytes=256), Journal(DIRECTORY, disk), history_bytes_max)


def state(store: Recorded) -> State:
    return [
        {key: row.tobytes() for ids, rows in store.iterate(table) for key, row in zip(ids.tolist(), rows, strict=True)}
        for table in range(len(WIDTHS))
    ]


def some_rows(seed: int) -> list[tuple[int, np.ndarray, np.ndarray]]:
    generator = np.random.default_rng(seed)
    parts = []
    for table in (0, 1)[: generator.integers(1, 3)]:
        ids = generator.permutation(8)[: generator.integers(0, 5)]
        parts.append((table, ids, generator.standard_normal((len(ids), WIDTHS[table]), np.float32)))
    return parts


class Script:
    """A run that writes, marks, keeps, goes back, forgets and drops; what every mark means, and when it was sure."""

    def __init__(self, disk: SimulatedDisk) -> None:
        self.disk = disk
        self.states: dict[int, State] = {}
        self.blobs: dict[int, dict[str, bytes]] = {}
        self.sure: list[tuple[int, set[int]]] = []
        """Marks that are there from so many operations on, up to the next entry."""
        self.store = opened(disk)

    def steps(self) -> Iterator[None]:
        """One step at a time; each may fail."""
        for number in range(3):
            yield self.store.write_many(some_rows(number))
        yield from self.mark(10)
        yield self.store.write_many(some_rows(3))
        yield self.store.write_many(some_rows(4))
        yield from self.mark(20)
        yield self.store.write_many(some_rows(5))
        yield from self.mark(30)
        yield self.store.write_many(some_rows(6))
        yield self.go_back(20)
        yield self.store.write_many(some_rows(5))
        yield from self.mark(30)
        yield self.store.forget(20)
        yield from self.mark(40)
        yield self.store.write_many(some_rows(7))

    def mark(self, done: int) -> Iterator[None]:
        self.blobs.setdefault(done, {})["trainer-1"] = b"one of %d" % done
        yield self.store.keep(done, "trainer-1", b"one of %d" % done)
        self.states[done] = state(self.store)
        yield self.store.mark(done)
        self.note({*(self.sure[-1][1] if self.sure else ()), done})
        self.blobs[done]["trainer-0"] = b"zero of %d" % done
        yield self.store.keep(done, "trainer-0", b"zero of %d" % done)

    def go_back(self, done: int) -> None:
        self.note({mark for mark in self.sure[-1][1] if mark <= done})
        self.store.return_to(done)
        assert state(self.store) == self.states[done]

    def note(self, marks: set[int]) -> None:
        self.sure.append((len(self.disk.log), marks))

    def sure_at(self, length: int) -> set[int]:
        return next((marks for start, marks in reversed(self.sure) if start <= length), set())


def test_every_crash_leaves_the_marks_that_were_made() -> None:
    disk = SimulatedDisk()
    script = Script(disk)
    for _ in script.steps():
        pass
    generator, seen, tried = random.Random(0), set(), 0
    for length in range(len(disk.log) + 1):
        sure = script.sure_at(length)
        for crashed in disk.crashes(length, generator, at_most=32):
            tried += 1
            key = (frozenset(crashed.contents().items()), frozenset(sure))
            if key not in seen:
                seen.add(key)
                newest_first(script, crashed, sure)
    assert tried > 1000
    assert len(seen) > 100


def newest_first(script: Script, disk: SimulatedDisk, sure: set[int]) -> None:
    """Go back to each mark that is told of, from the newest on, each time as a new process."""
    with opened(disk) as found:
        marks = found.marks()
    assert sure <= set(marks)
    for mark in reversed(marks):
        with opened(disk) as found:
            kept = found.kept(mark)
            assert kept.items() <= script.blobs[mark].items()
            with pytest.raises(StoreError, match="return to a mark, or load a checkpoint"):
                found.num_rows(0)
            found.return_to(mark)
            assert state(found) == script.states[mark]
            assert found.kept(mark) == kept
            assert found.marks() == [other for other in marks if other <= mark]
        with opened(disk) as found:
            assert found.marks() == [other for other in marks if other <= mark]
    with opened(disk) as found:
        if marks:
            found.return_to(marks[0])
        else:
            found.clear()
        found.write_many(some_rows(99))
        found.mark(15)
        after = state(found)
    with opened(disk) as found:
        found.return_to(15)
        assert state(found) == after


@pytest.mark.parametrize("number", [errno.ENOSPC, errno.EIO])
def test_a_disk_that_fails_once_at_any_call_costs_no_row(number: int) -> None:
    """The run does what a supervisor would: after an error it returns to the last mark, and replays from there."""
    at = failures = 0
    while True:
        disk = SimulatedDisk()
        with opened(disk):
            pass
        disk.fault = fault = Fault(at, number)
        store = opened_with_retry(disk)
        failures += train(store, disk)
        disk.fault = None
        expected = state(store)
        marks = store.marks()
        with pytest.raises(StoreError, match="is in use"):
            opened(disk)
        store.close()
        with opened(disk) as found:
            assert found.marks() == marks == [0, 1, 2, 3, 4]
            found.return_to(4)
            assert state(found) == expected == reference()
        if len(fault.seen) <= at:
            break
        at += 1
    assert failures > 40


def opened_with_retry(disk: SimulatedDisk) -> Recorded:
    try:
        return opened(disk)
    except StoreError:
        return opened(disk)


def batch(done: int) -> list[list[tuple[int, np.ndarray, np.ndarray]]]:
    return [some_rows(10 * done + number) for number in range(3)]


def reference() -> State:
    store = Recorded(MemoryStore(list(map(Width, WIDTHS))))
    for done in range(4):
        for parts in batch(done):
            store.write_many(parts)
    return state(store)


def train(store: Recorded, disk: SimulatedDisk) -> int:
    """Four iterations with a mark after each; how many errors there were."""
    failures, done = 0, -1
    while done < 4:
        before = state(store)
        try:
            if done < 0:
                store.mark(0)
            else:
                for parts in batch(done):
                    before = state(store)
                    store.write_many(parts)
                before = state(store)
                store.keep(done + 1, "a", b"%d" % done)
                store.mark(done + 1)
            done += 1
        except StoreError:
            failures += 1
            assert state(store) == before, "what fails has changed nothing"
            if done >= 0:
                try:
                    store.return_to(done)
                except StoreError:
                    store.return_to(done)
            else:
                store.clear()
    return failures


class Broken(Fault):
    """As `Fault`, and every later operation fails too."""

    def reach(self, name: str) -> bool:
        self.seen.append(name)
        return len(self.seen) > self.at


@pytest.mark.parametrize("number", [errno.ENOSPC, errno.EIO])
def test_a_disk_that_fails_from_any_call_on_refuses_until_it_is_mended(number: int) -> None:
    at = 0
    while True:
        disk = SimulatedDisk()
        store = opened(disk)
        store.mark(0)
        disk.fault = fault = Broken(at, number)
        try:
            for parts in batch(0):
                before = state(store)
                store.write_many(parts)
            before = state(store)
            store.mark(1)
        except StoreError:
            assert state(store) == before
            for action, value in ((store.mark, 1), (store.return_to, 0), (store.write_many, batch(0)[0])):
                with pytest.raises(StoreError, match="/journal/server-0"):
                    action(value)
            assert state(store) == before
            disk.fault = None
            store.return_to(0)
            assert state(store) == [{}, {}]
            for parts in batch(0):
                store.write_many(parts)
            store.mark(1)
        expected = state(store)
        disk.fault = None
        store.close()
        with opened(disk) as found:
            found.return_to(1)
            assert state(found) == expected
        if len(fault.seen) <= at:
            break
        at += 1
    assert at > 8


def test_a_write_that_is_refused_is_not_in_the_log() -> None:
    disk = SimulatedDisk()
    store = opened(disk)
    store.write_many(batch(0)[0])
    before = state(store)
    disk.fault = Fault(0, errno.ENOSPC, frozenset(["write"]))
    with pytest.raises(StoreError, match=r"start\.writes failed \(No space left on device\): free space") as caught:
        store.write_many(batch(1)[0])
    assert caught.value.errno == errno.ENOSPC
    assert state(store) == before
    assert store.stats().num_rows == sum(map(len, before))
    store.write_many(batch(2)[0])
    store.mark(1)
    expected = state(store)
    store.close()
    with opened(disk) as found:
        found.return_to(1)
        assert state(found) == expected


def test_what_can_not_be_synced_can_not_be_marked_nor_written_on() -> None:
    disk = SimulatedDisk()
    store = opened(disk)
    store.mark(0)
    store.write_many(batch(0)[0])
    disk.fault = Fault(0, errno.EIO, frozenset(["sync"]))
    with pytest.raises(StoreError, match=r"writing out .*Input/output error"):
        store.mark(1)
    assert store.marks() == [0]
    for action in (lambda: store.mark(1), lambda: store.write_many(batch(1)[0])):
        with pytest.raises(StoreError, match="could not be written to the disk: return to a mark"):
            action()
    store.return_to(0)
    store.write_many(batch(1)[0])
    store.mark(1)


def small_journal() -> tuple[SimulatedDisk, dict[int, State]]:
    disk = SimulatedDisk()
    states = {}
    with opened(disk) as store:
        for done in range(3):
            store.write_many(batch(done)[1])
            store.keep(done, "trainer-0", b"kept with %d" % done)
            store.mark(done)
            states[done] = state(store)
        store.write_many(batch(3)[0])
    return disk, states


def spoiled(disk: SimulatedDisk, path: str, data: bytes) -> SimulatedDisk:
    copy = disk.crashed(len(disk.log))
    copy.write_file(Path(path), data)
    return copy


def whole_or_refused(disk: SimulatedDisk, states: dict[int, State]) -> set[int]:
    """Go to every mark that is told of: its rows are right, or an error says why not. Those that are right."""
    right = set()
    with opened(disk) as store:
        marks = store.marks()
    for mark in reversed(marks):
        with opened(disk) as store:
            kept = store.kept(mark)
            assert kept in ({}, {"trainer-0": b"kept with %d" % mark})
            try:
                store.return_to(mark)
            except StoreError:
                with pytest.raises(StoreError, match="is damaged at byte"):
                    store.return_to(mark)
                with pytest.raises(StoreError, match="return to a mark again"):
                    store.num_rows(0)
            else:
                assert state(store) == states[mark]
                right.add(mark)
    return right


def test_a_journal_that_is_cut_anywhere_gives_the_last_whole_mark_or_an_error() -> None:
    disk, states = small_journal()
    files = {path: data for path, data in disk.contents().items() if data and "." in path}
    assert len(files) == 4 + 3
    for path, data in files.items():
        for length in range(len(data)):
            right = whole_or_refused(spoiled(disk, path, data[:length]), states)
            if "kept" in path or "002.writes" in path:
                assert right == {0, 1, 2}
            elif "001.writes" in path:
                assert right == set(), "the file after it leads from a mark that nothing leads to"
            assert 2 not in right or "kept" in path or "002.writes" in path


def test_a_journal_without_a_later_file_is_cut_to_the_last_whole_mark() -> None:
    disk, states = small_journal()
    newest = "/journal/server-0/000000000002.writes"
    last = "/journal/server-0/000000000001.writes"
    disk.unlink(Path(newest))
    data = disk.contents()[last]
    assert whole_or_refused(disk.crashed(len(disk.log)), states) == {0, 1, 2}
    for length in range(len(data)):
        assert whole_or_refused(spoiled(disk, last, data[:length]), states) == {0, 1}


def test_a_byte_that_changes_anywhere_is_noticed() -> None:
    disk, states = small_journal()
    files = {path: data for path, data in disk.contents().items() if data and "." in path}
    generator = random.Random(0)
    for path, data in files.items():
        for position in range(len(data)):
            flipped = bytearray(data)
            flipped[position] ^= 1 << generator.randrange(8)
            right = whole_or_refused(spoiled(disk, path, bytes(flipped)), states)
            if "kept" in path:
                with opened(spoiled(disk, path, bytes(flipped))) as store:
                    assert sum(len(store.kept(mark)) for mark in range(3)) == 2
            elif "002.writes" not in path:
                assert 2 not in right
            assert right in ({0, 1, 2}, {0, 1}, {0}, set())


def test_zeros_and_records_of_other_files_are_no_records() -> None:
    disk, states = small_journal()
    contents = disk.contents()
    first, second = (f"/journal/server-0/00000000000{k}.writes" for k in (0, 1))
    assert whole_or_refused(spoiled(disk, first, bytes(len(contents[first]))), states) == set()
    assert whole_or_refused(spoiled(disk, first, contents[second]), states) == set()
    assert whole_or_refused(spoiled(disk, first, contents[first] * 2), states) == {0}


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
