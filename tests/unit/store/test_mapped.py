"""Rows on disk: a full disk and other failures of the medium change nothing, or are never taken for rows."""

from __future__ import annotations

import errno
import os
import resource
import shutil
import subprocess
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest

from bagpipe.errors import ConfigError, StoreError
from bagpipe.store import MappedStore


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


# A full disk


def test_a_full_disk_is_named_before_any_row_changes(small_disk: Path) -> None:
    with MappedStore(TABLES, small_disk / "store") as store:
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
    with MappedStore(TABLES, small_disk / "store") as store:
        for part in np.array_split(np.arange(num_rows), 9):
            store.write(0, part, values(0, len(part)))
        assert store.num_rows(0) == num_rows


@pytest.mark.parametrize("number", [errno.ENOSPC, errno.EDQUOT, errno.EIO])
def test_an_allocation_that_fails_changes_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, number: int) -> None:
    allocate = os.posix_fallocate

    def fails(fd: int, offset: int, length: int) -> None:
        allocate(fd, offset, length // 2)  # part of it is done, as on a real disk
        raise OSError(number, os.strerror(number))

    with MappedStore(TABLES, tmp_path / "store") as store:
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
    with MappedStore(TABLES, tmp_path / "store") as store:
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

    with MappedStore(TABLES, tmp_path / "store") as store:
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
    with MappedStore(TABLES, tmp_path / "store") as store:
        store.write(0, np.arange(1000), values(0, 1000))
        os.truncate(tmp_path / "store" / "table-00000.rows", 192 * 900)
        out = np.empty((1, 48), np.float32)
        store.read(0, np.array([899]), out)
        with pytest.raises(StoreError, match=r"has 172,800 B and should have 192,000"):
            store.read(0, np.array([999]), out)


def test_after_a_write_that_failed_halfway_the_store_refuses_work(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with MappedStore(TABLES, tmp_path / "store") as store:
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
    with MappedStore(TABLES, tmp_path / "store", resident_bytes_max=4 << 20) as store:
        monkeypatch.setattr("bagpipe.store.residency._let_go", lambda *_: errno.EIO)
        with pytest.raises(StoreError, match=r"writing out .* failed"):
            store.write(0, np.arange(50_000), values(0, 50_000))
        monkeypatch.undo()
        with pytest.raises(StoreError, match="failed"):
            store.sync()
    with pytest.raises(StoreError, match="was not closed"):
        MappedStore.open(tmp_path / "store", TABLES)


def test_rows_lost_while_others_were_read_are_never_published(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with MappedStore(TABLES, tmp_path / "store", resident_bytes_max=4 << 20) as store:
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

    store = MappedStore(TABLES, tmp_path / "store")
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


# Settings


def test_a_bound_too_small_is_refused_and_leaves_nothing(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="resident_bytes_max is 1,000"):
        MappedStore(TABLES, tmp_path / "store", resident_bytes_max=1000)
    assert not (tmp_path / "store").exists()


def test_rows_without_floats_are_refused_and_leave_nothing(tmp_path: Path) -> None:
    with pytest.raises(StoreError, match="table 1: rows of 0 floats"):
        MappedStore([Zeros(1), Zeros(0)], tmp_path / "store")
    assert not (tmp_path / "store").exists()
