"""Policies side by side: same data, same model, each held to the reference."""

from dataclasses import replace

import pytest

from bagpipe import compare as comparison
from bagpipe.compare import chosen, compare
from bagpipe.config import parse_config
from bagpipe.errors import ConfigError
from bagpipe.job import prepare
from bagpipe.policies import POLICIES

SETTINGS = {
    "data": {"preset": "tiny", "samples": 1200},
    "model": {"name": "wide_deep", "dim": 4},
    "batch_size": 128,
    "cache": 4000,
    "lookahead": 4,
}


def ignore(done, note):
    pass


@pytest.fixture
def job(tmp_path):
    return prepare(parse_config(SETTINGS), tmp_path / "run")


def test_every_policy_ends_with_the_reference_bits_and_moves_its_own_rows(job):
    seen = []
    rows = {row.pop("policy"): row for row in compare(job, chosen(), lambda done, note: seen.append(done))}
    assert list(rows) == list(POLICIES)
    assert all(row["exact"] is True for row in rows.values())
    assert len({(row["loss"], row["auc"]) for row in rows.values()}) == 1
    assert rows["nocache"]["hit_rate"] == 0
    assert rows["nocache"]["fetched_rows"] > rows["lookahead"]["fetched_rows"] > rows["ideal"]["fetched_rows"] > 0
    assert seen == list(range(1, (1 + len(POLICIES)) * job.iterations + 1))
    assert list(job.run_dir.iterdir()) == []


def test_a_run_with_other_bits_is_not_exact(job, monkeypatch):
    def with_another_seed(job, report):
        return trained(replace(job, config=parse_config(SETTINGS | {"seed": 1})), report)

    trained = comparison.train_accelerated
    monkeypatch.setattr(comparison, "train_accelerated", with_another_seed)
    (row,) = compare(job, ["lru"], ignore)
    assert row["exact"] is False


def test_a_policy_that_does_not_fit_is_listed_with_the_reason(tmp_path):
    job = prepare(parse_config(SETTINGS | {"cache": 420}), tmp_path / "run")
    lru, ideal = compare(job, ["lru", "ideal"], ignore)
    assert lru["exact"] is True
    assert ideal["exact"] is None
    assert ideal["samples_per_second"] is None
    assert "keeps every row" in ideal["reason"]


def test_policies_are_taken_once_each_and_unknown_ones_refused():
    assert chosen(["lru", "nocache", "lru"]) == ["lru", "nocache"]
    with pytest.raises(ConfigError, match="'fifo'"):
        chosen(["lru", "fifo"])
