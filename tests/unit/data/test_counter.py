import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from bagpipe.data.counter import derive_key, feistel_side, permute, shuffle
from bagpipe.kernels.random import mix, mix_numpy
from definitions.counter import define_permute, define_shuffle
from harness.examples import examples


def test_mix_equals_its_twin_on_random_and_extreme_words():
    words = np.array([0, 1, 2**63, 2**64 - 1, *np.random.default_rng(0).integers(0, 2**63, 500)], dtype=np.uint64)
    assert [int(mix(word)) for word in words] == mix_numpy(words).tolist()


@pytest.mark.parametrize("rows", [1, 2, 3, 4, 5, 7, 16, 17, 100, 305, 1460, 10_000])
def test_permute_is_a_bijection_and_equals_its_twin(rows):
    ranks = np.arange(rows, dtype=np.uint64)
    side, key = feistel_side(rows), derive_key("test", rows)
    images = define_permute(ranks, np.uint64(rows), side, key)
    assert sorted(images.tolist()) == list(range(rows))
    assert [int(permute(rank, np.uint64(rows), side, key)) for rank in ranks] == images.tolist()


@given(rows=st.integers(1, 2**40), key=st.integers(0, 2**64 - 1), data=st.data())
@examples(50)
def test_permute_stays_in_range_and_keeps_ranks_apart_in_tables_of_any_size(rows, key, data):
    ranks = data.draw(st.lists(st.integers(0, rows - 1), min_size=1, max_size=20, unique=True))
    words = np.array(ranks, dtype=np.uint64)
    images = define_permute(words, np.uint64(rows), feistel_side(rows), np.uint64(key))
    assert len(set(images.tolist())) == len(ranks)
    assert int(images.max()) < rows
    assert int(permute(words[0], np.uint64(rows), feistel_side(rows), np.uint64(key))) == int(images[0])


def test_popular_ranks_are_scattered_over_the_table():
    rows = 10_131_227
    images = define_permute(np.arange(1000, dtype=np.uint64), np.uint64(rows), feistel_side(rows), derive_key(1))
    counts = np.histogram(images.astype(np.float64), bins=10, range=(0, rows))[0]
    assert counts.min() > 60
    assert counts.max() < 140


@pytest.mark.parametrize("size", [0, 1, 2, 3, 100, 1000])
def test_shuffle_is_a_permutation_and_equals_its_twin(size):
    ours, twin = np.arange(size), np.arange(size)
    shuffle(ours, derive_key("shuffle"))
    define_shuffle(twin, derive_key("shuffle"))
    assert ours.tolist() == twin.tolist()
    assert sorted(ours.tolist()) == list(range(size))


def test_a_shuffle_takes_each_element_anywhere():
    size, rounds = 8, 4000
    where = np.zeros((size, size))
    for turn in range(rounds):
        words = np.arange(size)
        shuffle(words, derive_key(turn))
        where[np.arange(size), words] += 1
    assert abs(where / rounds - 1 / size).max() < 0.03


def test_keys_depend_on_every_part_and_its_place():
    keys = {int(derive_key(*parts)) for parts in [("a", 1), ("a", 2), ("b", 1), (1, "a"), ("a1",), ("a", "1", "")]}
    assert len(keys) == 6
