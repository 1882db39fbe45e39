"""Memory that a client shares with a server on the same host, so that rows are copied once and no socket carries them.

The client owns a sealed memfd, which has no name that could be left behind; a server opens it through /proc. What lies
where follows from the numbers of rows alone, so no offset travels that would have to be trusted. If anything is not as
announced there is no shared memory, and buffers travel (I8).
"""

from __future__ import annotations

import fcntl
import mmap
import os
import secrets
from contextlib import suppress
from functools import cache
from pathlib import Path
from typing import NamedTuple

from bagpipe.wire.messages import SharedMemory

NAME = "bagpipe"
TOKEN_BYTES = 16
NUM_BYTES = 32 << 20
"""Of a client's memory for one connection; the pages that it never uses cost nothing."""
NUM_BYTES_MAX = 1 << 30
_LINE = 64
_SEALS = fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW


class Regions(NamedTuple):
    """Where ids, flags and rows lie."""

    ids: slice
    flags: slice
    """One byte an id: was its row ever written?"""
    rows: slice

    @property
    def num_bytes(self) -> int:
        """Of all together, from the beginning of the memory."""
        return int(self.rows.stop)


def regions(num_rows: int, num_floats: int) -> Regions:
    """The place of so many ids, their flags and their values, each from the beginning of a cache line."""
    ids = slice(_LINE, _LINE + num_rows * 8)
    flags = slice(_aligned(ids.stop), _aligned(ids.stop) + num_rows)
    rows = slice(_aligned(flags.stop), _aligned(flags.stop) + num_floats * 4)
    return Regions(ids, flags, rows)


@cache
def boot() -> str:
    """Which boot of which host this is; empty where that can't be known."""
    try:
        return Path("/proc/sys/kernel/random/boot_id").read_text(encoding="ascii").strip()
    except OSError:
        return ""


class OwnMemory:
    """A client's memory; it is gone when the client and all servers have let go of it."""

    def __init__(self, num_bytes: int = NUM_BYTES) -> None:
        """Raises OSError where there is no such memory."""
        self._descriptor = os.memfd_create(NAME, os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
        try:
            os.ftruncate(self._descriptor, num_bytes)
            fcntl.fcntl(self._descriptor, fcntl.F_ADD_SEALS, _SEALS | fcntl.F_SEAL_SEAL)
            self.memory = memoryview(mmap.mmap(self._descriptor, num_bytes))
        except OSError:
            os.close(self._descriptor)
            raise
        token = secrets.token_bytes(TOKEN_BYTES)
        self.memory[:TOKEN_BYTES] = token
        self.announcement = SharedMemory(boot(), os.getpid(), self._descriptor, num_bytes, token)

    def close(self) -> None:
        """Let go; who still has views of the memory keeps it. A second call does nothing."""
        if self._descriptor >= 0:
            os.close(self._descriptor)
            self._descriptor = -1
            self.memory = memoryview(b"")


class ForeignMemory:
    """A client's memory as a server sees it."""

    def __init__(self, memory: memoryview, path: Path, identity: tuple[int, int]) -> None:
        self.memory, self._path, self._identity = memory, path, identity

    @property
    def abandoned(self) -> bool:
        """Whether the client has let go of it, or is gone."""
        try:
            status = self._path.stat()
        except OSError:
            return True
        return (status.st_dev, status.st_ino) != self._identity


def attach(announced: SharedMemory) -> ForeignMemory | None:
    """The memory that a client announces; None unless it is on this host, sealed and exactly as announced."""
    if not boot() or announced.boot != boot() or len(announced.token) != TOKEN_BYTES:
        return None
    if not _LINE <= announced.num_bytes <= NUM_BYTES_MAX:
        return None
    path = Path(f"/proc/{announced.pid}/fd/{announced.descriptor}")
    with suppress(OSError, ValueError):
        if not str(path.readlink()).startswith(f"/memfd:{NAME}"):
            return None
        descriptor = os.open(path, os.O_RDWR | os.O_CLOEXEC | os.O_NONBLOCK)
        try:
            status = os.fstat(descriptor)
            if fcntl.fcntl(descriptor, fcntl.F_GET_SEALS) & _SEALS != _SEALS or status.st_size != announced.num_bytes:
                return None
            memory = memoryview(mmap.mmap(descriptor, announced.num_bytes))
        finally:
            os.close(descriptor)
        if memory[:TOKEN_BYTES] == announced.token:
            return ForeignMemory(memory, path, (status.st_dev, status.st_ino))
    return None


def _aligned(offset: int) -> int:
    return -(-offset // _LINE) * _LINE
