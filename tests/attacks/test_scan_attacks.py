"""Scans that begin or end where no row can be: a typed error, and the rows are as they were."""

from __future__ import annotations

from contextlib import contextmanager

import numpy as np
import pytest

from bagpipe.errors import StoreError, WireError
from bagpipe.server.rows import RowAccess
from bagpipe.server.storage import in_files, in_memory
from bagpipe.store.versioned import VersionedStore
from bagpipe.wire.messages import Scan

WIDTH, NUM_ROWS = 3, 10
IDS = np.arange(NUM_ROWS)
VALUES = np.arange(NUM_ROWS * WIDTH, dtype=np.float32).reshape(NUM_ROWS, WIDTH)
BEFORE_THE_FIRST = [(-1, 5), (-(2**63), 0), (-(2**70), 2**70), (5, 4)]
BEYOND_64_BITS = [(2**63, 2**63 + 5), (0, 2**63), (2**63 - 1, 2**64), (2**200, 2**201)]


@contextmanager
def stores(kind, tmp_path):
    """A local store, and one with marks over it, some rows of which lie in a layer."""
    with (in_memory() if kind == "memory" else in_files(tmp_path))([WIDTH]) as base:
        versions = VersionedStore(base)
        versions.write(0, IDS[:4], VALUES[:4])
        versions.mark(1)
        versions.write(0, IDS[4:], VALUES[4:])
        yield base, versions


@pytest.mark.parametrize(("start", "stop"), [*BEFORE_THE_FIRST, *BEYOND_64_BITS])
@pytest.mark.parametrize("kind", ["memory", "files"])
def test_places_where_no_row_can_be_are_refused_by_every_store(kind, start, stop, tmp_path):
    with stores(kind, tmp_path) as both:
        for store in both:
            for values in (True, False):
                with pytest.raises(StoreError, match=rf"table 0: there are no rows {start} to {stop}: give 0 <= start"):
                    store.scan(0, start, stop, values=values)
        assert np.array_equal(both[1].scan(0, 0, NUM_ROWS)[1], VALUES)


@pytest.mark.parametrize("start", [NUM_ROWS, NUM_ROWS + 1, 2**31, 2**32, 2**62, 2**63 - 1])
@pytest.mark.parametrize("kind", ["memory", "files"])
def test_behind_the_last_row_there_is_nothing(kind, start, tmp_path):
    with stores(kind, tmp_path) as both:
        for store in both:
            ids, rows = store.scan(0, start, 2**63 - 1)
            assert (ids.shape, ids.dtype, rows.shape, rows.dtype) == ((0,), np.int64, (0, WIDTH), np.float32)


@pytest.mark.parametrize(
    ("start", "count"),
    [
        (2**63, 5),
        (2**63 - 1, 5),
        (2**64 - 1, 1),
        (-1, 5),
        (-(2**63), 5),
        (0, 2**63),
        (0, 2**64),
        (0, -1),
        (5, -(2**63)),
    ],
)
@pytest.mark.parametrize("shared", [False, True])
def test_a_server_answers_such_a_scan_with_an_error_and_reads_and_writes_nothing(start, count, shared, tmp_path):
    with stores("memory", tmp_path) as (_, versions):
        access = RowAccess(versions, [WIDTH], 1 << 20)
        memory = memoryview(bytearray(1 << 12)) if shared else None
        with pytest.raises((StoreError, WireError), match=r"no rows|are allowed"):
            access.scan(Scan(0, start, count), memory)
        assert memory is None or not any(memory)
        assert access.scan(Scan(0, 0, NUM_ROWS), None)[0].count == NUM_ROWS
