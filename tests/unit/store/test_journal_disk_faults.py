"""A journal whose disk is full or fails, once or from some call on: what fails changes nothing and costs no row."""

from __future__ import annotations

import errno

import pytest

from bagpipe.errors import StoreError
from bagpipe.server.storage import Width
from bagpipe.store.memory import MemoryStore
from bagpipe.store.recorded import Recorded
from harness.disk import Fault, SimulatedDisk
from harness.journaled import WIDTHS, State, batch, opened, state

FULL, BROKEN = errno.ENOSPC, errno.EIO


@pytest.mark.parametrize(
    "in_turn", [(FULL, BROKEN), *(pytest.param((each,), marks=pytest.mark.long) for each in (FULL, BROKEN))]
)
def test_a_disk_that_fails_once_at_any_call_costs_no_row(in_turn: tuple[int, ...]) -> None:
    """The run does what a supervisor would: after an error it returns to the last mark, and replays from there."""
    at = failures = 0
    while True:
        disk = SimulatedDisk()
        with opened(disk):
            pass
        disk.fault = fault = Fault(at, in_turn[at % len(in_turn)])
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
