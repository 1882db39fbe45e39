"""One instruction that Numba lacks: ask the processor for a cache line before it is needed.

Changes no value, so kernels that use it keep their plain twins. The address is not checked: the index must be valid.
"""

from __future__ import annotations

from typing import Any

from llvmlite import ir  # type: ignore[import-untyped]
from numba import types
from numba.core import cgutils as numba_cgutils
from numba.extending import intrinsic as numba_intrinsic

FAR = 24
"""How many elements ahead to ask: long enough to hide memory, short enough that the line is still there."""

intrinsic: Any = numba_intrinsic  # its stub shows kernels the compiler's signature, not the one they call
cgutils: Any = numba_cgutils
_FOR_WRITING, _KEEP_IN_ALL_CACHES, _DATA = 1, 3, 1


@intrinsic  # type: ignore[untyped-decorator, unused-ignore]
def prefetch(_typing: Any, array: Any, index: Any) -> Any:
    """Bring the cache line of array[index] near; inside kernels only."""

    def emit(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        kind = signature.args[0]
        view = context.make_array(kind)(context, builder, arguments[0])
        where = context.cast(builder, arguments[1], signature.args[1], types.intp)
        address = cgutils.get_item_pointer(context, builder, kind, view, [where], wraparound=False)
        byte_pointer, word = ir.IntType(8).as_pointer(), ir.IntType(32)
        shape = ir.FunctionType(ir.VoidType(), [byte_pointer, word, word, word])
        function = cgutils.get_or_insert_function(builder.module, shape, "llvm.prefetch.p0i8")
        hints = [word(_FOR_WRITING), word(_KEEP_IN_ALL_CACHES), word(_DATA)]
        builder.call(function, [builder.bitcast(address, byte_pointer), *hints])
        return context.get_dummy_value()

    return types.void(array, index), emit
