"""How far training is, as the stages that move rows see it."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(slots=True)
class Points:
    """All iterations up to each number have passed that point."""

    updated: int = -1
    copied_out: int = -1
    acknowledged: int = -1
    closing: bool = False
    """Nothing is fetched any more."""
