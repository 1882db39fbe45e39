"""Which files a batch visits, and how many functions are called for it: `python tools/walk.py [--trainers N]`.

Profiler hooks in every thread of a small run count the functions of the package that are called in a few iterations in
its middle.
"""

from __future__ import annotations

import argparse
import sys
import threading
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from tempfile import TemporaryDirectory
from types import CodeType, FrameType
from typing import Any

from bagpipe.config import load_config
from bagpipe.job import prepare
from bagpipe.training import train

PACKAGE = f"{Path(sys.modules['bagpipe'].__file__ or '').parent}/"
FIRST, COUNT = 80, 40
"""Iterations before those that are counted, and how many are."""
NOT_COUNTED = ("kernels/", "models/", "failpoints.py", "arrays.py")


class Walk:
    """Counts calls while it is open."""

    def __init__(self) -> None:
        self.calls: Counter[CodeType] = Counter()
        self.is_open = False

    def hook(self, frame: FrameType, event: str, _: Any) -> None:
        """What the interpreter calls."""
        if self.is_open and event == "call" and frame.f_code.co_filename.startswith(PACKAGE):
            self.calls[frame.f_code] += 1

    def report(self, trainers: int) -> Callable[[int, str], None]:
        """What the run calls after each iteration."""
        first, last = FIRST * trainers, (FIRST + COUNT) * trainers
        heard = 0

        def hear(*_: object) -> None:
            nonlocal heard
            heard += 1
            self.is_open = first <= heard * trainers < last

        return hear

    def files(self) -> Counter[str]:
        """Calls by file, an iteration."""
        found: Counter[str] = Counter()
        for code, calls in self.calls.items():
            name = code.co_filename.removeprefix(PACKAGE)
            if not name.startswith(NOT_COUNTED):
                found[name] += calls
        return found


def main() -> None:
    """Print the walk."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--trainers", type=int, default=1, help="threads of one process")
    trainers = parser.parse_args().trainers
    settings = [
        *("data.preset=tiny", "data.samples=60000", "model.name=wide_deep", "batch_size=256", "threads=1"),
        *(f"trainers={trainers}", "checkpoint.final=false"),
    ]
    walk = Walk()
    threading.setprofile(walk.hook)
    sys.setprofile(walk.hook)
    with TemporaryDirectory() as directory:
        train(prepare(load_config(None, settings), Path(directory) / "run"), walk.report(trainers))
    sys.setprofile(None)
    files = walk.files()
    for name, calls in files.most_common():
        print(f"{calls / COUNT:8.1f}  {name}")
    num_calls = sum(walk.calls.values()) / COUNT
    print(f"{len(files)} files, {len(walk.calls)} functions, {num_calls:.0f} calls an iteration")


if __name__ == "__main__":
    main()
