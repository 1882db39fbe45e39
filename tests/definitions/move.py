"""What the kernels of `bagpipe.kernels.move` compute, in plain Python and NumPy: tests compare them with it."""

from __future__ import annotations

from typing import Any


def define_gather(cache: Any, slots: Any, rows: Any) -> None:
    """The twin of `gather`."""
    rows[:] = cache[slots]


def define_scatter(cache: Any, slots: Any, rows: Any) -> None:
    """The twin of `scatter`."""
    cache[slots, : rows.shape[1]] = rows
