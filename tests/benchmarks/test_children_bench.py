"""Processes that benchmarks start and talk with."""

from __future__ import annotations

import signal
import subprocess
import sys
import time
from pathlib import Path

import msgspec
import pytest

from bagpipe.errors import PipelineError
from benchmarks.children import call, child, heard

ROLE = """
import os
from benchmarks.children import answer
class Role:
    def add(self, one, other): return {"sum": one + other, "process": os.getpid()}
answer(Role())
"""


def test_processes_answer_what_they_are_asked_one_line_each():
    with child([sys.executable, "-c", ROLE], {}) as one, child([sys.executable, "-c", ROLE], {}) as two:
        assert call([one, two], "add", one=1, other=2) == [
            {"sum": 3, "process": one.pid},
            {"sum": 3, "process": two.pid},
        ]
        assert call([two], "add", one="a", other="b")[0]["sum"] == "ab"
    assert one.poll() == two.poll() == -signal.SIGKILL


def test_a_process_that_ends_early_is_named():
    with child(["false"], {}) as process:
        with pytest.raises(PipelineError, match="ended with 1"):
            heard(process)
        with pytest.raises(PipelineError, match="ended with 1"):
            call([process], "anything")


def test_a_process_ends_when_the_one_that_started_it_was_killed():
    code = (
        f"import sys, time\nfrom benchmarks.children import call, child\nROLE = {ROLE!r}\n"
        "with child([sys.executable, '-c', ROLE], {}) as process:\n"
        "    print(call([process], 'add', one=0, other=0)[0]['process'], flush=True)\n    time.sleep(60)"
    )
    with subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE) as parent:
        grandchild = msgspec.json.decode(parent.stdout.readline())
        parent.kill()
    for _ in range(200):
        if _is_gone(grandchild):
            return
        time.sleep(0.05)
    pytest.fail(f"process {grandchild} is still there")


def _is_gone(process):
    try:
        return Path(f"/proc/{process}/stat").read_text(encoding="ascii").rpartition(")")[2].split()[0] == "Z"
    except FileNotFoundError:
        return True
