import errno
import os
from pathlib import Path

import pytest
import torch

from bagpipe.data import Shards, ShardWriter, generated, write
from bagpipe.errors import BatchError, ConfigError, ShardError, ValueRangeError
from bagpipe.types import Batch, Ids, Table

TABLES = (Table("a", 100), Table("b", 50))


def make_batch(**changes):
    parts = {
        "dense": torch.zeros(3, 2),
        "a": Ids(torch.tensor([[1], [2], [3]])),
        "b": Ids(torch.tensor([4, 5, 6]), torch.tensor([0, 0, 2]), torch.ones(3)),
        "labels": torch.tensor([0.0, 1.0, 0.0]),
    } | changes
    return Batch(parts["dense"], {"a": parts["a"], "b": parts["b"]}, parts["labels"], number=7)


def write_batches(path, *batches, **options):
    with ShardWriter(path, TABLES, 2, **options) as writer:
        for batch in batches:
            writer.add(batch)
        return writer.finish()


def test_batches_of_any_size_are_cut_into_shards(tmp_path):
    manifest = write_batches(tmp_path / "data", make_batch(), make_batch(), make_batch(), shard_samples=4)
    assert [shard.samples for shard in manifest.shards] == [4, 4, 1]
    (batch,) = Shards(tmp_path / "data").batches(100)
    assert batch.sparse["a"].values.flatten().tolist() == [1, 2, 3] * 3
    assert batch.sparse["b"].lengths().tolist() == [0, 2, 1] * 3


def test_progress_is_told_up_to_the_end(tmp_path):
    told = []
    write(generated("tiny", 40_000), tmp_path / "data", progress=lambda done, total: told.append((done, total)))
    assert told[-1] == (40_000, 40_000)
    assert len(told) > 2
    assert told == sorted(told)


def test_nothing_temporary_remains(tmp_path):
    write(generated("tiny", 1000), tmp_path / "data", shard_samples=400)
    names = sorted(path.name for path in (tmp_path / "data").iterdir())
    assert names == ["manifest.json", "shard-00000.bin", "shard-00001.bin", "shard-00002.bin"]


def test_a_directory_with_anything_in_it_is_refused_and_left_alone(tmp_path):
    (tmp_path / "note.txt").write_text("mine")
    with pytest.raises(ShardError, match="is not empty: choose another"):
        write(generated("tiny", 10), tmp_path)
    assert [path.name for path in tmp_path.iterdir()] == ["note.txt"]
    assert (tmp_path / "note.txt").read_text() == "mine"


def test_a_data_set_is_never_written_over(tmp_path):
    write(generated("tiny", 10), tmp_path / "data")
    before = (tmp_path / "data" / "shard-00000.bin").read_bytes()
    with pytest.raises(ShardError, match="is not empty"):
        write(generated("tiny", 20), tmp_path / "data")
    assert (tmp_path / "data" / "shard-00000.bin").read_bytes() == before


def test_a_file_in_the_place_of_the_directory_is_refused(tmp_path):
    (tmp_path / "data").write_text("mine")
    with pytest.raises(ShardError, match="is a file"):
        write(generated("tiny", 10), tmp_path / "data")
    assert (tmp_path / "data").read_text() == "mine"


def test_two_writers_do_not_share_a_directory(tmp_path):
    with ShardWriter(tmp_path / "data", TABLES, 2) as first:
        with pytest.raises(ShardError, match="is not empty"), ShardWriter(tmp_path / "data", TABLES, 2):
            pass
        first.add(make_batch())
        first.finish()
    assert Shards(tmp_path / "data").num_samples == 3


def test_a_writer_that_is_left_before_the_end_removes_what_it_wrote(tmp_path):
    with ShardWriter(tmp_path / "data", TABLES, 2, shard_samples=1) as writer:
        writer.add(make_batch())
        assert (tmp_path / "data" / "shard-00002.bin").exists()
    assert not (tmp_path / "data").exists()


def test_a_writer_that_fails_leaves_a_directory_that_was_there(tmp_path):
    with pytest.raises(RuntimeError), ShardWriter(tmp_path, TABLES, 2):
        raise RuntimeError
    assert list(tmp_path.iterdir()) == []


def test_a_killed_writer_leaves_nothing_that_is_taken_for_data(tmp_path):
    writer = ShardWriter(tmp_path / "data", TABLES, 2, shard_samples=1).__enter__()
    writer.add(make_batch())
    with pytest.raises(ShardError, match="not a complete data set"):
        Shards(tmp_path / "data")


def test_a_full_disk_is_a_typed_error_and_leaves_nothing(tmp_path, monkeypatch):
    def full(descriptor):
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(os, "fsync", full)
    with pytest.raises(ShardError, match=r"shard-00000\.bin can't be written \(No space left on device\)"):
        write(generated("tiny", 100), tmp_path / "data")
    assert not (tmp_path / "data").exists()


def test_files_reach_the_disk_before_they_get_their_names(tmp_path, monkeypatch):
    events = []
    real_sync, real_rename = os.fsync, Path.rename
    monkeypatch.setattr(os, "fsync", lambda descriptor: events.append("sync") or real_sync(descriptor))
    monkeypatch.setattr(Path, "rename", lambda path, to: events.append(to.name) or real_rename(path, to))
    write(generated("tiny", 20), tmp_path / "data", shard_samples=10)
    assert events == ["sync", "shard-00000.bin", "sync", "shard-00001.bin", "sync", "sync", "manifest.json", "sync"]


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"dense": torch.tensor([[0.0, 0], [0, 0], [0, float("nan")]])}, "sample 5: dense is nan, must be finite"),
        ({"dense": torch.tensor([[0.0, 0], [float("-inf"), 0], [0, 0]])}, "sample 4: dense is -inf, must be finite"),
        ({"a": Ids(torch.tensor([[1], [100], [3]]))}, "sample 4: ids of 'a' is 100, its table has 100 rows"),
        ({"a": Ids(torch.tensor([[1], [2], [-1]]))}, "sample 5: ids of 'a' is -1, its table has 100 rows"),
        ({"labels": torch.tensor([0.0, 0.5, 1.0])}, r"sample 4: labels is 0\.5, must be 0 or 1"),
        ({"labels": torch.tensor([float("nan"), 0.0, 1.0])}, "sample 3: labels is nan, must be 0 or 1"),
        (
            {"b": Ids(torch.tensor([4, 5, 50]), torch.tensor([0, 0, 2]), torch.ones(3))},
            "sample 5: ids of 'b' is 50, its table has 50 rows",
        ),
        (
            {"b": Ids(torch.tensor([4, 5, 6]), torch.tensor([0, 0, 2]), torch.tensor([1, float("inf"), 1]))},
            "sample 4: weights of 'b' is inf, must be finite",
        ),
    ],
)
def test_values_that_training_can_not_take_are_refused_before_they_are_written(tmp_path, changes, message):
    with pytest.raises(ValueRangeError, match=message + "; mend the source"):
        write_batches(tmp_path / "data", make_batch(), make_batch(**changes))
    assert not (tmp_path / "data").exists()


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"a": Ids(torch.ones(3, 2, dtype=torch.int64))}, "batch 7 has .* the first one had"),
        ({"b": Ids(torch.tensor([4, 5, 6]), torch.tensor([0, 0, 2]))}, "batch 7 has .* the first one had"),
        ({"dense": torch.zeros(3, 5)}, r"numeric features of shape \(3, 5\)"),
        ({"dense": torch.zeros(3, 2, dtype=torch.float64)}, r"torch\.float64: give"),
    ],
)
def test_a_batch_of_another_kind_is_refused(tmp_path, changes, message):
    with pytest.raises(BatchError, match=message):
        write_batches(tmp_path / "data", make_batch(), make_batch(**changes))


def test_a_batch_without_a_feature_is_refused(tmp_path):
    batch = make_batch()
    with pytest.raises(BatchError, match="no ids of feature 'b'"):
        write_batches(tmp_path / "data", Batch(batch.dense, {"a": batch.sparse["a"]}, batch.labels))


def test_a_data_set_without_samples_is_not_written(tmp_path):
    with pytest.raises(ConfigError, match="no samples"):
        write(generated("tiny", 0), tmp_path / "data")
    assert not (tmp_path / "data").exists()


def test_shards_of_nothing_are_refused(tmp_path):
    with pytest.raises(ConfigError, match="shard_samples is 0"):
        ShardWriter(tmp_path / "data", TABLES, 2, shard_samples=0)


def grown_batch(number, start, stop):
    ids = {"a": Ids(torch.arange(start, stop)[:, None]), "b": Ids(torch.ones(stop - start, 1, dtype=torch.int64))}
    return Batch(torch.zeros(stop - start, 2), ids, torch.zeros(stop - start), number=number)


def with_rows(rows):
    def complete(manifest):
        tables = tuple(
            table.model_copy(update={"rows": rows}) if table.name == "a" else table for table in manifest.tables
        )
        return manifest.model_copy(update={"tables": tables})

    return complete


def test_a_table_may_get_its_size_at_the_end(tmp_path):
    tables = (Table("a"), Table("b", 50))
    with ShardWriter(tmp_path / "data", tables, 2, shard_samples=200, growing={"a"}) as writer:
        writer.add(grown_batch(0, 0, 1000))
        manifest = writer.finish(with_rows(1000))
    data = Shards(tmp_path / "data")
    assert data.tables[0].rows == 1000
    (batch,) = data.batches(1000)
    assert batch.sparse["a"].values.flatten().tolist() == list(range(1000))
    sizes = [shard.bytes for shard in manifest.shards]
    assert sizes[0] < sizes[2]  # small ids were stored in one byte


def test_a_size_that_is_too_small_is_found_by_the_reader(tmp_path):
    with ShardWriter(tmp_path / "data", (Table("a"), Table("b", 50)), 2, growing={"a"}) as writer:
        writer.add(grown_batch(0, 0, 300))
        writer.finish(with_rows(290))
    with pytest.raises(ValueRangeError, match="sample 290: 'ids:a' is 290, its table has 290 rows"):
        list(Shards(tmp_path / "data").batches(1000))


def test_shards_on_record_outlive_a_failure_and_a_later_writer_goes_on_after_them(tmp_path):
    kept = []
    with ShardWriter(tmp_path / "data", TABLES, 2, shard_samples=4, on_shard=kept.append) as writer:
        for _ in range(3):
            writer.add(make_batch())
    names = ["manifest.json.tmp", "shard-00000.bin", "shard-00001.bin"]
    assert sorted(path.name for path in (tmp_path / "data").iterdir()) == names
    with ShardWriter(tmp_path / "data", TABLES, 2, shard_samples=4, done=kept[-1]) as writer:
        assert (writer.num_samples, writer.room) == (8, 4)
        writer.add(make_batch().part(2, 3))
        manifest = writer.finish()
    write_batches(tmp_path / "whole", make_batch(), make_batch(), make_batch(), shard_samples=4)
    assert manifest == Shards(tmp_path / "whole").manifest


def test_a_shard_that_could_not_be_put_on_record_is_removed(tmp_path):
    def fail(_):
        raise RuntimeError("no record")

    with (
        pytest.raises(RuntimeError, match="no record"),
        ShardWriter(tmp_path / "data", TABLES, 2, shard_samples=3, on_shard=fail) as writer,
    ):
        writer.add(make_batch())
    assert not (tmp_path / "data").exists()
