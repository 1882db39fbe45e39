"""Recorded rows with their journal on a simulated disk, writes to fill it, and all rows as bytes to compare."""

from __future__ import annotations

from pathlib import Path

import numpy as np

from bagpipe.server.storage import Width
from bagpipe.store.journal import Journal
from bagpipe.store.memory import MemoryStore
from bagpipe.store.recorded import Recorded
from harness.disk import SimulatedDisk

WIDTHS = (3, 1)
DIRECTORY = Path("/journal/server-0")
State = list[dict[int, bytes]]


def opened(disk: SimulatedDisk, history_bytes_max: int | None = None) -> Recorded:
    return Recorded(MemoryStore(list(map(Width, WIDTHS)), chunk_bytes=256), Journal(DIRECTORY, disk), history_bytes_max)


def state(store: Recorded) -> State:
    return [
        {key: row.tobytes() for ids, rows in store.iterate(table) for key, row in zip(ids.tolist(), rows, strict=True)}
        for table in range(len(WIDTHS))
    ]


def some_rows(seed: int) -> list[tuple[int, np.ndarray, np.ndarray]]:
    generator = np.random.default_rng(seed)
    parts = []
    for table in (0, 1)[: generator.integers(1, 3)]:
        ids = generator.permutation(8)[: generator.integers(0, 5)]
        parts.append((table, ids, generator.standard_normal((len(ids), WIDTHS[table]), np.float32)))
    return parts


def batch(done: int) -> list[list[tuple[int, np.ndarray, np.ndarray]]]:
    return [some_rows(10 * done + number) for number in range(3)]
