"""A batch as a record and raw buffers, and back: bit for bit.

What lies where in the buffers is written in `bagpipe.data.samples_wire`.
"""

from __future__ import annotations

from collections.abc import Collection

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from bagpipe.adapt import nothing
from bagpipe.data.samples import Column
from bagpipe.data.samples_wire import pack_column
from bagpipe.errors import BatchError, WireError
from bagpipe.types import Batch, Ids
from bagpipe.wire.arrays import Packing, Unpacking
from bagpipe.wire.plan_messages import BatchHead, FeatureHead


def pack_batch(batch: Batch, packing: Packing, without: Collection[str] = ()) -> BatchHead:
    """Add the numbers of a batch, those of the ids of some features left out; what they are."""
    for name, tensor in (("dense", batch.dense), ("labels", batch.labels)):
        packing.add(_floats(batch, name, tensor))
    features = [
        pack_column(name, _column(batch, name, ids), packing, name not in without) for name, ids in batch.sparse.items()
    ]
    return BatchHead(batch.number, len(batch), int(batch.dense.shape[1]), features)


def unpack_batch(head: BatchHead, unpacking: Unpacking, without: Collection[str] = ()) -> Batch:
    """The batch of this head; ids that were left out have a length and a shape, and take no memory."""
    dense = _own_tensor(unpacking.floats(head.num_samples * head.num_dense, "dense"))
    labels = _own_tensor(unpacking.floats(head.num_samples, "labels"))
    sparse: dict[str, Ids] = {}
    for feature in head.features:
        if feature.name in sparse:
            raise WireError(f"batch {head.number} has ids of feature {feature.name!r} twice")
        if (feature.bits == 0) != (feature.name in without):
            raise WireError(f"batch {head.number} has ids of {feature.bits} bits of feature {feature.name!r}")
        try:
            sparse[feature.name] = _unpack_feature(head, feature, unpacking)
        except BatchError as error:
            raise WireError(f"batch {head.number}, feature {feature.name!r}: {error}") from error
    return Batch(dense.reshape(head.num_samples, head.num_dense), sparse, labels, number=head.number)


def _column(batch: Batch, name: str, ids: Ids) -> Column:
    offsets = None
    if ids.offsets is not None:
        offsets = np.append(ids.offsets.detach().cpu().numpy(), len(ids.values)).astype(np.int64)
    weights = None if ids.weights is None else _floats(batch, f"the weights of feature {name!r}", ids.weights)
    return Column(ids.values.detach().to("cpu", torch.int64).numpy(), offsets, weights)


def _unpack_feature(head: BatchHead, feature: FeatureHead, unpacking: Unpacking) -> Ids:
    if feature.width is not None and feature.num_ids != head.num_samples * feature.width:
        raise WireError(
            f"batch {head.number} has {feature.num_ids} ids of feature {feature.name!r}: {head.num_samples} samples "
            f"of {feature.width} have others"
        )
    offsets: Tensor | None = None
    if feature.width is None:
        offsets = torch.from_numpy(unpacking.int32s(head.num_samples, "offsets").astype(np.int64))
    values: Tensor
    if feature.bits == 0:
        values = nothing(feature.num_ids)
    elif feature.bits == 32:
        values = torch.from_numpy(unpacking.int32s(feature.num_ids, "ids").astype(np.int64))
    else:
        values = torch.from_numpy(unpacking.int64s(feature.num_ids, "ids"))
    shape = (feature.num_ids,) if feature.width is None else (head.num_samples, feature.width)
    weights: Tensor | None = None
    if feature.weighted:
        weights = torch.from_numpy(unpacking.floats(feature.num_ids, "weights")).reshape(shape)
    return Ids(values.reshape(shape), offsets, weights)


def _floats(batch: Batch, name: str, tensor: Tensor) -> NDArray[np.float32]:
    if tensor.dtype != torch.float32:
        raise BatchError(f"batch {batch.number}: {name} is {tensor.dtype}, and travels as float32 only: convert it")
    found: NDArray[np.float32] = np.ascontiguousarray(tensor.detach().cpu().numpy())
    return found


def _own_tensor(values: NDArray[np.float32]) -> Tensor:
    """A copy in memory of torch's own: the alignment of what enters a matrix product can change bits (I1)."""
    tensor = torch.empty(len(values), dtype=torch.float32)
    np.copyto(tensor.numpy(), values)
    return tensor
