"""Two small things for loops over rows and their users: the lowest bit of a mask, and indices that are not negative.

With `lowest` and `mask & (mask - 1)`, which clears that bit, a loop visits a row's few users and not all trainers.
Numba counts negative indices from the end, and looks at each; to say that there are none saves half of a short loop.
"""

from __future__ import annotations

from typing import Any

import numpy as np
from llvmlite import ir  # type: ignore[import-untyped]
from numba import types

from bagpipe.kernels import inlined
from bagpipe.kernels.prefetch import intrinsic


@inlined
def index(number: Any) -> Any:
    """A number that is not negative, as an index."""
    return np.uint64(number)


@intrinsic  # type: ignore[untyped-decorator, unused-ignore]
def lowest(_typing: Any, _mask: Any) -> Any:
    """The number of the lowest bit of a mask (uint64) that is not 0; inside kernels only."""

    def emit(_context: Any, builder: Any, _signature: Any, arguments: Any) -> Any:
        return builder.cttz(arguments[0], ir.Constant(ir.IntType(1), 1))

    return types.int64(types.uint64), emit


@intrinsic  # type: ignore[untyped-decorator, unused-ignore]
def int64_at(_typing: Any, _address: Any, _number: Any) -> Any:
    """The 64-bit number that stands so many behind an address in memory; inside kernels only.

    Arrays of a batch come in any number, and a tuple of them would be compiled anew for each.
    """

    def emit(_context: Any, builder: Any, _signature: Any, arguments: Any) -> Any:
        pointer = builder.inttoptr(arguments[0], ir.IntType(64).as_pointer())
        return builder.load(builder.gep(pointer, [arguments[1]]), align=1)  # of any array, aligned or not

    return types.int64(types.uint64, types.int64), emit
