"""The functions of C that row-copying kernels call, without the GIL and without a Python object a row.

Addresses travel as integers: they come from `array.ctypes.data`, and whoever passes one keeps its array alive.
"""

from __future__ import annotations

import mmap
import os
from collections.abc import Callable
from typing import cast

import numpy as np
from numba import types
from numba.core.typing.templates import Signature

from bagpipe.kernels import inlined
from bagpipe.kernels.intrinsics import prefetch_address

WILLNEED = os.POSIX_FADV_WILLNEED
DONTNEED = os.POSIX_FADV_DONTNEED
FORGET_MAPPED = mmap.MADV_DONTNEED

# From <fcntl.h> and <sys/mman.h>; Python does not name them.
WAIT_BEFORE = 1
START_WRITE = 2
WRITE_AND_WAIT = 1 | 2 | 4
POPULATE_READ = 22
POPULATE_WRITE = 23

_address, _size, _offset, _int = types.uintp, types.uintp, types.int64, types.int32


def _c_function(name: str, signature: Signature) -> Callable[..., int]:
    return cast(Callable[..., int], types.ExternalFunction(name, signature))


memcpy = _c_function("memcpy", _address(_address, _address, _size))
madvise = _c_function("madvise", _int(_address, _size, _int))
posix_fadvise = _c_function("posix_fadvise", _int(_int, _offset, _offset, _int))
sync_file_range = _c_function("sync_file_range", _int(_int, _offset, _offset, types.uint32))
_errno_location = _c_function("__errno_location", _address())


@inlined
def prefetch_bytes(address: int, size: int) -> None:
    """Ask for the cache lines of a row that is copied soon; rows are scattered, so the processor can't guess them."""
    for offset in range(0, size, 64):
        prefetch_address(address + offset)


@inlined
def errno_now() -> int:
    """The error of the call that failed just before, on this thread."""
    value = np.empty(1, np.int32)
    memcpy(value.ctypes.data, _errno_location(), 4)
    return np.int64(value[0])  # type: ignore[return-value]
