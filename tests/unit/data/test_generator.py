import hashlib
from dataclasses import replace
from itertools import pairwise

import numpy as np
import pytest
import torch

from bagpipe.data import PRESETS, Preset, best_auc, find_preset, generated
from bagpipe.errors import ConfigError
from benchmarks.calibration import expected_rows, expected_shared, expected_top_share

BATCH = 4096


def ids_of(source, start, stop, name):
    return source.gather(np.arange(start, stop)).columns[name].values[:, 0]


def measured_auc(scores, labels):
    order = np.argsort(scores, kind="stable")
    ranks = np.empty(len(scores))
    ranks[order] = np.arange(1, len(scores) + 1)
    positive = labels > 0
    pairs = positive.sum() * (~positive).sum()
    return (ranks[positive].sum() - positive.sum() * (positive.sum() + 1) / 2) / pairs


@pytest.mark.parametrize("name", list(PRESETS))
def test_every_preset_gives_ids_in_range_and_labels_of_its_rate(name):
    source = generated(name, 3000)
    (batch,) = source.batches(3000)
    for table in source.tables:
        for feature in table.features:
            ids = batch.sparse[feature].values
            assert table.rows is None or (int(ids.min()) >= 0 and int(ids.max()) < table.rows)
    assert set(batch.labels.tolist()) == {0.0, 1.0}
    assert float(batch.labels.mean()) == pytest.approx(source.preset.ctr, abs=0.04)
    assert torch.isfinite(batch.dense).all()


def test_a_sample_depends_on_its_number_only():
    source = generated("tiny", 10_000)
    whole = source.gather(np.arange(10_000))
    numbers = np.random.default_rng(0).permutation(10_000)[:500]
    some = source.gather(numbers)
    assert (some.dense == whole.dense[numbers]).all()
    assert (some.labels == whole.labels[numbers]).all()
    for name, column in whole.columns.items():
        if column.offsets is None:
            assert (some.columns[name].values == column.values[numbers]).all()
    bags = [whole.columns["recent"].ids(n, n + 1).values.tolist() for n in numbers[:50]]
    assert [some.columns["recent"].ids(n, n + 1).values.tolist() for n in range(50)] == bags


def test_a_longer_data_set_begins_with_the_shorter_one():
    short, long = (generated("tiny", n).gather(np.arange(1000)) for n in (1000, 50_000))
    assert (short.dense == long.dense).all()
    assert (short.labels == long.labels).all()


def test_another_seed_and_another_preset_give_other_data():
    small = find_preset("tiny")
    one, two, three = (
        generated(preset, 1000, seed).gather(np.arange(1000)).columns["user"].values
        for preset, seed in [(small, 0), (small, 1), (replace(small, name="other"), 0)]
    )
    assert (one != two).mean() > 0.8
    assert (one != three).mean() > 0.8


def test_the_samples_are_the_same_on_every_machine():
    samples = generated("tiny", 1000, seed=1, drift=0.1, day_samples=100, burst=0.1).gather(np.arange(1000))
    assert samples.columns["user"].values[:3, 0].tolist() == [779, 75, 911]
    digest = hashlib.sha256(samples.dense.tobytes() + samples.labels.tobytes())
    for column in samples.columns.values():
        digest.update(column.values.tobytes())
    assert digest.hexdigest()[:16] == "156ce390b41dd55b"


def test_a_scaled_preset_has_the_counts_that_its_laws_promise():
    preset = find_preset("criteo-kaggle-like").scaled(0.01)
    source = generated(preset, 8 * BATCH)
    seen: dict[str, set[int]] = {name: set() for name in preset.features}
    accesses = {table.name: np.zeros(table.rows) for table in preset.tables}
    shared, before = [], None
    for batch in source.batches(BATCH):
        rows = {name: set(ids.values.flatten().tolist()) for name, ids in batch.sparse.items()}
        for name, ids in batch.sparse.items():
            np.add.at(accesses[name], ids.values.flatten().numpy(), 1)
            seen[name] |= rows[name]
        if before is not None:
            shared.append(sum(len(rows[name] & before[name]) for name in rows))
        before = rows
        if batch.number in (0, 7):
            found = sum(map(len, seen.values()))
            assert found == pytest.approx(expected_rows(preset, (batch.number + 1) * BATCH), rel=0.02)
    assert np.mean(shared) == pytest.approx(expected_shared(preset, BATCH), rel=0.02)
    counts = np.sort(np.concatenate(list(accesses.values())))[::-1]
    top = counts[: len(counts) // 1000].sum() / counts.sum()
    assert top == pytest.approx(expected_top_share(preset, 0.001), abs=0.01)


def test_popular_rows_are_not_the_first_ids():
    preset = find_preset("criteo-kaggle-like")
    values, counts = np.unique(ids_of(generated(preset, 20_000), 0, 20_000, "C3"), return_counts=True)
    popular = values[np.argsort(-counts)[:100]]
    assert popular.min() > 100
    assert np.ptp(popular) > 0.9 * 10_131_227
    other, counts = np.unique(ids_of(generated(preset, 20_000, seed=1), 0, 20_000, "C3"), return_counts=True)
    assert len(set(popular) & set(other[np.argsort(-counts)[:100]])) < 5


def test_the_zipf_dial_sets_the_exponent():
    source = generated("tiny", 200_000, zipf=2.0)
    counts = np.sort(np.unique(ids_of(source, 0, 200_000, "user"), return_counts=True)[1])[::-1]
    assert counts[0] / counts[1] == pytest.approx(4, rel=0.05)
    assert counts[1] / counts[3] == pytest.approx(4, rel=0.08)


@pytest.mark.parametrize("share", [0.01, 0.5, 0.9])
def test_the_top_share_dial_sets_what_the_top_rows_take(share):
    source = generated("tiny", 100_000, top_share=share)
    counts = np.bincount(ids_of(source, 0, 100_000, "user"), minlength=1000)
    assert np.sort(counts)[-10:].sum() / 100_000 == pytest.approx(share, abs=0.01)


def coverage_by_day(source, day_samples, days):
    """Share of each day's accesses that goes to the 100 users who were the most popular on the first day."""
    ids = [ids_of(source, day * day_samples, (day + 1) * day_samples, "user") for day in range(days)]
    top = np.argsort(-np.bincount(ids[0], minlength=1000))[:100]
    return [np.isin(each, top).mean() for each in ids]


def test_drift_moves_the_given_share_of_popular_rows_each_day():
    moving = coverage_by_day(generated("tiny", 100_000, drift=0.2, day_samples=20_000), 20_000, 5)
    assert all(later < earlier for earlier, later in pairwise(moving))
    assert 0.8**4 - 0.15 < moving[4] / moving[0] < 0.8**4 + 0.25
    still = coverage_by_day(generated("tiny", 100_000), 20_000, 5)
    assert min(still) > 0.95 * still[0]


def test_drift_keeps_the_distribution_of_popularity():
    source = generated("tiny", 100_000, drift=0.5, day_samples=10_000)
    first, last = (
        np.sort(np.unique(ids_of(source, start, start + 10_000, "user"), return_counts=True)[1])[::-1][:20]
        for start in (0, 90_000)
    )
    assert first == pytest.approx(last, rel=0.35)


def test_bursts_repeat_ids_of_the_samples_shortly_before():
    near = generated("tiny", 30_000, burst=0.5, burst_samples=20, top_share=0.01)
    plain = generated("tiny", 30_000, top_share=0.01)

    def repeats(source):
        ids = ids_of(source, 0, 30_000, "device")
        return np.mean([ids[n] in ids[n - 20 : n] for n in range(20, 30_000)])

    assert repeats(plain) < 0.02
    assert 0.25 < repeats(near) < 0.55


def test_a_film_always_has_the_same_genres():
    columns = generated("movielens-like", 30_000).gather(np.arange(30_000)).columns
    items, genres = columns["item"].values[:, 0], columns["genres"]
    bags: dict[int, list[int]] = {}
    for number, item in enumerate(items.tolist()):
        bag = genres.ids(number, number + 1).values.tolist()
        assert bags.setdefault(item, bag) == bag
        assert 1 <= len(bag) <= 5
    assert len({tuple(bag) for bag in bags.values()}) > 1000


def test_features_of_one_table_share_its_rows_but_not_their_draws():
    columns = generated("tiny", 50_000).gather(np.arange(50_000)).columns
    item, recent = columns["item"].values[:, 0], columns["recent"].values
    assert np.bincount(item, minlength=500).argmax() == np.bincount(recent, minlength=500).argmax()
    first = recent[columns["recent"].offsets[:-1][np.diff(columns["recent"].offsets) > 0]]
    assert (first == item[np.diff(columns["recent"].offsets) > 0]).mean() < 0.2


def test_the_best_auc_is_that_of_the_true_probabilities():
    source = generated("criteo-kaggle-like", 60_000)
    numbers = np.arange(60_000)
    found = measured_auc(source.probabilities(numbers), source.gather(numbers).labels)
    best = best_auc("criteo-kaggle-like", 60_000)
    assert best == pytest.approx(found, abs=0.006)
    assert best == pytest.approx(0.811, abs=0.003)


def test_the_best_auc_of_two_samples_is_computed_by_hand():
    source = generated("tiny", 2)
    low, high = np.sort(source.probabilities(np.arange(2)))
    assert best_auc("tiny", 2) == pytest.approx(high * (1 - low) / (high * (1 - low) + low * (1 - high)))


def test_labels_follow_their_probabilities():
    source = generated("criteo-kaggle-like", 100_000)
    numbers = np.arange(100_000)
    chances, labels = source.probabilities(numbers), source.gather(numbers).labels
    for low in np.arange(0, 1, 0.2):
        inside = (chances >= low) & (chances < low + 0.2)
        assert labels[inside].mean() == pytest.approx(chances[inside].mean(), abs=0.02)


def test_a_simple_model_learns_from_the_popular_rows():
    """One weight a numeric feature and a row, Adagrad, 120 K samples, judged on samples that it has not seen."""
    preset: Preset = find_preset("criteo-kaggle-like").scaled(0.01)
    source = generated(preset, 140_000)
    torch.manual_seed(0)
    bags = torch.nn.ModuleList(torch.nn.EmbeddingBag(t.rows, 1, mode="sum") for t in preset.tables)
    for bag in bags:
        torch.nn.init.zeros_(bag.weight)
    linear = torch.nn.Linear(preset.num_dense, 1)
    with_dense = torch.optim.Adagrad([*bags.parameters(), *linear.parameters()], lr=0.1)

    def score(batch, dense=True):
        rows = sum(bag(ids.values) for bag, ids in zip(bags, batch.sparse.values(), strict=True))
        return (rows + (linear(batch.dense) if dense else 0)).squeeze(1)

    for batch in source.part(0, 120_000).batches(2048):
        with_dense.zero_grad()
        torch.nn.functional.binary_cross_entropy_with_logits(score(batch), batch.labels).backward()
        with_dense.step()
    (held_out,) = source.part(120_000, 140_000).batches(20_000)
    with torch.no_grad():
        assert measured_auc(score(held_out).numpy(), held_out.labels.numpy()) > 0.76
        assert measured_auc(score(held_out, dense=False).numpy(), held_out.labels.numpy()) > 0.60


@pytest.mark.parametrize(
    ("dials", "message"),
    [
        ({"skew": 1.0}, "no dial 'skew': choose one of top_share"),
        ({"top_share": 0.5, "zipf": 1.0}, "give one of them"),
        ({"top_share": 1.5}, "share of 1.5"),
        ({"zipf": -1.0}, "exponent"),
        ({"drift": 1.5}, "drift is 1.5"),
        ({"burst": -0.1}, "burst is -0.1"),
        ({"burst_samples": 0}, "burst_samples is 0"),
        ({"day_samples": 0}, "day_samples is 0"),
        ({"drift": 0.1, "day_samples": 1}, "days of drift, more than 4096: give day_samples"),
    ],
)
def test_a_dial_that_makes_no_sense_is_refused_by_name(dials, message):
    with pytest.raises(ConfigError, match=message):
        generated("tiny", 10_000, **dials)


def test_a_negative_number_of_samples_is_refused():
    with pytest.raises(ConfigError, match="-1 samples of preset 'tiny'"):
        generated("tiny", -1)


def test_a_preset_can_not_be_scaled_to_nothing():
    with pytest.raises(ConfigError, match="share of 0"):
        find_preset("tiny").scaled(0)


def test_the_terabyte_preset_keeps_no_table_of_its_size_in_memory():
    source = generated("criteo-terabyte-like", 100)
    laws = [stream.law for stream in source._features]
    assert sum(array.nbytes for law in laws for array in law if isinstance(array, np.ndarray)) < 1_000_000
    assert int(source.gather(np.arange(100)).columns["C20"].values.max()) > 100_000_000
