"""Names of array types, for signatures."""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray

Flags = NDArray[np.bool_]
UInt8s = NDArray[np.uint8]
UInt32s = NDArray[np.uint32]
UInt64s = NDArray[np.uint64]
Int32s = NDArray[np.int32]
Int64s = NDArray[np.int64]
Floats = NDArray[np.float32]
Masks = NDArray[Any]
"""Unsigned, one bit a trainer."""
Ranks = NDArray[np.int8]
NextUses = NDArray[np.uint16]
