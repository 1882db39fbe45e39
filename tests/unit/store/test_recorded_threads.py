"""Snapshots are exact while threads write."""

from __future__ import annotations

import threading
from pathlib import Path

import numpy as np
import pytest
from bagpipe.store.snapshot import Snapshot

from bagpipe.store import MappedStore, MemoryStore
from bagpipe.store.recorded import Recorded
from harness.recorded_rows import Ids


@pytest.mark.parametrize("kind", ["memory", "mapped"])
def test_snapshots_are_exact_while_two_threads_write_and_marks_go_on(kind: str, tmp_path: Path) -> None:
    """Every row has one number in all columns, so that half a row would be seen too."""
    num_rows, num_marks, width = 20_000, 6, 64
    tables = (Ids(width), Ids(width))
    inner = MemoryStore(tables) if kind == "memory" else MappedStore(tables, tmp_path / "rows")
    store = Recorded(inner)
    ids = np.random.default_rng(0).permutation(num_rows)
    store.write_many([(table, ids[: num_rows // 2], _lines(ids[: num_rows // 2], width, 0)) for table in (0, 1)])
    problems: list[BaseException] = []
    readers: list[threading.Thread] = []
    expected = dict.fromkeys(ids[: num_rows // 2].tolist(), 0.0)

    def watched(work, *args) -> threading.Thread:
        def run() -> None:
            try:
                work(*args)
            except BaseException as error:
                problems.append(error)

        thread = threading.Thread(target=run)
        thread.start()
        return thread

    def write_half(half: int, generation: int) -> None:
        random = np.random.default_rng(10 * generation + half)
        mine = ids[half::2]
        for _ in range(6):
            some = random.choice(mine, 1500, replace=False)
            store.write_many([(table, some, _lines(some, width, generation)) for table in (0, 1)])

    def read(snapshot: Snapshot, rows: dict[int, float]) -> None:
        with snapshot:
            for table in (0, 1):
                found: dict[int, float] = {}
                for chunk_ids, values in snapshot.iterate(table, None, 700):
                    assert (values == values[:, :1]).all()
                    found.update(zip(chunk_ids.tolist(), (values[:, 0] - chunk_ids % 1000).tolist(), strict=True))
                assert found == rows

    for generation in range(1, num_marks + 1):
        store.mark(generation)
        readers.append(watched(read, store.snapshot(generation), dict(expected)))
        store.forget(generation)
        for thread in [watched(write_half, half, generation) for half in (0, 1)]:
            thread.join()
        for half in (0, 1):
            random = np.random.default_rng(10 * generation + half)
            for _ in range(6):
                expected.update(
                    dict.fromkeys(random.choice(ids[half::2], 1500, replace=False).tolist(), 1000.0 * generation)
                )
    for thread in readers:
        thread.join()
    assert not problems
    store.forget(num_marks + 1)
    assert store.history_bytes == 0
    store.close()


def _lines(ids: np.ndarray, width: int, generation: int) -> np.ndarray:
    return np.repeat((ids % 1000 + 1000.0 * generation).astype(np.float32)[:, None], width, 1)
