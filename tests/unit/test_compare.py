"""Policies side by side: same data, same model, each held to the reference."""

from dataclasses import replace

import pytest

from bagpipe import compare as comparison
from bagpipe.compare import chosen, compare, compare_over, num_iterations, parse_sweep, points_of
from bagpipe.compare_page import compare_page
from bagpipe.config import parse_config
from bagpipe.errors import ConfigError
from bagpipe.job import prepare
from bagpipe.oracle import oracle, slots
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
    assert set(rows) == set(POLICIES)
    moved = [row["fetched_rows"] for row in rows.values()]
    assert moved == sorted(moved), "who fetches fewest comes first"
    assert all(row["exact"] is True for row in rows.values())
    assert len({(row["loss"], row["auc"]) for row in rows.values()}) == 1
    assert rows["nocache"]["hit_rate"] == 0
    assert rows["nocache"]["fetched_rows"] > rows["lookahead"]["fetched_rows"] > rows["ideal"]["fetched_rows"] > 0
    assert seen == sorted(seen), "evaluation is told of with the last iteration"
    assert list(dict.fromkeys(seen)) == list(range(1, (1 + len(POLICIES)) * job.iterations + 1))
    assert list(job.run_dir.iterdir()) == []
    assert all(row["promised"] for row in rows.values())
    assert rows["ideal"]["peak_rows"] == rows["ideal"]["fetched_rows"]
    assert all(row["peak_rows"] <= row["cache_rows"] for row in rows.values())
    assert rows["nocache"]["peak_rows"] < rows["lookahead"]["peak_rows"]


def test_a_run_with_other_bits_is_not_exact(job, monkeypatch):
    def with_another_seed(job, report):
        return trained(replace(job, config=parse_config(SETTINGS | {"seed": 1})), report)

    trained = comparison.train_configured
    monkeypatch.setattr(comparison, "train_configured", with_another_seed)
    (row,) = compare(job, ["lru"], ignore)
    assert row["exact"] is False


def test_kernels_that_choose_who_leaves_are_called_before_the_run_that_counts(job, monkeypatch):
    """Though that one may get far before its cache is full."""
    chosen_by, calls = [], []

    def noted(keys, count):
        calls.append(count)
        return lowest(keys, count)

    def counted(job, report):
        before = len(calls)
        found = trained(job, report)
        chosen_by.append((job.config.policy, job.run_dir.name == "warm-up", len(calls) > before))
        return found

    lowest, trained = slots.lowest, comparison.train_configured
    monkeypatch.setattr(slots, "lowest", noted)
    monkeypatch.setattr(oracle, "lowest", noted)
    monkeypatch.setattr(comparison, "train_configured", counted)
    names = ["belady", "frequency"]
    compare(job, names, ignore)
    assert chosen_by == [(name, warm, warm) for name in names for warm in (True, False)]


def test_a_policy_that_does_not_fit_is_listed_with_the_reason(tmp_path):
    job = prepare(parse_config(SETTINGS | {"cache": 420}), tmp_path / "run")
    lru, ideal = compare(job, ["lru", "ideal"], ignore)
    assert lru["exact"] is True
    assert ideal["exact"] is None
    assert ideal["samples_per_second"] is None
    assert "policy 'ideal' keeps" in ideal["reason"]


def test_the_order_is_that_of_rows_whatever_the_speeds_and_speeds_that_overlap_are_not_told_apart(job, monkeypatch):
    """Speeds are played, everything else is trained: lru is fastest by far, the others are slow and alike."""
    speeds = {"lru": [900.0, 950.0, 940.0], "belady": [100.0, 300.0, 120.0], "lookahead": [110.0, 945.0, 90.0]}
    order = []

    def timed(job, report):
        state, summary = trained(job, report)
        if job.run_dir.name == "warm-up":
            return state, summary
        order.append(job.config.policy)
        return state, summary | {"samples_per_second": speeds[order[-1]][order.count(order[-1]) - 1]}

    trained = comparison.train_configured
    monkeypatch.setattr(comparison, "train_configured", timed)
    there = ["lru", "belady", "lookahead"]
    rows = compare(replace(job, config=parse_config(SETTINGS | {"cache": 500})), there, ignore, repeats=3)
    assert order == [*there, *reversed(there), *there], "in turns"
    assert [row["fetched_rows"] for row in rows] == sorted(row["fetched_rows"] for row in rows)
    assert rows[-1]["policy"] == "lru", "it fetches most"
    found = {row["policy"]: row for row in rows}
    assert {name: row["samples_per_second"] for name, row in found.items()} == {
        "lru": 940.0, "belady": 120.0, "lookahead": 110.0
    }  # fmt: skip
    assert (found["belady"]["samples_per_second_min"], found["belady"]["samples_per_second_max"]) == (100.0, 300.0)
    assert {name for name, row in found.items() if row["as_fast_as_any"]} == {"lru", "lookahead"}
    assert all(row["exact"] and row["runs"] == 3 for row in rows)


def test_speeds_of_one_run_tell_nobody_apart(job):
    assert [row["as_fast_as_any"] for row in compare(job, ["lru", "nocache"], ignore)] == [None, None]


def test_policies_are_taken_once_each_and_unknown_ones_refused():
    assert chosen(["lru", "nocache", "lru"]) == ["lru", "nocache"]
    with pytest.raises(ConfigError, match="'fifo'"):
        chosen(["lru", "fifo"])


def swept(job, text, policies):
    points = points_of(job, parse_sweep(text))
    seen = []
    rows = compare_over(points, policies, lambda done, note: seen.append((done, note)))
    trained = [(done, note) for done, note in seen if "evaluating" not in note]
    assert [done for done, _ in trained] == list(range(1, num_iterations(points, policies) + 1))
    return rows, trained


def test_a_sweep_repeats_the_comparison_with_each_value(job):
    rows, seen = swept(job, "cache=500, 900", ["lru", "belady"])
    assert [(row["policy"], row["value"]) for row in rows] == [
        ("belady", "500"), ("lru", "500"), ("lru", "900"), ("belady", "900")
    ], "where they fetch as many, in the order in which they were named"  # fmt: skip
    assert all(row["exact"] for row in rows)
    assert [row["cache_rows"] for row in rows] == [500, 500, 900, 900]
    assert rows[0]["fetched_rows"] > rows[2]["fetched_rows"]
    assert sum("reference" in note for _, note in seen) == job.iterations, "the reference does not depend on the cache"


def test_other_batches_and_other_skew_are_compared_with_a_reference_of_their_own(job):
    small, large = points_of(job, parse_sweep("batch=64,256"))
    assert (small.job.iterations, job.iterations, large.job.iterations) == (17, 9, 5)
    rows, _ = swept(job, "skew=0.9,0.01", ["lru"])
    assert all(row["exact"] for row in rows)
    assert rows[0]["fetched_rows"] < rows[1]["fetched_rows"]


@pytest.mark.parametrize("length", [{}, {"epochs": 3}, {"iterations": 5}, {"iterations": 13}], ids=str)
def test_a_sweep_of_batches_trains_the_samples_of_the_job(tmp_path, length):
    job = prepare(parse_config(SETTINGS | length), tmp_path / "run")
    wanted = job.samples_of(job.iterations)
    for point in points_of(job, parse_sweep("batch=7,64,128,1000,1500,5000")):
        found = sum(len(batch.labels) for batch in point.job.batches())
        assert found == point.job.samples_of(point.job.iterations)
        assert wanted <= found < wanted + point.job.config.batch_size, point.value
        assert found == wanted or "iterations" in length, "whole epochs are the same with all batches"
        assert point.job.samples_of(point.job.iterations - 1) < wanted, "no iteration too many"


def test_lookahead_can_be_swept(job):
    points = points_of(job, parse_sweep("lookahead=2,auto"))
    assert [point.job.config.lookahead for point in points] == [2, "auto"]


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("dim=4,8", "names are cache, lookahead, batch, skew"),
        ("cache", "not of the form"),
        ("cache=", "not of the form"),
        ("cache=much", "cache is 'much'"),
        ("cache=x%", "'x' in --sweep is not a number"),
        ("cache=nan%", "cache 'nan%' in --sweep: give a share of the rows above 0%"),
        ("cache=inf%", "above 0%"),
        ("cache=0%", "above 0%"),
        ("cache=-5%", "above 0%"),
        ("cache=5%", "table 'device' has no known size"),
        ("batch=0", "at least 1"),
        ("lookahead=far", "lookahead"),
        ("skew=2", "0.01 to 0.999"),
    ],
)
def test_a_sweep_that_can_not_be_is_refused_before_anything_is_trained(job, text, message):
    with pytest.raises(ConfigError, match=message):
        points_of(job, parse_sweep(text))


def test_a_share_of_the_rows_is_a_cache_size(tmp_path):
    job = prepare(parse_config(SETTINGS | {"data": {"preset": "scratchpipe-high", "samples": 300}}), tmp_path / "run")
    (point,) = points_of(job, parse_sweep("cache=2%"))
    assert point.job.config.cache == round(0.02 * 80_000_000)


def row(policy, **more):
    figures = dict.fromkeys(("hit_rate", "stall_fraction", "loss", "auc"), 0.25)
    figures |= dict.fromkeys(("samples_per_second", "fetched_rows", "written_rows", "peak_rows", "cache_rows"), 1234)
    return {"policy": policy} | figures | {"exact": True, "promised": True, "runs": 3} | more


def test_the_page_shows_every_policy_and_says_what_is_not_exact():
    none = dict.fromkeys(row("x"), None)
    rows = [
        row("lru", cache_rows=98765),
        row("windowed", exact=False, promised=False),
        none | {"policy": "ideal", "promised": True, "reason": "too <small>"},
    ]
    html = compare_page("tiny", rows).html()
    assert "Does not promise the reference&#x27;s bits: windowed" in html
    assert "no (not promised)" in html
    assert "ideal: too &lt;small&gt;" in html
    assert html.count("<svg") == 6
    assert ">98,765<" in html, "the slots of each"
    broken = compare_page("tiny", [row("lru", exact=False)]).html()
    assert "though promised: lru" in broken


def test_the_page_of_a_sweep_has_a_line_for_each_policy_and_a_table_for_each_value():
    sweep = parse_sweep("cache=1%,2%")
    rows = [row(policy, value=value) for value in sweep.values for policy in POLICIES]
    html = compare_page("tiny", rows, sweep).html()
    assert html.count("<table>") == 2
    assert all(f">{policy}</text>" in html for policy in POLICIES)
