"""How often each rank of a table is drawn: laws of popularity, and the small tables that draw from them in O(1).

Ranks are grouped into buckets: the first 256 alone, the rest in runs that grow by 1/64. The masses of the buckets are
exact to 1e-6; inside a run of the tail all ranks are alike. A table of a billion rows needs about 1,200 buckets.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache
from typing import Protocol

import numpy as np
from numpy.typing import NDArray

from bagpipe.errors import ConfigError

Floats = NDArray[np.float64]
Ints = NDArray[np.int64]
UInts = NDArray[np.uint64]

HEAD = 256
GROWTH = 64


class Popularity(Protocol):
    """A law of popularity; samplers are cached by it."""

    def __hash__(self) -> int: ...

    def masses(self, edges: Ints) -> Floats:
        """The probability of each bucket [edges[i], edges[i + 1]) of the ranks [0, edges[-1])."""
        ...


@dataclass(frozen=True)
class PowerLaw:
    """Rank r, counted from 1, has weight (r + shift)^-exponent; a share of the draws is uniform instead."""

    exponent: float
    shift: float = 0.0
    uniform: float = 0.0

    def __post_init__(self) -> None:
        if not (0 <= self.exponent <= 20 and self.shift >= 0 and 0 <= self.uniform <= 1):
            raise ConfigError(
                f"{self}: give an exponent in [0, 20], a shift of at least 0 and a uniform share in [0, 1]"
            )

    def masses(self, edges: Ints) -> Floats:
        """The probability of each bucket; tail sums by the midpoint rule."""
        centres = edges[:-1] + 1 + self.shift
        # Relative to the first rank, so that a steep law neither overflows nor underflows.
        scale = 1 + self.shift
        bounds = (edges + 0.5 + self.shift) / scale
        if self.exponent == 1:
            integral = np.diff(np.log(bounds)) * scale
        else:
            integral = np.diff(bounds ** (1 - self.exponent)) / (1 - self.exponent) * scale
        widths = np.diff(edges)
        weights = np.where(widths == 1, (centres / scale) ** -self.exponent, integral)
        masses: Floats = (1 - self.uniform) * weights / weights.sum() + self.uniform * widths / edges[-1]
        return masses


@dataclass(frozen=True)
class TopShare:
    """The top 1 % of ranks take a given share of the draws, falling off exponentially; the others are drawn alike.

    The skew experiment of Bagpipe (section 5.3). The exponential meets the flat rest at the border, which fixes its
    rate; a share of 0.01 is the uniform distribution.
    """

    share: float
    fraction: float = 0.01

    def __post_init__(self) -> None:
        if not self.fraction <= self.share <= 0.999:
            raise ConfigError(f"the top {self.fraction:.0%} of rows take a share of {self.share}: give 0.01 to 0.999")

    def masses(self, edges: Ints) -> Floats:
        """The probability of each bucket."""
        rows = float(edges[-1])
        top = self.fraction * rows
        flat = (1 - self.share) / (rows - top)
        rate = _exponential_rate(self.share / (flat * top))
        inside = np.minimum(edges, top)
        if rate < 1e-9:
            cumulative = flat * edges
        else:
            # The density at x is flat * exp(rate * (1 - x / top)) for x < top.
            cumulative = flat * top / rate * (np.exp(rate) - np.exp(rate * (1 - inside / top))) + flat * (
                edges - inside
            )
        return np.diff(cumulative)


def _exponential_rate(mean: float) -> float:
    """The y for which (e^y - 1) / y is `mean`, by bisection."""
    low, high = 0.0, 50.0
    for _ in range(100):
        middle = (low + high) / 2
        low, high = (middle, high) if np.expm1(middle) / middle < mean else (low, middle)
    return low


@dataclass(frozen=True, eq=False)
class Sampler:
    """Draws a rank from one random word: Walker's alias method over buckets, then a place inside the bucket."""

    keep: UInts
    """Bucket b stays b when the lower half of the word is below keep[b], else it becomes other[b]."""
    other: Ints
    first: UInts
    """Bucket b covers the ranks first[b] to first[b + 1]."""
    masses: Floats

    @property
    def widths(self) -> Floats:
        """Number of ranks of each bucket."""
        return np.diff(self.first.astype(np.float64))


@lru_cache(maxsize=1024)
def sampler(popularity: Popularity, rows: int) -> Sampler:
    """The sampler of a law over this number of ranks."""
    edges = _edges(rows)
    masses = popularity.masses(edges)
    keep, other = _alias(masses)
    return Sampler(keep, other, edges.astype(np.uint64), masses)


def _edges(rows: int) -> Ints:
    edges = list(range(min(rows, HEAD) + 1))
    while edges[-1] < rows:
        edges.append(min(rows, edges[-1] + max(1, edges[-1] // GROWTH)))
    return np.array(edges, dtype=np.int64)


def _alias(masses: Floats) -> tuple[UInts, Ints]:
    scaled = (masses / masses.sum() * len(masses)).tolist()
    keep, other = [2**32] * len(scaled), list(range(len(scaled)))
    short = [bucket for bucket, mass in enumerate(scaled) if mass < 1]
    long = [bucket for bucket, mass in enumerate(scaled) if mass >= 1]
    while short and long:
        small, large = short.pop(), long[-1]
        keep[small], other[small] = round(scaled[small] * 2**32), large
        scaled[large] -= 1 - scaled[small]
        if scaled[large] < 1:
            short.append(long.pop())
    return np.array(keep, dtype=np.uint64), np.array(other, dtype=np.int64)
