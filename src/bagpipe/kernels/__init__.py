"""The hot loops: serial Numba functions that release the GIL, each beside a plain NumPy twin that tests compare it to.

Without fastmath Numba neither fuses nor reorders float operations, so a kernel and its twin give the same bits (I1).
Nothing here uses Numba's own threads: its default threading layer aborts when two Python threads enter it.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TypeVar, cast

from numba import njit

Function = TypeVar("Function", bound=Callable[..., object])


def kernel(function: Function) -> Function:
    """Compile a function at its first call, cached on disk, free of the GIL."""
    return cast(Function, njit(nogil=True, cache=True, fastmath=False, boundscheck=False)(function))


def inlined(function: Function) -> Function:
    """Compile a function that kernels call, inlined into each of them."""
    return cast(Function, njit(nogil=True, cache=True, fastmath=False, inline="always")(function))
