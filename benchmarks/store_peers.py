"""Rows on disk the way others keep them: RocksDB, LMDB, a plain memory map, and what the disk gives at all.

A batch is 16,384 rows by 64-bit id, warm; cold reads are of few rows, since these take one after the other. Engines are
given a gigabyte of cache and asked for no durability, as a store of scratch rows needs none.
"""

from __future__ import annotations

import importlib.util
import json
import os
import shutil
import subprocess
import time
from abc import ABC, abstractmethod
from pathlib import Path
from typing import Any

import numpy as np

from bagpipe.arrays import Floats, Int64s

BATCH_ROWS = 16_384
COLD_ROWS = 4_000
_CACHE_BYTES = 1 << 30


class Peer(ABC):
    """A way to keep rows in a directory, by id."""

    name: str
    needs: str | None = None
    """The package that has to be there."""

    def __init__(self, directory: Path, num_rows: int, width: int) -> None:
        self.directory, self.num_rows, self.width = directory, num_rows, width
        self.open()

    @abstractmethod
    def open(self) -> None:
        """Take up what lies in the directory."""

    @abstractmethod
    def read(self, ids: Int64s, out: Floats) -> None:
        """Fill `out` with the rows of these ids."""

    @abstractmethod
    def write(self, ids: Int64s, rows: Floats) -> None:
        """Set the rows of these ids."""

    @abstractmethod
    def close(self) -> None:
        """Everything is in files."""


class RocksDB(Peer):
    """RocksDB in raw mode, with bloom filters and without a log."""

    name, needs = "rocksdb", "rocksdict"

    def open(self) -> None:
        """With a cache for blocks."""
        import rocksdict

        options = rocksdict.Options(raw_mode=True)
        options.create_if_missing(True)
        blocks = rocksdict.BlockBasedOptions()
        blocks.set_block_cache(rocksdict.Cache(_CACHE_BYTES))
        blocks.set_bloom_filter(10, block_based=False)
        options.set_block_based_table_factory(blocks)
        self._made = rocksdict
        self._db = rocksdict.Rdict(str(self.directory), options)
        unlogged = rocksdict.WriteOptions()
        unlogged.disable_wal = True
        self._db.set_write_options(unlogged)

    def read(self, ids: Int64s, out: Floats) -> None:
        """By one call for all."""
        found = self._db.get([key.tobytes() for key in ids.astype(">u8")])
        out[:] = np.frombuffer(b"".join(found), np.float32).reshape(out.shape)

    def write(self, ids: Int64s, rows: Floats) -> None:
        """In one batch."""
        batch = self._made.WriteBatch(raw_mode=True)
        for key, row in zip(ids.astype(">u8"), rows, strict=True):
            batch.put(key.tobytes(), row.tobytes())
        self._db.write(batch)

    def close(self) -> None:
        """With what is in memory written."""
        self._db.close()


class LMDB(Peer):
    """LMDB without syncs, keys in order."""

    name, needs = "lmdb", "lmdb"

    def open(self) -> None:
        """A map with room for the pages of a tree."""
        import lmdb

        map_size = max(8 * self.num_rows * (self.width * 4 + 64), 1 << 28)
        self._env = lmdb.open(str(self.directory), map_size=map_size, sync=False, readahead=False)

    def read(self, ids: Int64s, out: Floats) -> None:
        """By one cursor."""
        keys = [key.tobytes() for key in ids.astype(">u8")]
        with self._env.begin() as txn:
            found = dict(txn.cursor().getmulti(keys))
        out[:] = np.frombuffer(b"".join(found[key] for key in keys), np.float32).reshape(out.shape)

    def write(self, ids: Int64s, rows: Floats) -> None:
        """In one transaction."""
        order = np.argsort(ids)
        pairs = [(ids[n].astype(">u8").tobytes(), rows[n].tobytes()) for n in order]
        with self._env.begin(write=True) as txn:
            txn.cursor().putmulti(pairs)

    def close(self) -> None:
        """And sync what was written."""
        self._env.sync(True)
        self._env.close()


class MemoryMap(Peer):
    """`numpy.memmap`, a row at the place that its id says."""

    name = "memmap"

    def open(self) -> None:
        """As large as all rows."""
        path = self.directory / "rows"
        shape = self.num_rows, self.width
        self._array: np.memmap[Any, np.dtype[np.float32]] = np.memmap(
            path, np.float32, "r+" if path.exists() else "w+", shape=shape
        )

    def read(self, ids: Int64s, out: Floats) -> None:
        """By indexing."""
        np.take(self._array, ids, axis=0, out=out, mode="clip")

    def write(self, ids: Int64s, rows: Floats) -> None:
        """By indexing."""
        self._array[ids] = rows

    def close(self) -> None:
        """With what was written in the file."""
        self._array.flush()
        del self._array


PEERS: tuple[type[Peer], ...] = (RocksDB, LMDB, MemoryMap)


def measure(peer: type[Peer], directory: Path, num_rows: int, width: int, repeats: int) -> dict[str, Any]:
    """Rows a second of one of them, or why it was left out."""
    figures: dict[str, Any] = {"store": peer.name, "floats_per_row": width, "num_rows": num_rows}
    if peer.needs is not None and importlib.util.find_spec(peer.needs) is None:
        return figures | {"skipped": f"{peer.needs} is not installed: pip install 'bagpipe[bench]'"}
    directory.mkdir()
    store = peer(directory, num_rows, width)
    rows = np.ones((BATCH_ROWS, width), np.float32)
    for start in range(0, num_rows, BATCH_ROWS):
        ids = np.arange(start, min(start + BATCH_ROWS, num_rows))
        store.write(ids, rows[: len(ids)])
    rng = np.random.default_rng(0)
    seconds: dict[str, list[float]] = {"read": [], "written": []}
    for _ in range(repeats + 1):
        for work in seconds:
            ids = rng.choice(num_rows, BATCH_ROWS, replace=False)
            began = time.perf_counter()
            if work == "read":
                store.read(ids, rows)
            else:
                store.write(ids, rows)
            seconds[work].append(time.perf_counter() - began)
    store.close()
    for work, times in seconds.items():
        figures[f"{work}_rows_per_second"] = round(BATCH_ROWS / float(np.median(times[1:])))
    store.open()
    forget(directory)
    ids = rng.choice(num_rows, min(COLD_ROWS, num_rows), replace=False)
    began = time.perf_counter()
    store.read(ids, rows[: len(ids)])
    figures["read_cold_rows_per_second"] = round(len(ids) / (time.perf_counter() - began))
    store.close()
    shutil.rmtree(directory)
    return figures


def forget(directory: Path) -> None:
    """Let the page cache have nothing of these files."""
    for path in directory.rglob("*"):
        if path.is_file():
            fd = os.open(path, os.O_RDONLY)
            os.fsync(fd)
            os.posix_fadvise(fd, 0, 0, os.POSIX_FADV_DONTNEED)
            os.close(fd)


def measure_disk(directory: Path, num_bytes: int, seconds: int) -> dict[str, Any]:
    """Random pages a second that fio gets from this disk, 64 at a time past the page cache, or why it was left out."""
    figures: dict[str, Any] = {"store": "fio"}
    fio = shutil.which("fio")
    if fio is None:
        return figures | {"skipped": "fio is not installed"}
    command = [
        fio, "--name=pages", f"--directory={directory}", f"--size={num_bytes}", "--bs=4k", "--direct=1",
        "--iodepth=64", "--ioengine=libaio", "--time_based", f"--runtime={seconds}", "--output-format=json",
        "--unlink=1", "--fallocate=none", "--randrepeat=1",
    ]  # fmt: skip
    for work, pattern in (("read", "randread"), ("written", "randwrite")):
        done = subprocess.run([*command, f"--rw={pattern}"], capture_output=True, text=True, timeout=600, check=False)  # noqa: S603
        if done.returncode:
            return figures | {"skipped": f"fio failed: {(done.stderr or done.stdout).strip()[-200:]}"}
        job = json.loads(done.stdout[done.stdout.index("{") :])["jobs"][0]
        figures[f"{work}_cold_rows_per_second"] = round(job["read" if work == "read" else "write"]["iops"])
    return figures
