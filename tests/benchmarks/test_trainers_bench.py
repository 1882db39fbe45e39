"""Two trainers over slow links, small: every design with the same losses, and TorchRec where it is installed."""

from __future__ import annotations

import json
import os
import subprocess
import sys

import pytest
import torch

from bagpipe.data import find_preset
from bagpipe.models import MODELS, build_model, count_dense
from bagpipe.types import Ids, Table
from benchmarks import torchrec_peer, torchrec_ranks, trainer_roles, trainers
from benchmarks.namespaces import SERVERS, NamespaceError, joined_namespaces

CASE = trainers.Case("wide_deep", trainers.SYSTEMS[1:4:2], trainers.TOLD)
PEER = """
import json, runpy, sys
import torch
peer = runpy.run_path(sys.argv[1])
torch.manual_seed(0)
told = {}
tables = [{"name": "a", "rows": 9, "features": ["a"]}, {"name": "b", "rows": 5, "features": ["b"]}]
for name in sys.argv[2:]:
    model = peer["make_dense_part"](name, tables, 13, 8)
    width = peer["vector_width"](model)
    vectors = {feature: torch.ones(3, width) * (number + 1) for number, feature in enumerate("ab")}
    logits = model(torch.ones(3, 13), vectors)
    told[name] = [sum(p.numel() for p in model.parameters()), width, logits.tolist()]
assert not {"numba", "msgspec", "zmq", "bagpipe.prepared"} & sys.modules.keys()
print(json.dumps(told))
"""


class Here:
    """Namespaces of which all are this one."""

    def host(self, side):
        return side

    def command(self, side, command):
        return command


@pytest.mark.long
def test_both_trainers_train_in_namespaces_with_the_same_losses_in_two_designs(monkeypatch):
    monkeypatch.delenv(torchrec_ranks.VARIABLE, raising=False)
    try:
        with joined_namespaces([*trainers.SIDES, SERVERS]) as namespaces:
            rows = trainers.measure(namespaces, [CASE], True)
    except NamespaceError as error:
        pytest.skip(str(error))
    assert [(row["design"], row["delayed"]) for row in rows] == [("owned", False), ("lrpp", False)]
    for row in rows:
        assert row["loss_difference_max"] == 0
        assert row["iteration_ms"] > 0
        assert row["loop_ms"] > 0
        row_bytes = 4 * trainer_roles.QUICK.dim
        assert len(row["bytes_sent"]) == len(row["bytes_received"]) == 2
        assert sum(row["bytes_sent"]) > row_bytes * row["written_rows"] > 0
        assert row["server_bytes_sent"] > row["plan_bytes"] + row_bytes * row["fetched_rows"] > row["plan_bytes"] > 0
        assert row["time_ratio_to_torchrec"] is row["speedup_over_torchrec_floor"] is None
        assert row["torchrec_reason"] == torchrec_ranks.NOT_GIVEN


def test_without_namespaces_every_figure_is_null_and_the_reason_is_told(monkeypatch):
    monkeypatch.setenv("PATH", "")
    rows = trainers.BENCHMARK.run(True)
    assert len(rows) == sum(len(case.systems) for case in trainers.QUICK_CASES)
    for row in rows:
        assert all(row[figure] is None for figure in (*trainers.FIGURES, *torchrec_ranks.FIGURES))
        assert "there is no `ip` here" in row["link_reason"]
    designs = {(row["model"], row["design"], row["delayed"]) for row in rows}
    assert {design for model, design, _ in designs if model == "wide_deep"} == {
        "owned",
        "lrpp",
        "replicated",
        "partitioned",
    }
    assert {model for model, _, _ in designs} == set(MODELS)


def test_a_turn_lasts_from_the_first_start_until_the_last_traffic_has_ended():
    told = {"bytes_sent": 100, "bytes_received": 60, "fetched_rows": 8, "written_rows": 6, "stall_seconds": 0.4}
    told |= {"lookahead": 5, "cache_rows": 9}
    turn = trainers.Turn(
        trainers.SYSTEMS[0],
        [
            told | {"start": 10.0, "end": 13.0, "seconds": [1.0, 1.0]},
            told | {"start": 10.5, "end": 14.0, "seconds": [1.0, 3.0], "bytes_sent": 50},
        ],
        {"bytes_sent": 1000, "plans": 4, "plan_bytes": 800},
        [[0.5, 0.25], [0.75]],
    )
    figures = turn.figures(64)
    assert tuple(figures) == trainers.FIGURES[:-1]
    assert figures["iteration_ms"] == 2000
    assert figures["loop_ms"] == 2000
    assert figures["samples_per_second"] == 32
    assert figures["bytes_sent"] == [50, 25]
    assert figures["server_bytes_sent"] == 500
    assert figures["plan_bytes"] == 200
    assert (figures["fetched_rows"], figures["written_rows"]) == (8, 6)
    assert figures["stall_fraction"] == pytest.approx(0.1)
    other = trainers.Turn(turn.system, turn.trainers, turn.served, [[0.5, 0.25], [0.5]])
    assert turn.loss_difference(turn) == 0
    assert turn.loss_difference(other) == 0.25


def test_ratios_are_to_the_turns_of_torchrec_before_and_after_and_its_floor_is_link_and_dense_part(monkeypatch):
    seconds = iter([9.0, 2.0, 4.0, 6.0])  # the first one is not counted

    def call(ranks, do, **_):
        if do == "prepare":
            return [{"sharding": {"a": "table_wise", "b": "data_parallel", "c": "table_wise"}}] * 2
        if do == "dense":
            return [{"seconds": [9.0, 1.0, 1.0, 2.0]}, {"seconds": [9.0, 1.5, 1.5, 1.5]}]
        took = next(seconds)
        return [{"seconds": [took - 1], "bytes_sent": [1_000]}, {"seconds": [took], "bytes_sent": [2_000]}]

    monkeypatch.setattr(torchrec_ranks, "call", call)
    torchrec = torchrec_ranks.TorchRec([object(), object()], "host:1", 8_000, None)
    torchrec.prepare(trainers.TOLD, "dlrm", 8, find_preset("tiny").tables, "")
    for _ in range(3):
        torchrec.take_turn()
    found = torchrec.compared(1, 2.5)
    assert set(found) == {*torchrec_ranks.FIGURES, "torchrec_reason"}
    assert found["torchrec_iteration_ms"] == 5000
    assert found["torchrec_floor_ms"] == 2000 + 1500
    assert found["torchrec_bytes_sent"] == [1_000, 2_000]
    assert found["torchrec_sharding"] == {"data_parallel": 1, "table_wise": 2}
    assert found["time_ratio_to_torchrec"] == 0.5
    assert found["speedup_over_torchrec_floor"] == 1.4


def test_a_torchrec_that_ends_is_a_reason_and_no_error(monkeypatch):
    monkeypatch.setenv(torchrec_ranks.VARIABLE, "/bin/false")
    with torchrec_ranks.torchrec_ranks(Here(), ["one", "two"], 1, 8, {}) as torchrec:
        torchrec.prepare(trainers.DEFAULT, "dlrm", 8, find_preset("tiny").tables, "")
        torchrec.take_turn()
    found = torchrec.compared(0, 1.0)
    assert found["time_ratio_to_torchrec"] is None
    assert "TorchRec failed: a process of this benchmark ended with 1" in found["torchrec_reason"]


def test_an_interpreter_that_is_not_there_and_tables_that_do_not_fit_are_reasons(monkeypatch):
    monkeypatch.setenv(torchrec_ranks.VARIABLE, "/no/such/python")
    with torchrec_ranks.torchrec_ranks(Here(), ["one", "two"], 1, 8, {}) as torchrec:
        assert "is /no/such/python, which can't be run" in torchrec.reason
    huge = find_preset("criteo-terabyte-like").tables
    assert "GB are available" in torchrec_ranks._too_large(huge, 1 << 20)
    assert torchrec_ranks._too_large(find_preset("tiny").tables, 8) is None


def test_the_peer_has_our_dense_parts_and_needs_nothing_but_torch():
    command = [sys.executable, "-I", "-c", PEER, torchrec_peer.__file__, *MODELS]
    told = json.loads(subprocess.run(command, capture_output=True, text=True, check=True).stdout)
    tables = [Table("a", 9), Table("b", 5)]
    ids = {name: Ids(torch.zeros(3, 1, dtype=torch.int64)) for name in "ab"}
    for name, (parameters, width, logits) in told.items():
        model = build_model(name, tables, 13, 8, seed=0)
        assert parameters == count_dense(model)
        assert width == (12 if name == "deepfm" else 8)
        for number, table in enumerate("ab"):
            model.embeddings[table].weight.data.fill_(number + 1)
            if name == "deepfm":
                model.linear[table].weight.data.fill_(number + 1)
        torch.testing.assert_close(torch.tensor(logits), model(torch.ones(3, 13), ids))


@pytest.mark.skipif(not os.environ.get(torchrec_ranks.VARIABLE), reason=torchrec_ranks.NOT_GIVEN)
def test_torchrec_trains_beside_us():
    case = trainers.Case("deepfm", trainers.SYSTEMS[:1], trainers.DEFAULT)
    try:
        with joined_namespaces([*trainers.SIDES, SERVERS]) as namespaces:
            (row,) = trainers.measure(namespaces, [case], True)
    except NamespaceError as error:
        pytest.skip(str(error))
    assert row["torchrec_reason"] is None
    assert row["time_ratio_to_torchrec"] == pytest.approx(row["iteration_ms"] / row["torchrec_iteration_ms"])
    assert row["torchrec_iteration_ms"] > row["torchrec_dense_ms"] > 0
    assert sum(row["torchrec_sharding"].values()) == 26
