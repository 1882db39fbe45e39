"""The benchmark of the wire, small."""

from __future__ import annotations

import os

from bagpipe.wire.keys import VARIABLE
from benchmarks.transport import BENCHMARK, CONTESTANTS, IN_FLIGHT


def test_all_ways_bring_the_same_rows_and_are_compared_with_tcp(monkeypatch):
    monkeypatch.setenv(VARIABLE, "as it was")
    results = BENCHMARK.run(True)
    assert [(row["transport"], row["in_flight"]) for row in results] == [
        (each.name, many) for many in IN_FLIGHT for each in CONTESTANTS
    ]
    for row in results:
        assert row["rows_per_second"] > 0
        assert row["time_ratio_to_tcp"] > 0
        assert row["transport"] != "tcp" or row["time_ratio_to_tcp"] == 1
    assert os.environ[VARIABLE] == "as it was"
