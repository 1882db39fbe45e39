"""What the keeper of a Ray of our own ends: everything below it, orphans and sessions of their own too, and no more."""

from __future__ import annotations

import os
import subprocess
import sys
import time
from pathlib import Path

from bagpipe.cluster import keeper

TREE = """
import ctypes, os, subprocess, sys, time
sys.path.insert(0, sys.argv[1])
import keeper
ctypes.CDLL(None).prctl(keeper.PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0)
sleeper = "import time; time.sleep(600)"
orphan = f"import subprocess, sys; subprocess.Popen([sys.executable, '-c', {sleeper!r}], start_new_session=True)"
subprocess.Popen([sys.executable, "-c", sleeper])
subprocess.run([sys.executable, "-c", orphan])
below = keeper.children_of(os.getpid())
print(*below, flush=True)
keeper.end_children()
print(*keeper.children_of(os.getpid()), flush=True)
"""


def test_all_processes_below_are_ended_and_others_are_not():
    bystander = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(600)"])
    try:
        done = subprocess.run(
            [sys.executable, "-c", TREE, str(Path(keeper.__file__).parent)],
            capture_output=True,
            text=True,
            timeout=60,
            check=True,
        )
        before, after = (line.split() for line in done.stdout.split("\n")[:2])
        assert len(before) == 2
        assert after == []
        assert not any(Path(f"/proc/{pid}").exists() for pid in before)
        assert bystander.poll() is None
    finally:
        bystander.kill()
        bystander.wait()


def test_children_are_found_at_any_depth():
    child = subprocess.Popen(
        [sys.executable, "-c", "import subprocess, sys; subprocess.run([sys.executable, '-c', 'input()'])"],
        stdin=subprocess.PIPE,
    )
    try:
        until = time.monotonic() + 30
        while len(keeper.children_of(child.pid)) < 1 and time.monotonic() < until:
            time.sleep(0.05)
        assert child.pid in keeper.children_of(os.getpid())
        assert set(keeper.children_of(child.pid)) < set(keeper.children_of(os.getpid()))
    finally:
        child.communicate(b"\n", timeout=30)


def test_a_keeper_whose_owner_asks_for_nothing_ends_at_once():
    done = subprocess.run([sys.executable, keeper.__file__], input=b"", capture_output=True, timeout=30, check=False)
    assert (done.returncode, done.stdout) == (0, b"")
