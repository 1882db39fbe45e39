"""Rows of marks as files of checkpoints, and rows that come back from those and a journal."""

from __future__ import annotations

import random
import shutil
import threading
from collections.abc import Sequence
from pathlib import Path

import numpy as np
import pytest

from bagpipe.checkpoint.directory import Checkpoints
from bagpipe.checkpoint.disk import Disk, SystemDisk
from bagpipe.checkpoint.manifest import Facts, TableEntry
from bagpipe.errors import CheckpointError, StoreError
from bagpipe.server.storage import Width
from bagpipe.store.journal import Journal
from bagpipe.store.local import LocalStore
from bagpipe.store.mapped import MappedStore
from bagpipe.store.memory import MemoryStore
from bagpipe.store.recorded import Recorded
from definitions.shards import define_servers
from harness.disk import Fault, SimulatedDisk

WIDTHS = {"user": 4, "item": 2}
NAMES = list(WIDTHS)
FACTS = Facts(
    tables=tuple(
        TableEntry(name=name, rows=None, dims=(width,), width=width, optimizer="sgd") for name, width in WIDTHS.items()
    )
)
Parts = list[tuple[int, np.ndarray, np.ndarray]]
State = list[dict[int, bytes]]


def some_rows(seed: int, num_ids: int = 200, at_most: int = 50) -> Parts:
    generator = np.random.default_rng(seed)
    return [
        (
            table,
            ids := generator.permutation(num_ids)[: generator.integers(0, at_most)],
            generator.standard_normal((len(ids), width), np.float32),
        )
        for table, width in enumerate(WIDTHS.values())
    ]


class Servers:
    """Some stores that have a shard of all rows each, and journals and checkpoints on one disk."""

    def __init__(
        self, path: Path, count: int = 1, kind: str = "memory", disk: Disk | None = None, journals: bool = True
    ) -> None:
        self.disk = disk or SystemDisk()
        self.path = path
        self.checkpoints = Checkpoints(path / "checkpoints", full_every=3, keep=2, disk=self.disk)
        self.stores = [
            Recorded(
                self._rows(kind, number),
                Journal(path / f"journal-{number}", self.disk) if journals else None,
                checkpoints=path / "checkpoints",
                shard=(number, count),
                disk=self.disk,
            )
            for number in range(count)
        ]

    def _rows(self, kind: str, number: int) -> LocalStore:
        tables = list(map(Width, WIDTHS.values()))
        if kind == "memory":
            return MemoryStore(tables, chunk_bytes=256)
        directory = self.path / f"rows-{number}"
        return MappedStore(tables, directory)

    def write(self, parts: Parts) -> None:
        for number, store in enumerate(self.stores):
            mine = [define_servers(table, ids, len(self.stores)) == number for table, ids, _ in parts]
            store.write_many([(table, ids[m], rows[m]) for (table, ids, rows), m in zip(parts, mine, strict=True)])

    def mark(self, done: int) -> None:
        for store in self.stores:
            store.mark(done)

    def save(self, done: int) -> int:
        """A checkpoint; how many rows are in its files."""
        with self.checkpoints.begin(done) as pending:
            for store in self.stores:
                pending.add(store.save(done, pending.directory, NAMES, since=pending.base))
            checkpoint = pending.commit(FACTS)
        for store in self.stores:
            store.settle(done)
        return sum(part.rows for entry in checkpoint.manifest.files for part in entry.rows or ())

    def condense(self, done: int) -> None:
        for store in self.stores:
            with store.snapshot(done) as snapshot:
                store.condense(done, snapshot)
            store.forget(done)

    def return_to(self, done: int) -> None:
        for store in self.stores:
            store.return_to(done)

    def state(self) -> State:
        found: State = [{}, {}]
        for store in self.stores:
            for table in range(len(WIDTHS)):
                for ids, rows in store.iterate(table):
                    found[table].update(zip(ids.tolist(), (row.tobytes() for row in rows), strict=True))
        return found

    def close(self) -> None:
        for store in self.stores:
            store.close()


@pytest.mark.parametrize("kind", ["memory", "mapped"])
@pytest.mark.parametrize("count", [1, 3])
def test_servers_that_die_again_and_again_come_back_with_the_rows_of_their_last_mark(
    kind: str, count: int, tmp_path: Path
) -> None:
    choice = random.Random(count)
    servers = Servers(tmp_path, count, kind)
    states: dict[int, State] = {}
    done = deaths = 0
    servers.mark(0)
    states[0] = servers.state()
    for seed in range(60):
        action = choice.choice(["write", "write", "mark", "mark", "save", "condense", "die", "back"])
        if action == "write":
            servers.write(some_rows(seed))
        elif action == "mark":
            done += 1
            servers.mark(done)
            states[done] = servers.state()
        elif action == "condense" and done in servers.stores[0].marks():
            servers.condense(done)
        elif action == "save" and done not in {found.done for found in servers.checkpoints.list()}:
            if done in servers.stores[0].marks():
                servers.save(done)
                servers.checkpoints.continue_from(done)
        elif action in ("die", "back"):
            if action == "die":
                deaths += 1
                base = servers.checkpoints._base
                servers.close()
                servers = Servers(tmp_path, count, kind)
                servers.checkpoints.continue_from(base and base.done)
            marks = [store.marks() for store in servers.stores]
            assert all(marks[0] == other for other in marks)
            assert marks[0][-1] == done
            done = choice.choice(marks[0][-3:])
            servers.return_to(done)
            base = servers.checkpoints._base
            if base is not None and base.done > done:
                servers.checkpoints.continue_from(None)
            assert servers.state() == states[done]
    assert deaths > 5
    servers.close()


@pytest.mark.parametrize("by", ["save", "condense"])
def test_a_server_goes_on_from_rows_of_a_mark_and_its_journal_after_every_crash(by: str) -> None:
    """Also in the middle of a checkpoint or what is condensed, and while files of the journal are removed for it."""
    disk, path = SimulatedDisk(), Path("/run")
    disk.make_directory(path)
    disk.sync_directory(path.parent)
    servers = Servers(path, 1, disk=disk)
    states: dict[int, State] = {}
    sure: list[tuple[int, int]] = []

    def mark(done: int) -> None:
        states[done] = servers.state()
        servers.mark(done)
        sure.append((len(disk.log), done))

    for done in range(7):
        mark(done)
        if done in (2, 4, 5):
            getattr(servers, by)(done)
        servers.write(some_rows(done, num_ids=10, at_most=5))
    generator, seen = random.Random(0), set()
    for length in range(len(disk.log) + 1):
        last = next((done for start, done in reversed(sure) if start <= length), None)
        for crashed in disk.crashes(length, generator, at_most=64):
            key = (frozenset(crashed.contents().items()), last)
            if key in seen or last is None:
                continue
            seen.add(key)
            found = Servers(path, 1, disk=crashed)
            marks = found.stores[0].marks()
            assert last in marks
            for done in {marks[-1], last, generator.choice(marks)}:
                if done in found.stores[0].marks():
                    found.return_to(done)
                    assert found.state() == states[done]
            found.close()
    assert len(seen) > 100


def test_an_incremental_checkpoint_has_the_rows_that_were_written_since_the_last_one(tmp_path: Path) -> None:
    servers = Servers(tmp_path, 2)
    servers.write(some_rows(0, num_ids=1000, at_most=1000))
    servers.mark(10)
    num_all = sum(map(len, servers.state()))
    assert servers.save(10) == num_all
    parts = [(0, np.arange(7), np.ones((7, 4), np.float32)), (1, np.arange(3), np.ones((3, 2), np.float32))]
    servers.write(parts)
    servers.mark(20)
    expected = servers.state()
    servers.write(some_rows(1, num_ids=1000, at_most=1000))
    for store in servers.stores:
        store.forget(20)
    assert servers.save(20) == 10
    servers.close()
    for count in (1, 2, 3):
        others = Servers(tmp_path / f"of-{count}", count, journals=False)
        for store in others.stores:
            store.load(20, tmp_path / "checkpoints", NAMES)
            assert store.marks() == [20]
        assert others.state() == expected
        others.write(parts)
        others.return_to(20)
        assert others.state() == expected
        others.close()


def test_after_a_journal_was_replayed_the_next_checkpoint_is_still_incremental(tmp_path: Path) -> None:
    servers = Servers(tmp_path)
    servers.write(some_rows(0, num_ids=500, at_most=500))
    servers.mark(1)
    servers.save(1)
    servers.write([(0, np.arange(5), np.ones((5, 4), np.float32))])
    servers.mark(2)
    servers.close()
    servers = Servers(tmp_path)
    servers.return_to(2)
    servers.checkpoints.continue_from(1)
    servers.write([(1, np.arange(2), np.ones((2, 2), np.float32))])
    servers.mark(3)
    expected = servers.state()
    assert servers.save(3) == 7
    other = Servers(tmp_path / "other", journals=False)
    other.stores[0].load(3, tmp_path / "checkpoints", NAMES)
    assert other.state() == expected


def test_a_checkpoint_is_that_of_its_mark_though_others_write_meanwhile(tmp_path: Path) -> None:
    servers = Servers(tmp_path)
    servers.write(some_rows(0, num_ids=4000, at_most=4000))
    servers.mark(1)
    expected = servers.state()
    over = threading.Event()

    def write() -> None:
        seed = 1
        while not over.is_set():
            servers.write(some_rows(seed, num_ids=4000, at_most=500))
            seed += 1

    thread = threading.Thread(target=write)
    thread.start()
    try:
        servers.save(1)
    finally:
        over.set()
        thread.join()
    other = Servers(tmp_path / "other", journals=False)
    other.stores[0].load(1, tmp_path / "checkpoints", NAMES)
    assert other.state() == expected


def test_a_checkpoint_that_is_not_there_changes_nothing(tmp_path: Path) -> None:
    servers = Servers(tmp_path)
    servers.write(some_rows(0))
    servers.mark(1)
    before = servers.state()
    with pytest.raises(CheckpointError, match="no checkpoint after 5 iterations"):
        servers.stores[0].load(5, tmp_path / "checkpoints", NAMES)
    assert servers.state() == before
    assert servers.stores[0].marks() == [1]


@pytest.mark.parametrize("journals", [True, False])
def test_a_load_that_fails_halfway_is_refused_until_it_is_done_again(journals: bool) -> None:
    disk, path = SimulatedDisk(), Path("/run")
    disk.make_directory(path)
    disk.sync_directory(path.parent)
    servers = Servers(path, disk=disk, journals=journals)
    servers.write(some_rows(0, num_ids=20))
    servers.mark(1)
    servers.save(1)
    expected = servers.state()
    servers.write(some_rows(1, num_ids=20))
    servers.mark(2)
    at = failed = 0
    while True:
        disk.fault = fault = Fault(at, 5)
        try:
            servers.stores[0].load(1, path / "checkpoints", NAMES)
        except (CheckpointError, StoreError):
            failed += 1
        disk.fault = None
        if len(fault.seen) <= at:
            break
        servers.stores[0].load(1, path / "checkpoints", NAMES)
        assert servers.state() == expected
        assert servers.stores[0].marks() == [1]
        servers.stores[0].mark(1)
        servers.write(some_rows(1, num_ids=20))
        servers.mark(2)
        at += 1
    assert failed > 4


def test_a_journal_whose_checkpoint_is_gone_leads_nowhere_and_a_load_helps(tmp_path: Path) -> None:
    servers = Servers(tmp_path)
    states = {}
    for done in (1, 2):
        servers.write(some_rows(done))
        servers.mark(done)
        states[done] = servers.state()
        servers.checkpoints.continue_from(None)
        servers.save(done)
    servers.write(some_rows(3))
    servers.mark(3)
    servers.close()
    servers = Servers(tmp_path)
    store = servers.stores[0]
    assert store.marks() == [2, 3]
    shutil.rmtree(tmp_path / "checkpoints" / "00000002")
    assert store.marks() == []
    with pytest.raises(StoreError, match=r"no mark 3: there are \[\].*load a checkpoint"):
        store.return_to(3)
    store.load(1, tmp_path / "checkpoints", NAMES)
    assert servers.state() == states[1]
    servers.write(some_rows(2))
    servers.mark(2)
    servers.close()
    servers = Servers(tmp_path)
    assert servers.stores[0].marks() == [1, 2]
    servers.return_to(2)
    assert servers.state() == states[2]


def test_the_journal_keeps_only_what_follows_the_last_checkpoint(tmp_path: Path) -> None:
    servers = Servers(tmp_path)

    def names() -> Sequence[str]:
        return sorted(path.name for path in (tmp_path / "journal-0").iterdir() if path.suffix == ".writes")

    for done in range(1, 4):
        servers.write(some_rows(done))
        servers.mark(done)
    assert names() == ["000000000001.writes", "000000000002.writes", "start.writes"]
    servers.save(3)
    assert names() == ["000000000003.writes"]
    servers.stores[0].settle(2)
    servers.stores[0].settle(9)
    assert names() == ["000000000003.writes"]
    assert servers.stores[0].marks() == [3]
    servers.return_to(3)
    servers.stores[0].mark(3)
    assert names() == ["000000000003.writes"]


def test_a_journal_that_is_condensed_is_short_and_leads_to_the_same_rows(tmp_path: Path) -> None:
    servers = Servers(tmp_path)
    (store,) = servers.stores
    store._journal_bytes = 10_000
    states, longest = {}, 0
    for done in range(1, 40):
        servers.write(some_rows(done))
        servers.mark(done)
        states[done] = servers.state()
        store.forget(done)
        if store.is_long():
            with store.snapshot(done) as snapshot:
                store.condense(done, snapshot)
        longest = max(longest, store._journal.num_bytes())
    assert store._condensed.marks()[0] > 20
    rows_bytes = sum(4 * width * store.num_rows(table) for table, width in enumerate(WIDTHS.values()))
    written_once = 50 * (4 + 2) * 4 * 2
    assert longest <= max(10_000, 2 * rows_bytes) + 3 * written_once
    servers.write(some_rows(99))
    servers.close()
    back = Servers(tmp_path)
    back.return_to(39)
    assert back.state() == states[39]
    back.close()


def test_rows_condensed_of_a_future_that_was_left_are_gone(tmp_path: Path) -> None:
    servers = Servers(tmp_path)
    (store,) = servers.stores
    for done in (1, 2):
        servers.write(some_rows(done))
        servers.mark(done)
    state = servers.state()
    with store.snapshot(2) as snapshot:
        store.condense(2, snapshot)
    servers.return_to(1)
    assert store._condensed.marks() == []
    servers.write(some_rows(2))
    servers.mark(2)
    assert servers.state() == state
    servers.close()
