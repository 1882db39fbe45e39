"""Frequencies of all data: counted in one more reading, ranked, and exact; caches that are a share of the rows."""

from __future__ import annotations

import random
from pathlib import Path

import numpy as np
import pyarrow as pa
import pytest

from bagpipe.config import Config, Share, cache_size, parse_config
from bagpipe.data import Generated, Loader, find_preset, from_frame, write
from bagpipe.errors import ConfigError
from bagpipe.job import Job, prepare
from bagpipe.oracle.oracle import Oracle
from bagpipe.oracle.slots import Group
from bagpipe.oracle.tables import OracleTable
from bagpipe.policies import PolicyOptions
from bagpipe.policies.sampled import Sample
from bagpipe.table import Table
from bagpipe.trainer.source import Source
from bagpipe.training import train_configured, train_reference
from definitions.plan_contract import check_contract

ALL = PolicyOptions(sample=0)


def test_a_scan_ranks_every_row_whatever_the_order() -> None:
    chance = np.random.default_rng(0)
    batches = [[chance.zipf(1.3, 50) % 900 - 20 for _ in "abc"] for _ in range(40)]
    for order in (1, -1):
        sample = Sample([2, 1])
        for batch in batches[::order]:
            sample.count(batch)
        ranked = sample.rank([Group(0, [0], 1), Group(1, [1], 1)])
        for (_, found), features in zip(ranked, ((0, 1), (2,)), strict=True):
            ids, counts = np.unique(
                np.concatenate([batch[f] for batch in batches for f in features]), return_counts=True
            )
            assert found.tolist() == ids[np.argsort(-counts, kind="stable")].tolist()
    assert [len(ids) for _, ids in Sample([1]).rank([Group(0, [0], 1)])] == [0]


@pytest.mark.parametrize("policy", ["frequency", "static"])
def test_the_first_plan_brings_the_hottest_rows_of_all_data(policy: str) -> None:
    data = Generated(find_preset("tiny"), 3000, 0)
    source = Source(Loader(data, 8, epochs=2, seed=3))
    source.tables = data.tables
    ids = {name: np.concatenate([batch.sparse[name].values.numpy().ravel() for batch in data.batches(500)])
           for name in source.features}  # fmt: skip
    uses = sorted(
        (-int(count), t, int(row))
        for t, table in enumerate(data.tables)
        for row, count in zip(
            *np.unique(np.concatenate([ids[name] for name in table.features]), return_counts=True), strict=True
        )
    )
    tables = [OracleTable(table.name, table.rows, table.features) for table in data.tables]
    oracle = Oracle(tables, [300], policy=policy, options=ALL)
    plans = source.planned(oracle)
    first, second = next(plans)[0], next(plans)[0]
    plans.close()
    came = {(t, row) for t in range(len(tables)) for row in first.fetch.of_table(t)[0].tolist()}
    hottest = {(t, row) for _, t, row in uses[: 300 - len(first.rows)]}
    num_pinned = getattr(oracle.policy, "num_pinned", [300])[0]
    assert {(t, row) for _, t, row in uses[: min(num_pinned, len(hottest))]} <= came
    assert second.iteration == 1


@pytest.mark.parametrize("policy", ["frequency", "static"])
def test_a_sample_is_spread_over_all_data(policy: str) -> None:
    """Rows 0 to 4 are in the first tenth only, and 50 to 54 in the rest: the first plan brings these along."""
    ids = [number % 5 + (0 if number < 60 else 50) for number in range(600)]
    data = from_frame(pa.table({"label": [0] * 600, "item": ids}), label="label", categorical=["item"])
    source = Source(Loader(data, 4))
    source.tables = data.tables
    oracle = Oracle([OracleTable("item", 100)], [9], policy=policy, options=PolicyOptions(sample=7), ahead=0)
    plans = source.planned(oracle)
    came = set(next(plans)[0].fetch.ids.tolist())
    plans.close()
    assert {51, 52, 53, 54} <= came


def test_rows_without_an_array_are_brought_along_only_if_the_window_has_them() -> None:
    chance = random.Random(1)
    batches = [[[chance.randrange(40) for _ in range(5)]] for _ in range(90)]
    batches[80:] = [[[99, 98, 97, 99, 98, 97]] for _ in range(10)]
    brought = []
    for rows_direct_max in (100, 0):
        oracle = Oracle(
            [OracleTable("only", 100)], [20], policy="frequency", options=ALL, rows_direct_max=rows_direct_max
        )
        assert oracle.to_count is not None
        for batch in batches:
            oracle.count([np.array(batch[0])])
        plans = [plan for plan, _ in oracle.plans(([np.array(batch[0])], None) for batch in batches)]
        check_contract(plans, [0], [20], batches)
        brought.append(set(plans[0].fetch.ids.tolist()))
    assert {97, 98, 99} <= brought[0]
    assert {97, 98, 99}.isdisjoint(brought[1])


def test_a_loader_that_may_not_give_the_same_again_is_refused() -> None:
    data = Generated(find_preset("tiny"), 64, 0)
    source = Source(list(data.batches(8)))
    source.tables = data.tables
    oracle = Oracle([OracleTable(t.name, t.rows, t.features) for t in data.tables], [900], "auto", "frequency", ALL)
    with pytest.raises(
        ConfigError, match=r"sample is 0, .* the loader is a list: give a bagpipe\.data\.Loader, or the"
    ):
        next(source.planned(oracle))


def ignore(*_: object) -> None:
    pass


@pytest.fixture(scope="module")
def shards(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("data") / "shards"
    write(Generated(find_preset("criteo-kaggle-like").scaled(1 / 200), 1200, 0), path)
    return path


def job_of(shards: Path, tmp_path: Path, **settings: object) -> Job:
    model = {"name": "wide_deep", "dim": 4}
    common = {"data": {"path": str(shards)}, "model": model, "batch_size": 12, "iterations": 70}
    config = parse_config(common | settings)
    assert isinstance(config, Config)
    return prepare(config, tmp_path / "run")


def test_a_scan_in_small_and_large_caches_gives_the_bits_of_the_reference(shards: Path, tmp_path: Path) -> None:
    policy = {"policy": "frequency", "policy_options": {"sample": 0}}
    expected, _ = train_reference(job_of(shards, tmp_path), ignore)
    hit_rates = {}
    for number, (cache, trainers) in enumerate((("0.3%", 1), ("64%", 1))):
        job = job_of(shards, tmp_path / str(number), cache=cache, trainers=trainers, check=True, **policy)
        num_rows = sum(table.rows or 0 for table in job.train.tables)
        found, summary = train_configured(job, ignore, hold=True)
        assert not expected.differing(found)
        assert summary["cache_rows"] == round(float(cache[:-1]) / 100 * num_rows)
        hit_rates[cache] = summary["hit_rate"]
    assert 0.2 < hit_rates["0.3%"] < hit_rates["64%"]


@pytest.mark.parametrize("sample", [pytest.param(0, marks=pytest.mark.long), 3])
def test_several_trainers_scan_too(shards: Path, tmp_path: Path, sample: int) -> None:
    settings = {"trainers": 2, "cache": "1.5%", "policy": "static", "policy_options": {"sample": sample}}
    expected, _ = train_reference(job_of(shards, tmp_path, **settings), ignore)
    found, _ = train_configured(job_of(shards, tmp_path / "again", **settings), ignore, hold=True)
    assert not expected.differing(found)


@pytest.mark.parametrize("text", ["0%", "-1%", "101%", "nan%", "1.5 %%"])
def test_a_share_that_is_none_is_refused(text: str) -> None:
    with pytest.raises(ConfigError, match="cache is "):
        parse_config({"cache": text})


def test_a_share_of_the_rows_needs_tables_of_known_size() -> None:
    share = cache_size(" 1.5 %")
    assert share == Share(1.5)
    assert isinstance(share, Share)
    assert share.num_rows([Table("user", 900), Table("ad", 100)]) == 15
    assert Share(0.01).num_rows([Table("user", 10)]) == 1
    with pytest.raises(ConfigError, match=r"cache is 1\.5%, and table 'word' has no known size: give rows or bytes"):
        share.num_rows([Table("user", 900), Table("word", None)])
