"""AUC and log loss against the definitions, pair by pair and sample by sample."""

from __future__ import annotations

import itertools
import math
from fractions import Fraction

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from bagpipe.errors import BatchError, ValueRangeError
from bagpipe.metrics import Metrics, auc, log_loss

SCORES = st.one_of(st.sampled_from([-1.0, -0.0, 0.0, 0.5]), st.floats(allow_nan=False, allow_infinity=False, width=32))
SAMPLES = st.lists(st.tuples(st.integers(0, 1), SCORES), max_size=40)


def auc_by_pairs(labels, scores):
    positives = [score for label, score in zip(labels, scores, strict=True) if label]
    negatives = [score for label, score in zip(labels, scores, strict=True) if not label]
    if not positives or not negatives:
        return math.nan
    wins = sum(Fraction((p > n) * 2 + (p == n), 2) for p in positives for n in negatives)
    return float(wins / (len(positives) * len(negatives)))


@given(SAMPLES)
def test_auc_equals_the_share_of_ordered_pairs_to_the_last_bit(samples):
    labels, scores = [label for label, _ in samples], [score for _, score in samples]
    found = auc(np.array(labels, np.float32), np.array(scores, np.float32))
    expected = auc_by_pairs(labels, scores)
    assert found == expected or (math.isnan(found) and math.isnan(expected))


def test_auc_of_perfect_reversed_and_equal_scores():
    labels = np.array([0, 0, 1, 1])
    assert auc(labels, np.array([1, 2, 3, 4])) == 1.0
    assert auc(labels, np.array([4, 3, 2, 1])) == 0.0
    assert auc(labels, np.zeros(4)) == 0.5
    assert auc(labels, np.array([-np.inf, 0, 0, np.inf])) == 0.875


def test_auc_of_one_class_or_no_samples_is_nan():
    assert math.isnan(auc(np.ones(3), np.arange(3.0)))
    assert math.isnan(auc(np.zeros(3), np.arange(3.0)))
    assert math.isnan(auc(np.empty(0), np.empty(0)))
    assert math.isnan(log_loss(np.empty(0), np.empty(0)))


def test_log_loss_is_the_mean_of_the_definition_in_double_precision():
    random = np.random.default_rng(0)
    labels, logits = random.integers(0, 2, 200), random.normal(0, 4, 200).astype(np.float32)
    expected = math.fsum(
        math.log1p(math.exp(-float(logit) if label else float(logit)))
        for label, logit in zip(labels, logits, strict=True)
    )
    assert log_loss(labels, logits) == pytest.approx(expected / 200, rel=1e-14)


def test_log_loss_is_right_far_from_zero():
    assert log_loss(np.array([1, 0]), np.array([1e4, -1e4])) == 0.0
    assert log_loss(np.array([0, 1]), np.array([1e4, -1e4])) == 1e4
    assert log_loss(np.array([1]), np.array([50.0])) == pytest.approx(math.exp(-50), rel=1e-12)
    assert log_loss(np.array([1, 0]), np.array([np.inf, -np.inf])) == 0.0
    assert log_loss(np.array([0]), np.array([np.inf])) == np.inf


def test_log_loss_equals_that_of_torch():
    generator = torch.Generator().manual_seed(0)
    logits = torch.randn(100, generator=generator, dtype=torch.float64)
    labels = torch.randint(0, 2, (100,), generator=generator).double()
    expected = torch.nn.functional.binary_cross_entropy_with_logits(logits, labels)
    assert log_loss(labels, logits) == pytest.approx(float(expected), rel=1e-12)


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.float16, torch.bfloat16])
@pytest.mark.parametrize("label_dtype", [torch.float32, torch.int64, torch.bool])
def test_tensors_and_arrays_of_any_type_give_the_same(dtype, label_dtype):
    logits = torch.tensor([-1.5, 0.25, 0.25, 3.0], dtype=dtype, requires_grad=True)
    labels = torch.tensor([0, 1, 0, 1]).to(label_dtype)
    arrays = np.array([0, 1, 0, 1]), np.array([-1.5, 0.25, 0.25, 3.0])
    assert auc(labels, logits) == auc(*arrays) == 0.875
    assert log_loss(labels, logits) == log_loss(*arrays)


@given(SAMPLES, st.lists(st.integers(0, 40), max_size=4))
def test_batches_add_up_to_the_metrics_of_all_samples(samples, cuts):
    labels = torch.tensor([label for label, _ in samples], dtype=torch.float32)
    logits = torch.tensor([score for _, score in samples], dtype=torch.float32)
    metrics = Metrics()
    bounds = [0, *sorted(min(cut, len(samples)) for cut in cuts), len(samples)]
    for start, stop in itertools.pairwise(bounds):
        metrics.add(labels[start:stop], logits[start:stop])
        metrics.auc()  # reading in between changes nothing
    assert len(metrics) == len(samples)
    np.testing.assert_equal(metrics.auc(), auc(labels, logits))
    np.testing.assert_equal(metrics.log_loss(), log_loss(labels, logits))


def test_metrics_of_nothing_are_nan():
    assert len(Metrics()) == 0
    assert math.isnan(Metrics().auc())
    assert math.isnan(Metrics().log_loss())


def test_metrics_keep_their_own_copy():
    labels, logits = torch.tensor([0.0, 1.0]), torch.tensor([-1.0, 1.0])
    metrics = Metrics()
    metrics.add(labels, logits)
    labels.zero_()
    logits.zero_()
    assert metrics.auc() == 1.0
    assert metrics.log_loss() == pytest.approx(math.log1p(math.exp(-1)))


@pytest.mark.parametrize("metric", [auc, log_loss, Metrics().add])
def test_what_would_be_silently_wrong_is_refused(metric):
    with pytest.raises(ValueRangeError, match=r"label 1 is 2\.0"):
        metric(np.array([1.0, 2.0]), np.zeros(2))
    with pytest.raises(ValueRangeError, match="label 0 is nan"):
        metric(np.array([math.nan, 1.0]), np.zeros(2))
    with pytest.raises(ValueRangeError, match="1 of 3 scores are NaN, the first is number 2"):
        metric(np.zeros(3), np.array([0.0, 1.0, math.nan]))
    with pytest.raises(BatchError, match=r"\(3,\), scores \(3, 1\)"):
        metric(np.zeros(3), np.zeros((3, 1)))
    with pytest.raises(BatchError, match=r"\(2,\), scores \(3,\)"):
        metric(np.zeros(2), np.zeros(3))


def test_ranks_of_millions_of_samples_are_not_rounded():
    count = 3_000_000
    labels = np.zeros(count, np.bool_)
    labels[0] = labels[-1] = True
    expected = float(Fraction(count - 2, 2 * (count - 2)))
    assert auc(labels, np.arange(count, dtype=np.float64)) == expected
    labels[1] = True
    pairs = 3 * (count - 3)
    assert auc(labels, np.arange(count, dtype=np.float64)) == float(Fraction(count - 3, pairs))
