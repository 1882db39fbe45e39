"""What stores of this machine show of a write that is under way, and what a call gets that meets `close`."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path

import numpy as np
import pytest

from bagpipe.errors import StoreError
from bagpipe.store import MappedStore, MemoryStore, Store
from bagpipe.store.chunks import ChunkedRows
from bagpipe.store.local import LocalStore
from bagpipe.store.mapped import FileRows
from bagpipe.store.versioned import VersionedStore

INITIAL = -7.0


class Sevens:
    """Rows that begin with a number that nobody writes."""

    width = 3

    def initialise(self, ids: np.ndarray, out: np.ndarray) -> None:
        out[:] = INITIAL


TABLES = (Sevens(), Sevens())


def marked(store: VersionedStore) -> VersionedStore:
    store.mark(0)
    return store


MAKERS: dict[str, Callable[[Path], VersionedStore | LocalStore]] = {
    "memory": lambda _: MemoryStore(TABLES, chunk_bytes=64),
    "mapped": lambda path: MappedStore(TABLES, path / "rows"),
    "versioned": lambda _: VersionedStore(MemoryStore(TABLES, chunk_bytes=64)),
    "versioned, mapped": lambda path: VersionedStore(MappedStore(TABLES, path / "rows")),
    "a layer": lambda _: marked(VersionedStore(MemoryStore(TABLES, chunk_bytes=64), chunk_bytes=64)),
}


@pytest.fixture(params=MAKERS)
def store(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[Store]:
    with MAKERS[request.param](tmp_path) as made:
        yield made


@pytest.fixture
def in_the_gap(monkeypatch: pytest.MonkeyPatch) -> Callable[[Callable[[], None]], None]:
    """Has something done in the next write, once its rows have their places and before any has its value."""
    waiting: list[Callable[[], None]] = []

    def scatter(kind: type[ChunkedRows]) -> Callable[..., None]:
        real = kind.scatter

        def scattered(rows: ChunkedRows, positions: np.ndarray, values: np.ndarray) -> None:
            while waiting:
                waiting.pop()()
            real(rows, positions, values)

        return scattered

    for kind in (ChunkedRows, FileRows):
        monkeypatch.setattr(kind, "scatter", scatter(kind))
    return waiting.append


def write(store: Store, number: float, *ids: int, table: int = 0) -> None:
    store.write(table, np.array(ids), np.full((len(ids), 3), number, np.float32))


def read(store: Store, *ids: int, table: int = 0) -> list[float]:
    out = np.full((len(ids), 3), np.nan, np.float32)
    store.read(table, np.array(ids), out)
    assert (out == out[:, :1]).all(), "a row is all of one write"
    return out[:, 0].tolist()


def test_a_new_row_is_not_found_before_it_has_its_value(store, in_the_gap) -> None:
    seen: list[float] = []
    write(store, 1.0, 10, 11)
    in_the_gap(lambda: seen.extend(read(store, 10, 12, 13, 99)))
    write(store, 2.0, 12, 11, 13)
    assert seen == [1.0, INITIAL, INITIAL, INITIAL]
    assert read(store, 10, 11, 12, 13, 99) == [1.0, 2.0, 2.0, 2.0, INITIAL]


def test_a_read_beside_a_write_sees_nothing_of_what_was_returned_from(store, in_the_gap) -> None:
    """The values of rows that were given up still lie where new rows get their places."""
    seen: list[float] = []
    write(store, 1.0, 10)
    if isinstance(store, VersionedStore):
        store.mark(1)
        write(store, 2.0, 11, 12)
        store.rollback(1)
    else:
        write(store, 2.0, 11, 12)
        store.truncate(0, 1)
    in_the_gap(lambda: seen.extend(read(store, 10, 11, 12, 13)))
    write(store, 3.0, 13, 12)
    assert seen == [1.0, INITIAL, INITIAL, INITIAL]
    assert read(store, 10, 11, 12, 13) == [1.0, INITIAL, 3.0, 3.0]


def test_of_two_writes_at_once_each_shows_its_rows_when_it_is_done(store, in_the_gap) -> None:
    seen: list[float] = []

    def another() -> None:
        write(store, 2.0, 20, 21)
        seen.extend(read(store, 10, 11, 20, 21))

    in_the_gap(another)
    write(store, 1.0, 10, 11)
    assert seen == [INITIAL, INITIAL, 2.0, 2.0]
    assert read(store, 10, 11, 20, 21) == [1.0, 1.0, 2.0, 2.0]


def test_a_write_that_fails_halfway_leaves_a_store_that_refuses_all_work(store, in_the_gap) -> None:
    def fail() -> None:
        raise ZeroDivisionError("the end")

    write(store, 1.0, 10)
    in_the_gap(fail)
    with pytest.raises(ZeroDivisionError):
        write(store, 2.0, 11)
    with pytest.raises(StoreError, match="halfway"):
        read(store, 10)


class Ending(MemoryStore):
    """Is closed, as by another thread, right after the next call has seen that it is open."""

    closes = False

    def _check_usable(self) -> None:
        super()._check_usable()
        if self.closes:
            self.close()


IDS, VALUES = np.arange(3), np.ones((3, 3), np.float32)
CALLS: dict[str, Callable[[LocalStore], object]] = {
    "read": lambda store: store.read(0, IDS, VALUES.copy()),
    "find": lambda store: store.find(0, IDS),
    "gather": lambda store: store.gather(0, IDS, VALUES.copy()),
    "write": lambda store: store.write(0, IDS + 2, VALUES),
    "write_many": lambda store: store.write_many([(1, IDS, VALUES), (0, IDS, VALUES)]),
    "num_rows": lambda store: store.num_rows(0),
    "ids": lambda store: store.ids(0),
    "iterate": lambda store: list(store.iterate(0)),
    "scan": lambda store: store.scan(0, 0, 3),
    "put": lambda store: store.put(0, IDS, VALUES),
    "place": lambda store: store.place([(0, IDS, VALUES)]),
    "truncate": lambda store: store.truncate(0, 1),
    "stats": lambda store: store.stats(),
}


@pytest.mark.parametrize("call", CALLS)
def test_a_call_that_meets_close_is_refused_by_name(call: str) -> None:
    store = Ending(TABLES)
    store.write(0, IDS, VALUES)
    store.closes = True
    with pytest.raises(StoreError, match="the store is closed"):
        CALLS[call](store)


@pytest.mark.parametrize("marked", [False, True])
def test_a_versioned_write_that_meets_close_is_refused_and_over(marked: bool) -> None:
    base = Ending(TABLES)
    store = VersionedStore(base)
    if marked:
        store.mark(0)
        base.bytes_in_memory_max = 10**9  # so that a write to the layer looks at the base first
    base.closes = True
    with pytest.raises(StoreError, match="the store is closed"):
        write(store, 1.0, 10)
    assert not any(layer.num_writers for layer in store._layers), "nobody waits for it"
    store.close()


def test_rows_that_a_read_has_found_stay_whatever_is_merged_marked_and_written_meanwhile() -> None:
    """A read of a server may take long; layers that are gone are used again."""
    store = marked(VersionedStore(MemoryStore(TABLES)))
    write(store, 1.0, 10)
    store.mark(1)
    found, out = store.find(0, np.array([10])), np.empty((1, 3), np.float32)
    store.saved(1)
    for done in (2, 3):
        store.mark(done)
        write(store, 2.0, 11)
        store.saved(done)
    found.fill(out)
    assert out.tolist() == [[1.0] * 3]
    layers = {id(layer.rows) for layer in store._layers}
    del found
    for done in (4, 5, 6):
        store.mark(done)
        store.saved(done)
        layers |= {id(layer.rows) for layer in store._layers}
    assert len(layers) < 4, "their memory is used again when nobody reads there"
    store.close()
