import numpy as np
import pytest

from bagpipe.data import draw
from bagpipe.data.counter import derive_key, feistel_side
from bagpipe.data.popularity import PowerLaw, sampler
from bagpipe.data.samples import copy_places, spans
from definitions.draw import define_add_effects, define_draw_dense, define_draw_ids, define_draw_weights
from definitions.samples import define_copy_places

COUNTERS = np.concatenate([np.arange(700), [2**40, 5, 2**62], np.arange(9000, 9300)])


def make_law(rows=1000, ranks=None, drift=0.0, burst=0.0, days=9):
    drawn = sampler(PowerLaw(1.2, 1, 0.1), ranks or rows)
    return draw.Law(
        key=derive_key("key"),
        keep=drawn.keep,
        other=drawn.other,
        first=drawn.first,
        table_key=derive_key("table"),
        rows=np.uint64(rows),
        side=feistel_side(ranks or rows),
        pivots=np.array([derive_key("day", day) for day in range(days)], dtype=np.uint64),
        drift=np.uint64(round(drift * 2**32)),
        day_samples=np.int64(100),
        burst=np.uint64(round(burst * 2**32)),
        burst_samples=np.uint64(50),
    )


def make_bags(most=4):
    lengths = np.random.default_rng(1).integers(0, most + 1, len(COUNTERS))
    return np.concatenate([[0], np.cumsum(lengths)])


@pytest.mark.parametrize(
    "law",
    [
        make_law(),
        make_law(rows=1),
        make_law(rows=2, drift=0.5, burst=0.5),
        make_law(rows=7, drift=1.0, burst=1.0),
        make_law(rows=10_131_227, drift=0.1),
        make_law(rows=292_775_614, burst=0.3),
        make_law(rows=0, ranks=5000, drift=0.2, burst=0.1),
        make_law(days=0, drift=0.5),
    ],
    ids=lambda law: f"rows={law.rows}-drift={law.drift}-burst={law.burst}",
)
def test_draw_ids_equals_its_twin(law):
    offsets = make_bags()
    ours, twin = np.empty(offsets[-1], dtype=np.int64), np.empty(offsets[-1], dtype=np.int64)
    draw.draw_ids(COUNTERS, offsets, law, ours)
    define_draw_ids(COUNTERS, offsets, law, twin)
    assert (ours == twin).all()
    if law.rows:
        assert ours.min() >= 0
        assert ours.max() < law.rows


def test_draw_weights_equals_its_twin():
    offsets = make_bags()
    ours, twin = np.empty(offsets[-1], dtype=np.float32), np.empty(offsets[-1], dtype=np.float32)
    draw.draw_weights(COUNTERS, offsets, derive_key("w"), ours)
    define_draw_weights(COUNTERS, offsets, derive_key("w"), twin)
    assert ours.tobytes() == twin.tobytes()
    assert ours.min() > 0
    assert ours.max() <= 2


@pytest.mark.parametrize("features", [0, 1, 13])
def test_draw_dense_equals_its_twin(features):
    keys = np.array([derive_key("dense", j) for j in range(features)], dtype=np.uint64)
    factors = np.arange(features) * 37 - 100
    results = []
    for function in (draw.draw_dense, define_draw_dense):
        dense, score = np.empty((len(COUNTERS), features), dtype=np.float32), np.arange(len(COUNTERS))
        function(COUNTERS, keys, factors, dense, score)
        results.append((dense.tobytes(), score.tolist()))
    assert results[0] == results[1]


@pytest.mark.parametrize("weighted", [True, False])
def test_add_effects_equals_its_twin(weighted):
    offsets = make_bags()
    ids = np.random.default_rng(2).integers(-(2**63), 2**63 - 1, offsets[-1])
    weights = np.empty(offsets[-1] if weighted else 0, dtype=np.float32)
    if weighted:
        draw.draw_weights(COUNTERS, offsets, derive_key("w"), weights)
    factors = np.array([0, 2**24, 11863283, 9686330, 2**23])
    results = []
    for function in (draw.add_effects, define_add_effects):
        score = np.arange(len(COUNTERS))
        function(ids, offsets, weights, derive_key("e"), factors, score)
        results.append(score.tolist())
    assert results[0] == results[1]


def test_numeric_features_are_nearly_standard_normal():
    dense, score = np.empty((50_000, 2), dtype=np.float32), np.zeros(50_000, dtype=np.int64)
    keys = np.array([derive_key(1), derive_key(2)], dtype=np.uint64)
    draw.draw_dense(np.arange(50_000), keys, np.zeros(2, dtype=np.int64), dense, score)
    assert abs(dense.mean(0)).max() < 0.02
    assert abs(dense.std(0) - 1).max() < 0.02
    assert abs(np.corrcoef(dense.T)[0, 1]) < 0.02


@pytest.mark.parametrize("kind", [np.uint8, np.uint16, np.uint32, np.int64])
def test_copy_places_equals_its_twin(kind):
    generator = np.random.default_rng(3)
    values = generator.integers(0, 200, 3 * 500).astype(kind)
    values.flags.writeable = False
    places, slots = generator.integers(0, 500, 100), generator.permutation(100)
    for width in (0, 1, 3):
        ours, twin = np.zeros((2, 100 * width), dtype=np.int64)
        copy_places(values, places, width, ours, slots)
        define_copy_places(values, places, width, twin, slots)
        assert (ours == twin).all()


def test_spans_are_runs_one_after_the_other():
    assert spans(np.array([5, 9, 0]), np.array([2, 0, 3])).tolist() == [5, 6, 0, 1, 2]
    assert spans(np.empty(0, dtype=np.int64), np.empty(0, dtype=np.int64)).tolist() == []
