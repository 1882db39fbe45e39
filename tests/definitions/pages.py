"""Which pages of a file rows lie on, and how those that must be read are joined."""

from __future__ import annotations

import mmap

import numpy as np

PAGE_BYTES = mmap.PAGESIZE


def pages_of(position: int, rows_per_chunk: int, row_bytes: int, chunk_bytes: int) -> range:
    """The pages of one row."""
    begin = position // rows_per_chunk * chunk_bytes + position % rows_per_chunk * row_bytes
    return range(begin // PAGE_BYTES, (begin + row_bytes - 1) // PAGE_BYTES + 1)


def define_note(noted: np.ndarray, rows: list[range], num_max: int) -> tuple[int, set[int]]:
    """How many rows from the first on need at most so many pages that are not noted, and these."""
    new: set[int] = set()
    for number, pages in enumerate(rows):
        more = {page for page in pages if not noted[page]} - new
        if len(new) + len(more) > num_max:
            return number, new
        new |= more
    return len(rows), new


def define_runs(pages: list[int], pages_per_chunk: int, gap: int) -> list[tuple[int, int]]:
    """The pages in ascending order, (first, stop), joined over gaps but not over the ends of chunks."""
    runs: list[tuple[int, int]] = []
    for page in pages:
        if runs and page - runs[-1][1] <= gap and page // pages_per_chunk == runs[-1][0] // pages_per_chunk:
            runs[-1] = (runs[-1][0], max(runs[-1][1], page + 1))
        else:
            runs.append((page, page + 1))
    return runs
