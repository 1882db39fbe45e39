"""Sums over trainers: contributions are added in rank order from +0.0, then divided. Cost: one pass over them."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
from torch import Tensor

from bagpipe.arrays import Floats
from bagpipe.kernels import kernel
from bagpipe.kernels.lanes import LANES, load, spread, store


def sum_parts(parts: Tensor, sums: Tensor, total: float | None = None) -> None:
    """sums[i] = parts[0, i] + parts[1, i] + ..., each sum float32; over `total`, a float32, if there is one."""
    if parts.device.type == "cpu":
        if sums.numel():
            _sum_parts(
                parts.numpy(), sums.numpy()[None], np.float32(1.0 if total is None else total), total is not None
            )
        return
    sums.zero_()
    for part in parts:
        sums.add_(part)
    if total is not None:
        # As in reference.py: on other devices a division by a number need not be the CPU's, but is the same everywhere.
        sums.copy_(torch.div(sums, float(total)))


@kernel
def _sum_parts(parts: Floats, sums: Floats, total: Any, divided: bool) -> None:
    length = parts.shape[1]
    whole, total_lanes = length - length % LANES, spread(total)
    for i in range(0, whole, LANES):
        lanes = spread(np.float32(0.0))
        for rank in range(parts.shape[0]):
            lanes = lanes + load(parts, np.intp(rank), i)
        store(sums, np.intp(0), i, lanes / total_lanes if divided else lanes)
    for i in range(whole, length):
        one = np.float32(0.0)
        for rank in range(parts.shape[0]):
            one += parts[rank, i]
        sums[0, i] = one / total if divided else one
