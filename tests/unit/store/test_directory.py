"""The directory of a mapped store: reopening, every way it can be wrong, and what dead processes leave behind."""

from __future__ import annotations

import errno
import gc
import json
import os
import signal
import subprocess
import sys
import zlib
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest

from bagpipe.errors import BagpipeError, StoreError
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
    gc.collect()  # what earlier tests have left
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

for when in ("after sync", "after write", "temporary"):
    store = MappedStore.create(f"{sys.argv[1]}/{when}", [Zeros()], keep=when != "temporary")
    store.write(0, np.arange(100), np.ones((100, 48), np.float32))
    store.sync()
    if when == "after write":
        store.write(0, np.arange(1), np.zeros((1, 48), np.float32))
    globals()[when] = store  # or it would be closed here
os.kill(os.getpid(), signal.SIGKILL)
"""


@pytest.fixture(scope="module")
def killed(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("killed")
    done = subprocess.run([sys.executable, "-c", KILLED, str(path)], check=False, timeout=120)
    assert done.returncode == -signal.SIGKILL
    return path


def test_a_process_killed_after_sync_leaves_what_was_synced(killed: Path) -> None:
    with MappedStore.open(killed / "after sync", TABLES[:1]) as store:
        assert store.num_rows(0) == 100


def test_a_process_killed_after_a_later_write_leaves_a_directory_that_says_so(killed: Path) -> None:
    with pytest.raises(StoreError, match=r"was not closed.*from a checkpoint"):
        MappedStore.open(killed / "after write", TABLES[:1])


def test_a_process_killed_leaves_no_temporary_rows(killed: Path) -> None:
    assert list((killed / "temporary").iterdir()) == []
    with MappedStore.create(killed / "temporary", TABLES) as store:  # and its place can be taken again
        assert store.num_rows(0) == 0


FORKED = """
import gc, os, sys
import numpy as np
from bagpipe.errors import StoreError
from bagpipe.store import MappedStore

class Zeros:
    width = 48
    def initialise(self, ids, out):
        out[:] = 0

stores = [MappedStore.create(sys.argv[1] + name, [Zeros()], keep=name == "kept") for name in ("kept", "temporary")]
for store in stores:
    store.write(0, np.arange(100), np.ones((100, 48), np.float32))
ready, go_on = os.pipe(), os.pipe()
if os.fork() == 0:
    for store in stores:
        try:
            store.num_rows(0)
            os._exit(1)
        except StoreError as error:
            assert "forked" in str(error)
        store.close()
    os.write(ready[1], b"closed")
    os.read(go_on[0], 1)
    os._exit(0)
os.read(ready[0], 6)
assert sorted(os.listdir(sys.argv[1] + "kept")) == ["table-00000.rows"]
assert os.path.exists(sys.argv[1] + "temporary")
stores[0].write(0, np.arange(200), np.ones((200, 48), np.float32))
stores[0].close()
assert MappedStore.open(sys.argv[1] + "kept", [Zeros()]).num_rows(0) == 200  # the fork lives, and holds no lock
os.write(go_on[1], b"!")
assert os.wait()[1] == 0
"""


def test_a_forked_process_leaves_the_store_alone(tmp_path: Path) -> None:
    subprocess.run([sys.executable, "-c", FORKED, f"{tmp_path}/"], check=True, timeout=120)


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
    "no directory": (lambda path: path.rename(path.parent / "away"), r"opening .*store failed \(No such file"),
    "empty directory": (lambda path: [file.unlink() for file in path.iterdir()], "holds no store"),
    "no index": (lambda path: (path / "index.json").unlink(), "was not closed"),
    "empty index": (replaced("index.json", lambda _: b""), "index.json is damaged"),
    "index cut off": (replaced("index.json", lambda data: data[:-20]), "index.json is damaged"),
    "index with a bit flipped": (
        replaced("index.json", lambda data: data[:30] + bytes([data[30] ^ 1]) + data[31:]),
        "index.json is damaged",
    ),
    "index that is not JSON": (replaced("index.json", lambda _: b"x\n%08x\n" % zlib.crc32(b"x")), "not the index"),
    "index that is a number": (replaced("index.json", lambda _: b"1\n%08x\n" % zlib.crc32(b"1")), "not the index"),
    "index of many brackets": (
        replaced("index.json", lambda _: b"[" * 10**6 + b"\n%08x\n" % zlib.crc32(b"[" * 10**6)),
        "not the index",
    ),
    "newer version": (edited_index(lambda index: index.update(version=3)), r"version 3.*reads version 2"),
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
    "ids missing": (lambda path: (path / "table-00000.ids").unlink(), r"opening .*table-00000\.ids failed"),
    "rows behind a link": (replace_by_link, r"opening .*table-00000\.rows failed"),
}


def test_labels_must_be_those_that_the_rows_were_written_with(tmp_path: Path) -> None:
    with MappedStore.create(tmp_path / "store", TABLES, keep=True, labels=["users", "ads"]) as store:
        store.write(0, np.arange(3), values(0, 3))
    with pytest.raises(StoreError, match=r"holds rows of 'ads', and those of 'words' are asked for: use the model"):
        MappedStore.open(tmp_path / "store", TABLES, labels=["users", "words"])
    with MappedStore.open(tmp_path / "store", TABLES) as store:
        store.write(0, np.arange(4), values(0, 4))
    with MappedStore.open(tmp_path / "store", TABLES, labels=["users", "ads"]) as store:
        assert store.num_rows(0) == 4
        assert store.path == (tmp_path / "store").resolve()


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
    with pytest.raises(StoreError, match=r"opening .*file failed"):
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


def test_every_error_is_one_of_ours(tmp_path: Path) -> None:
    with pytest.raises(BagpipeError):
        MappedStore.open(tmp_path / "nowhere", TABLES)


def test_a_path_may_lead_through_a_link(tmp_path: Path) -> None:
    (tmp_path / "large disk").mkdir()
    (tmp_path / "here").symlink_to(tmp_path / "large disk")
    with MappedStore.create(tmp_path / "here", TABLES, keep=True) as store:
        store.write(0, np.arange(10), values(0, 10))
    with MappedStore.open(tmp_path / "here", TABLES) as store:
        assert store.num_rows(0) == 10


def test_an_index_that_could_not_be_published_is_not_there(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    store = MappedStore.create(tmp_path / "store", TABLES, keep=True)
    store.write(0, np.arange(10), values(0, 10))
    real = os.fsync

    def fails_for_directories(fd: int) -> None:
        if Path(f"/proc/self/fd/{fd}").is_dir():
            raise OSError(errno.EIO, "Input/output error")
        real(fd)

    with monkeypatch.context() as patch:
        patch.setattr(os, "fsync", fails_for_directories)
        with pytest.raises(StoreError, match=r"writing .*index\.json failed"):
            store.sync()
    assert not list(tmp_path.glob("store/index*"))
    store.close()
    with MappedStore.open(tmp_path / "store", TABLES) as again:
        assert again.num_rows(0) == 10
