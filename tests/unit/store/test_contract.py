"""What every store promises; a store joins by adding a maker."""

from __future__ import annotations

import hashlib
import tempfile
import threading
from collections.abc import Callable, Iterator
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from torch import nn

from bagpipe.errors import StoreError
from bagpipe.server.client import RemoteStore
from bagpipe.server.server import EmbeddingServer
from bagpipe.state import of_store, parameters_sha256
from bagpipe.store import MappedStore, MemoryStore, Store
from bagpipe.store.versioned import VersionedStore
from bagpipe.store.views import shared_views
from bagpipe.wire.listener import Listener
from bagpipe.wire.stream import SocketNetwork
from definitions.shards import define_servers
from harness.examples import examples

LOWEST, HIGHEST = -(2**63), 2**63 - 1
WIDTHS = (48, 1, 7)


class Rows:
    """Initial values that tell table, id and column apart, so that no mix-up goes unseen."""

    def __init__(self, table: int, width: int) -> None:
        self.table, self.width = table, width

    def initialise(self, ids: np.ndarray, out: np.ndarray) -> None:
        assert ids.dtype == np.int64
        assert len(out) == len(ids)
        assert 1 <= out.shape[1] <= self.width
        assert out.flags.c_contiguous
        columns = np.arange(out.shape[1], dtype=np.float32)
        out[:] = (ids % 1000).astype(np.float32)[:, None] + columns / 128 + self.table


TABLES = tuple(Rows(number, width) for number, width in enumerate(WIDTHS))


def remote(num_servers: int, shared_memory: bool) -> RemoteStore:
    servers = [EmbeddingServer(server=number, servers=num_servers) for number in range(num_servers)]
    listeners = [Listener("127.0.0.1:0", server.handle) for server in servers]

    def end() -> None:
        for each in (*listeners, *servers):
            each.close()

    addresses = [listener.address for listener in listeners]
    return RemoteStore(TABLES, addresses, SocketNetwork(), shared_memory=shared_memory, on_close=end)


def versioned(**options: bool) -> VersionedStore:
    store = VersionedStore(MemoryStore(TABLES, chunk_bytes=2048), chunk_bytes=2048, **options)  # type: ignore[arg-type]
    store.mark(0)
    return store


# Small chunks, so that tests cross their borders.
MAKERS: dict[str, Callable[[Path], Store]] = {
    "memory": lambda _: MemoryStore(TABLES, chunk_bytes=2048),
    "mapped": lambda path: MappedStore(TABLES, path, resident_bytes_max=4 << 20, chunk_bytes=8192),
    "versioned": lambda _: versioned(),
    "versioned, without a way back": lambda _: versioned(rollback=False),
    "view": lambda _: shared_views(MemoryStore(TABLES, chunk_bytes=2048), 1)[0],
    "one server": lambda _: remote(1, shared_memory=False),
    "three servers": lambda _: remote(3, shared_memory=True),
}


@pytest.fixture(params=MAKERS)
def store(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[Store]:
    with MAKERS[request.param](tmp_path) as made:
        yield made


def in_order(store: Store, table: int, ids: np.ndarray) -> np.ndarray:
    """Indices of ids in order of first write as the store lists them: server by server."""
    num_servers = store.num_servers if isinstance(store, RemoteStore) else 1
    return np.argsort(define_servers(table, ids, num_servers), kind="stable")


def array(*ids: int) -> np.ndarray:
    return np.array(ids, np.int64)


def initial(table: int, ids: np.ndarray) -> np.ndarray:
    out = np.empty((len(ids), WIDTHS[table]), np.float32)
    TABLES[table].initialise(ids, out)
    return out


def read(store: Store, table: int, ids: np.ndarray, columns: int | None = None) -> np.ndarray:
    out = np.full((len(ids), columns or WIDTHS[table]), np.nan, np.float32)
    store.read(table, ids, out)
    return out


def random_values(seed: int, num_rows: int, table: int = 0) -> np.ndarray:
    return np.random.default_rng(seed).standard_normal((num_rows, WIDTHS[table]), np.float32)


def test_a_row_never_written_has_its_initial_value_and_reading_does_not_store_it(store: Store) -> None:
    ids = array(5, -5, 5, 10**12)
    for table in range(len(TABLES)):
        assert np.array_equal(read(store, table, ids), initial(table, ids))
        assert store.num_rows(table) == 0
        assert store.ids(table).tolist() == []
        assert list(store.iterate(table)) == []
    assert store.stats().num_rows == 0


def test_what_was_written_is_read_bit_for_bit(store: Store) -> None:
    special = np.array([0x7FC00001, 0xFFC12345, 0x80000000, 0x00000001, 0x7F800000, 0xFF800000], np.uint32)
    values = np.resize(special, (3, 48)).view(np.float32)
    store.write(0, array(3, 1, 2), values)
    assert np.array_equal(read(store, 0, array(1, 2, 3)).view(np.uint32), values[[1, 2, 0]].view(np.uint32))


def test_one_read_mixes_written_and_initial_rows_in_the_order_asked(store: Store) -> None:
    values = random_values(0, 2)
    store.write(0, array(20, 10), values)
    ids = array(99, 10, 98, 20, 10, 99)
    expected = initial(0, ids)
    expected[[1, 4]], expected[3] = values[1], values[0]
    assert np.array_equal(read(store, 0, ids), expected)


def test_rows_of_several_tables_are_written_and_read_in_one_call(store: Store) -> None:
    written = [(table, array(7, 9, -table), random_values(table, 3, table)) for table in (2, 0)]
    store.write_many(written, passed=3)
    parts = [(table, array(9, 5, 7), np.full((3, WIDTHS[table]), np.nan, np.float32)) for table in (0, 1, 2)]
    store.read_many(parts, after=3)
    for table, ids, out in parts:
        expected = initial(table, ids)
        if table != 1:
            expected[[0, 2]] = random_values(table, 3, table)[[1, 0]]
        assert np.array_equal(out, expected)
    store.write_many([], passed=4)
    store.read_many([], after=4)
    assert store.stats().num_rows == 6


@pytest.mark.parametrize("columns", [1, 16, 47, 48])
def test_the_first_columns_of_rows_are_read_alone(store: Store, columns: int) -> None:
    some = np.random.default_rng(0).permutation(5000)
    store.write(0, some[:4000], random_values(0, 4000))
    expected = initial(0, some)
    expected[:4000] = random_values(0, 4000)
    for asked in (np.arange(5000), np.arange(4000), np.arange(4000, 5000), np.array([4999, 0, 4999]), np.arange(0)):
        found = read(store, 0, some[asked], columns)
        assert np.array_equal(found.view(np.uint32), expected[asked, :columns].view(np.uint32))
    assert store.num_rows(0) == 4000


def test_whole_rows_and_first_columns_of_one_table_are_read_in_one_call(store: Store) -> None:
    store.write_many([(table, np.arange(40), random_values(table, 40, table)) for table in (0, 2)], passed=0)
    asked = [
        (0, array(3, 50, 7), 48),
        (0, array(8, 3, 51), 16),
        (1, array(9), 1),
        (2, array(1, 60), 3),
        (2, array(2), 7),
    ]
    parts = [(table, ids, np.full((len(ids), columns), np.nan, np.float32)) for table, ids, columns in asked]
    store.read_many(parts, after=0)
    for table, ids, out in parts:
        assert np.array_equal(out, read(store, table, ids)[:, : out.shape[1]])
        written = ids[ids < 40]
        if table != 1:
            assert np.array_equal(out[ids < 40], random_values(table, 40, table)[written, : out.shape[1]])


def test_a_table_twice_in_one_write_is_refused_and_changes_nothing(store: Store) -> None:
    with pytest.raises(StoreError, match="table 1 is named twice"):
        store.write_many([(table, array(k), random_values(k, 1, table)) for k, table in enumerate((1, 0, 1))])
    with pytest.raises(StoreError, match="id 5 is written twice"):
        store.write_many([(0, array(1), random_values(0, 1)), (1, array(5, 5), random_values(0, 2, 1))])
    assert store.stats().num_rows == 0


def test_tables_do_not_share_ids(store: Store) -> None:
    for table in range(len(TABLES)):
        store.write(table, array(7), random_values(table, 1, table))
    for table in range(len(TABLES)):
        assert np.array_equal(read(store, table, array(7)), random_values(table, 1, table))


def test_a_second_write_replaces_the_row_and_keeps_its_place(store: Store) -> None:
    store.write(0, array(4, 8, 6), random_values(0, 3))
    store.write(0, array(6, 1, 4), random_values(1, 3))
    assert store.ids(0).tolist() == array(4, 8, 6, 1)[in_order(store, 0, array(4, 8, 6, 1))].tolist()
    assert store.num_rows(0) == 4
    assert np.array_equal(read(store, 0, array(6, 1, 4)), random_values(1, 3))
    assert np.array_equal(read(store, 0, array(8)), random_values(0, 3)[1:2])


def test_any_64_bit_number_is_an_id(store: Store) -> None:
    ids = array(LOWEST, LOWEST + 1, -1, 0, 1, 2**24, 2**24 + 1, 2**53 + 1, HIGHEST - 1, HIGHEST)
    store.write(1, ids, random_values(3, len(ids), 1))
    assert np.array_equal(read(store, 1, ids[::-1]), random_values(3, len(ids), 1)[::-1])
    assert np.array_equal(store.ids(1), ids[in_order(store, 1, ids)])


def test_no_rows_are_no_problem(store: Store) -> None:
    nothing = array()
    store.write(0, nothing, np.empty((0, 48), np.float32))
    assert read(store, 0, nothing).shape == (0, 48)
    assert store.num_rows(0) == 0


def test_strided_ids_and_values_are_taken(store: Store) -> None:
    ids, values = np.arange(20)[::2], random_values(0, 20)[::2]
    store.write(0, ids, values)
    assert np.array_equal(read(store, 0, ids), values)


def test_a_table_that_grows_in_many_writes_keeps_every_row(store: Store) -> None:
    ids = np.random.default_rng(0).permutation(30_000) * 7919 - 10**8
    values = random_values(1, len(ids))
    for part in np.array_split(np.arange(len(ids)), 11):
        store.write(0, ids[part], values[part])
    again = np.random.default_rng(2).permutation(len(ids))
    assert np.array_equal(read(store, 0, ids[again]), values[again])
    assert np.array_equal(store.ids(0), ids[in_order(store, 0, ids)])


@pytest.mark.parametrize("rows_per_chunk", [1, 7, 50, 1000])
def test_iterating_gives_each_row_once_in_order_of_first_write(store: Store, rows_per_chunk: int) -> None:
    ids = np.random.default_rng(0).permutation(50) - 25
    store.write(2, ids, random_values(0, 50, 2))
    store.write(2, ids[10:20], random_values(1, 10, 2))
    chunks = list(store.iterate(2, rows_per_chunk))
    assert [len(some) for some, _ in chunks][:-1] == [rows_per_chunk] * (len(chunks) - 1)
    order = in_order(store, 2, ids)
    assert np.array_equal(np.concatenate([some for some, _ in chunks]), ids[order])
    expected = random_values(0, 50, 2)
    expected[10:20] = random_values(1, 10, 2)
    assert np.array_equal(np.concatenate([values for _, values in chunks]), expected[order])


def test_stats_follow_the_rows(store: Store) -> None:
    before = store.stats()
    store.write(0, np.arange(20_000), random_values(0, 20_000))
    store.write(1, np.arange(5), random_values(0, 5, 1))
    after = store.stats()
    assert after.num_rows == 20_005
    taken = after.bytes_in_memory + after.bytes_on_disk - before.bytes_in_memory - before.bytes_on_disk
    assert taken >= 20_000 * 48 * 4


OK = np.empty((2, 48), np.float32)


@pytest.mark.parametrize(
    ("table", "ids", "rows", "named"),
    [
        (3, array(1, 2), OK, r"no table 3.*has 3"),
        (-1, array(1, 2), OK, r"no table -1"),
        (0, array(1, 2).astype(np.int32), OK, r"ids are int32 of shape \(2,\).*int64"),
        (0, array(1, 2).astype(np.uint64), OK, r"ids are uint64"),
        (0, array(1, 2).astype(">i8"), OK, r"ids are >i8"),
        (0, array(1, 2).reshape(2, 1), OK, r"ids are int64 of shape \(2, 1\)"),
        (0, [1, 2], OK, r"ids are list"),
        (0, array(1, 2), OK.astype(np.float64), r"float64 of shape \(2, 48\).*float32"),
        (0, array(1, 2), OK[:1], r"shape \(1, 48\).*\(2, 48\)"),
        (0, array(1, 2), np.empty((2, 49), np.float32), r"shape \(2, 49\).*\(2, 48\)"),
        (0, array(1, 2), np.empty((2, 0), np.float32), r"shape \(2, 0\).*\(2, 48\)"),
        (0, array(1, 2), OK.ravel(), r"shape \(96,\)"),
        (0, array(1, 2), None, r"is NoneType"),
    ],
)
def test_wrong_arguments_are_refused_by_name_and_change_nothing(
    store: Store, table: int, ids: object, rows: object, named: str
) -> None:
    for call in (store.read, store.write):
        with pytest.raises(StoreError, match=named):
            call(table, ids, rows)  # type: ignore[arg-type]
    assert store.stats().num_rows == 0


def test_a_part_of_a_row_can_not_be_written(store: Store) -> None:
    with pytest.raises(StoreError, match=r"values is float32 of shape \(2, 47\): give float32 of shape \(2, 48\)"):
        store.write(0, array(1, 2), np.empty((2, 47), np.float32))
    assert store.stats().num_rows == 0


def test_wrong_tables_are_refused_everywhere(store: Store) -> None:
    for call in (store.num_rows, store.ids, store.iterate):
        with pytest.raises(StoreError, match="no table 3"):
            call(3)
    with pytest.raises(StoreError, match="rows_per_chunk is 0"):
        store.iterate(0, 0)


def test_an_output_that_can_not_be_written_into_is_refused(store: Store) -> None:
    locked = np.empty((2, 48), np.float32)
    locked.flags.writeable = False
    for out in (locked, np.empty((4, 48), np.float32)[::2], np.empty((2, 48), np.float32, order="F")):
        with pytest.raises(StoreError, match="read-only or strided"):
            store.read(0, array(1, 2), out)


def test_a_row_twice_in_one_write_is_refused_and_changes_nothing(store: Store) -> None:
    store.write(0, array(1), random_values(0, 1))
    with pytest.raises(StoreError, match="id 1 is written twice"):
        store.write(0, array(1, 2, 1), random_values(1, 3))
    assert store.ids(0).tolist() == [1]
    assert np.array_equal(read(store, 0, array(1)), random_values(0, 1))


def test_a_closed_store_refuses_work_and_can_be_closed_again(store: Store) -> None:
    store.write(0, array(1), random_values(0, 1))
    chunks = store.iterate(0)
    store.close()
    store.close()
    for call in (
        lambda: read(store, 0, array(1)),
        lambda: store.write(0, array(1), random_values(0, 1)),
        lambda: store.num_rows(0),
        lambda: store.ids(0),
        lambda: store.iterate(0),
        lambda: next(chunks),
        store.stats,
    ):
        with pytest.raises(StoreError, match="closed"):
            call()


def test_leaving_the_context_closes(store: Store) -> None:
    with pytest.raises(ZeroDivisionError), store:
        raise ZeroDivisionError
    with pytest.raises(StoreError, match="closed"):
        store.num_rows(0)


def test_one_thread_reads_while_another_writes_other_rows_and_the_table_grows(store: Store) -> None:
    old = np.arange(0, 4000, 2)
    store.write(0, old, random_values(0, len(old)))
    failures: list[BaseException] = []
    done = threading.Event()

    def reader() -> None:
        try:
            rng = np.random.default_rng(1)
            while not done.is_set():
                some = rng.choice(len(old), 500)
                assert np.array_equal(read(store, 0, old[some]), random_values(0, len(old))[some])
                never = -1 - rng.integers(0, 1000, 50)
                assert np.array_equal(read(store, 0, never), initial(0, never))
        except BaseException as error:
            failures.append(error)

    thread = threading.Thread(target=reader)
    thread.start()
    try:
        for turn in range(60):
            fresh = np.arange(turn * 2000 + 1, (turn + 1) * 2000, 2)
            store.write(0, fresh, random_values(turn, len(fresh)))
            store.write(0, fresh[::3], random_values(turn, len(fresh))[::3])
    finally:
        done.set()
        thread.join()
    assert failures == []
    assert store.num_rows(0) == len(old) + 60_000
    for turn in range(60):
        fresh = np.arange(turn * 2000 + 1, (turn + 1) * 2000, 2)
        assert np.array_equal(read(store, 0, fresh), random_values(turn, len(fresh)))


some_ids = st.lists(st.one_of(st.integers(-4, 12), st.integers(LOWEST, HIGHEST)), max_size=20)
calls = st.lists(st.tuples(st.integers(0, 2), st.booleans(), some_ids), max_size=15)


@pytest.mark.parametrize("name", MAKERS)
@examples(40)
@given(calls=calls)
def test_it_equals_a_dict_after_any_calls(name: str, calls: list[tuple[int, bool, list[int]]]) -> None:
    model: list[dict[int, np.ndarray]] = [{} for _ in TABLES]
    with tempfile.TemporaryDirectory() as path, MAKERS[name](Path(path)) as store:
        for number, (table, writes, listed) in enumerate(calls):
            ids = array(*(dict.fromkeys(listed) if writes else listed))
            if writes:
                values = random_values(number, len(ids), table)
                store.write(table, ids, values)
                model[table].update(zip(ids.tolist(), values, strict=True))
            expected = initial(table, ids)
            for k, key in enumerate(ids.tolist()):
                expected[k] = model[table].get(key, expected[k])
            columns = 1 + number % WIDTHS[table]
            assert np.array_equal(read(store, table, ids, columns), expected[:, :columns])
            assert np.array_equal(read(store, table, ids), expected)
        for table, rows in enumerate(model):
            listed = array(*rows)
            assert store.ids(table).tolist() == listed[in_order(store, table, listed)].tolist()
            for ids, values in store.iterate(table, 5):
                assert np.array_equal(values, np.stack([rows[key] for key in ids.tolist()]))


def test_the_digest_of_a_state_is_by_key_and_does_not_depend_on_where_rows_are(store: Store) -> None:
    """Of dense parameters by name, then of tables by name: shape, ids in order, rows in order of their ids."""
    model = nn.Linear(3, 2)
    names = ["word", "untouched", "ad"]
    ids = {0: np.random.default_rng(1).permutation(100_000) * 92_233_720_368_547 - 2**62, 2: array(7, HIGHEST, LOWEST)}
    for table, some in ids.items():
        for half in np.array_split(np.arange(len(some)), 2):
            store.write(table, some[half], random_values(table, len(some), table)[half])
    digest = hashlib.sha256()
    for name, value in sorted(model.named_parameters()):
        digest.update(f"{name} float32 {tuple(value.shape)}\n".encode() + value.detach().numpy().tobytes())
    for table in (2, 0):
        order = np.argsort(ids[table])
        digest.update(f"{names[table]} ({len(order)}, {WIDTHS[table]})\n".encode())
        digest.update(ids[table][order].tobytes())
        digest.update(random_values(table, len(order), table)[order].tobytes())
    assert parameters_sha256(model, names, store) == digest.hexdigest()
    assert of_store(model, names, store).sha256() == digest.hexdigest()
    assert store.ids(2).tolist() == ids[2][in_order(store, 2, ids[2])].tolist(), "the store's own order has not changed"
