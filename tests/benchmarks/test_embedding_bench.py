"""The benchmark of the embedding layer, small."""

from __future__ import annotations

import importlib.util

from benchmarks.embedding import BENCHMARK


def test_the_contestants_agree_and_absent_peers_are_null_with_a_reason() -> None:
    results = BENCHMARK.run(True)
    assert [result["optimizer"] for result in results] == ["sgd", "adagrad"]
    for result in results:
        assert result["time_ratio_to_pytorch"] > 0
        if importlib.util.find_spec("fbgemm_gpu") is None:
            assert result["time_ratio_to_fbgemm"] is None
            assert "not installed" in result["fbgemm_reason"]
        else:
            assert result["time_ratio_to_fbgemm"] > 0
