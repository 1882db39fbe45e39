"""How good predictions are: area under the ROC curve and log loss, exact and in double precision.

A result depends on the samples only, not on how they were cut into batches. Where a metric is not defined (no samples,
or one class only for the AUC) it is NaN; input that would make it silently wrong is refused (I8).
"""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from bagpipe.errors import BatchError, ValueRangeError

Array = npt.NDArray[Any]


def auc(labels: Array | Tensor, scores: Array | Tensor) -> float:
    """Chance that a positive sample scores above a negative one, ties counting half; NaN unless both classes occur."""
    return _auc(*_checked(labels, scores))


def log_loss(labels: Array | Tensor, logits: Array | Tensor) -> float:
    """Mean of -log(probability that the logit gives to the label); NaN for no samples."""
    return _log_loss(*_checked(labels, logits))


class Metrics:
    """Collects labels and logits batch by batch: exact metrics at five bytes a sample (float32 logits)."""

    def __init__(self) -> None:
        self._labels: list[npt.NDArray[np.bool_]] = []
        self._logits: list[Array] = []

    def __len__(self) -> int:
        return sum(map(len, self._labels))

    def add(self, labels: Array | Tensor, logits: Array | Tensor) -> None:
        """Take in a batch; the values are copied."""
        positive, checked = _checked(labels, logits)
        self._labels.append(positive)
        self._logits.append(checked.copy())

    def auc(self) -> float:
        """As `bagpipe.metrics.auc` of all samples so far."""
        return _auc(*self._joined())

    def log_loss(self) -> float:
        """As `bagpipe.metrics.log_loss` of all samples so far."""
        return _log_loss(*self._joined())

    def _joined(self) -> tuple[npt.NDArray[np.bool_], Array]:
        if len(self._labels) != 1:
            self._labels = [np.concatenate([np.empty(0, np.bool_), *self._labels])]
            self._logits = [np.concatenate(self._logits) if self._logits else np.empty(0, np.float32)]
        return self._labels[0], self._logits[0]


def _auc(positive: npt.NDArray[np.bool_], scores: Array) -> float:
    positives = int(np.count_nonzero(positive))
    negatives = len(positive) - positives
    if not positives or not negatives:
        return float("nan")
    order = np.argsort(scores)
    ordered = scores[order]
    starts = np.flatnonzero(np.concatenate([[True], ordered[1:] != ordered[:-1]]))
    stops = np.append(starts[1:], len(ordered))
    # Whole numbers, so that nothing is rounded before the division: twice the mean rank of a tie is first + last.
    positives_of_tie = np.add.reduceat(positive[order].astype(np.int64), starts)
    twice_ranks = int(np.sum(positives_of_tie * (starts + stops + 1)))
    return (twice_ranks - positives * (positives + 1)) / (2 * positives * negatives)


def _log_loss(positive: npt.NDArray[np.bool_], logits: Array) -> float:
    if not len(positive):
        return float("nan")
    wide = logits.astype(np.float64)
    return float(np.logaddexp(0.0, np.where(positive, -wide, wide)).mean())


def _checked(labels: Array | Tensor, scores: Array | Tensor) -> tuple[npt.NDArray[np.bool_], Array]:
    """Labels as booleans (a new array) and scores, both of one dimension."""
    marks, values = _array(labels), _array(scores)
    if marks.ndim != 1 or marks.shape != values.shape:
        raise BatchError(f"labels have shape {marks.shape}, scores {values.shape}: give one of each a sample")
    positive = marks == 1
    strange = np.flatnonzero(~positive & (marks != 0))
    if len(strange):
        raise ValueRangeError(f"label {strange[0]} is {marks[strange[0]]}: labels are 0 or 1")
    broken = np.flatnonzero(np.isnan(values))
    if len(broken):
        raise ValueRangeError(
            f"{len(broken)} of {len(values)} scores are NaN, the first is number {broken[0]}: lower the learning rate, "
            "or look for values in the data that are not finite"
        )
    return positive, values


def _array(values: Array | Tensor) -> Array:
    if isinstance(values, Tensor):
        values = values.detach().cpu()
        # NumPy has no bfloat16; widening is exact.
        return values.float().numpy() if values.dtype == torch.bfloat16 else values.numpy()
    return np.asarray(values)
