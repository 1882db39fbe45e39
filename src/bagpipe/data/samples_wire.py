"""Samples in NumPy as the record and the raw buffers of a batch: what a data processor sends, without PyTorch.

Floats: dense, labels, then the weights of each feature. Integers, feature by feature: offsets, ids, in 32 bits where
they fit. `bagpipe.data.batch_wire` is the way back.
"""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray

from bagpipe.data.samples import Column, Samples
from bagpipe.wire.arrays import Packing
from bagpipe.wire.plan_messages import BatchHead, FeatureHead


def pack_samples(samples: Samples, number: int, packing: Packing) -> BatchHead:
    """Add the numbers of samples that are the batch of this number; what they are."""
    packing.add(np.ascontiguousarray(samples.dense, np.float32))
    packing.add(np.ascontiguousarray(samples.labels, np.float32))
    features = [pack_column(name, column, packing) for name, column in samples.columns.items()]
    return BatchHead(number, len(samples), samples.dense.shape[1], features)


def pack_column(name: str, column: Column, packing: Packing, with_ids: bool = True) -> FeatureHead:
    """Add the numbers of a feature, with or without its ids; what they are."""
    bits = 0
    if column.offsets is not None:
        packing.add(column.offsets[:-1].astype(np.int32))
    if with_ids:
        bits = 32 if _fits(column.values) else 64
        packing.add(np.ascontiguousarray(column.values, np.int32 if bits == 32 else np.int64))
    if column.weights is not None:
        packing.add(np.ascontiguousarray(column.weights, np.float32))
    width = None if column.offsets is not None else column.values.shape[1]
    return FeatureHead(name, width, column.values.size, bits, column.weights is not None)  # type: ignore[arg-type]


def _fits(values: NDArray[Any]) -> bool:
    limits = np.iinfo(np.int32)
    return not values.size or bool(limits.min <= values.min() and values.max() <= limits.max)
