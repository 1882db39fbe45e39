"""`bagpipe launch` in a process of its own, and what it has started."""

from __future__ import annotations

import os
import subprocess
import sys
import time
from pathlib import Path

from bagpipe.cluster import keeper
from bagpipe.config import load_config
from bagpipe.job import prepare
from bagpipe.training import train

BAGPIPE = [sys.executable, "-c", "from bagpipe.cli import main; main()"]
TINY = [
    *("data.preset=tiny", "data.samples=2000", "model.name=wide_deep", "model.dim=4", "batch_size=128", "threads=1"),
    "cache=20000",  # the default has millions of places, which take longer to prepare than these runs to train
]


def settings(*more):
    return [word for each in (*TINY, *more) for word in ("--set", each)]


def expected(tmp_path, iterations, *more):
    config = load_config(None, [*TINY, f"iterations={iterations}", *more])
    return train(prepare(config, tmp_path / "expected"), lambda *_: None)


def bagpipe(*words, **environment):
    return subprocess.run(
        [*BAGPIPE, *words], capture_output=True, text=True, timeout=200, check=False, env=os.environ | environment
    )


class Driver:
    """A launch under way, and the processes that it has started."""

    def __init__(self, run_dir, *words, **environment):
        self.said = run_dir.with_name("said")
        with self.said.open("w") as said:
            self.process = subprocess.Popen(
                [*BAGPIPE, "launch", "--json", "--run-dir", str(run_dir), *words],
                stdout=subprocess.PIPE,
                stderr=said,
                text=True,
                start_new_session=True,
                env=os.environ | environment,
            )

    def wait_for(self, words, seconds=150):
        until = time.monotonic() + seconds
        while words not in self.said.read_text():
            assert time.monotonic() < until, self.said.read_text()
            assert self.process.poll() is None, self.process.communicate()[0]
            time.sleep(0.1)
        self.started = keeper.children_of(self.process.pid)
        assert len(self.started) > 5

    def end(self, number):
        self.process.send_signal(number)
        return self.process.communicate(timeout=60)[0]

    def assert_nothing_is_left(self, seconds=30):
        until = time.monotonic() + seconds
        while left := [pid for pid in self.started if is_there(pid)]:
            assert time.monotonic() < until, [Path(f"/proc/{pid}/cmdline").read_bytes() for pid in left]
            time.sleep(0.05)


def is_there(pid):
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except FileNotFoundError:
        return False


def title(pid):
    try:
        return Path(f"/proc/{pid}/cmdline").read_bytes().partition(b"\0")[0].decode()
    except OSError:
        return ""
