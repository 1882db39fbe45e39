"""How the C library hands out large blocks: each is mapped afresh, and paging it in can cost more than using it.

A training iteration allocates and frees the same large tensors again and again. At batch 16,384 the pages of two of
them took a quarter of an iteration on the CPU; kept on the heap they are there already. The values of nothing change.
"""

from __future__ import annotations

import ctypes

_TRIM_THRESHOLD = -1
_MMAP_MAX = -4
_KEPT_BYTES = 2**31 - 1  # what a C int can say


def keep_freed_memory() -> bool:
    """Let this process keep the memory that it frees, for its next iteration; False where the C library can't.

    For processes that do nothing but train: memory returns to the system only when the process ends.
    """
    try:
        mallopt = ctypes.CDLL(None).mallopt
    except (AttributeError, OSError):
        return False
    return bool(mallopt(_TRIM_THRESHOLD, _KEPT_BYTES)) and bool(mallopt(_MMAP_MAX, 0))
