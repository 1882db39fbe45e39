"""The benchmark of the wire, small."""

from __future__ import annotations

import os
import pathlib

import pytest

from bagpipe.errors import ConfigError
from bagpipe.wire.keys import VARIABLE
from benchmarks import transport
from benchmarks.transport import CONTESTANTS, FEW_ROWS, IN_FLIGHT, ROWS
from benchmarks.transport_store import WAYS

HERE = pathlib.Path(transport.__file__).parents[1]


def test_all_ways_bring_the_same_rows_beside_floors_and_another_checkout(monkeypatch):
    monkeypatch.setenv(VARIABLE, "as it was")
    results = transport.run(True, HERE)
    store, wire = ([row for row in results if row["part"] == part] for part in ("store", "wire"))
    assert [(row["transport"], row["rows"]) for row in store] == [
        (way, num_rows) for num_rows in (ROWS, FEW_ROWS) for way in WAYS
    ]
    for row in store:
        for clock in ("wall", "processor"):
            assert row[f"{clock}_ms"] > 0
            assert row[f"{clock}_ms_against"] > 0
            assert row[f"{clock}_ratio_to_against"] > 0
    assert [(row["transport"], row["in_flight"]) for row in wire] == [
        (each.name, many) for many in IN_FLIGHT for each in CONTESTANTS
    ]
    for row, each in zip(wire, CONTESTANTS * len(IN_FLIGHT), strict=True):
        assert row["wall_ms"] > 0
        assert row.get("floor", "") == " + ".join(each.floor)
        assert ("wall_ratio_to_floor" in row) == bool(each.floor)
    assert os.environ[VARIABLE] == "as it was"


def test_another_checkout_must_be_one(tmp_path):
    with pytest.raises(ConfigError, match="there is no src/bagpipe"):
        transport.run(True, tmp_path)
