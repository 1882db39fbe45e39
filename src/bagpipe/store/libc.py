"""The functions of C that row-copying kernels call, without the GIL and without a Python object a row.

Addresses travel as integers: they come from `array.ctypes.data`, and whoever passes one keeps its array alive.
"""

from __future__ import annotations

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
NOWAIT = os.RWF_NOWAIT

# From <fcntl.h>; Python does not name them.
START_WRITE = 2
WRITE_AND_WAIT = 1 | 2 | 4

_address, _size, _offset, _int, _done = types.uintp, types.uintp, types.int64, types.int32, types.intp


def _c_function(name: str, signature: Signature) -> Callable[..., int]:
    return cast(Callable[..., int], types.ExternalFunction(name, signature))


memcpy = _c_function("memcpy", _address(_address, _address, _size))
pread = _c_function("pread", _done(_int, _address, _size, _offset))
preadv2 = _c_function("preadv2", _done(_int, _address, _int, _offset, _int))
pwrite = _c_function("pwrite", _done(_int, _address, _size, _offset))
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
