"""What runs with faults have come to, as a table at the end of `make chaos`."""

from __future__ import annotations

from collections import defaultdict
from statistics import median

import pytest

RUNS = defaultdict(list)
"""By kind of fault: for each run its faults, how many were recovered from, seconds, and whether bits differ."""


@pytest.fixture
def ledger():
    """Takes note of a run: `ledger(kind, faults, recovered, seconds, differs)`."""
    return lambda kind, *run: RUNS[kind].append(run)


def pytest_terminal_summary(terminalreporter):
    if not RUNS:
        return
    write = terminalreporter.write_line
    terminalreporter.section("faults")
    write(f"{'kind of fault':44} {'runs':>6} {'faults':>7} {'recovered':>10} {'median s':>9} {'mismatches':>11}")
    total = [0, 0, 0, 0]
    for kind, runs in sorted(RUNS.items()):
        counts = [len(runs), sum(run[0] for run in runs), sum(run[1] for run in runs), sum(run[3] for run in runs)]
        total = [before + more for before, more in zip(total, counts, strict=True)]
        seconds = median(run[2] for run in runs)
        write(f"{kind:44} {counts[0]:6} {counts[1]:7} {counts[2]:10} {seconds:9.2f} {counts[3]:11}")
    from harness.faults import SEED

    write(f"{'all':44} {total[0]:6} {total[1]:7} {total[2]:10} {'':9} {total[3]:11}")
    write(f"the same again: BAGPIPE_CHAOS_SEED={SEED}")
