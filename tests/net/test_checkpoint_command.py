"""`bagpipe checkpoint`: what a directory holds, for people and programs."""

from __future__ import annotations

import json
import sys
from types import SimpleNamespace

import pyarrow.parquet as pq
import pytest
from safetensors.numpy import load_file

from bagpipe.cli import main
from harness import seams
from harness.checkpointed import TABLES, World, opened, save


@pytest.fixture
def bagpipe(monkeypatch, capsys):
    def run(*arguments):
        monkeypatch.setattr(sys, "argv", ["bagpipe", "checkpoint", *map(str, arguments)])
        capsys.readouterr()
        with pytest.raises(SystemExit) as ended:
            main()
        out, err = capsys.readouterr()
        return SimpleNamespace(code=ended.value.code or 0, out=out, err=err)

    return run


@pytest.fixture
def run_dir(tmp_path):
    """A run with checkpoints after 10, 20, 30 and 40 iterations, the third of them full."""
    checkpoints, world = opened(tmp_path / "run" / "checkpoints", keep=9), World()
    for done in (10, 20, 30, 40):
        world.train(done)
        save(checkpoints, world, full=done in (10, 30))
    return tmp_path / "run"


def loaded(result, code=0):
    assert result.code == code, result.err
    return json.loads(result.out)


def test_list_names_all_and_what_they_build_on(bagpipe, run_dir):
    for place in (run_dir, run_dir / "checkpoints", run_dir / "checkpoints" / "00000020"):
        found = loaded(bagpipe("list", place, "--json"))["checkpoints"]
        assert [row["done"] for row in found] == [10, 20, 30, 40]
        assert [row["rows"] for row in found] == ["all", "since 10", "all", "since 30"]
        assert found[1]["chain_bytes"] == found[0]["bytes"] + found[1]["bytes"]
    shown = bagpipe("list", run_dir)
    assert shown.code == 0
    assert "since 30" in shown.out


def test_list_tells_what_is_no_checkpoint(bagpipe, run_dir, tmp_path):
    (run_dir / "checkpoints" / "00000030" / "manifest.json").write_text("{}")
    found = loaded(bagpipe("list", run_dir, "--json"))["checkpoints"]
    assert [row["problem"] is None for row in found] == [True, True, False, False]
    assert "damaged" in found[2]["problem"]
    (tmp_path / "empty").mkdir()
    assert loaded(bagpipe("list", tmp_path / "empty", "--json"))["checkpoints"] == []
    assert "holds no checkpoints" in bagpipe("list", tmp_path / "empty").out.replace("\n", " ")
    assert loaded(bagpipe("list", tmp_path / "none", "--json"), code=1)["error"] == "CheckpointError"


def test_verify_finds_damage_and_what_builds_on_it(bagpipe, run_dir):
    assert loaded(bagpipe("verify", run_dir, "--json"))["ok"]
    assert bagpipe("verify", run_dir).code == 0
    path = run_dir / "checkpoints" / "00000030" / "rows-0-00000.safetensors"
    data = bytearray(path.read_bytes())
    data[-1] ^= 1
    path.write_bytes(data)
    found = loaded(bagpipe("verify", run_dir, "--json"), code=1)
    assert not found["ok"]
    assert [row["ok"] for row in found["checkpoints"]] == [True, True, False, False]
    assert "00000030/rows-0-00000.safetensors" in found["checkpoints"][3]["problem"]
    assert bagpipe("verify", run_dir).code == 1
    assert loaded(bagpipe("verify", run_dir, "--done", "20", "--json"))["ok"]
    assert loaded(bagpipe("verify", run_dir, "--done", "40", "--json"), code=1)["ok"] is False
    assert loaded(bagpipe("verify", run_dir / "checkpoints" / "00000010", "--json"))["checkpoints"][0]["done"] == 10


def test_show_tells_what_one_holds(bagpipe, run_dir):
    found = loaded(bagpipe("show", run_dir, "--json"))
    assert (found["done"], found["chain"], found["config"]) == (40, [30, 40], {"seed": 3})
    assert [table["name"] for table in found["tables"]] == ["user", "wörd"]
    assert loaded(bagpipe("show", run_dir, "--done", 10, "--json"))["chain"] == [10]
    shown = bagpipe("show", run_dir)
    assert shown.code == 0
    assert "rowwise_adagrad" in shown.out
    assert "trainer-0.safetensors" in shown.out
    refused = loaded(bagpipe("show", run_dir, "--done", 11, "--json"), code=1)
    assert "has no checkpoint after 11 iterations: it has [10, 20, 30, 40]" in refused["message"]


def test_export_writes_weights_or_parquet(bagpipe, run_dir, tmp_path):
    found = loaded(bagpipe("export", run_dir, tmp_path / "out", "--format", "parquet", "--json"))
    assert [pq.read_table(path).column_names for path in found["files"]] == [
        ["id", "vector_0", "state"],
        ["id", "vector_0", "vector_1"],
    ]
    refused = loaded(bagpipe("export", run_dir, tmp_path / "a.safetensors", "--json"), code=1)
    assert refused["error"] == "CheckpointError"
    with opened(tmp_path / "other").begin(3) as pending:
        seams.checkpoint_of_first_values(pending, TABLES[0], "user", 0.5)
    shown = bagpipe("export", tmp_path / "other", tmp_path / "a.safetensors")
    assert shown.code == 0
    weight = load_file(tmp_path / "a.safetensors")["user.weight"]
    assert weight.shape == (1000, 4)
    assert (weight == 0.5).all()


def test_prune_keeps_the_last_ones_with_their_chains(bagpipe, run_dir):
    found = loaded(bagpipe("prune", run_dir, "--keep", "1", "--json"))
    assert (found["removed"], found["kept"]) == ([10, 20], [30, 40])
    shown = bagpipe("prune", run_dir, "--keep", "1")
    assert shown.code == 0
    assert "30, 40" in shown.out


def test_a_wrong_option_is_wrong_usage(bagpipe, run_dir):
    assert loaded(bagpipe("prune", run_dir, "--keep", "0", "--json"), code=2)["error"] == "UsageError"
