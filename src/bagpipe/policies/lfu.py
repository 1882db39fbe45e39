"""Least frequently used: rows stay until their slot is needed, the one that the fewest batches have used leaves first.

What a cache does that counts: uses since a row came, and among equals the one used longest ago leaves first.
"""

from __future__ import annotations

from bagpipe.policies.base import Int64s, RankingPolicy, SlotFacts


class LfuPolicy(RankingPolicy):
    """Keeps everything; victims are the least frequently used rows outside the batch."""

    name = "lfu"

    def keys(self, iteration: int, facts: SlotFacts) -> Int64s:  # noqa: ARG002 - the same at any time
        """Uses, then the last of them."""
        return facts.keys(facts.uses)
