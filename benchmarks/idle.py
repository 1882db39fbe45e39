"""When a turn of a system is over: nothing is computed in the background any more, and nothing is on its way."""

from __future__ import annotations

import time
from collections.abc import Callable

POLL_S = 0.004
IDLE_SHARE = 0.2
"""Background threads are at rest when the process used less than this share of one core between two polls."""
SETTLE_S = 0.1
"""A turn is over when nothing has moved for so long; the time is that of the last movement."""
HEARTBEAT_BYTES = 4_000
"""Between two polls of an idle link."""


def wait_until_idle(counted: Callable[[], tuple[int, int]]) -> float:
    """Wait until neither background threads nor the link have anything to do; the time when they came to rest.

    `counted` are the bytes that were sent and received so far.
    """
    busy_until, used, moved = time.perf_counter(), time.process_time(), sum(counted())
    while time.perf_counter() - busy_until < SETTLE_S:
        time.sleep(POLL_S)
        now, used_now, moved_now = time.perf_counter(), time.process_time(), sum(counted())
        if used_now - used > IDLE_SHARE * POLL_S or moved_now - moved > HEARTBEAT_BYTES:
            busy_until = now
        used, moved = used_now, moved_now
    return busy_until
