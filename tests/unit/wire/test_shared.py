"""Memory that is shared by its descriptor is used when it is exactly as announced, and never otherwise."""

from __future__ import annotations

import array
import fcntl
import gc
import mmap
import os
import socket
import subprocess
import sys
from pathlib import Path

import pytest

from bagpipe.wire.shared import OwnMemory, attach, regions

SIZE = 1 << 16


@pytest.fixture
def own():
    memory = OwnMemory(SIZE)
    yield memory
    memory.close()


def attached(descriptor: int, num_bytes: int = SIZE) -> memoryview | None:
    """By a descriptor of its own, as one that has come with a message; it is closed in any case."""
    passed = os.dup(descriptor)
    try:
        return attach(passed, num_bytes)
    finally:
        with pytest.raises(OSError, match="Bad file descriptor"):
            os.fstat(passed)


def test_both_sides_see_the_same_bytes(own: OwnMemory) -> None:
    foreign = attached(own.descriptor)
    assert foreign is not None
    own.memory[1000:1003] = b"abc"
    assert bytes(foreign[1000:1003]) == b"abc"
    foreign[SIZE - 1] = 7
    assert own.memory[SIZE - 1] == 7
    own.close()
    own.close()
    assert foreign[SIZE - 1] == 7, "it is still safe to touch"


def test_nobody_can_make_it_shorter_or_longer(own: OwnMemory) -> None:
    for size in (0, SIZE - 1, SIZE + 1):
        with pytest.raises(PermissionError):
            os.ftruncate(own.descriptor, size)
    with pytest.raises(PermissionError):
        fcntl.fcntl(own.descriptor, fcntl.F_ADD_SEALS, fcntl.F_SEAL_WRITE)


@pytest.mark.parametrize("num_bytes", [SIZE * 2, SIZE // 2, SIZE - 1, 0, -1, 63, 1 << 62, 1 << 70])
def test_what_is_not_of_the_size_that_was_announced_is_not_shared(own: OwnMemory, num_bytes: int) -> None:
    assert attached(own.descriptor, num_bytes) is None


def test_what_would_take_too_much_is_not_shared() -> None:
    own = OwnMemory((1 << 30) + 4096)
    assert attached(own.descriptor, own.num_bytes) is None
    own.close()


@pytest.mark.parametrize("seals", [0, fcntl.F_SEAL_SHRINK, fcntl.F_SEAL_GROW])
def test_memory_that_could_shrink_or_grow_is_not_shared(seals: int) -> None:
    descriptor = os.memfd_create("bagpipe", os.MFD_ALLOW_SEALING)
    os.ftruncate(descriptor, SIZE)
    fcntl.fcntl(descriptor, fcntl.F_ADD_SEALS, seals)
    assert attached(descriptor) is None
    os.close(descriptor)


def test_files_pipes_and_sockets_are_left_alone(tmp_path: Path) -> None:
    path = tmp_path / "bagpipe"
    path.write_bytes(b"t" * SIZE)
    readable, writable = os.pipe()
    ends = socket.socketpair()
    with path.open("r+b") as file:
        for descriptor in (file.fileno(), readable, writable, ends[0].fileno(), os.open(tmp_path, os.O_RDONLY)):
            assert attached(descriptor) is None
    os.close(descriptor)
    for descriptor in (readable, writable):
        os.close(descriptor)
    for end in ends:
        end.close()
    assert path.read_bytes() == b"t" * SIZE


def test_memory_that_can_only_be_read_is_not_shared(own: OwnMemory) -> None:
    sealed = os.memfd_create("bagpipe", os.MFD_ALLOW_SEALING)
    os.ftruncate(sealed, SIZE)
    fcntl.fcntl(sealed, fcntl.F_ADD_SEALS, fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW | fcntl.F_SEAL_WRITE)
    read_only = os.open(f"/proc/self/fd/{own.descriptor}", os.O_RDONLY)
    for descriptor in (sealed, read_only):
        assert attached(descriptor) is None
        os.close(descriptor)


def test_nothing_has_a_name_and_all_is_given_back() -> None:
    gc.collect()  # what earlier tests have left
    names, descriptors = set(Path("/dev/shm").iterdir()), set(Path("/proc/self/fd").iterdir())
    mapped = Path("/proc/self/maps").read_text().count("memfd:bagpipe")
    own = OwnMemory(SIZE)
    foreign = attached(own.descriptor)
    assert set(Path("/dev/shm").iterdir()) == names
    own.close()
    del foreign, own
    gc.collect()
    assert set(Path("/proc/self/fd").iterdir()) <= descriptors
    assert Path("/proc/self/maps").read_text().count("memfd:bagpipe") == mapped


OTHER = """
import array, socket, sys
from bagpipe.wire.shared import OwnMemory
own = OwnMemory(65536)
own.memory[100:105] = b"hello"
way = socket.socket(fileno=int(sys.argv[1]))
way.sendmsg([b"x"], [(socket.SOL_SOCKET, socket.SCM_RIGHTS, array.array("i", [own.descriptor]))])
sys.stdin.read()
"""


def test_another_process_shares_and_what_it_shared_stays_when_it_is_killed() -> None:
    ours, theirs = socket.socketpair()
    other = subprocess.Popen(
        [sys.executable, "-c", OTHER, str(theirs.fileno())], stdin=subprocess.PIPE, pass_fds=[theirs.fileno()]
    )
    theirs.close()
    ours.settimeout(60)
    _, ((_, _, data),), _, _ = ours.recvmsg(1, socket.CMSG_SPACE(4))
    foreign = attach(array.array("i", data)[0], SIZE)
    assert foreign is not None
    other.kill()
    other.communicate(timeout=60)
    assert bytes(foreign[100:105]) == b"hello"
    ours.close()


def test_no_process_that_is_started_inherits_it(own: OwnMemory) -> None:
    assert not os.get_inheritable(own.descriptor)


@pytest.mark.parametrize(("num_rows", "num_floats"), [(0, 0), (1, 1), (7, 7 * 48), (64, 64), (1000, 3)])
def test_regions_lie_apart_and_begin_on_cache_lines(num_rows: int, num_floats: int) -> None:
    layout = regions(num_rows, num_floats)
    for region, size in zip(layout, (num_rows * 8, num_rows, num_floats * 4), strict=True):
        assert region.start % 64 == 0
        assert region.stop - region.start == size
    assert layout.ids.stop <= layout.flags.start
    assert layout.flags.stop <= layout.rows.start
    assert layout.num_bytes == layout.rows.stop
    assert mmap.PAGESIZE % 64 == 0
