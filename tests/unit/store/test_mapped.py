"""Rows on disk: the page cache is bounded, and a failure of the medium changes nothing or is never taken for rows."""

from __future__ import annotations

import ctypes
import errno
import gc
import mmap
import os
import resource
import shutil
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import suppress
from pathlib import Path

import numpy as np
import pytest

from bagpipe.errors import ConfigError, StoreError
from bagpipe.store import MappedStore
from bagpipe.store import mapped as module
from bagpipe.store.chunks import ScratchFile
from bagpipe.store.mapped import _GAP_PAGES, PAGE_BYTES, FileRows, Residency, _join, _note
from definitions.pages import define_note, define_runs, pages_of

libc = ctypes.CDLL(None, use_errno=True)
BOUND = 4 << 20


class Zeros:
    def __init__(self, width: int) -> None:
        self.width = width

    def initialise(self, ids: np.ndarray, out: np.ndarray) -> None:
        out[:] = 0


TABLES = (Zeros(48), Zeros(3))


def values(seed: int, num_rows: int, width: int = 48) -> np.ndarray:
    return np.random.default_rng(seed).standard_normal((num_rows, width), np.float32)


def contents(store: MappedStore) -> list[tuple[list[int], bytes]]:
    return [
        (store.ids(table).tolist(), b"".join(rows.tobytes() for _, rows in store.iterate(table))) for table in (0, 1)
    ]


def files_of(store: MappedStore) -> list[FileRows]:
    return [part.chunks for part in store._tables]


def pages_in_cache(file: FileRows) -> int:
    """How many pages of the file the kernel holds, by mincore."""
    num_bytes = os.fstat(file._file.fd).st_size
    if not num_bytes:
        return 0
    with mmap.mmap(file._file.fd, num_bytes) as mapping:
        flags = (ctypes.c_ubyte * -(-num_bytes // PAGE_BYTES))()
        address = ctypes.c_void_p(ctypes.addressof(view := ctypes.c_char.from_buffer(mapping)))
        assert libc.mincore(address, ctypes.c_size_t(num_bytes), flags) == 0
        del view
    return int((np.frombuffer(flags, np.uint8) & 1).sum())


def drop_all(residency: Residency) -> None:
    """Take all files out of the page cache, or skip where that is not possible."""
    with residency.changed:
        while residency.bytes_now:
            residency.bytes_max, before = 0, residency.bytes_max
            residency._drop_some()
            residency.bytes_max = before
    if any(map(pages_in_cache, residency._files)):
        pytest.skip("this file system is memory itself: its pages can't be dropped")


@pytest.fixture
def small_disk(tmp_path: Path) -> Iterator[Path]:
    if shutil.which("mount") is None:
        pytest.skip("there is no mount command")
    path = tmp_path / "disk"
    path.mkdir()
    made = subprocess.run(
        ["mount", "-t", "tmpfs", "-o", "size=3m", "none", str(path)], capture_output=True, check=False
    )
    if made.returncode:
        pytest.skip(f"can't mount a small disk: {made.stderr.decode().strip()}")
    yield path
    subprocess.run(["umount", "--lazy", str(path)], check=True)


# Rows


@pytest.mark.parametrize("width", [1, 3, 16, 48, 96, 1024, 1500, 100_000])
@pytest.mark.parametrize("cold", [False, True])
def test_rows_are_copied_as_an_array_would(tmp_path: Path, width: int, cold: bool) -> None:
    rng = np.random.default_rng(width)
    residency = Residency(BOUND)
    file = FileRows(0, width, tmp_path, residency, chunk_bytes=64 << 10)
    num_rows = min(5000, 4_000_000 // width)
    file.reserve(num_rows)
    twin = np.zeros((num_rows, width), np.float32)
    written = rng.permutation(num_rows)
    for part in (written, written[: num_rows // 2], np.arange(num_rows // 3), written[:1], written[:0]):
        rows = rng.integers(0, 2**32, (len(part), width), np.uint32).view(np.float32)
        if cold:
            drop_all(residency)
        file.scatter(part, rows)
        twin[part] = rows
    for wanted in (rng.integers(-1, num_rows, 300), np.arange(num_rows), np.full(3, -1), np.array([num_rows - 1] * 2)):
        for columns in {-(-width // 3), width}:
            out, expected = np.full((2, len(wanted), columns), 7, np.float32)
            if cold:
                drop_all(residency)
            file.gather(wanted, out)
            expected[wanted >= 0] = twin[wanted[wanted >= 0], :columns]
            assert np.array_equal(out.view(np.uint32), expected.view(np.uint32))


def test_many_random_calls_leave_what_an_array_would_hold_while_pages_come_and_go(tmp_path: Path) -> None:
    rng = np.random.default_rng(1)
    num_rows = 60_000  # 11.5 MB
    expected = np.zeros((num_rows, 48), np.float32)
    with MappedStore(TABLES, tmp_path, resident_bytes_max=BOUND, chunk_bytes=1 << 20) as store:
        for turn in range(60):
            size = int(rng.choice([1, 100, 3000, 30_000]))
            start = int(rng.integers(0, num_rows - size + 1))
            ids = rng.choice(num_rows, size, replace=False) if turn % 3 else np.arange(start, start + size)
            if turn % 2:
                rows = rng.standard_normal((size, 48), np.float32)
                store.write(0, ids, rows)
                expected[ids] = rows
            else:
                out = np.empty((size, 48), np.float32)
                store.read(0, ids, out)
                assert np.array_equal(out, expected[ids])
        for ids, rows in store.iterate(0, 7000):
            assert np.array_equal(rows, expected[ids])


# The bound on the page cache


@pytest.mark.parametrize("width", [1, 48, 1024, 1500])
def test_pages_are_noted_and_joined_as_defined(width: int) -> None:
    rng = np.random.default_rng(width)
    row_bytes, shift = width * 4, 5
    chunk_bytes = -(-(row_bytes << shift) // PAGE_BYTES) * PAGE_BYTES
    num_pages, pages_per_chunk = 20 * chunk_bytes // PAGE_BYTES, chunk_bytes // PAGE_BYTES
    for _ in range(40):
        positions = rng.integers(-1, 20 << shift, rng.integers(0, 60))
        noted = (rng.random(num_pages) < rng.choice([0, 0.5, 1])).astype(np.uint8)
        before, num_max = noted.copy(), int(rng.integers(0, 200))
        rows = [pages_of(at, 1 << shift, row_bytes, chunk_bytes) if at >= 0 else range(0) for at in positions.tolist()]
        pages = np.empty(len(positions) * 4, np.int64)
        num_rows, num_new, num_listed = _note(noted, shift, row_bytes, chunk_bytes, positions, num_max, 0, pages)
        listed = np.sort(pages[:num_listed])
        expected_rows, new = define_note(before, rows, num_max)
        assert (num_rows, num_new, listed.tolist()) == (expected_rows, len(new), sorted(new))
        assert np.flatnonzero(noted != before).tolist() == sorted(new)
        doubtful = before.copy()  # all pages, some maybe twice
        num_rows, _, num_listed = _note(doubtful, shift, row_bytes, chunk_bytes, positions, num_pages, 1, pages)
        assert num_rows == len(positions)
        listed = np.sort(pages[:num_listed])
        assert set(listed.tolist()) == {page for each in rows for page in each}
        runs = np.empty((len(listed), 2), np.int64)
        before_joining = doubtful.copy()
        num_runs, num_more = _join(doubtful, pages_per_chunk, listed, runs)
        expected = define_runs(listed.tolist(), pages_per_chunk, _GAP_PAGES)
        assert [tuple(run) for run in runs[:num_runs].tolist()] == expected
        assert all(doubtful[first:stop].all() for first, stop in expected)
        assert num_more == int(doubtful.sum()) - int(before_joining.sum())


def test_the_page_cache_stays_under_the_bound_while_threads_read_and_write(tmp_path: Path) -> None:
    """Over all files together, whenever one looks; and rows are always whole and of their own id."""
    num_rows, bound, threads = 40_000, 8 << 20, 4
    tables = (Zeros(48), Zeros(96))  # 23 MB
    over = threading.Event()
    failures: list[BaseException] = []
    most = 0
    with MappedStore(tables, tmp_path, resident_bytes_max=bound) as store:
        for table, source in enumerate(tables):
            rows = np.repeat(np.arange(num_rows, dtype=np.float32), source.width).reshape(-1, source.width)
            store.write(table, np.arange(num_rows), rows)
        drop_all(store._residency)

        def work(number: int) -> None:
            rng = np.random.default_rng(number)
            mine = np.arange(number, num_rows, threads)
            for turn in range(60):
                table = turn % 2
                ids = rng.choice(mine, 2000, replace=False)
                rows = np.empty((len(ids), tables[table].width), np.float32)
                store.read(table, ids, rows)
                assert (rows == rows[:, :1]).all()
                assert np.array_equal(rows[:, 0].astype(np.int64) % num_rows, ids)
                store.write(table, ids, rows + np.float32(num_rows))

        def worked(number: int) -> None:
            try:
                work(number)
            except BaseException as error:
                failures.append(error)

        def look() -> None:
            nonlocal most
            while not over.is_set():
                with store._residency.changed:  # so that nothing goes from one file to the other between two looks
                    most = max(most, sum(map(pages_in_cache, files_of(store))))
                time.sleep(0.002)

        watcher = threading.Thread(target=look)
        workers = [threading.Thread(target=worked, args=(number,)) for number in range(threads)]
        for thread in (watcher, *workers):
            thread.start()
        for thread in workers:
            thread.join(300)
        over.set()
        watcher.join(60)
        assert not failures
        assert bound // 4 < most * PAGE_BYTES <= bound
        assert store.stats().bytes_in_memory <= bound + 60 * 2 * num_rows


def test_pages_that_the_system_took_back_are_asked_for_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[int] = []
    bring, waits = module._bring, iter([0, 10_000])
    monkeypatch.setattr(module, "_bring", lambda *args: asked.append(len(args[3])) or bring(*args))
    file = FileRows(0, 1024, tmp_path, Residency(BOUND))  # a page a row
    file.reserve(100)
    every_other, rows = np.arange(0, 100, 3), np.ones((34, 1024), np.float32)
    file.scatter(every_other, rows)
    asked.clear()
    monkeypatch.setattr(module, "_num_waits", lambda: next(waits, 0))
    file.gather(every_other, rows)
    assert not asked, "they should be in memory"
    file.gather(every_other, rows)
    assert asked == [34], "most were not, the last time"
    for _ in range(module._DOUBT_COPIES):
        file.gather(every_other, rows)
    asked.clear()
    file.gather(every_other, rows)
    assert not asked


def test_a_bound_too_small_is_refused_and_leaves_nothing(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="resident_bytes_max is 1,000"):
        MappedStore(TABLES, tmp_path / "store", resident_bytes_max=1000)
    assert not (tmp_path / "store").exists()


# A full disk


def test_a_full_disk_is_named_before_any_row_changes(small_disk: Path) -> None:
    with MappedStore(TABLES, small_disk / "store") as store:
        store.write(0, np.arange(1000), values(0, 1000))
        before = contents(store)
        mixed = np.arange(500, 30_500)
        with pytest.raises(
            StoreError, match=r"file of table 0 in .*store can't grow to 5,856,000 B.*are free.*larger disk"
        ) as caught:
            store.write(0, mixed, values(1, len(mixed)))
        assert caught.value.errno == errno.ENOSPC
        assert contents(store) == before
        store.write(0, np.arange(500, 2000), values(2, 1500))  # what does fit still goes in, to the last page
        assert store.num_rows(0) == 2000


def test_the_last_free_bytes_are_used_when_a_whole_step_does_not_fit(small_disk: Path) -> None:
    num_rows = (3 << 20) // 192 - 100
    with MappedStore(TABLES, small_disk) as store:
        for part in np.array_split(np.arange(num_rows), 9):
            store.write(0, part, values(0, len(part)))
        assert store.num_rows(0) == num_rows


@pytest.mark.parametrize("number", [errno.ENOSPC, errno.EDQUOT, errno.EIO])
def test_an_allocation_that_fails_changes_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, number: int) -> None:
    allocate = os.posix_fallocate

    def fails(fd: int, offset: int, length: int) -> None:
        allocate(fd, offset, length // 2)  # part of it is done, as on a real disk
        raise OSError(number, os.strerror(number))

    with MappedStore(TABLES, tmp_path) as store:
        store.write(0, np.arange(1000), values(0, 1000))
        before, disk_before = contents(store), os.fstat(files_of(store)[0]._file.fd).st_blocks
        with monkeypatch.context() as patch:
            patch.setattr(os, "posix_fallocate", fails)
            with pytest.raises(StoreError, match=str(tmp_path)) as caught:
                store.write(0, np.arange(990, 9000), values(1, 8010))
            assert caught.value.errno == number
            assert contents(store) == before
            assert os.fstat(files_of(store)[0]._file.fd).st_blocks == disk_before
            store.write(0, np.arange(1000), values(2, 1000))  # needs no room
        store.write(0, np.arange(990, 9000), values(1, 8010))
        assert store.num_rows(0) == 9000


def test_a_limit_on_file_sizes_is_an_error_and_not_a_signal(tmp_path: Path) -> None:
    limit = resource.getrlimit(resource.RLIMIT_FSIZE)
    with MappedStore(TABLES, tmp_path) as store:
        try:
            resource.setrlimit(resource.RLIMIT_FSIZE, (1 << 20, limit[1]))
            with pytest.raises(StoreError, match="can't grow to 1,920,000 B"):
                store.write(0, np.arange(10_000), values(0, 10_000))
            store.write(0, np.arange(1000), values(0, 1000))
        finally:
            resource.setrlimit(resource.RLIMIT_FSIZE, limit)
        assert store.num_rows(0) == 1000


def test_space_is_allocated_ahead_in_steps_that_grow(tmp_path: Path) -> None:
    file = FileRows(0, 256, tmp_path, Residency(BOUND))
    sizes = []
    for num_rows in (1, 1024, 1025, 2049, 5000, 100_000):
        file.reserve(num_rows)
        sizes.append(os.fstat(file._file.fd).st_size >> 10)
        assert file.bytes_on_disk == os.fstat(file._file.fd).st_size
    assert sizes == [1024, 1024, 2048, 4096, 8192, 100_000]


def test_a_process_without_room_for_mappings_is_told_so(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def fails(*_: object) -> None:
        raise OSError(errno.ENOMEM, "Cannot allocate memory")

    with MappedStore(TABLES, tmp_path, chunk_bytes=1 << 16) as store:
        store.write(0, np.arange(100), values(0, 100))
        before = contents(store)
        monkeypatch.setattr(ScratchFile, "map", fails)
        with pytest.raises(StoreError, match="table 0: no memory for 5,000 rows"):
            store.write(0, np.arange(5000), values(0, 5000))
        assert contents(store) == before


def test_dropping_pages_touches_no_memory_beyond_the_chunks_that_are_mapped(tmp_path: Path) -> None:
    """The file is allocated ahead, so its last extent may reach further than the last chunk."""
    with MappedStore(TABLES, tmp_path, chunk_bytes=1 << 16) as store:
        store.write(0, np.arange(10), values(0, 10))
        file = files_of(store)[0]
        assert file._file.num_bytes > len(file.chunks) * file._chunk_bytes
        others = mmap.mmap(-1, 1 << 21, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
        others.write(b"x" * (1 << 21))
        place = np.frombuffer(others, np.uint8).ctypes.data
        addresses = np.array([*file._addresses, *[place] * 64], np.int64)
        none, size = np.zeros(1, np.int64), file._file.num_bytes
        assert module._drop(file._file.fd, addresses[:1], file._chunk_bytes, size, none) == 0
        assert others[:] == b"x" * (1 << 21)


# A failing disk


@pytest.mark.parametrize("call", ["write", "read"])
def test_rows_lost_when_pages_are_dropped_end_all_work(tmp_path: Path, monkeypatch, call: str) -> None:
    with MappedStore(TABLES, tmp_path, resident_bytes_max=BOUND) as store:
        if call == "read":
            store.write(0, np.arange(50_000), values(0, 50_000))
        with monkeypatch.context() as patch:
            patch.setattr(module, "_drop", lambda *_: errno.EIO)
            with pytest.raises(StoreError, match=r"lost on their way to the disk \(Input/output error\).*checkpoint"):
                getattr(store, call)(0, np.arange(50_000), values(0, 50_000))
        for again in (store.stats, lambda: store.num_rows(0), lambda: store.write(0, np.arange(1), values(0, 1))):
            with pytest.raises(StoreError, match="lost on their way"):
                again()


def test_rows_lost_by_the_system_on_its_own_are_never_read(tmp_path: Path, monkeypatch) -> None:
    with MappedStore(TABLES, tmp_path) as store:
        store.write(0, np.arange(10), values(0, 10))
        with monkeypatch.context() as patch:
            patch.setattr(module, "_lost", lambda *_: errno.EIO)  # the kernel says so once
            with pytest.raises(StoreError, match="lost on their way"):
                store.read(0, np.arange(10), values(1, 10))
        with pytest.raises(StoreError, match="lost on their way"):
            store.read(0, np.arange(10), values(1, 10))


def test_a_write_that_fails_halfway_leaves_a_store_that_refuses_work(tmp_path: Path, monkeypatch) -> None:
    with MappedStore(TABLES, tmp_path) as store:
        store.write(0, np.arange(10), values(0, 10))
        monkeypatch.setattr(module, "_bring", lambda *_: errno.EIO)
        with pytest.raises(StoreError, match=r"can't write rows of table 0 in .*: Input/output error"):
            store.write(0, np.arange(10, 5000), values(1, 4990))
        for call in (lambda: store.num_rows(0), store.stats, lambda: store.read(0, np.arange(1), values(0, 1))):
            with pytest.raises(StoreError, match="failed halfway"):
                call()


FAILING = """
import os, sys
import numpy as np
from bagpipe.errors import StoreError
from bagpipe.store import MappedStore

class Zeros:
    width = 48
    def initialise(self, ids, out):
        out[:] = 0

what, image, place, other = sys.argv[1:]
store = MappedStore([Zeros()], place, resident_bytes_max=1 << 30 if what == "later" else 4 << 20)
ids, out = np.arange(100_000), np.empty((100_000, 48), np.float32)

def write():
    for start in range(0, len(ids), 10_000):
        store.write(0, ids[start : start + 10_000], np.ones((10_000, 48), np.float32))

try:
    if what == "reading":
        write()
        os.sync()
        os.truncate(image, 4 << 20)
        for _ in range(3):  # each time: a page that could not be read is never touched
            try:
                store.read(0, ids, out)
                print("read", out.min())
            except StoreError:
                pass
    else:
        store._tables[0].chunks.reserve(len(ids))  # allocated, and then the disk below has no room
        with open(other, "wb", buffering=0) as file:
            try:
                while True:
                    file.write(bytes(1 << 20))
            except OSError:
                pass
        write()
        os.sync()
    store.read(0, ids, out)
    print("read", out.min())
except StoreError as error:
    print(error)
"""


@pytest.fixture
def failing_disk(tmp_path: Path) -> Iterator[tuple[Path, Path, Path]]:
    """A file system on an image in another one, in which there is room for half of it: image, place, another file."""
    below, place = tmp_path / "below", tmp_path / "place"
    image, undo = below / "image", list[list[str]]()
    try:
        for command, reverse in (
            (["mount", "-t", "tmpfs", "-o", "size=40m", "none", str(below)], ["umount", "--lazy", str(below)]),
            (["truncate", "-s", "32M", str(image)], None),
            (["mkfs.ext4", "-q", "-O", "^has_journal", str(image)], None),
            (["mount", "-o", "loop", str(image), str(place)], ["umount", "--lazy", str(place)]),
        ):
            below.mkdir(exist_ok=True)
            place.mkdir(exist_ok=True)
            try:
                subprocess.run(command, capture_output=True, check=True)
            except (OSError, subprocess.CalledProcessError) as error:
                pytest.skip(f"can't make a disk that fails: {error}")
            undo += [reverse] if reverse else []
        yield image, place, below / "other"
    finally:
        for command in reversed(undo):
            subprocess.run(command, capture_output=True, check=False)


@pytest.mark.parametrize(
    ("what", "said"),
    [
        ("reading", "can't read rows of table 0 in"),
        ("dropping", "lost on their way to the disk"),
        ("later", "lost on their way to the disk"),
    ],
)
def test_a_disk_that_fails_is_an_error_and_never_other_rows(failing_disk, what: str, said: str) -> None:
    """`later`: the operating system writes pages out by itself, and drops those that it can't write."""
    command = [sys.executable, "-c", FAILING, what, *map(str, failing_disk)]
    done = subprocess.run(command, capture_output=True, text=True, check=False, timeout=120)
    assert (done.returncode, said in done.stdout) == (0, True), done.stdout + done.stderr
    assert not any(line.startswith("read") and "rows" not in line for line in done.stdout.splitlines())


# Its end


CLOSED = """
import sys, threading, time
import numpy as np
from bagpipe.errors import StoreError
from bagpipe.store import MappedStore

class Zeros:
    width = 48
    def initialise(self, ids, out):
        out[:] = 0

def work(store, started, writes):
    rng = np.random.default_rng(writes)
    rows = np.ones((4000, 48), np.float32)
    try:
        while True:
            ids = rng.choice(60_000, 4000, replace=False) * 2 + writes
            store.write(0, ids, rows) if writes else store.read(0, ids, rows)
            started.set()
    except StoreError as error:
        assert "closed" in str(error), error

for turn in range(8):
    store = MappedStore([Zeros()], sys.argv[1], resident_bytes_max=4 << 20, chunk_bytes=1 << 20)
    store.write(0, np.arange(0, 120_000, 2), np.ones((60_000, 48), np.float32))
    events = [threading.Event() for _ in range(4)]
    threads = [
        threading.Thread(target=work, args=(store, event, number % 2), daemon=True)
        for number, event in enumerate(events)
    ]
    for thread in threads:
        thread.start()
    for event in events:
        event.wait(60)
    time.sleep(turn * 0.003)
    if turn == 7:
        print("ends with threads at work", flush=True)
        sys.exit(0)
    store.close()
    del store
    for thread in threads:
        thread.join(60)
        assert not thread.is_alive()
    assert not open("/proc/self/maps").read().count(sys.argv[1]), "all is given back"
"""


def test_closing_under_readers_and_writers_refuses_their_calls_and_crashes_nothing(tmp_path: Path) -> None:
    command = [sys.executable, "-c", CLOSED, str(tmp_path)]
    done = subprocess.run(command, capture_output=True, text=True, check=False, timeout=240)
    assert (done.returncode, done.stderr, done.stdout) == (0, "", "ends with threads at work\n")


KILLED = """
import os, signal, sys
import numpy as np
from bagpipe.store import MappedStore

class Zeros:
    width = 48
    def initialise(self, ids, out):
        out[:] = 0

store = MappedStore([Zeros()], sys.argv[1])
store.write(0, np.arange(100), np.ones((100, 48), np.float32))
os.kill(os.getpid(), signal.SIGKILL)
"""


def test_a_process_that_is_killed_leaves_nothing(tmp_path: Path) -> None:
    done = subprocess.run([sys.executable, "-c", KILLED, str(tmp_path)], check=False, timeout=120)
    assert done.returncode == -signal.SIGKILL
    assert not list(tmp_path.iterdir())


FORKED = """
import os, sys
import numpy as np
from bagpipe.errors import StoreError
from bagpipe.store import MappedStore

class Zeros:
    width = 48
    def initialise(self, ids, out):
        out[:] = 0

store = MappedStore([Zeros()], sys.argv[1])
store.write(0, np.arange(100), np.ones((100, 48), np.float32))
if os.fork() == 0:
    for call in (lambda: store.num_rows(0), lambda: store.write(0, np.arange(1), np.zeros((1, 48), np.float32))):
        try:
            call()
            os._exit(1)
        except StoreError as error:
            assert "forked" in str(error)
    store.close()
    os._exit(0)
assert os.wait()[1] == 0
store.write(0, np.arange(200), np.ones((200, 48), np.float32))
out = np.zeros((200, 48), np.float32)
store.read(0, np.arange(200), out)
assert (out == 1).all()
"""


def test_a_forked_process_leaves_the_store_alone(tmp_path: Path) -> None:
    subprocess.run([sys.executable, "-c", FORKED, str(tmp_path)], check=True, timeout=120)


def num_descriptors() -> int:
    return len(list(Path("/proc/self/fd").iterdir()))


@pytest.mark.parametrize("closes", [True, False])
def test_disk_and_descriptors_are_given_back(tmp_path: Path, closes: bool) -> None:
    gc.collect()
    before = num_descriptors()
    store = MappedStore(TABLES, tmp_path)
    store.write(0, np.arange(1000), values(0, 1000))
    assert num_descriptors() == before + 2
    assert str(tmp_path) in Path("/proc/self/maps").read_text()
    if closes:
        store.close()
    del store
    if not closes:
        gc.collect()
    assert num_descriptors() == before
    assert str(tmp_path) not in Path("/proc/self/maps").read_text()


# The directory


def test_a_directory_is_made_and_may_hold_other_files(tmp_path: Path) -> None:
    place = tmp_path / "a" / "rows"
    with MappedStore(TABLES, place) as store:
        (place / "index.json").write_text("mine")
        with MappedStore(TABLES, str(place)) as other:  # two at once do not disturb each other
            for each, number in ((store, 1), (other, 2)):
                each.write(0, np.arange(10), np.full((10, 48), number, np.float32))
            out = np.empty((10, 48), np.float32)
            store.read(0, np.arange(10), out)
            assert (out == 1).all()
        assert store.path == place
    assert [file.name for file in place.iterdir()] == ["index.json"]


def test_without_one_it_is_that_of_temporary_files(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    with MappedStore(TABLES) as store:
        assert store.path == tmp_path


def earlier_store(path: Path) -> None:
    path.mkdir()
    for name in ("index.json", "table-00000.rows", "table-00000.ids"):
        (path / name).write_bytes(b"rows")


def no_rights(path: Path) -> None:
    path.mkdir()
    path.chmod(0o500)
    if os.access(path, os.W_OK):
        pytest.skip("this user may write anywhere")


@pytest.mark.parametrize(
    ("make", "named"),
    [
        (earlier_store, r"rows of a store of an earlier version \(table-00000\.ids\).*remove .* another directory"),
        (lambda path: path.write_text("mine"), "is a file: give a directory"),
        (no_rights, r"can't make a file in .*: Permission denied: check the path"),
    ],
)
def test_a_directory_that_can_not_be_used_is_refused_and_left_alone(
    tmp_path: Path, make: Callable[[Path], object], named: str
) -> None:
    place = tmp_path / "rows"
    make(place)
    before = sorted((path, path.read_bytes() if path.is_file() else b"") for path in tmp_path.rglob("*"))
    with pytest.raises(StoreError, match=named):
        MappedStore(TABLES, place)
    assert sorted((path, path.read_bytes() if path.is_file() else b"") for path in tmp_path.rglob("*")) == before


def test_when_a_file_can_not_be_made_nothing_is_left(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    made, make = [], module.tempfile.TemporaryFile

    def fails(**options: object) -> object:
        if made:
            raise OSError(errno.EMFILE, "Too many open files")
        made.append(1)
        return make(**options)

    monkeypatch.setattr(module.tempfile, "TemporaryFile", fails)
    with pytest.raises(
        StoreError, match=r"can't make a file in .*: Too many open files: raise the limit of open files"
    ):
        MappedStore(TABLES, tmp_path / "rows")
    assert not list(tmp_path.iterdir())


def test_rows_without_floats_are_refused_and_leave_nothing(tmp_path: Path) -> None:
    with pytest.raises(StoreError, match="table 1: rows of 0 floats"):
        MappedStore([Zeros(1), Zeros(0)], tmp_path / "store")
    with suppress(FileNotFoundError):
        assert not list((tmp_path / "store").iterdir())
