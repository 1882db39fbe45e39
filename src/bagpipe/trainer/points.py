"""How far training is, as the stages that move rows see it."""

from __future__ import annotations

from dataclasses import dataclass

from bagpipe.store.base import NO_ITERATION


@dataclass(slots=True)
class Points:
    """All iterations up to each number have passed that point."""

    updated: int = -1
    copied_out: int = -1
    acknowledged: int = -1
    closing: bool = False
    """Nothing is fetched any more."""
    before: int = 0
    """Iterations of earlier loops over the same rows. All trainers have passed them, so without counting on from there
    a read that must follow another trainer's write would not wait for it (I3)."""

    def in_store(self, iteration: int) -> int:
        """The number of an iteration of this loop as the store knows it."""
        return iteration if iteration == NO_ITERATION else self.before + iteration
