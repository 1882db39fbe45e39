"""Rows that are returned to marks and read as they were at one; what is refused, and what it takes."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
from bagpipe.store.blocks import BLOCK_BYTES
from bagpipe.store.snapshot import take_old

from bagpipe.errors import StoreError
from bagpipe.store import MappedStore, MemoryStore
from bagpipe.store.base import Marked
from bagpipe.store.journal import Journal
from bagpipe.store.recorded import Recorded
from harness.recorded_rows import TABLES, contents, memory, rows_of, write


def test_a_recorded_store_is_marked() -> None:
    marked: Marked = Recorded(memory())
    assert marked.marks() == []


@pytest.fixture(params=["memory", "mapped"])
def store(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[Recorded]:
    made = memory() if request.param == "memory" else MappedStore(TABLES, tmp_path / "rows")
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


@pytest.mark.parametrize("since", [None, 0])
def test_a_snapshot_goes_through_old_values_once_for_many_chunks(
    store: Recorded, since: int | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    seen: list[int] = []

    def counted(positions: np.ndarray, *rest: object) -> None:
        seen.append(len(positions))
        take_old(positions, *rest)

    monkeypatch.setattr("bagpipe.store.snapshot.take_old", counted)
    store.mark(0)
    write(store, 0, dict.fromkeys(range(100), 1.0))
    store.mark(1)
    for start in range(0, 100, 10):
        write(store, 0, dict.fromkeys(range(start, start + 10), 2.0))
    with store.snapshot(1) as snapshot:
        chunks = list(snapshot.iterate(0, since, 7))
    assert [len(ids) for ids, _ in chunks] == [7] * 14 + [2]
    assert contents(iter(chunks)) == [(row, 1.0) for row in range(100)]
    assert seen == [10] * 10
