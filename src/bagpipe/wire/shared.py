"""Memory that a client shares with a server on the same host, so that rows are copied once and no socket carries them.

The client makes a sealed memfd, which has no name that could be left behind, and sends its descriptor with the message
that introduces it. What lies where follows from the numbers of rows alone, so no offset travels that would have to be
trusted. If anything is not as announced there is no shared memory, and buffers travel (I8).
"""

from __future__ import annotations

import fcntl
import mmap
import os
from typing import NamedTuple

NAME = "bagpipe"
NUM_BYTES = 32 << 20
"""Of a client's memory for one connection; the pages that it never uses cost nothing."""
NUM_BYTES_MAX = 1 << 30
_LINE = 64
_SEALS = getattr(fcntl, "F_SEAL_SHRINK", 0) | getattr(fcntl, "F_SEAL_GROW", 0)


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


class OwnMemory:
    """A client's memory; it is gone when the client and its server have let go of it."""

    def __init__(self, num_bytes: int = NUM_BYTES) -> None:
        """Raises OSError where there is no such memory."""
        if not hasattr(os, "memfd_create"):
            raise OSError("this system has no memfd")
        self.descriptor, self.num_bytes = os.memfd_create(NAME, os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING), num_bytes
        try:
            os.ftruncate(self.descriptor, num_bytes)
            fcntl.fcntl(self.descriptor, fcntl.F_ADD_SEALS, _SEALS | fcntl.F_SEAL_SEAL)
            self.memory = memoryview(mmap.mmap(self.descriptor, num_bytes))
        except OSError:
            os.close(self.descriptor)
            raise

    def close(self) -> None:
        """Let go; who still has views of the memory keeps it. A second call does nothing."""
        if self.descriptor >= 0:
            os.close(self.descriptor)
            self.descriptor = -1
            self.memory = memoryview(b"")


def attach(descriptor: int, num_bytes: int) -> memoryview | None:
    """The memory of a client whose descriptor has come, which is closed; None unless it is sealed and as announced.

    Without the seals a client could make it shorter, and reading what is gone would end this process.
    """
    try:
        if not _SEALS or not _LINE <= num_bytes <= NUM_BYTES_MAX or os.fstat(descriptor).st_size != num_bytes:
            return None
        if fcntl.fcntl(descriptor, fcntl.F_GET_SEALS) & _SEALS != _SEALS:
            return None
        return memoryview(mmap.mmap(descriptor, num_bytes))
    except (OSError, ValueError):  # not a memfd, or not one that may be written
        return None
    finally:
        os.close(descriptor)


def _aligned(offset: int) -> int:
    return -(-offset // _LINE) * _LINE
