"""What the kernels of `bagpipe.kernels.rank_sum` compute, in plain Python and NumPy: tests compare them with it."""

from __future__ import annotations

from typing import Any

import numpy as np


def define_sum_parts(parts: Any, sums: Any, total: float | None = None) -> None:
    """The twin of `sum_parts`."""
    sums[:] = 0.0
    with np.errstate(all="ignore"):
        for part in parts:
            sums += part
        if total is not None:
            sums /= np.float32(total)
