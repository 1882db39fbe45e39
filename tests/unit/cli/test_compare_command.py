import json

import pytest
from typer.testing import CliRunner

from bagpipe.cli import app
from bagpipe.errors import ConfigError

CONTRACT = {"policy", "samples_per_second", "hit_rate", "fetched_rows", "written_rows", "stall_fraction", "exact"}
SETTINGS = ["data.preset=tiny", "data.samples=800", "model.name=wide_deep", "model.dim=4", "batch_size=128"]


def compare(*arguments, cache=4000):
    settings = [part for setting in (*SETTINGS, f"cache={cache}") for part in ("--set", setting)]
    result = CliRunner().invoke(app, ["compare", *settings, *arguments])
    if result.exception is not None and not isinstance(result.exception, SystemExit):
        raise result.exception
    return result


def test_json_is_a_list_with_the_contracts_keys():
    result = compare("--policies", "lookahead, nocache", "--json")
    assert result.exit_code == 0
    rows = json.loads(result.stdout)
    assert [row["policy"] for row in rows] == ["lookahead", "nocache"]
    assert all(set(row) >= CONTRACT and row["exact"] for row in rows)


def test_people_see_a_table_and_why_a_policy_is_missing():
    result = compare("--policies", "lru,ideal", cache=420)
    assert result.exit_code == 0
    assert "ideal can't run: policy 'ideal' keeps every row" in " ".join(result.stdout.split())


def test_it_fails_if_no_policy_could_run():
    assert compare("--policies", "ideal", "--json", cache=420).exit_code == 1


def test_unknown_policies_are_refused_before_anything_is_trained():
    with pytest.raises(ConfigError, match="'fifo'"):
        compare("--policies", "fifo")
