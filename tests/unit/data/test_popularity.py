import numpy as np
import pytest

from bagpipe.data.popularity import PowerLaw, TopShare, sampler
from bagpipe.data.presets import PRESETS, find_preset
from bagpipe.errors import ConfigError
from benchmarks.calibration import expected_rows, expected_shared, expected_top_share

BATCH = 16_384


def exact_cumulative(law: PowerLaw, rows: int) -> np.ndarray:
    weights = (np.arange(1, rows + 1) + law.shift) ** -law.exponent
    return np.cumsum((1 - law.uniform) * weights / weights.sum() + law.uniform / rows)


def share_of_top(popularity, rows, fraction):
    drawn = sampler(popularity, rows)
    return np.interp(fraction * rows, drawn.first.astype(float), np.concatenate([[0], np.cumsum(drawn.masses)]))


@pytest.mark.parametrize("law", [PowerLaw(0), PowerLaw(0.7, 3), PowerLaw(1), PowerLaw(1.5, 42, 0.18), PowerLaw(5)])
@pytest.mark.parametrize("rows", [1, 2, 3, 255, 257, 100_000])
def test_bucket_masses_are_those_of_the_exact_law(law, rows):
    drawn = sampler(law, rows)
    assert drawn.masses.sum() == pytest.approx(1, abs=1e-12)
    assert np.cumsum(drawn.masses) == pytest.approx(
        exact_cumulative(law, rows)[drawn.first[1:].astype(int) - 1], abs=1e-6
    )


@pytest.mark.parametrize("rows", [1, 3, 256, 100_000, 882_774_559])
def test_the_alias_tables_hold_the_masses(rows):
    drawn = sampler(PowerLaw(1.1, 1), rows)
    kept = drawn.keep / 2**32
    masses = kept.copy()
    np.add.at(masses, drawn.other, 1 - kept)
    assert masses / len(kept) == pytest.approx(drawn.masses, abs=1e-9)
    assert int(drawn.first[-1]) == rows


def test_a_table_of_a_billion_rows_needs_a_small_sampler():
    assert len(sampler(PowerLaw(1.5), 10**9).keep) < 1500


@pytest.mark.parametrize("share", [0.01, 0.1, 0.4, 0.9, 0.99])
def test_the_top_one_percent_take_the_share_that_was_asked_for(share):
    assert share_of_top(TopShare(share), 1_000_000, 0.01) == pytest.approx(share, abs=1e-4)


def test_a_top_share_of_one_percent_is_uniform_and_a_larger_one_falls_until_the_border():
    assert np.ptp(sampler(TopShare(0.01), 1000).masses[:256]) < 1e-12
    drawn = sampler(TopShare(0.9), 100_000)
    density = drawn.masses / drawn.widths
    top = drawn.first[1:] <= 1000
    assert (np.diff(density[top]) < 0).all()
    assert density[~top][1:] == pytest.approx(density[-1], rel=1e-6)


@pytest.mark.parametrize(
    ("law", "arguments"),
    [(PowerLaw, (-1,)), (PowerLaw, (float("nan"),)), (PowerLaw, (1, -1)), (PowerLaw, (1, 0, 2)), (TopShare, (0.001,))],
)
def test_a_law_that_makes_no_sense_is_refused(law, arguments):
    with pytest.raises(ConfigError, match="give"):
        law(*arguments)


@pytest.mark.parametrize(
    ("batches", "published"),
    [(1, 65e3), (5, 206e3), (10, 347e3), (50, 1.225e6), (100, 2.138e6), (200, 3.753e6), (300, 5.226e6)],
)
def test_the_full_criteo_preset_touches_as_many_rows_as_published(batches, published):
    rows = expected_rows(find_preset("criteo-kaggle-like"), batches * BATCH)
    assert rows == pytest.approx(published, rel=0.03)


def test_the_full_criteo_preset_is_as_skewed_as_published():
    preset = find_preset("criteo-kaggle-like")
    assert 0.88 < expected_top_share(preset, 0.001) < 0.92
    assert 22e3 < expected_shared(preset, BATCH) < 24e3


def test_the_avazu_preset_starts_as_skewed_as_published():
    assert expected_top_share(find_preset("avazu-like"), 0.0005) == pytest.approx(0.91, abs=0.005)


@pytest.mark.parametrize(
    ("name", "fraction", "share"),
    [("random", 0.02, 0.02), ("low", 0.02, 0.085), ("low", 0.65, 0.90), ("medium", 0.02, 0.45), ("high", 0.02, 0.88)],
)
def test_the_scratchpipe_traces_have_the_localities_that_are_documented(name, fraction, share):
    preset = find_preset(f"scratchpipe-{name}")
    assert expected_top_share(preset, fraction) == pytest.approx(share, abs=0.002)
    assert [table.rows for table in preset.tables] == [10_000_000] * 8
    assert {feature.ids for feature in preset.features.values()} == {20}


@pytest.mark.parametrize(
    ("name", "tables", "dense", "rows"),
    [
        ("criteo-kaggle-like", 26, 13, 33_762_577),
        ("avazu-like", 21, 1, 9.4e6),
        ("criteo-terabyte-like", 26, 13, 882.77e6),
    ],
)
def test_the_presets_have_the_published_totals(name, tables, dense, rows):
    preset = PRESETS[name]
    assert (len(preset.tables), preset.num_dense) == (tables, dense)
    assert sum(table.rows for table in preset.tables) == pytest.approx(rows, rel=0.006)


def test_an_unknown_preset_is_refused_with_the_names_of_the_others():
    with pytest.raises(ConfigError, match=r"no preset 'criteo'.*criteo-kaggle-like"):
        find_preset("criteo")
