"""What every store with marks promises (`bagpipe.store.base.Marked`): rows as they were, to return to and to save."""

from __future__ import annotations

import pytest

from bagpipe.checkpoint.directory import Checkpoints
from bagpipe.checkpoint.manifest import Facts, TableEntry
from bagpipe.store import MappedStore, MemoryStore
from bagpipe.store.journal import Journal
from bagpipe.store.recorded import Recorded
from harness.recorded_rows import TABLES, WIDTHS, memory, rows_of, write

NAMES = ["user", "ad"]
FACTS = Facts(
    tables=tuple(
        TableEntry(name=name, rows=None, dims=(width,), width=width, optimizer="none")
        for name, width in zip(NAMES, WIDTHS, strict=True)
    )
)


STORES = {
    "memory": lambda path: Recorded(memory()),
    "mapped": lambda path: Recorded(MappedStore(TABLES, path / "rows")),
    "journal": lambda path: Recorded(memory(), Journal(path / "journal")),
    "little memory": lambda path: Recorded(memory(), Journal(path / "journal"), 200),
}


@pytest.mark.parametrize("make", STORES.values(), ids=STORES)
@pytest.mark.parametrize("later", [1, 3])
def test_a_mark_that_is_forgotten_while_it_is_saved_is_saved_as_it_was(tmp_path, make, later):
    """As a server does it: the mark is held when a trainer asks, and its rows are written when there is time."""
    saved = Checkpoints(tmp_path / "checkpoints")
    with make(tmp_path) as store:
        for table in (0, 1):
            write(store, table, {row: 0.5 + row for row in range(8 + table)})
        store.mark(1)
        expected = [rows_of(store, table) for table in (0, 1)]
        with saved.begin(1) as pending:
            held = store.snapshot(1, tmp_path)
            for done in range(2, 2 + later):
                for table in (0, 1):
                    write(store, table, {row: 10.0 * done + row for row in range(12)})
                store.mark(done)
                store.forget(done)  # and what memory that gives back is used again
            pending.add(store.save(1, pending.directory, NAMES, snapshot=held))
            pending.commit(FACTS)
        assert store.marks() == [1 + later]
        assert rows_of(store) == [(row, 10.0 * (1 + later) + row) for row in range(12)]
    with Recorded(MemoryStore(TABLES)) as store:
        store.load(1, saved.directory, NAMES)
        assert [rows_of(store, table) for table in (0, 1)] == expected


@pytest.mark.parametrize("make", STORES.values(), ids=STORES)
def test_rows_return_to_the_first_of_several_marks_as_they_were(tmp_path, make):
    """A row that was written after each of them has several old values, of which the oldest counts."""
    with make(tmp_path) as store:
        states = []
        for done in (1, 2, 3, 4):
            for table in (0, 1):
                write(store, table, {row: 10.0 * done + row for row in range(4 + done)})
            store.mark(done)
            states.append([rows_of(store, table) for table in (0, 1)])
        assert store.marks() == [1, 2, 3, 4]
        for done in (3, 1):
            store.return_to(done)
            assert [rows_of(store, table) for table in (0, 1)] == states[done - 1]
