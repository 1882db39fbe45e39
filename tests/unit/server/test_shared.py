"""Shared memory is used when it is exactly as announced, and never otherwise."""

from __future__ import annotations

import fcntl
import gc
import mmap
import os
import subprocess
import sys
from pathlib import Path

import msgspec
import pytest
from bagpipe.server.shared import TOKEN_BYTES, OwnMemory, attach, boot, regions

from bagpipe.server import shared
from bagpipe.wire.messages import SharedMemory

SIZE = 1 << 16


@pytest.fixture
def own():
    memory = OwnMemory(SIZE)
    yield memory
    memory.close()


def test_both_sides_see_the_same_bytes(own: OwnMemory) -> None:
    foreign = attach(own.announcement)
    assert foreign is not None
    own.memory[1000:1003] = b"abc"
    assert bytes(foreign.memory[1000:1003]) == b"abc"
    foreign.memory[SIZE - 1] = 7
    assert own.memory[SIZE - 1] == 7
    assert not foreign.abandoned
    own.close()
    own.close()
    assert foreign.abandoned
    assert foreign.memory[SIZE - 1] == 7  # and it is still safe to touch


def test_another_memory_under_the_same_number_counts_as_abandoned(own: OwnMemory) -> None:
    foreign = attach(own.announcement)
    assert foreign is not None
    own.close()
    other = OwnMemory(SIZE)
    assert other.announcement.descriptor == own.announcement.descriptor
    assert foreign.abandoned
    assert attach(own.announcement) is None
    other.close()


CHANGES = {
    "another host": {"boot": "9e3b8d3e-0000-0000-0000-000000000000"},
    "no host": {"boot": ""},
    "another token": {"token": bytes(TOKEN_BYTES)},
    "a short token": {"token": b"x"},
    "larger": {"num_bytes": SIZE * 2},
    "smaller": {"num_bytes": SIZE // 2},
    "empty": {"num_bytes": 0},
    "immense": {"num_bytes": 1 << 62},
    "no such process": {"pid": 2**22 + 5},
    "no such descriptor": {"descriptor": 999_999},
    "a number that is no descriptor": {"descriptor": 2**70},
}


@pytest.mark.parametrize("name", CHANGES)
def test_what_is_not_as_announced_is_not_shared(own: OwnMemory, name: str) -> None:
    assert attach(msgspec.structs.replace(own.announcement, **CHANGES[name])) is None


def announced(descriptor: int, token: bytes, size: int = SIZE) -> SharedMemory:
    return SharedMemory(boot(), os.getpid(), descriptor, size, token)


@pytest.mark.parametrize("seals", [0, fcntl.F_SEAL_SHRINK, fcntl.F_SEAL_GROW])
def test_memory_that_could_shrink_or_grow_is_not_shared(seals: int) -> None:
    descriptor = os.memfd_create("bagpipe", os.MFD_ALLOW_SEALING)
    os.ftruncate(descriptor, SIZE)
    os.pwrite(descriptor, b"t" * TOKEN_BYTES, 0)
    fcntl.fcntl(descriptor, fcntl.F_ADD_SEALS, seals)
    assert attach(announced(descriptor, b"t" * TOKEN_BYTES)) is None
    os.close(descriptor)


def test_files_pipes_and_others_memory_are_left_alone(tmp_path: Path) -> None:
    path = tmp_path / "bagpipe"
    path.write_bytes(b"t" * SIZE)
    readable, writable = os.pipe()
    foreign = os.memfd_create("another", os.MFD_ALLOW_SEALING)
    os.ftruncate(foreign, SIZE)
    with path.open("r+b") as file:
        for descriptor in (file.fileno(), readable, writable, foreign):
            assert attach(announced(descriptor, b"t" * TOKEN_BYTES)) is None
    for descriptor in (readable, writable, foreign):
        os.close(descriptor)
    assert path.read_bytes() == b"t" * SIZE


def test_memory_that_can_only_be_read_is_not_shared() -> None:
    descriptor = os.memfd_create("bagpipe", os.MFD_ALLOW_SEALING)
    os.ftruncate(descriptor, SIZE)
    os.pwrite(descriptor, b"t" * TOKEN_BYTES, 0)
    fcntl.fcntl(descriptor, fcntl.F_ADD_SEALS, fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW | fcntl.F_SEAL_WRITE)
    assert attach(announced(descriptor, b"t" * TOKEN_BYTES)) is None
    os.close(descriptor)


def test_without_a_boot_id_there_is_no_shared_memory(own: OwnMemory, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(shared, "boot", lambda: "")
    assert attach(msgspec.structs.replace(own.announcement, boot="")) is None


def test_nothing_has_a_name_and_all_is_given_back() -> None:
    gc.collect()  # what earlier tests have left
    names, descriptors = set(Path("/dev/shm").iterdir()), set(Path("/proc/self/fd").iterdir())
    mapped = Path("/proc/self/maps").read_text().count("memfd:bagpipe")
    own = OwnMemory(SIZE)
    foreign = attach(own.announcement)
    assert set(Path("/dev/shm").iterdir()) == names
    own.close()
    del foreign, own
    gc.collect()
    assert set(Path("/proc/self/fd").iterdir()) <= descriptors
    assert Path("/proc/self/maps").read_text().count("memfd:bagpipe") == mapped


OTHER = """
import sys, msgspec
from bagpipe.server.shared import OwnMemory
own = OwnMemory(65536)
own.memory[100:105] = b"hello"
sys.stdout.write(msgspec.json.encode(own.announcement).decode() + "\\n")
sys.stdout.flush()
sys.stdin.read()
"""


def test_another_process_shares_until_it_ends() -> None:
    other = subprocess.Popen([sys.executable, "-c", OTHER], stdin=subprocess.PIPE, stdout=subprocess.PIPE)
    assert other.stdin is not None
    assert other.stdout is not None
    foreign = attach(msgspec.json.decode(other.stdout.readline(), type=SharedMemory))
    assert foreign is not None
    assert bytes(foreign.memory[100:105]) == b"hello"
    assert not foreign.abandoned
    other.kill()
    other.wait()
    assert foreign.abandoned
    assert bytes(foreign.memory[100:105]) == b"hello"
    other.stdin.close()
    other.stdout.close()


@pytest.mark.parametrize(("num_rows", "num_floats"), [(0, 0), (1, 1), (7, 7 * 48), (64, 64), (1000, 3)])
def test_regions_lie_apart_and_begin_on_cache_lines(num_rows: int, num_floats: int) -> None:
    layout = regions(num_rows, num_floats)
    assert layout.ids.start >= TOKEN_BYTES
    for region, size in zip(layout, (num_rows * 8, num_rows, num_floats * 4), strict=True):
        assert region.start % 64 == 0
        assert region.stop - region.start == size
    assert layout.ids.stop <= layout.flags.start
    assert layout.flags.stop <= layout.rows.start
    assert layout.num_bytes == layout.rows.stop
    assert mmap.PAGESIZE % 64 == 0
