"""No cache: every row is fetched before its iteration and written back after it, with nothing overlapped.

The baseline of the paper's section 2: fetch and write-back of each iteration are on the critical path.
"""

from __future__ import annotations

from bagpipe.policies.base import Policy


class NoCachePolicy(Policy):
    """Keeps nothing, and each fetch waits for the iteration before (horizon 0)."""

    name = "nocache"
    horizon = 0
