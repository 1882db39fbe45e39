"""Whatever a crash leaves on the disk, a journal has the marks that were made, and rows come back as they were."""

from __future__ import annotations

import random
from collections.abc import Iterator

import pytest

from bagpipe.errors import StoreError
from harness.disk import SimulatedDisk
from harness.journaled import State, opened, some_rows, state


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


@pytest.mark.parametrize("at_most", [3, pytest.param(32, marks=pytest.mark.long)])
def test_every_crash_leaves_the_marks_that_were_made(at_most: int) -> None:
    disk = SimulatedDisk()
    script = Script(disk)
    for _ in script.steps():
        pass
    generator, seen, tried = random.Random(0), set(), 0
    for length in range(len(disk.log) + 1):
        sure = script.sure_at(length)
        for crashed in disk.crashes(length, generator, at_most=at_most):
            tried += 1
            key = (frozenset(crashed.contents().items()), frozenset(sure))
            if key not in seen:
                seen.add(key)
                newest_first(script, crashed, sure)
    assert tried > 30 * at_most
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
