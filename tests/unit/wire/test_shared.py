"""Shared memory: only what is sealed, whole and writable is touched; nothing else costs more than a look."""

from __future__ import annotations

import fcntl
import mmap
import os
import socket

import pytest

from bagpipe.wire import shared
from bagpipe.wire.shared import NUM_BYTES_MAX, OwnMemory, attach, regions
from harness.wire import MB, nothing_left_behind

SEALS = fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW


@pytest.fixture(autouse=True)
def _nothing_left_behind():
    with nothing_left_behind():
        yield


def memfd(num_bytes=MB, seals=SEALS):
    descriptor = os.memfd_create("test", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
    os.ftruncate(descriptor, num_bytes)
    if seals:
        fcntl.fcntl(descriptor, fcntl.F_ADD_SEALS, seals)
    return descriptor


def test_what_one_side_writes_the_other_reads():
    own = OwnMemory(MB)
    memory = attach(os.dup(own.descriptor), MB)
    own.memory[100:104] = b"rows"
    assert bytes(memory[100:104]) == b"rows"
    memory[200:202] = b"ok"
    assert bytes(own.memory[200:202]) == b"ok"
    own.close()
    own.close()
    assert bytes(memory[100:104]) == b"rows"  # whoever still has it keeps it
    del memory


def test_own_memory_can_not_become_shorter_and_its_seals_stay():
    own = OwnMemory(MB)
    for spoil in (lambda: os.ftruncate(own.descriptor, 10), lambda: os.ftruncate(own.descriptor, 2 * MB)):
        with pytest.raises(PermissionError):
            spoil()
    with pytest.raises(PermissionError):
        fcntl.fcntl(own.descriptor, fcntl.F_ADD_SEALS, fcntl.F_SEAL_WRITE)
    assert not os.get_inheritable(own.descriptor)
    own.close()


def a_file(tmp_path):
    path = tmp_path / "file"
    path.write_bytes(bytes(MB))
    return os.open(path, os.O_RDWR)


def a_pipe(_):
    reading, writing = os.pipe()
    os.close(writing)
    return reading


def a_socket(_):
    return socket.socket().detach()


def read_only(_):
    descriptor = memfd()
    again = os.open(f"/proc/self/fd/{descriptor}", os.O_RDONLY)
    os.close(descriptor)
    return again


BAD = {
    "unsealed": lambda _: memfd(seals=0),
    "may shrink": lambda _: memfd(seals=fcntl.F_SEAL_GROW),
    "may grow": lambda _: memfd(seals=fcntl.F_SEAL_SHRINK),
    "sealed against writes": lambda _: memfd(seals=SEALS | fcntl.F_SEAL_WRITE),
    "too short": lambda _: memfd(MB - 1),
    "too long": lambda _: memfd(MB + 1),
    "empty": lambda _: memfd(0),
    "a file": a_file,
    "a directory": lambda path: os.open(path, os.O_RDONLY),
    "a device": lambda _: os.open("/dev/zero", os.O_RDWR),
    "a pipe": a_pipe,
    "a socket": a_socket,
    "read-only": read_only,
}


@pytest.mark.parametrize("kind", BAD)
def test_what_is_not_as_announced_is_refused_and_closed(tmp_path, kind):
    """The fixture sees that each is closed. Reading memory that has become shorter would end the process."""
    descriptor = BAD[kind](tmp_path)
    assert attach(descriptor, MB) is None
    with pytest.raises(OSError, match="Bad file descriptor"):
        os.fstat(descriptor)


@pytest.mark.parametrize("num_bytes", [-1, 0, 63, NUM_BYTES_MAX + 1, 1 << 63])
def test_sizes_that_make_no_sense_are_refused(num_bytes):
    assert attach(memfd(64), num_bytes) is None


def test_where_nothing_can_be_sealed_nothing_is_shared(monkeypatch):
    """Without the calls, as on macOS, a descriptor that came all the same is closed."""
    monkeypatch.setattr(shared, "_SEALS", 0)
    assert attach(memfd(), MB) is None
    monkeypatch.delattr(os, "memfd_create")
    with pytest.raises(OSError, match="no memfd"):
        OwnMemory()


def test_where_memory_can_not_be_had_nothing_stays_open(monkeypatch):
    def fail(*_):
        raise OSError("no memory")

    monkeypatch.setattr(mmap, "mmap", fail)
    with pytest.raises(OSError, match="no memory"):
        OwnMemory(MB)
    assert attach(memfd(), MB) is None


@pytest.mark.parametrize("num_rows", [0, 1, 7, 8, 9, 1000])
@pytest.mark.parametrize("num_floats", [0, 1, 16, 17, 48_000])
def test_regions_begin_at_cache_lines_and_do_not_overlap(num_rows, num_floats):
    ids, flags, rows = places = regions(num_rows, num_floats)
    assert all(place.start % 64 == 0 for place in places)
    assert 0 < ids.start <= ids.stop <= flags.start <= flags.stop <= rows.start <= rows.stop == places.num_bytes
    assert (ids.stop - ids.start, flags.stop - flags.start) == (8 * num_rows, num_rows)
    assert rows.stop - rows.start == 4 * num_floats
