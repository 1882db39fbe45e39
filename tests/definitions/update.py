"""What the kernels of `bagpipe.kernels.update` compute, in plain Python and NumPy: tests compare them with it."""

from __future__ import annotations

import numpy as np

from bagpipe.arrays import Floats


def define_first_not_finite(grads: Floats) -> int:
    """The definition of `first_not_finite`."""
    bad = np.flatnonzero(~np.isfinite(grads).all(axis=1))
    return int(bad[0]) if bad.size else -1
