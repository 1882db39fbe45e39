"""The figures of `bagpipe data stats` equal a brute-force count over dictionaries."""

from __future__ import annotations

import json
from collections import Counter
from fractions import Fraction
from types import SimpleNamespace

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from typer import Typer
from typer.testing import CliRunner

from bagpipe.cli.stats import stats as stats_command
from bagpipe.data import IndexedDataset, Shards, generated, write
from bagpipe.data.samples import Column, Samples
from bagpipe.data.stats import BATCH_SIZES, TOP, Day, days_of, measure
from bagpipe.errors import CapacityError, ConfigError, DataError, ValueRangeError
from bagpipe.types import Table
from harness.examples import examples

LOWEST, HIGHEST = -(2**63), 2**63 - 1


class Given(IndexedDataset):
    """Samples from lists: for each feature one list of ids a sample."""

    num_dense = 0

    def __init__(self, tables, features):
        self.tables, self._features = tuple(tables), features
        self.num_samples = len(next(iter(features.values())))

    def gather(self, samples):
        columns = {}
        for name, bags in self._features.items():
            chosen = [bags[i] for i in samples]
            values = np.array([key for bag in chosen for key in bag], np.int64)
            columns[name] = Column(values, np.cumsum([0, *map(len, chosen)]))
        nothing = np.zeros(len(samples), np.float32)
        return Samples(nothing.reshape(-1, 1)[:, :0], columns, nothing)


def keys_of(data, table_number, start, stop):
    """(table, id) of each access in samples start to stop."""
    table = data.tables[table_number]
    return [
        (table.name, key)
        for sample in range(start, stop)
        for feature in table.features
        for key in data._features[feature][sample]
    ]


def share(counts, num_top, used):
    """Share of the accesses `used` that go to the num_top rows of the highest counts; ties count in proportion."""
    total = sum(used.values())
    if not total or not counts:
        return None
    covered, left = Fraction(0), num_top
    for level in sorted(set(counts.values()), reverse=True):
        tied = [row for row, count in counts.items() if count == level]
        taken = min(left, len(tied))
        covered += Fraction(taken, len(tied)) * sum(used[row] for row in tied)
        left -= taken
    return float(covered / total)


def top_rows(counts, top):
    return -(-len(counts) * TOP[top] // 1000)


def check_table(found, data, tables, days, sizes):
    def keys(start, stop):
        return [key for t in tables for key in keys_of(data, t, start, stop)]

    n = data.num_samples
    counts = Counter(keys(0, n))
    assert (found.accesses, found.unique_rows) == (counts.total(), len(counts))
    for top in TOP:
        assert found.top_share[top] == pytest.approx(share(counts, top_rows(counts, top), counts))
    for size in sizes:
        each = [len(set(keys(at, at + size))) for at in range(0, n - size + 1, size)]
        assert found.rows_per_batch[size] == (pytest.approx(np.mean(each)) if each else None)
    descending = np.cumsum(sorted(counts.values(), reverse=True))
    for name, rows in found.rows_for.items():
        wanted = Fraction(int(name[:-1]), 100) * counts.total()
        assert rows == (int((descending < wanted).sum()) + 1 if counts else 0)
    first = Counter(keys(days[0].start, days[0].stop))
    before = Counter()
    for number, (day, shown) in enumerate(zip(days, found.days, strict=True)):
        today, past = Counter(keys(day.start, day.stop)), set(keys(0, day.start))
        again = [row for row in today if row in before]
        assert (shown.accesses, shown.unique_rows) == (today.total(), len(today))
        assert shown.new_rows == len(set(today) - past)
        if number and today:
            assert shown.repeated_rows == pytest.approx(len(again) / len(today))
            assert shown.repeated_accesses == pytest.approx(sum(today[row] for row in again) / today.total())
        else:
            assert (shown.repeated_rows, shown.repeated_accesses) == (None, None)
        for top in TOP:
            assert shown.top_share[top] == pytest.approx(share(today, top_rows(today, top), today))
            assert shown.covered[top] == pytest.approx(share(first, top_rows(first, top), today))
        before = today


def check(data, days, sizes, **options):
    found = measure(data, batch_sizes=sizes, days=days, **options)
    check_table(found.whole, data, range(len(data.tables)), days, sizes)
    for number, table in enumerate(found.tables):
        check_table(table, data, [number], days, sizes)
    return found


ids = st.one_of(st.integers(0, 9), st.sampled_from([LOWEST, LOWEST + 1, -1, 0, 2**40, HIGHEST]), st.integers(-99, 99))
samples = st.lists(
    st.tuples(
        st.lists(ids, max_size=4), st.lists(st.integers(0, 6), max_size=3), st.lists(st.integers(0, 6), max_size=2)
    ),
    min_size=1,
    max_size=50,
)
TABLES = (Table("word", None), Table("item", 7, ("seen", "bought")))


def dataset(rows):
    words, seen, bought = zip(*rows, strict=True)
    return Given(TABLES, {"word": words, "seen": seen, "bought": bought})


@examples(60)
@given(samples, st.integers(1, 5), st.sets(st.integers(1, 60), min_size=1, max_size=4))
def test_figures_are_those_of_a_brute_force_count(rows, num_days, sizes):
    data = dataset(rows)
    check(data, days_of(data, num_days), sorted(sizes))


@examples(15)
@given(samples, st.data())
def test_days_need_not_touch(rows, draw):
    data = dataset(rows)
    cuts = sorted(draw.draw(st.sets(st.integers(0, len(rows)), min_size=2, max_size=6)))
    days = [Day(f"d{a}", a, b) for a, b in zip(cuts[:-1:2], cuts[1::2], strict=False)]
    check(data, days, [3])


@pytest.mark.parametrize("memory", [10_000_000, 5_000, 3_000])
def test_rows_that_do_not_fit_the_memory_are_counted_in_several_passes_with_the_same_figures(memory):
    random = np.random.default_rng(0)
    rows = [
        (
            (random.integers(-60, 60, 2) * 2**50).tolist(),
            random.integers(0, 7, 1).tolist(),
            random.integers(0, 7, random.integers(0, 3)).tolist(),
        )
        for _ in range(300)
    ]
    data = dataset(rows)
    found = check(data, days_of(data, 3), [16, 64], memory_bytes=memory)
    assert (found.passes > 1) == (memory < 10_000_000)


def test_memory_for_nothing_is_refused():
    with pytest.raises(CapacityError, match="10 bytes of memory are too little"):
        measure(generated("tiny", 100), memory_bytes=10)


def test_frequent_rows_are_counted_beyond_the_array_of_common_counts(monkeypatch):
    monkeypatch.setattr("bagpipe.data.accesses.COMMON", 4)
    random = np.random.default_rng(1)
    data = dataset([([int(n)], [int(n % 7)], []) for n in random.zipf(1.5, 400)])
    check(data, days_of(data, 4), [50])


def test_a_vast_table_costs_only_the_rows_that_are_touched():
    vast = 2**40
    bags = [[(17 * n * n) % 50 * (vast // 50)] for n in range(200)]
    data = Given((Table("vast", vast),), {"vast": bags})
    found = check(data, days_of(data), [32], memory_bytes=100_000)
    assert found.passes == 1
    assert found.whole.rows == vast


def test_a_table_that_no_sample_uses_has_no_shares():
    data = Given((Table("used", 5), Table("unused", 5)), {"used": [[1]] * 10, "unused": [[]] * 10})
    found = check(data, days_of(data, 2), [5])
    unused = found.tables[1]
    assert (unused.accesses, unused.unique_rows, unused.curve) == (0, 0, ())
    assert unused.top_share == {"0.1%": None, "1%": None}
    assert unused.days[1].covered == {"0.1%": None, "1%": None}
    json.dumps(found.record())


def test_a_bad_id_is_named_with_its_sample():
    data = Given((Table("ad", 5, ("a", "b")),), {"a": [[0], [1], [2]], "b": [[0], [5, 1], [2]]})
    with pytest.raises(ValueRangeError, match=r"sample 1: id 5 is out of range for table 'ad' \(5 rows\)"):
        measure(data)


def test_shards_have_the_figures_of_what_they_were_written_from(tmp_path):
    source = generated("tiny", 5000)
    write(source, tmp_path / "tiny", shard_samples=1300)
    expected = measure(source).record()
    assert measure(Shards(tmp_path / "tiny"), workers=2).record() == expected
    assert expected["all"]["rows_per_batch"]["65536"] is None
    assert list(expected["all"]["rows_per_batch"]) == [str(size) for size in BATCH_SIZES]


def test_drift_of_generated_data_shows():
    still = measure(generated("tiny", 20_000, day_samples=4000), days=None)
    moving = measure(generated("tiny", 20_000, day_samples=4000, drift=0.5), days=None)
    assert still.whole.days[-1].covered["1%"] > still.whole.days[0].covered["1%"] - 0.05
    assert moving.whole.days[-1].covered["1%"] < moving.whole.days[0].covered["1%"] - 0.2


def test_the_curve_ends_with_all_rows_and_passes_through_the_top_shares():
    curve = measure(generated("tiny", 5000)).whole.curve
    assert curve[-1] == (1.0, 1.0)
    assert list(curve) == sorted(curve)
    assert all(share_of_accesses >= share_of_rows for share_of_rows, share_of_accesses in curve)


def test_days_are_those_of_the_manifest_unless_a_number_is_given():
    named = SimpleNamespace(
        days=[SimpleNamespace(name="Mon", start=0, stop=60), SimpleNamespace(name="Tue", start=60, stop=90)]
    )
    data = SimpleNamespace(num_samples=100, manifest=named)
    assert days_of(data) == (Day("Mon", 0, 60), Day("Tue", 60, 90))
    assert days_of(data, 2) == (Day("1", 0, 50), Day("2", 50, 100))
    assert days_of(data, None, 80) == (Day("Mon", 0, 60), Day("Tue", 60, 80))
    assert [day.stop for day in days_of(data, None, 56)] == [8, 16, 24, 32, 40, 48, 56]
    assert [day.stop for day in days_of(SimpleNamespace(num_samples=3))] == [1, 2, 3]


@pytest.mark.parametrize(
    ("options", "error", "message"),
    [
        ({"batch_sizes": []}, ConfigError, "give at least one"),
        ({"batch_sizes": [0, 4]}, ConfigError, "each 1 or more"),
        ({"days": [Day("a", 0, 10), Day("b", 5, 20)]}, ConfigError, "day 'b' is samples 5 to 20"),
        ({"days": [Day("a", 90, 101)]}, ConfigError, "of 100 in all"),
    ],
)
def test_wrong_arguments_are_refused(options, error, message):
    with pytest.raises(error, match=message):
        measure(generated("tiny", 100), **options)
    with pytest.raises(ConfigError, match="days is 0"):
        days_of(generated("tiny", 100), 0)


def test_no_samples_are_refused():
    with pytest.raises(DataError, match="nothing to count"):
        measure(generated("tiny", 0))


def test_progress_ends_with_all_that_there_is_to_read():
    told = []
    measure(generated("tiny", 2000), memory_bytes=80_000, report=lambda done, total: told.append((done, total)))
    assert told[-1][0] == told[-1][1] >= 4000
    assert all(done <= total for done, total in told)


def run(*arguments):
    app = Typer()
    app.command()(stats_command)
    result = CliRunner().invoke(app, [str(each) for each in arguments])
    if result.exception is not None and not isinstance(result.exception, SystemExit):
        raise result.exception
    assert result.exit_code == 0, result.output
    return result.stdout


def test_the_command_prints_one_object_and_writes_the_page(tmp_path):
    page = tmp_path / "page.html"
    found = json.loads(
        run("tiny", "--samples", 3000, "--batch-sizes", "100,1000", "--days", 3, "--html", page, "--json")
    )
    assert found["data"] == "tiny"
    assert found["samples"] == 3000
    assert [day["stop"] for day in found["days"]] == [1000, 2000, 3000]
    assert [table["table"] for table in found["tables"]] == ["user", "item", "city", "device"]
    assert list(found["all"]["rows_per_batch"]) == ["100", "1000"]
    assert page.read_text().startswith("<!DOCTYPE html>")


def test_the_command_prints_tables_for_people(tmp_path):
    write(generated("tiny", 2000), tmp_path / "shards")
    shown = " ".join(run(tmp_path / "shards", "--samples", 1000, "--memory", "1MB").split())
    assert "samples │ 1,000 │" in shown
    for title in ("tables", "different rows of a batch", "overlap with the day before", "day 7, by table"):
        assert title in shown


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("nowhere",), "neither a directory of shards nor a preset"),
        (("tiny", "--batch-sizes", "1,x"), "give whole numbers"),
        (("tiny", "--memory", "12"), "give bytes such as"),
        (("tiny", "--memory", "much"), "give bytes such as"),
        (("tiny", "--samples", "50", "--html", "/nowhere/page.html"), "can't be written"),
    ],
)
def test_the_command_refuses_what_it_can_not_use(arguments, message):
    with pytest.raises(ConfigError, match=message):
        run(*arguments)
