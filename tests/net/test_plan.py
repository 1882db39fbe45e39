import json

import pytest
from typer.testing import CliRunner

from bagpipe.cli import app
from bagpipe.data import generated, write
from bagpipe.errors import ConfigError

CONTRACT = {"lookahead", "cache_rows", "cache_bytes", "fetched_rows", "shared_rows", "critical_rows"}


def plan(*arguments):
    result = CliRunner().invoke(app, ["plan", *map(str, arguments)])
    if result.exception is not None and not isinstance(result.exception, SystemExit):
        raise result.exception
    assert result.exit_code == 0, result.output
    return result.stdout


def test_a_preset_gives_one_entry_a_lookahead_with_the_contracts_keys():
    rows = json.loads(plan("tiny", "--batch-size", 256, "--lookahead", "4,1", "--json"))
    assert [row["lookahead"] for row in rows] == [1, 4]
    assert all(set(row) >= CONTRACT for row in rows)
    assert [row["shared_rows"] > 0 for row in rows] == [False, True]
    assert [row["advised"] for row in rows] == [False, True]


@pytest.fixture
def by_hand(tmp_path):
    """Six samples, one id each of one table, to be read as three batches: {a, b}, {b, c}, {a, b}."""
    (tmp_path / "raw.csv").write_text("y,word\n" + "".join(f"{n % 2},{word}\n" for n, word in enumerate("abbcab")))
    (tmp_path / "schema.toml").write_text('format = "csv"\nlabel = "y"\nnumeric = []\ncategorical = ["word"]\n')
    prepare = ["data", "prepare", "csv", tmp_path / "raw.csv", tmp_path / "data", "--schema", tmp_path / "schema.toml"]
    assert CliRunner().invoke(app, [*map(str, prepare), "--memory", "64GB"]).exit_code == 0
    return tmp_path / "data"


def test_the_figures_are_those_counted_by_hand(by_hand):
    rows = json.loads(plan(by_hand, "--batch-size", 2, "--lookahead", "1,2,3", "--json"))
    assert [row["fetched_rows"] * 3 for row in rows] == [6, 4, 3]
    assert [row["shared_rows"] * 3 for row in rows] == [0, 2, 3], "b, b; and a, over the second batch"
    assert [row["critical_rows"] * 3 for row in rows] == [2, 2, 2]
    assert [row["cache_rows"] for row in rows] == [3, 3, 3], "there are no more rows, however often each is fetched"


def test_shards_give_the_figures_of_the_stream_that_they_were_written_from(tmp_path):
    write(generated("tiny", 2000), tmp_path / "shards")
    options = ("--batch-size", 200, "--lookahead", "1,3,5", "--json")
    assert plan(tmp_path / "shards", *options) == plan("tiny", *options, "--iterations", 10)


def test_bytes_count_the_optimizers_state():
    options = ("tiny", "--lookahead", 2, "--iterations", 3, "--dim", 10, "--json")
    plain, adam = (json.loads(plan(*options, "--optimizer", name))[0] for name in ("sgd", "adam"))
    assert plain["cache_bytes"] == plain["cache_rows"] * 40
    assert adam["cache_bytes"] == plain["cache_rows"] * 120


def test_tables_are_told_apart_on_demand():
    (row,) = json.loads(plan("tiny", "--lookahead", 8, "--iterations", 9, "--tables", "--json"))
    assert [table["table"] for table in row["tables"]] == ["user", "item", "city", "device"]
    assert sum(table["fetched_rows"] for table in row["tables"]) == pytest.approx(row["fetched_rows"])


def test_people_are_told_which_lookahead_to_take_and_what_fits():
    shown = " ".join(plan("tiny", "--batch-size", 256, "--cache", 1300, "--dim", 8).split())
    assert "Take lookahead = 10 and a cache of 1,255 rows (80.3 kB)" in shown
    assert "Lookahead 20 would fetch" in shown
    assert "needs a cache of 1,600 rows (102.4 kB)" in shown
    assert "window will be shortened" in " ".join(plan("tiny", "--cache", "1KB").split())
    assert "Traffic still falls" in " ".join(plan("tiny", "--lookahead", "1,2").split())


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("nowhere",), "neither a directory of shards nor a preset"),
        (("tiny", "--lookahead", "1;2"), "whole numbers with commas"),
        (("tiny", "--cache", "much"), "cache is 'much'"),
        (("tiny", "--optimizer", "lion"), "no row optimizer 'lion'"),
    ],
)
def test_what_can_not_be_used_is_named(arguments, message):
    with pytest.raises(ConfigError, match=message):
        plan(*arguments)
