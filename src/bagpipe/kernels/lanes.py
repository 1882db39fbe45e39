"""Sixteen float32 columns at a time, for kernels that walk short rows.

Numba's own vectoriser checks for overlap and counts columns again at every row; that way pooling took about a seventh
longer at 48 columns, updates up to a third at 16 to 128, and sums over trainers up to twice as long. A `Lanes` value is
one SIMD register's worth of columns (LLVM splits it where registers are narrower); its operators are the plain IEEE
ones, column by column, so the bits are those of the scalar code (I1).
"""

from __future__ import annotations

import operator
from collections.abc import Callable
from typing import Any

from llvmlite import ir  # type: ignore[import-untyped]
from numba import types
from numba.extending import models, overload, register_model

from bagpipe.arrays import Floats
from bagpipe.kernels.intrinsics import intrinsic

LANES = 16

_FLOAT_BYTES = 4
_VECTOR = ir.VectorType(ir.FloatType(), LANES)


class Lanes(types.Type):
    """The Numba type of sixteen float32 values."""

    def __init__(self) -> None:
        super().__init__(name=f"Lanes{LANES}")


@register_model(Lanes)
class _LanesModel(models.PrimitiveModel):
    def __init__(self, manager: Any, kind: Any) -> None:
        super().__init__(manager, kind, _VECTOR)  # type: ignore[no-untyped-call]


_lanes = Lanes()


def adjacent(array: Floats) -> bool:
    """Whether the columns of an array lie next to each other, which `load` and `store` take for granted."""
    return array.size == 0 or array.shape[1] == 1 or array.strides[1] == _FLOAT_BYTES


def _pointer(context: Any, builder: Any, signature: Any, values: Any) -> Any:
    """Where array[row, column] lies; columns are adjacent, rows may be any distance apart."""
    array, row, column = values[:3]
    view = context.make_array(signature.args[0])(context, builder, array)
    stride = builder.extract_value(view.strides, 0)
    offset = builder.add(builder.mul(row, stride), builder.mul(column, ir.Constant(column.type, _FLOAT_BYTES)))
    start = builder.bitcast(view.data, ir.IntType(8).as_pointer())
    return builder.bitcast(builder.gep(start, [offset]), _VECTOR.as_pointer())


@intrinsic
def load(typing: Any, array: Any, row: Any, column: Any) -> Any:  # noqa: ARG001
    """The sixteen columns of a row that start at a column."""

    def generate(context: Any, builder: Any, signature: Any, values: Any) -> Any:
        loaded = builder.load(_pointer(context, builder, signature, values))
        loaded.align = _FLOAT_BYTES
        return loaded

    return _lanes(array, types.intp, types.intp), generate


@intrinsic
def store(typing: Any, array: Any, row: Any, column: Any, value: Any) -> Any:  # noqa: ARG001
    """Write the sixteen columns of a row that start at a column."""

    def generate(context: Any, builder: Any, signature: Any, values: Any) -> Any:
        builder.store(values[3], _pointer(context, builder, signature, values), align=_FLOAT_BYTES)
        return context.get_dummy_value()

    return types.void(array, types.intp, types.intp, _lanes), generate


@intrinsic
def spread(typing: Any, value: Any) -> Any:  # noqa: ARG001
    """The same float32 in all lanes."""

    def generate(context: Any, builder: Any, signature: Any, values: Any) -> Any:  # noqa: ARG001
        empty = ir.Constant(_VECTOR, ir.Undefined)
        first = builder.insert_element(empty, values[0], ir.Constant(ir.IntType(32), 0))
        everywhere = ir.Constant(ir.VectorType(ir.IntType(32), LANES), [0] * LANES)
        return builder.shuffle_vector(first, empty, everywhere)

    return _lanes(types.float32), generate


@intrinsic
def _lanes_root(typing: Any, value: Any) -> Any:  # noqa: ARG001
    def generate(context: Any, builder: Any, signature: Any, values: Any) -> Any:  # noqa: ARG001
        kind = ir.FunctionType(_VECTOR, [_VECTOR])
        return builder.call(builder.module.declare_intrinsic(f"llvm.sqrt.v{LANES}f32", (), kind), values)

    return _lanes(_lanes), generate


@intrinsic
def _float_root(typing: Any, value: Any) -> Any:  # noqa: ARG001
    def generate(context: Any, builder: Any, signature: Any, values: Any) -> Any:  # noqa: ARG001
        return builder.call(builder.module.declare_intrinsic("llvm.sqrt", [ir.FloatType()]), values)

    return types.float32(types.float32), generate


def root(value: Any) -> Any:
    """The correctly rounded square root of a float32 or of sixteen; kernels only."""
    raise NotImplementedError("root is for compiled code: use numpy.sqrt")


@overload(root)
def _root(value: Any) -> Any:
    def of_lanes(value: Any) -> Any:
        return _lanes_root(value)

    def of_float(value: Any) -> Any:
        return _float_root(value)

    if isinstance(value, Lanes):
        return of_lanes
    return of_float if value == types.float32 else None


def _operator(symbol: Callable[[Any, Any], Any], instruction: str) -> None:
    @intrinsic
    def apply(typing: Any, left: Any, right: Any) -> Any:  # noqa: ARG001
        def generate(context: Any, builder: Any, signature: Any, values: Any) -> Any:  # noqa: ARG001
            return getattr(builder, instruction)(*values)

        return _lanes(_lanes, _lanes), generate

    @overload(symbol)
    def choose(left: Any, right: Any) -> Any:
        def of_lanes(left: Any, right: Any) -> Any:
            return apply(left, right)

        return of_lanes if isinstance(left, Lanes) and isinstance(right, Lanes) else None


for _symbol, _instruction in (
    (operator.add, "fadd"),
    (operator.sub, "fsub"),
    (operator.mul, "fmul"),
    (operator.truediv, "fdiv"),
):
    _operator(_symbol, _instruction)
