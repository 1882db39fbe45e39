"""What kernels need and Numba cannot say: cache lines asked for early, bits counted, memory read at any address.

Nothing here is checked: indices, addresses and the bytes behind them must be valid. A prefetch changes no value.
"""

from __future__ import annotations

from typing import Any

import numpy as np
from llvmlite import ir  # type: ignore[import-untyped]
from numba import types
from numba.core import cgutils as numba_cgutils
from numba.extending import intrinsic as numba_intrinsic

from bagpipe.kernels import inlined

intrinsic: Any = numba_intrinsic  # its stub shows kernels the compiler's signature, not the one they call
cgutils: Any = numba_cgutils

FAR = 24
"""How many elements ahead to ask: long enough to hide memory, short enough that the line is still there."""
WORD = 8
"""Bytes of `load_word` and `store_word`."""

_BYTE, _NUMBER, _LONG = ir.IntType(8), ir.IntType(32), ir.IntType(64)


def _ask(context: Any, builder: Any, address: Any) -> Any:
    kind = ir.FunctionType(ir.VoidType(), [_BYTE.as_pointer(), *[_NUMBER] * 3])
    function = builder.module.declare_intrinsic("llvm.prefetch", [_BYTE.as_pointer()], kind)
    read, keep_in_all_caches, data = _NUMBER(0), _NUMBER(3), _NUMBER(1)
    builder.call(function, [address, read, keep_in_all_caches, data])
    return context.get_dummy_value()


@intrinsic
def prefetch(_typing: Any, array: Any, *index: Any) -> Any:
    """Ask for the cache line of array[index]: rows are scattered, so the processor can't guess the next one."""

    def emit(context: Any, builder: Any, signature: Any, values: Any) -> Any:
        view = context.make_array(signature.args[0])(context, builder, values[0])
        given = zip(cgutils.unpack_tuple(builder, values[1]), index, strict=True)
        indices = [context.cast(builder, value, kind, types.intp) for value, kind in given]
        place = cgutils.get_item_pointer(context, builder, signature.args[0], view, indices, wraparound=False)
        return _ask(context, builder, builder.bitcast(place, _BYTE.as_pointer()))

    return types.void(array, types.StarArgTuple(index)), emit  # type: ignore[no-untyped-call, unused-ignore]


@intrinsic
def prefetch_address(_typing: Any, _address: Any) -> Any:
    """Ask for the cache line at an address."""

    def emit(context: Any, builder: Any, _signature: Any, values: Any) -> Any:
        return _ask(context, builder, builder.inttoptr(values[0], _BYTE.as_pointer()))

    return types.void(types.intp), emit


@inlined
def index(number: Any) -> Any:
    """A number that is not negative, as an index.

    Numba counts negative indices from the end, and looks at each; to say that there are none saves half a short loop.
    """
    return np.uint64(number)


@intrinsic
def lowest(_typing: Any, _mask: Any) -> Any:
    """The number of the lowest bit of a mask (uint64) that is not 0.

    With `mask & (mask - 1)`, which clears that bit, a loop visits a row's few users and not all trainers.
    """

    def emit(_context: Any, builder: Any, _signature: Any, values: Any) -> Any:
        return builder.cttz(values[0], ir.Constant(ir.IntType(1), 1))

    return types.int64(types.uint64), emit


@intrinsic
def num_bits(_typing: Any, _mask: Any) -> Any:
    """How many bits of a mask (uint64) are set."""

    def emit(_context: Any, builder: Any, _signature: Any, values: Any) -> Any:
        return builder.ctpop(values[0])

    return types.uint64(types.uint64), emit


@intrinsic
def int64_at(_typing: Any, _address: Any, _number: Any) -> Any:
    """The 64-bit number that stands so many behind an address in memory, aligned or not.

    Arrays of a batch come in any number, and a tuple of them would be compiled anew for each.
    """

    def emit(_context: Any, builder: Any, _signature: Any, values: Any) -> Any:
        pointer = builder.inttoptr(values[0], _LONG.as_pointer())
        return builder.load(builder.gep(pointer, [values[1]]), align=1)

    return types.int64(types.uint64, types.int64), emit


def _word(context: Any, builder: Any, signature: Any, values: Any) -> Any:
    view = context.make_array(signature.args[0])(context, builder, values[0])
    place = builder.gep(builder.bitcast(view.data, _BYTE.as_pointer()), [values[1]])
    return builder.bitcast(place, _LONG.as_pointer())


@intrinsic
def load_word(_typing: Any, array: Any, _position: Any) -> Any:
    """The eight bytes from array[position] on, in the machine's order."""

    def emit(context: Any, builder: Any, signature: Any, values: Any) -> Any:
        return builder.load(_word(context, builder, signature, values), align=1)

    return types.uint64(array, types.intp), emit


@intrinsic
def store_word(_typing: Any, array: Any, _position: Any, _value: Any) -> Any:
    """Write eight bytes from array[position] on."""

    def emit(context: Any, builder: Any, signature: Any, values: Any) -> Any:
        builder.store(values[2], _word(context, builder, signature, values), align=1)
        return context.get_dummy_value()

    return types.void(array, types.intp, types.uint64), emit
