"""Eight bytes at once from and to any place of a byte array, which Numba has no way to say.

Nothing is checked: all eight bytes must lie in the array. Their order in the word is the machine's.
"""

from __future__ import annotations

from typing import Any

from llvmlite import ir  # type: ignore[import-untyped]
from numba import types
from numba.extending import intrinsic as numba_intrinsic

intrinsic: Any = numba_intrinsic  # its stub shows kernels the compiler's signature, not the one they call
WORD = 8


def _pointer(context: Any, builder: Any, signature: Any, values: Any) -> Any:
    view = context.make_array(signature.args[0])(context, builder, values[0])
    place = builder.gep(builder.bitcast(view.data, ir.IntType(8).as_pointer()), [values[1]])
    return builder.bitcast(place, ir.IntType(64).as_pointer())


@intrinsic
def load_word(typing: Any, array: Any, position: Any) -> Any:  # noqa: ARG001
    """The eight bytes from array[position] on."""

    def generate(context: Any, builder: Any, signature: Any, values: Any) -> Any:
        return builder.load(_pointer(context, builder, signature, values), align=1)

    return types.uint64(array, types.intp), generate


@intrinsic
def store_word(typing: Any, array: Any, position: Any, word: Any) -> Any:  # noqa: ARG001
    """Write eight bytes from array[position] on."""

    def generate(context: Any, builder: Any, signature: Any, values: Any) -> Any:
        builder.store(values[2], _pointer(context, builder, signature, values), align=1)
        return context.get_dummy_value()

    return types.void(array, types.intp, types.uint64), generate
