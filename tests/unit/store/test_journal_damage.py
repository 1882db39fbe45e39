"""A journal whose files were cut or changed gives the rows of a mark, or an error says why not."""

from __future__ import annotations

import random
from pathlib import Path

import pytest

from bagpipe.errors import StoreError
from harness.disk import SimulatedDisk
from harness.journaled import State, batch, opened, state


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


sparsely = pytest.mark.parametrize("step", [8, pytest.param(1, marks=pytest.mark.long)])


def places(data: bytes, step: int) -> list[int]:
    """All of them in a file's first words, and one in so many behind these."""
    return [place for place in range(len(data)) if place < 16 or place % step == 0]


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


@sparsely
def test_a_journal_that_is_cut_anywhere_gives_the_last_whole_mark_or_an_error(step: int) -> None:
    disk, states = small_journal()
    files = {path: data for path, data in disk.contents().items() if data and "." in path}
    assert len(files) == 4 + 3
    for path, data in files.items():
        for length in places(data, step):
            right = whole_or_refused(spoiled(disk, path, data[:length]), states)
            if "kept" in path or "002.writes" in path:
                assert right == {0, 1, 2}
            elif "001.writes" in path:
                assert right == set(), "the file after it leads from a mark that nothing leads to"
            assert 2 not in right or "kept" in path or "002.writes" in path


@sparsely
def test_a_journal_without_a_later_file_is_cut_to_the_last_whole_mark(step: int) -> None:
    disk, states = small_journal()
    newest = "/journal/server-0/000000000002.writes"
    last = "/journal/server-0/000000000001.writes"
    disk.unlink(Path(newest))
    data = disk.contents()[last]
    assert whole_or_refused(disk.crashed(len(disk.log)), states) == {0, 1, 2}
    for length in places(data, step):
        assert whole_or_refused(spoiled(disk, last, data[:length]), states) == {0, 1}


@sparsely
def test_a_byte_that_changes_anywhere_is_noticed(step: int) -> None:
    disk, states = small_journal()
    files = {path: data for path, data in disk.contents().items() if data and "." in path}
    generator = random.Random(0)
    for path, data in files.items():
        for position in places(data, step):
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
