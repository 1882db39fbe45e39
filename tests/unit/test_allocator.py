"""Keeping freed memory: large blocks that are freed and asked for again are not paged in again."""

import subprocess
import sys

import pytest

from bagpipe.allocator import keep_freed_memory

PROGRAM = """
import resource, sys, torch
from bagpipe.allocator import keep_freed_memory
kept = keep_freed_memory() if sys.argv[1] == "keep" else True
def faults():
    return resource.getrusage(resource.RUSAGE_SELF).ru_minflt
for _ in range(3):
    torch.empty(50_000_000, dtype=torch.uint8).fill_(1)
before = faults()
for _ in range(3):
    torch.empty(50_000_000, dtype=torch.uint8).fill_(1)
print(int(kept), faults() - before)
"""


def run(mode):
    result = subprocess.run(
        [sys.executable, "-c", PROGRAM, mode], capture_output=True, text=True, check=True, timeout=120
    )
    kept, faults = result.stdout.split()
    return bool(int(kept)), int(faults)


@pytest.mark.skipif(sys.platform != "linux", reason="a setting of glibc")
def test_memory_that_is_freed_and_used_again_is_not_paged_in_again():
    kept, faults = run("keep")
    if not kept:
        pytest.skip("this C library has no such setting")
    assert faults < run("leave")[1]


def test_a_c_library_without_the_setting_is_left_as_it_is(monkeypatch):
    monkeypatch.setattr("ctypes.CDLL", lambda _: object())
    assert keep_freed_memory() is False
