import json

import pytest
from typer.testing import CliRunner

from bagpipe.cli import app
from bagpipe.errors import ConfigError
from bagpipe.observe.page import Page

ONCE = {"runs": 1, "as_fast_as_any": None}
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


def test_policies_come_in_the_order_of_rows_fetched_and_speeds_with_their_spread():
    named = "nocache,lru,lookahead"
    rows = json.loads(compare("--policies", named, "--repeat", "2", "--json", cache=420).stdout)
    assert [row["policy"] for row in rows] == ["lookahead", "lru", "nocache"]
    assert all(row["runs"] == 2 for row in rows)
    assert all(
        row["samples_per_second_min"] <= row["samples_per_second"] <= row["samples_per_second_max"] for row in rows
    )
    shown = " ".join(compare("--policies", named, "--repeat", "2", cache=420).stdout.split())
    assert "medians of 2 runs in turns" in shown
    once = " ".join(compare("--policies", named, "--repeat", "1", cache=420).stdout.split())
    assert "of one run each" in once
    assert "--repeat 3" in once


def test_people_see_a_table_and_why_a_policy_is_missing():
    result = compare("--policies", "lru,ideal", cache=420)
    assert result.exit_code == 0
    assert "by now, all of which policy 'ideal' keeps" in " ".join(result.stdout.split())


def test_a_sweep_and_a_page_can_be_had(tmp_path):
    page = tmp_path / "page.html"
    result = compare("--policies", "lru", "--sweep", "cache=500,900", "--repeat", "1", "--html", str(page))
    assert result.exit_code == 0
    lines = [line.split() for line in result.stdout.splitlines()]
    assert [line[1] for line in lines if line[:1] == ["lru"]] == ["500", "900"], result.stdout
    assert "Over cache" in page.read_text()


def never(*_):
    raise AssertionError("it has begun to train")


def test_a_page_that_can_not_be_written_is_refused_before_anything_is_trained(monkeypatch, tmp_path):
    monkeypatch.setattr("bagpipe.compare.compare_over", never)
    for path in (tmp_path / "nowhere" / "page.html", tmp_path):
        with pytest.raises(ConfigError, match=r"can't be written .*: choose another file"):
            compare("--html", str(path))


def test_the_page_of_before_stays_as_long_as_training_may_fail(monkeypatch, tmp_path):
    monkeypatch.setattr("bagpipe.compare.compare_over", never)
    earlier = tmp_path / "page.html"
    earlier.write_text("earlier")
    for name in ("page.html", "new.html"):
        with pytest.raises(AssertionError, match="begun to train"):
            compare("--html", str(tmp_path / name))
    assert earlier.read_text() == "earlier"
    assert list(tmp_path.iterdir()) == [earlier]


def test_the_table_is_shown_even_if_the_page_can_not_be_saved_in_the_end(monkeypatch, tmp_path):
    def full(page, path):
        raise ConfigError(f"{path} can't be written (no space)")

    monkeypatch.setattr("bagpipe.observe.page.Page.save", full)
    monkeypatch.setattr("bagpipe.compare.compare_over", lambda *_: [])
    monkeypatch.setattr("bagpipe.compare_page.compare_page", lambda *_: Page("", ""))
    shown = []
    monkeypatch.setattr("bagpipe.cli.compare._print", lambda *_: shown.append(True))
    with pytest.raises(ConfigError, match="no space"):
        compare("--html", str(tmp_path / "page.html"))
    assert shown == [True]


def found(monkeypatch, **slots):
    """What a comparison that has found these slots would say."""
    figures = (
        dict.fromkeys(("samples_per_second", "hit_rate", "peak_rows"), 1) | {"exact": True, "promised": True} | ONCE
    )
    rows = [{"policy": name, "cache_rows": count} | figures for name, count in slots.items()]
    monkeypatch.setattr("bagpipe.compare.compare_over", lambda *_: rows)
    return compare().stdout


def test_the_title_of_a_sweep_of_batches_tells_samples_as_iterations_differ(monkeypatch):
    rows = [{"policy": "lru", "value": size, "cache_rows": 1, "exact": True, "promised": True} | ONCE for size in "12"]
    monkeypatch.setattr("bagpipe.compare.compare_over", lambda *_: rows)
    assert "on tiny, 720 samples\n" in compare("--sweep", "batch=1,2").stdout
    assert "on tiny, 6 iterations\n" in compare("--sweep", "cache=1,2").stdout


def test_slots_are_shown_where_policies_differ_in_them(monkeypatch):
    differ = found(monkeypatch, lru=4000, ideal=123456, lfu=None)
    assert "slots" in differ
    assert "123,456" in differ
    assert "slots" not in found(monkeypatch, lru=4000, lfu=None)


def test_what_does_not_promise_exactness_is_said():
    result = compare("--policies", "windowed", "--set", "policy_options.mode=stale", cache=500)
    assert "windowed does not promise the reference's bits" in result.stdout


def test_verify_says_that_a_policy_does_not_promise_exactness():
    settings = [*SETTINGS, "cache=500", "policy=windowed", "policy_options.mode=stale"]
    arguments = [part for setting in settings for part in ("--set", setting)]
    found = json.loads(CliRunner().invoke(app, ["verify", "--json", *arguments]).stdout)
    assert found["exact"] is False
    shown = CliRunner().invoke(app, ["verify", *arguments])
    assert "policy 'windowed' does not promise the reference's bits" in " ".join(shown.stdout.split())
    assert (shown.exit_code == 0) == ("identical │ yes" in " ".join(shown.stdout.split()))


def test_a_promise_that_is_not_kept_is_a_failure(monkeypatch):
    monkeypatch.setattr("bagpipe.state.State.sha256", lambda state: str(id(state)))
    result = compare("--policies", "lru")
    assert result.exit_code == 1
    assert "lru has other bits than the reference" in " ".join(result.stdout.split())


def test_it_fails_if_no_policy_could_run():
    assert compare("--policies", "ideal", "--json", cache=420).exit_code == 1


def test_unknown_policies_are_refused_before_anything_is_trained():
    with pytest.raises(ConfigError, match="'fifo'"):
        compare("--policies", "fifo")
