"""The hot loops: serial Numba functions that release the GIL; tests compare each with its plain definition in NumPy.

The definition is in tests/definitions, or beside a kernel where the reference trainer is built on it.
Without fastmath Numba neither fuses nor reorders float operations, so both give the same bits (I1).
Nothing here uses Numba's own threads: its default threading layer aborts when two Python threads enter it.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable
from typing import Any, TypeVar, cast

from numba import njit
from numba.core import event

Function = TypeVar("Function", bound=Callable[..., object])

_OPTIONS: dict[str, Any] = {"nogil": True, "fastmath": False, "error_model": "numpy"}
"""A division by zero is inf or NaN, as in NumPy."""
SILENT_SECONDS = 1.0
"""Compiling that takes longer than this is explained, once a process."""


KEPT = (
    "compiling kernels, which takes some seconds. They are kept on disk: later runs compile only what they are the "
    "first to need, and everything again after an upgrade of bagpipe or numba, or on another kind of processor"
)
NOT_KEPT = (
    "compiling kernels, which takes some seconds at every start: no directory to keep them in can be written. Set "
    "NUMBA_CACHE_DIR to one that can"
)


def kernel(function: Function) -> Function:
    """Compile a function at its first call, kept on disk where that is possible, free of the GIL."""
    return _compiled(function, boundscheck=False)


def inlined(function: Function) -> Function:
    """Compile a function that kernels call, inlined into each of them."""
    return _compiled(function, inline="always")


def _compiled(function: Function, **options: Any) -> Function:
    try:
        return cast(Function, njit(**_OPTIONS, cache=True, **options)(function))
    except RuntimeError:  # as where Numba finds no directory that it can write to; any other comes again
        return cast(Function, njit(**_OPTIONS, **options)(function))


def kept_in(compiled: Any) -> str | None:
    """Where the code of a kernel is kept; None: nowhere, each process compiles it again."""
    return cast("str | None", compiled.stats.cache_path)


class Announcer(event.Listener):  # type: ignore[misc, unused-ignore]
    """Tells people why a run starts slowly; a kernel that is loaded from disk raises no event."""

    def __init__(self) -> None:
        self._depth, self._seconds, self._start, self._said = 0, 0.0, 0.0, False

    def on_start(self, event: Any) -> None:
        """A function begins to compile, perhaps for another one; Numba holds its lock meanwhile."""
        if not event.data["dispatcher"].py_func.__module__.startswith("bagpipe."):
            return
        if self._seconds > SILENT_SECONDS and not self._said:
            self._said = True
            logging.getLogger("bagpipe").warning(KEPT if kept_in(event.data["dispatcher"]) else NOT_KEPT)
        if self._depth == 0:
            self._start = time.perf_counter()
        self._depth += 1

    def on_end(self, event: Any) -> None:
        """It is compiled."""
        if event.data["dispatcher"].py_func.__module__.startswith("bagpipe."):
            self._depth -= 1
            if self._depth == 0:
                self._seconds += time.perf_counter() - self._start


event.register("numba:compile", Announcer())  # type: ignore[no-untyped-call, unused-ignore]
