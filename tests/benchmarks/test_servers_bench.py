"""Many clients on two servers, small."""

from __future__ import annotations

import numpy as np
import pytest

from bagpipe.errors import PipelineError
from benchmarks import servers


@pytest.mark.parametrize("shared_memory", [True, pytest.param(False, marks=pytest.mark.long)])
def test_clients_get_what_they_wrote_and_the_servers_keep_their_size(shared_memory):
    row = servers._hammered(1.0, shared_memory)
    assert row["errors"] == 0, row["first_error"]
    assert row["rows_read_per_second"] >= servers.ROWS_MIN
    assert 0 < row["read_ms_p50"] <= row["read_ms_p95"] <= row["read_ms_p99"] <= row["read_ms_max"]
    assert 0 < row["write_ms_p50"] <= row["write_ms_max"]
    assert 0 < row["server_memory_bytes_early"] <= 1.5 * row["server_memory_bytes_end"]


def test_a_wrong_row_is_an_error_of_the_client_that_read_it():
    class Forgetful:
        def write(self, table, ids, values):
            pass

        def read(self, table, ids, out):
            out[:] = ids[:, None]

    client = servers.Client.__new__(servers.Client)
    client.outcome = servers.Outcome()
    client._rng, client._ids = np.random.default_rng(0), np.arange(servers.IDS_PER_CLIENT) * servers.NUM_CLIENTS
    client._versions, client._store = np.zeros(servers.IDS_PER_CLIENT, np.int64), Forgetful()
    client.hammer(until=float("inf"))
    (error,) = client.outcome.errors
    assert error.startswith(PipelineError.__name__)
    assert "not as they were written" in error
