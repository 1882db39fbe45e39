"""One instruction that Numba lacks: which bit of a mask of trainers is the lowest that is set.

With `mask & (mask - 1)`, which clears that bit, a loop visits a row's few users and not all trainers.
"""

from __future__ import annotations

from typing import Any

from llvmlite import ir  # type: ignore[import-untyped]
from numba import types

from bagpipe.kernels.prefetch import intrinsic


@intrinsic  # type: ignore[untyped-decorator, unused-ignore]
def lowest(_typing: Any, _mask: Any) -> Any:
    """The number of the lowest bit of a mask (uint64) that is not 0; inside kernels only."""

    def emit(_context: Any, builder: Any, _signature: Any, arguments: Any) -> Any:
        return builder.cttz(arguments[0], ir.Constant(ir.IntType(1), 1))

    return types.int64(types.uint64), emit
