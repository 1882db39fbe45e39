"""Training over a slow link, small: the same losses everywhere, and bytes only where rows travel."""

from __future__ import annotations

import numpy as np
import pytest

from bagpipe.server.storage import Width
from benchmarks import overlap
from benchmarks.namespaces import NamespaceError, joined_namespaces
from harness.wire import until


def check(results, names):
    assert [row["system"] for row in results] == list(names)
    rows = {row["system"]: row for row in results}
    for row in results:
        assert row["loss_difference_max"] == 0
        assert row["iteration_ms"] > 0
        assert row["speedup_over_nocache"] == pytest.approx(1 / row["time_ratio_to_nocache"])
    assert rows["ideal"]["time_ratio_to_ideal"] == rows["nocache"]["time_ratio_to_nocache"] == 1
    assert rows["ideal"]["fetched_rows"] == 0
    for name in set(names) - {"ideal"}:
        row_bytes = 4 * overlap.QUICK.dim
        assert rows[name]["bytes_received"] > row_bytes * rows[name]["fetched_rows"] > 0
        assert rows[name]["bytes_sent"] > row_bytes * rows[name]["written_rows"] > 0
    for count in ("fetched_rows", "written_rows", "bytes_sent", "bytes_received"):
        assert rows["lookahead"][count] < rows["nocache"][count]


def test_without_namespaces_the_simulated_network_is_the_link_and_the_reason_is_told(monkeypatch):
    monkeypatch.setenv("PATH", "")
    monkeypatch.setattr(overlap, "MODELS", {"wide_deep": overlap.MODELS["wide_deep"]})
    results = overlap.BENCHMARK.run(True)
    check(results, ["lookahead", "nocache", "ideal"])
    assert {row["link"] for row in results} == {"simulated"}
    assert "no `ip`" in results[0]["link_reason"]


def test_the_simulated_link_counts_both_directions_and_keeps_to_its_rate():
    link = overlap.SimulatedLink()
    try:
        store = link.open_store("lookahead", [Width(4)])
        start, before = link.now(), link.counted()
        link.limit(8_000_000)
        store.write(0, np.arange(10_000), np.ones((10_000, 4), np.float32))
        sent = link.counted()[0] - before[0]
        assert sent > 10_000 * 4 * 4
        assert link.now() - start >= sent / 1e6
        link.limit(None)
        store.close()
    finally:
        link.close()


def test_of_a_long_message_only_what_has_passed_is_counted():
    link = overlap.SimulatedLink()
    try:
        link.limit(8_000_000)
        link.listen("nobody", lambda *_: None)
        connection = link.connect("nobody", 60)
        start = link.now()
        link.post(connection.other, bytes(500_000))
        passed, seen = link.counted()[0], link.now()
        assert passed <= (seen - start) * 1e6 + 1
        until(lambda: link.counted() == (500_000, 0), 60)
    finally:
        link.close()


@pytest.mark.long
def test_trainer_and_servers_train_in_namespaces_with_keys_and_without():
    try:
        with joined_namespaces() as namespaces:
            results = overlap.in_namespaces(namespaces, "wide_deep", True)
    except NamespaceError as error:
        pytest.skip(str(error))
    check(results, ["lookahead", "lookahead with keys", "nocache", "ideal"])
    assert results[1]["time_ratio_to_no_keys"] > 0
