"""Sums of squares that do not depend on the order or the grouping of their terms: added exactly, rounded once.

A float64 is a whole number times a power of two; whole numbers of one power are added as integers.
"""

from __future__ import annotations

from collections.abc import Iterable
from fractions import Fraction

import numpy as np
from numpy.typing import NDArray

_DIGITS = 53
_HALF = 27
_LEAST = -1074
"""Powers of two from the least that a float64 can have."""
_POWERS = 2100


class Bins:
    """Whole numbers for each power of two, upper and lower halves apart, so that many can be added."""

    def __init__(self) -> None:
        self._sums = np.zeros((2, _POWERS), np.int64)
        self._odd = 0.0
        """What is not finite: inf, or NaN."""

    def add_squares(self, values: NDArray[np.float32]) -> None:
        """Add the square of each number; in float64 it is exact."""
        with np.errstate(invalid="ignore", over="ignore"):
            squares = np.square(values.reshape(-1), dtype=np.float64)
            finite = np.isfinite(squares)
            self._odd += float(squares[~finite].sum())
        fractions, powers = np.frexp(squares[finite])
        whole = np.ldexp(fractions, _DIGITS).astype(np.int64)
        at = powers - _LEAST
        for half, part in enumerate((whole >> _HALF, whole & ((1 << _HALF) - 1))):
            # Parts have 27 bits and a float64 carries 53: a block of 2**26 of them is added without rounding.
            for start in range(0, len(part), 1 << 26):
                block = slice(start, start + (1 << 26))
                self._sums[half] += np.bincount(at[block], part[block], _POWERS).astype(np.int64)

    def packed(self) -> NDArray[np.float32]:
        """The bits of it all, as numbers that can be exchanged."""
        return np.concatenate([self._sums.reshape(-1).view(np.float32), np.array([self._odd]).view(np.float32)])

    @staticmethod
    def total(parts: Iterable[NDArray[np.float32]]) -> float:
        """The sum of what several have packed, rounded once."""
        sums, odd = np.zeros((2, _POWERS), object), 0.0
        for part in parts:
            sums += part[:-2].copy().view(np.int64).reshape(2, _POWERS).astype(object)
            odd += float(part[-2:].copy().view(np.float64)[0])
        if not np.isfinite(odd):
            return odd
        total = Fraction(0)
        for at in np.flatnonzero(sums.any(0)).tolist():
            whole = (int(sums[0, at]) << _HALF) + int(sums[1, at])
            total += whole * Fraction(2) ** (at + _LEAST - _DIGITS)
        return float(total)
