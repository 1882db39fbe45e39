"""Parts of rows on their way between trainers: gathered, scaled, added and put back. Cost: one pass over them."""

from __future__ import annotations

from typing import Any

from bagpipe.kernels import kernel


@kernel
def gather_part(rows: Any, index: Any, part: Any) -> None:
    """part[i] = the first columns of rows[index[i]]."""
    for i in range(index.size):
        for column in range(part.shape[1]):
            part[i, column] = rows[index[i], column]


@kernel
def scatter_part(rows: Any, index: Any, part: Any) -> None:
    """The first columns of rows[index[i]] = part[i]."""
    for i in range(index.size):
        for column in range(part.shape[1]):
            rows[index[i], column] = part[i, column]


@kernel
def gather_scaled(rows: Any, index: Any, factor: Any, part: Any, at: Any) -> None:
    """part[at[i]] = rows[index[i]] * factor."""
    for i in range(index.size):
        for column in range(part.shape[1]):
            part[at[i], column] = rows[index[i], column] * factor


@kernel
def add_part(sums: Any, index: Any, part: Any) -> None:
    """sums[index[i]] += part[i]."""
    for i in range(index.size):
        for column in range(part.shape[1]):
            sums[index[i], column] += part[i, column]


def gather_part_simple(rows: Any, index: Any, part: Any) -> None:
    """The twin of `gather_part`."""
    part[:] = rows[index, : part.shape[1]]


def scatter_part_simple(rows: Any, index: Any, part: Any) -> None:
    """The twin of `scatter_part`."""
    rows[index, : part.shape[1]] = part


def gather_scaled_simple(rows: Any, index: Any, factor: Any, part: Any, at: Any) -> None:
    """The twin of `gather_scaled`."""
    part[at] = rows[index] * factor


def add_part_simple(sums: Any, index: Any, part: Any) -> None:
    """The twin of `add_part`."""
    sums[index] += part
