"""The benchmark of checkpoints, in small: both loops train the same, and what is written follows what has changed."""

from benchmarks import load


def test_a_loop_that_is_kept_trains_the_same_and_writes_what_has_changed():
    (row,) = load("checkpoint").run(True)
    assert row["loss_difference_max"] == 0
    assert row["full_rows"] == row["rows"]
    assert 0 < row["incremental_rows"] < row["full_rows"]
    key_bytes = 8
    for kind in ("full", "incremental"):
        values = row[f"{kind}_rows"] * (row["row_bytes"] + key_bytes)
        assert values <= row[f"{kind}_bytes"] <= 1.1 * values + 4096
    assert row["time_ratio_to_plain"] > 0
