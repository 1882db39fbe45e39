"""Copies of rows between a cache and a dense block. Cost: one read and one write of each row."""

from __future__ import annotations

from typing import Any

from bagpipe.kernels import kernel


@kernel
def gather(cache: Any, slots: Any, rows: Any) -> None:
    """rows[i] = cache[slots[i]]; where `rows` has fewer columns, the first ones."""
    for i in range(slots.size):
        slot = slots[i]
        for column in range(rows.shape[1]):
            rows[i, column] = cache[slot, column]


@kernel
def scatter(cache: Any, slots: Any, rows: Any) -> None:
    """cache[slots[i]] = rows[i]; where `rows` has fewer columns, those behind them stay as they are."""
    for i in range(slots.size):
        slot = slots[i]
        for column in range(rows.shape[1]):
            cache[slot, column] = rows[i, column]
