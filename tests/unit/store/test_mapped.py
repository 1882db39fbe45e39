"""Rows on disk: a full disk, reopening, every way a directory can be wrong, and what is left behind."""

from __future__ import annotations

import errno
import gc
import json
import os
import resource
import signal
import subprocess
import sys
import zlib
from collections.abc import Callable, Iterator
from pathlib import Path

import numpy as np
import pytest

from bagpipe.errors import BagpipeError, ConfigError, StoreError
from bagpipe.store import MappedStore


class Zeros:
    def __init__(self, width: int) -> None:
        self.width = width

    def initialise(self, ids: np.ndarray, out: np.ndarray) -> None:
        out[:] = 0


TABLES = (Zeros(48), Zeros(3))


def values(seed: int, num_rows: int, width: int = 48) -> np.ndarray:
    return np.random.default_rng(seed).standard_normal((num_rows, width), np.float32)


def num_open_files() -> int:
    return len(list(Path("/proc/self/fd").iterdir()))


def contents(store: MappedStore) -> list[tuple[list[int], bytes]]:
    return [
        (store.ids(table).tolist(), b"".join(rows.tobytes() for _, rows in store.iterate(table))) for table in (0, 1)
    ]


@pytest.fixture
def kept(tmp_path: Path) -> Path:
    with MappedStore.create(tmp_path / "store", TABLES, keep=True) as store:
        store.write(0, np.arange(1000) * 7 - 50, values(0, 1000))
        store.write(1, np.arange(10), values(1, 10, 3))
    return tmp_path / "store"


@pytest.fixture
def small_disk(tmp_path: Path) -> Iterator[Path]:
    path = tmp_path / "disk"
    path.mkdir()
    made = subprocess.run(
        ["mount", "-t", "tmpfs", "-o", "size=3m", "none", str(path)], capture_output=True, check=False
    )
    if made.returncode:
        pytest.skip(f"can't mount a small disk: {made.stderr.decode().strip()}")
    yield path
    subprocess.run(["umount", "--lazy", str(path)], check=True)


# A full disk


def test_a_full_disk_is_named_before_any_row_changes(small_disk: Path) -> None:
    with MappedStore.create(small_disk / "store", TABLES, keep=True) as store:
        store.write(0, np.arange(1000), values(0, 1000))
        before = contents(store)
        mixed = np.arange(500, 30_500)
        with pytest.raises(
            StoreError, match=r"table-00000\.rows can't grow to 5,856,000 B.*are free.*larger disk"
        ) as caught:
            store.write(0, mixed, values(1, len(mixed)))
        assert caught.value.errno == errno.ENOSPC
        assert contents(store) == before
        store.write(0, np.arange(500, 2000), values(2, 1500))  # what does fit still goes in, to the last page
    with MappedStore.open(small_disk / "store", TABLES) as store:
        assert store.num_rows(0) == 2000


def test_the_last_free_bytes_are_used_when_a_whole_step_does_not_fit(small_disk: Path) -> None:
    num_rows = (3 << 20) // 192 - 100
    with MappedStore.create(small_disk / "store", TABLES) as store:
        for part in np.array_split(np.arange(num_rows), 9):
            store.write(0, part, values(0, len(part)))
        assert store.num_rows(0) == num_rows


@pytest.mark.parametrize("number", [errno.ENOSPC, errno.EDQUOT, errno.EIO])
def test_an_allocation_that_fails_changes_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, number: int) -> None:
    allocate = os.posix_fallocate

    def fails(fd: int, offset: int, length: int) -> None:
        allocate(fd, offset, length // 2)  # part of it is done, as on a real disk
        raise OSError(number, os.strerror(number))

    with MappedStore.create(tmp_path / "store", TABLES) as store:
        store.write(0, np.arange(1000), values(0, 1000))
        before, disk_before = contents(store), store.stats().bytes_on_disk
        with monkeypatch.context() as patch:
            patch.setattr(os, "posix_fallocate", fails)
            with pytest.raises(StoreError, match=r"table-00000\.rows") as caught:
                store.write(0, np.arange(990, 9000), values(1, 8010))
            assert caught.value.errno == number
            assert contents(store) == before
            assert store.stats().bytes_on_disk == disk_before
            store.write(0, np.arange(1000), values(2, 1000))  # needs no room
        store.write(0, np.arange(990, 9000), values(1, 8010))
        assert store.num_rows(0) == 9000


def test_a_limit_on_file_sizes_is_an_error_and_not_a_signal(tmp_path: Path) -> None:
    limit = resource.getrlimit(resource.RLIMIT_FSIZE)
    with MappedStore.create(tmp_path / "store", TABLES) as store:
        try:
            resource.setrlimit(resource.RLIMIT_FSIZE, (1 << 20, limit[1]))
            with pytest.raises(StoreError, match="can't grow to 1,920,000 B"):
                store.write(0, np.arange(10_000), values(0, 10_000))
            store.write(0, np.arange(1000), values(0, 1000))
        finally:
            resource.setrlimit(resource.RLIMIT_FSIZE, limit)
        assert store.num_rows(0) == 1000


def test_a_small_disk_at_sync_leaves_the_store_usable(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(*_: object) -> int:
        raise OSError(errno.ENOSPC, "No space left on device")

    with MappedStore.create(tmp_path / "store", TABLES, keep=True) as store:
        store.write(0, np.arange(10), values(0, 10))
        with monkeypatch.context() as patch:
            patch.setattr(os, "pwrite", full)
            with pytest.raises(StoreError, match=r"table-00000\.ids"):
                store.sync()
        store.write(0, np.arange(20), values(1, 20))
    with MappedStore.open(tmp_path / "store", TABLES) as store:
        assert store.num_rows(0) == 20


# Failures of the medium


def test_a_file_cut_off_while_in_use_is_an_error_and_not_a_signal(tmp_path: Path) -> None:
    with MappedStore.create(tmp_path / "store", TABLES, keep=True) as store:
        store.write(0, np.arange(1000), values(0, 1000))
        os.truncate(tmp_path / "store" / "table-00000.rows", 192 * 900)
        out = np.empty((1, 48), np.float32)
        store.read(0, np.array([899]), out)
        with pytest.raises(StoreError, match=r"has 172,800 B and should have 192,000"):
            store.read(0, np.array([999]), out)


def test_after_a_write_that_failed_halfway_the_store_refuses_work(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with MappedStore.create(tmp_path / "store", TABLES, keep=True) as store:
        store.write(0, np.arange(10), values(0, 10))
        store.sync()
        monkeypatch.setattr("bagpipe.store.rowfile._write", lambda *_: errno.EIO)
        with pytest.raises(StoreError, match=r"writing .*table-00000\.rows failed \(Input/output error\)"):
            store.write(0, np.arange(10), values(1, 10))
        for call in (lambda: store.num_rows(0), store.sync, lambda: store.read(0, np.arange(1), values(0, 1))):
            with pytest.raises(StoreError, match="failed halfway"):
                call()
    with pytest.raises(StoreError, match="was not closed"):
        MappedStore.open(tmp_path / "store", TABLES)


def test_rows_lost_on_their_way_to_the_disk_are_never_published(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with MappedStore.create(tmp_path / "store", TABLES, keep=True, resident_bytes_max=4 << 20) as store:
        monkeypatch.setattr("bagpipe.store.residency._let_go", lambda *_: errno.EIO)
        with pytest.raises(StoreError, match=r"writing out .* failed"):
            store.write(0, np.arange(50_000), values(0, 50_000))
        monkeypatch.undo()
        with pytest.raises(StoreError, match="failed"):
            store.sync()
    with pytest.raises(StoreError, match="was not closed"):
        MappedStore.open(tmp_path / "store", TABLES)


def test_rows_lost_while_others_were_read_are_never_published(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with MappedStore.create(tmp_path / "store", TABLES, keep=True, resident_bytes_max=4 << 20) as store:
        store.write(0, np.arange(50_000), values(0, 50_000))
        with monkeypatch.context() as patch:
            patch.setattr("bagpipe.store.residency._let_go", lambda *_: errno.EIO)
            with pytest.raises(StoreError, match=r"writing out .* failed"):
                store.read(0, np.arange(50_000), values(0, 50_000))
        for call in (store.sync, lambda: store.num_rows(0), lambda: store.write(0, np.arange(1), values(0, 1))):
            with pytest.raises(StoreError, match="writing out"):
                call()
    with pytest.raises(StoreError, match="was not closed"):
        MappedStore.open(tmp_path / "store", TABLES)


def test_rows_that_do_not_reach_the_disk_at_sync_are_never_published(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fails(_: int) -> None:
        raise OSError(errno.EIO, "Input/output error")

    store = MappedStore.create(tmp_path / "store", TABLES, keep=True)
    store.write(0, np.arange(10), values(0, 10))
    with monkeypatch.context() as patch:
        patch.setattr(os, "fdatasync", fails)
        with pytest.raises(StoreError, match=r"writing out .*table-00000\.rows failed"):
            store.sync()
    with pytest.raises(StoreError, match="writing out"):  # the kernel would say nothing a second time
        store.sync()
    store.close()
    with pytest.raises(StoreError, match="was not closed"):
        MappedStore.open(tmp_path / "store", TABLES)


# Reopening


def test_a_kept_store_opens_as_it_was_and_goes_on(kept: Path) -> None:
    with MappedStore.open(kept, TABLES) as store:
        assert store.ids(0).tolist() == (np.arange(1000) * 7 - 50).tolist()
        before = contents(store)
        store.write(0, np.array([10**15, -50]), values(5, 2))
        out = np.empty((2, 48), np.float32)
        store.read(0, np.array([10**15, -43]), out)
        assert np.array_equal(out, np.stack([values(5, 2)[0], values(0, 1000)[1]]))
    with MappedStore.open(kept, TABLES) as store:
        after = contents(store)
        assert after[1] == before[1]
        assert after[0][0] == [*before[0][0], 10**15]
        assert store.num_rows(0) == 1001


def test_a_store_without_rows_can_be_kept_too(tmp_path: Path) -> None:
    MappedStore.create(tmp_path / "store", TABLES, keep=True).close()
    with MappedStore.open(tmp_path / "store", TABLES) as store:
        assert contents(store) == [([], b""), ([], b"")]


def test_files_kept_are_no_longer_than_their_rows(kept: Path) -> None:
    assert (kept / "table-00000.rows").stat().st_size == 1000 * 192
    assert (kept / "table-00000.ids").stat().st_size == 1000 * 8


KILLED = """
import os, signal, sys
import numpy as np
from bagpipe.store import MappedStore

class Zeros:
    width = 48
    def initialise(self, ids, out):
        out[:] = 0

store = MappedStore.create(sys.argv[1], [Zeros()], keep=sys.argv[2] != "temporary")
store.write(0, np.arange(100), np.ones((100, 48), np.float32))
store.sync()
if sys.argv[2] == "after write":
    store.write(0, np.arange(1), np.zeros((1, 48), np.float32))
os.kill(os.getpid(), signal.SIGKILL)
"""


def killed(path: Path, when: str) -> None:
    done = subprocess.run([sys.executable, "-c", KILLED, str(path), when], check=False, timeout=120)
    assert done.returncode == -signal.SIGKILL


def test_a_process_killed_after_sync_leaves_what_was_synced(tmp_path: Path) -> None:
    killed(tmp_path / "store", "after sync")
    with MappedStore.open(tmp_path / "store", TABLES[:1]) as store:
        assert store.num_rows(0) == 100


def test_a_process_killed_after_a_later_write_leaves_a_directory_that_says_so(tmp_path: Path) -> None:
    killed(tmp_path / "store", "after write")
    with pytest.raises(StoreError, match=r"was not closed.*from a checkpoint"):
        MappedStore.open(tmp_path / "store", TABLES[:1])


def test_a_process_killed_leaves_no_temporary_rows(tmp_path: Path) -> None:
    killed(tmp_path / "store", "temporary")
    assert list((tmp_path / "store").iterdir()) == []
    with MappedStore.create(tmp_path / "store", TABLES) as store:  # and its place can be taken again
        assert store.num_rows(0) == 0


def edited_index(change: Callable[[dict], object]) -> Callable[[Path], None]:
    def edit(path: Path) -> None:
        index = json.loads((path / "index.json").read_bytes().split(b"\n")[0])
        change(index)
        line = json.dumps(index).encode()
        (path / "index.json").write_bytes(b"%s\n%08x\n" % (line, zlib.crc32(line)))

    return edit


def replaced(name: str, change: Callable[[bytes], bytes]) -> Callable[[Path], None]:
    return lambda path: (path / name).write_bytes(change((path / name).read_bytes())) and None


def repeat_an_id(path: Path) -> None:
    ids = np.fromfile(path / "table-00001.ids", np.int64)
    ids[3] = ids[4]
    ids.tofile(path / "table-00001.ids")
    edited_index(lambda index: index["tables"][1].update(ids_crc32=zlib.crc32(ids.data)))(path)


def replace_by_link(path: Path) -> None:
    (path / "table-00000.rows").rename(path.parent / "elsewhere")
    (path / "table-00000.rows").symlink_to(path.parent / "elsewhere")


DAMAGE: dict[str, tuple[Callable[[Path], object], str]] = {
    "no directory": (lambda path: path.rename(path.parent / "away"), "holds no store"),
    "no index": (lambda path: (path / "index.json").unlink(), "was not closed"),
    "empty index": (replaced("index.json", lambda _: b""), "index.json is damaged"),
    "index cut off": (replaced("index.json", lambda data: data[:-20]), "index.json is damaged"),
    "index with a bit flipped": (
        replaced("index.json", lambda data: data[:30] + bytes([data[30] ^ 1]) + data[31:]),
        "index.json is damaged",
    ),
    "index that is not JSON": (replaced("index.json", lambda _: b"x\n%08x\n" % zlib.crc32(b"x")), "not the index"),
    "index that is a number": (replaced("index.json", lambda _: b"1\n%08x\n" % zlib.crc32(b"1")), "not the index"),
    "newer version": (edited_index(lambda index: index.update(version=2)), r"version 2.*reads version 1"),
    "no version": (edited_index(lambda index: index.pop("version")), "not the index"),
    "another format": (edited_index(lambda index: index.update(format="x")), "not the index"),
    "no tables": (edited_index(lambda index: index.pop("tables")), "not the index"),
    "rows below zero": (edited_index(lambda index: index["tables"][0].update(num_rows=-1)), "not the index"),
    "rows of a fraction": (edited_index(lambda index: index["tables"][0].update(num_rows=1.5)), "not the index"),
    "more rows than there are": (
        edited_index(lambda index: index["tables"][0].update(num_rows=2**60)),
        r"table-00000\.rows has 192,000 B and should have",
    ),
    "other byte order": (edited_index(lambda index: index.update(byte_order="big")), "big-endian"),
    "other width": (edited_index(lambda index: index["tables"][0].update(width=47)), r"\[47, 3\].*\[48, 3\]"),
    "rows cut off": (replaced("table-00000.rows", lambda data: data[:-1]), "has 191,999 B and should have 192,000"),
    "ids cut off": (replaced("table-00000.ids", lambda data: data[:-8]), "has 7,992 B and should have 8,000"),
    "ids too long": (replaced("table-00000.ids", lambda data: data + b"12345678"), "has 8,008 B"),
    "ids changed": (replaced("table-00000.ids", lambda data: b"\1" + data[1:]), r"table-00000\.ids is damaged"),
    "an id twice": (repeat_an_id, r"table-00001\.ids is damaged \(an id repeats"),
    "rows missing": (lambda path: (path / "table-00000.rows").unlink(), r"opening .*table-00000\.rows failed"),
    "rows behind a link": (replace_by_link, r"opening .*table-00000\.rows failed"),
}


@pytest.mark.parametrize("name", DAMAGE)
def test_a_damaged_directory_is_refused_by_name_and_left_alone(kept: Path, name: str) -> None:
    damage, named = DAMAGE[name]
    damage(kept)
    before = {path.name: path.read_bytes() for path in kept.glob("*")}
    num_open = num_open_files()
    with pytest.raises(StoreError, match=named):
        MappedStore.open(kept, TABLES)
    assert {path.name: path.read_bytes() for path in kept.glob("*")} == before
    gc.collect()
    assert num_open_files() == num_open


@pytest.mark.parametrize("tables", [TABLES[:1], TABLES[::-1], (*TABLES, Zeros(1)), ()])
def test_other_tables_than_those_written_are_refused(kept: Path, tables: tuple[Zeros, ...]) -> None:
    with pytest.raises(StoreError, match=r"\[48, 3\] floats by table"):
        MappedStore.open(kept, tables)


# The directory


def test_a_directory_in_use_or_not_empty_is_refused(tmp_path: Path, kept: Path) -> None:
    with pytest.raises(StoreError, match="not empty"):
        MappedStore.create(kept, TABLES)
    with MappedStore.open(kept, TABLES), pytest.raises(StoreError, match="in use"):
        MappedStore.open(kept, TABLES)
    with MappedStore.create(tmp_path / "other", TABLES), pytest.raises(StoreError, match="in use"):
        MappedStore.create(tmp_path / "other", TABLES)
    (tmp_path / "file").touch()
    with pytest.raises(StoreError, match=r"creating .*file failed"):
        MappedStore.create(tmp_path / "file", TABLES)
    MappedStore.open(kept, TABLES).close()


def test_a_temporary_store_leaves_nothing_even_if_nobody_closes_it(tmp_path: Path) -> None:
    num_open = num_open_files()
    store = MappedStore.create(tmp_path / "store", TABLES)
    store.write(0, np.arange(10), values(0, 10))
    assert list(tmp_path.glob("store/*")) == []  # also nothing that a killed process could leave
    del store
    gc.collect()
    assert not (tmp_path / "store").exists()
    assert num_open_files() == num_open


def test_the_directory_of_a_temporary_store_goes_with_it_but_not_what_others_put_there(tmp_path: Path) -> None:
    (tmp_path / "empty").mkdir()
    MappedStore.create(tmp_path / "empty", TABLES).close()
    assert not (tmp_path / "empty").exists()
    with MappedStore.create(tmp_path / "shared", TABLES):
        (tmp_path / "shared" / "note").touch()
    assert (tmp_path / "shared" / "note").exists()


@pytest.mark.parametrize("num_opened", [0, 1, 2, 3, 4])
def test_when_creation_fails_nothing_is_left(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, num_opened: int) -> None:
    real, left, num_open = os.open, iter(range(num_opened)), num_open_files()

    def limited(path: Path, flags: int, mode: int) -> int:
        if next(left, None) is None:
            raise OSError(errno.EMFILE, "Too many open files")
        return real(path, flags, mode)

    monkeypatch.setattr(os, "open", limited)
    with pytest.raises(StoreError, match=r"opening .*store.* failed \(Too many open files\)"):
        MappedStore.create(tmp_path / "store", [Zeros(1)] * 50, keep=True)
    monkeypatch.undo()
    assert not (tmp_path / "store").exists()
    assert num_open_files() == num_open


def test_a_bound_too_small_is_refused_and_leaves_nothing(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="resident_bytes_max is 1,000"):
        MappedStore.create(tmp_path / "store", TABLES, resident_bytes_max=1000)
    gc.collect()
    assert not (tmp_path / "store").exists()


def test_every_error_is_one_of_ours(tmp_path: Path) -> None:
    with pytest.raises(BagpipeError):
        MappedStore.open(tmp_path / "nowhere", TABLES)
