"""A journal knows which checkpoint it begins with, wherever that lies, and takes no other for it."""

from __future__ import annotations

import shutil
from collections.abc import Sequence
from pathlib import Path

import pytest

from bagpipe.checkpoint.directory import Checkpoints
from bagpipe.checkpoint.manifest import Facts, TableEntry
from bagpipe.store.journal import Journal
from bagpipe.store.recorded import Recorded
from harness.recorded_rows import WIDTHS, memory, rows_of, write

NAMES = [str(table) for table in range(len(WIDTHS))]
FACTS = Facts(
    tables=tuple(
        TableEntry(name=name, rows=None, dims=(width,), width=width, optimizer="sgd")
        for name, width in zip(NAMES, WIDTHS, strict=True)
    )
)


def opened(path: Path, places: Sequence[Path] | None = None, **options) -> Recorded:
    """As a server that has come back: it knows the directory of its run, and no other."""
    return Recorded(memory(), Journal(path / "journal"), checkpoints=path / "run", places=places, **options)


def save(store: Recorded, done: int, directory: Path) -> None:
    """A checkpoint as a server is told to write it."""
    with Checkpoints(directory).begin(done, full=True) as pending:
        store.checkpoints = directory
        pending.add(store.save(done, pending.directory, NAMES))
        pending.commit(FACTS)
    store.settle(done)


@pytest.fixture
def kept(tmp_path: Path) -> Path:
    """A journal that begins with checkpoint 10 of a script's own directory, and has a mark more."""
    with opened(tmp_path) as store:
        write(store, 0, {1: 1, 2: 2})
        store.mark(10)
        save(store, 10, tmp_path / "mine")
        write(store, 0, {2: 22})
        store.mark(20)
        assert store.marks() == [10, 20]
    return tmp_path


def test_a_journal_goes_on_from_a_checkpoint_in_a_directory_that_nobody_names_again(kept: Path) -> None:
    with opened(kept, [kept / "run", kept / "mine"]) as store:
        assert store.marks() == [10, 20]
        store.return_to(20)
        assert rows_of(store) == [(1, 1), (2, 22)]
    with opened(kept, [kept]) as store:
        store.return_to(10)
        assert rows_of(store) == [(1, 1), (2, 2)]


def test_a_checkpoint_outside_of_the_places_that_are_allowed_is_not_read(kept: Path) -> None:
    with opened(kept, [kept / "run"]) as store:
        assert store.marks() == []


def test_a_checkpoint_that_is_another_by_now_is_not_gone_on_from(kept: Path) -> None:
    shutil.rmtree(kept / "mine")
    with opened(kept) as store:
        assert store.marks() == []
    other = Recorded(memory())
    write(other, 0, {1: -1})
    other.mark(10)
    save(other, 10, kept / "mine")
    with opened(kept) as store:
        assert store.marks() == []


@pytest.mark.parametrize("damage", [b"", b"[{}]", b"\0" * 99])
def test_a_note_that_is_damaged_is_as_if_there_was_none(kept: Path, damage: bytes) -> None:
    (kept / "journal" / "checkpoints.json").write_bytes(damage)
    with opened(kept) as store:
        assert store.marks() == []
        store.checkpoints = kept / "mine"
        assert store.marks() == [10, 20]


def test_what_was_loaded_is_where_the_journal_begins(kept: Path) -> None:
    with opened(kept) as store:
        store.load(10, kept / "mine", NAMES)
        write(store, 0, {3: 3})
        store.mark(11)
    with opened(kept) as store:
        store.return_to(11)
        assert rows_of(store) == [(1, 1), (2, 2), (3, 3)]


def test_rows_condensed_before_a_checkpoint_go_when_the_journal_begins_with_that(tmp_path: Path) -> None:
    with opened(tmp_path) as store:
        write(store, 0, {1: 1})
        store.mark(10)
        with store.snapshot(10) as snapshot:
            store.condense(10, snapshot)
        store.forget(10)
        write(store, 0, {1: 2})
        store.mark(20)
        save(store, 20, tmp_path / "mine")
        assert store._condensed.marks() == []
        assert store._journal.starts == [20]
    with opened(tmp_path) as store:
        store.return_to(20)
        assert rows_of(store) == [(1, 2)]


def test_a_replay_sets_no_old_values_aside_and_gives_no_mark_up(
    kept: Path, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    with opened(kept) as store:
        store.return_to(20)
        for done in (30, 40):
            write(store, 0, dict.fromkeys(range(100), float(done)))
            write(store, 0, dict.fromkeys(range(100), float(done + 1)))
            store.mark(done)
    with opened(kept, history_bytes_max=100) as store:
        monkeypatch.setattr(store._history.blocks, "take", lambda: pytest.fail("an old value is set aside"))
        store.return_to(40)
        assert rows_of(store)[:2] == [(1, 41), (2, 41)]
        assert store._history.marks() == [40]
    assert not caplog.records
