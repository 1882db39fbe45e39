"""Rows come back to the last bit, from chains and for any number of servers; another model is refused by name."""

from __future__ import annotations

import re
import socket
import subprocess
import sys

import msgspec
import numpy as np
import pytest
from safetensors.numpy import load_file

from bagpipe.checkpoint import rows as row_files
from bagpipe.checkpoint.disk import Disk
from bagpipe.checkpoint.manifest import RowCount
from bagpipe.checkpoint.point import ResumePoint, load_rows, table_differences
from bagpipe.checkpoint.rows import check_file, read_rows, write_rows
from bagpipe.errors import CheckpointError
from bagpipe.server.storage import Width
from bagpipe.store.local import MemoryStore
from harness.checkpointed import FACTS, TABLES, WIDTHS, World, by_rows, load, opened, save


def test_a_chain_gives_the_newest_value_of_each_row_for_any_number_of_servers(tmp_path):
    checkpoints, world = opened(tmp_path, keep=9), World(rows=100)
    world.train(0, share=1)
    states = {}
    for done, servers in ((10, 3), (20, 2), (30, 1), (40, 5)):
        world.train(done, share=0.2)
        save(checkpoints, world, servers)
        states[done] = world.state()
    assert checkpoints.open(40).chain == [10, 20, 30, 40]
    for done, expected in states.items():
        checkpoint = checkpoints.open(done)
        checkpoint.verify()
        assert checkpoint.blob("trainer-0") == b"blob of %d" % done
        for servers in (1, 2, 3, 4, 5):
            assert load(checkpoint, servers) == expected
            assert by_rows(checkpoint, servers) == expected


def test_an_incremental_one_has_only_the_rows_written_since(tmp_path):
    checkpoints, world = opened(tmp_path), World(rows=1000)
    world.train(10, share=1)
    assert save(checkpoints, world).num_rows() == [1000, 1000]
    for done in (20, 30, 40):
        world.train(done, share=0.01)
        save(checkpoints, world, full=done == 40)
    sizes = {checkpoint.done: checkpoint.manifest.num_bytes for checkpoint in checkpoints.list()}
    assert [checkpoint.chain for checkpoint in checkpoints.list()] == [[10], [10, 20], [10, 20, 30], [40]]
    assert sizes[20] < sizes[10] / 20
    assert sizes[40] > sizes[10] / 1.1
    assert load(checkpoints.open(40)) == world.state()


def test_only_files_that_can_hold_a_shard_are_read(tmp_path, monkeypatch):
    checkpoints, world = opened(tmp_path), World(rows=200)
    world.train(10, share=1)
    checkpoint = save(checkpoints, world, servers=4)
    read = []
    monkeypatch.setattr(
        "bagpipe.checkpoint.rows.read_rows",
        lambda disk, directory, entry, tables: read.append(entry.name) or read_rows(disk, directory, entry, tables),
    )
    for shard, expected in (((1, 4), "1"), ((0, 2), "01"), ((1, 2), "23"), ((1, 3), "12"), ((0, 1), "0123")):
        read.clear()
        list(checkpoint.in_order(shard))
        assert [name.split("-")[1] for name in read] == list(expected)


def test_files_are_cut_at_a_size_and_plain_safetensors(tmp_path, monkeypatch):
    monkeypatch.setattr(row_files, "FILE_BYTES", 1000)
    monkeypatch.setattr(row_files, "CHUNK_BYTES", 300)
    world = World(rows=200)
    world.train(1, share=1)
    reported = []
    entries = write_rows(Disk(), tmp_path, world.shard(0, 1), list(WIDTHS.items()), report=reported.append)
    assert len(entries) > 5
    assert max(entry.bytes for entry in entries) < 1700
    assert reported == sorted(reported)
    assert reported[-1] == 200 * (8 + 20 + 8 + 12)
    found = [{}, {}]
    for entry in entries:
        check_file(Disk(), tmp_path, entry)
        tensors = load_file(tmp_path / entry.name)
        for table, name in enumerate(WIDTHS):
            ids, rows = tensors.get(f"{name}.ids", ()), tensors.get(f"{name}.rows", ())
            found[table] |= {key: row.tobytes() for key, row in zip(ids, rows, strict=True)}
        assert set(tensors) <= {"user.ids", "user.rows", "wörd.ids", "wörd.rows"}
    assert found == world.state()


@pytest.mark.parametrize(
    "changes",
    [
        {"bytes": 2**40},
        {"rows": (RowCount(0, 30),)},
        {"rows": (RowCount(0, 29), RowCount(1, 30))},
        {"rows": ()},
    ],
    ids=str,
)
def test_an_entry_that_says_something_else_than_its_file_is_refused(tmp_path, changes):
    world = World()
    world.train(1, share=1)
    (entry,) = write_rows(Disk(), tmp_path, world.shard(0, 1), list(WIDTHS.items()))
    assert [len(ids) for _, ids, _ in read_rows(Disk(), tmp_path, entry, list(WIDTHS.items()))] == [30, 30]
    wrong = msgspec.structs.replace(entry, **changes)
    with pytest.raises(CheckpointError, match="use another checkpoint"):
        list(read_rows(Disk(), tmp_path, wrong, list(WIDTHS.items())))


def test_no_rows_make_no_files(tmp_path):
    checkpoint = save(opened(tmp_path), World())
    assert [entry.name for entry in checkpoint.manifest.files] == ["trainer-0.safetensors"]
    assert load(checkpoint) == [{}, {}]


def changed(table, **changes):
    return [msgspec.structs.replace(part, **changes) if part.name == table else part for part in TABLES]


@pytest.mark.parametrize(
    ("expected", "message"),
    [
        (changed("user", rows=7), "table 'user' has rows 1000 in the checkpoint and 7 in the model"),
        (changed("user", dims=(5,)), r"dims \(4,\) in the checkpoint and \(5,\)"),
        (changed("user", width=8, optimizer="adagrad"), "width 5 .*; table 'user' has optimizer rowwise_adagrad in"),
        (TABLES[:1], "table 'wörd' is only in the checkpoint"),
        (changed("user", name="ad"), "'user' is only in the checkpoint; table 'ad' is only in the model"),
        (TABLES[::-1], "its tables are in the order"),
    ],
)
def test_another_model_is_refused_with_the_difference_named(tmp_path, expected, message):
    checkpoint = save(opened(tmp_path), World())
    checkpoint.check_tables(TABLES)
    assert not table_differences(TABLES, TABLES)
    with pytest.raises(CheckpointError, match=message):
        checkpoint.check_tables(expected)


def test_a_store_of_other_tables_is_refused_and_stays_empty(tmp_path):
    world = World()
    world.train(1)
    checkpoint = save(opened(tmp_path), world)
    for names, widths in ((["user", "ad"], [5, 3]), (["user", "wörd"], [5, 4]), (["wörd", "user"], [3, 5])):
        with MemoryStore([Width(width) for width in widths]) as store:
            with pytest.raises(CheckpointError, match=r"user 5, wörd 3, and .* are asked for"):
                load_rows(checkpoint, store, names)
            assert store.stats().num_rows == 0


def test_what_is_not_there_is_refused_by_name(tmp_path):
    checkpoints = opened(tmp_path / "none")
    assert checkpoints.list() == []
    assert checkpoints.latest() is None
    assert checkpoints.prune() == []
    with pytest.raises(CheckpointError, match="no checkpoint after 3 iterations: it has none"):
        checkpoints.open(3)
    checkpoint = save(checkpoints, World())
    with pytest.raises(CheckpointError, match=r"nothing of the name 'trainer-1': it has \['trainer-0'\]"):
        checkpoint.blob("trainer-1")
    with pytest.raises(CheckpointError, match="has no table 'ad'"):
        next(checkpoint.rows("ad"))


@pytest.mark.parametrize("left", [(), ("checkpoints",)], ids=["nothing is mounted", "only the directory above"])
@pytest.mark.parametrize("initial", [False, True])
def test_a_machine_that_does_not_see_a_checkpoint_says_so_with_its_name(tmp_path, initial, left):
    world = World()
    world.train(7)
    checkpoint = save(opened(tmp_path / "checkpoints"), world)
    point = ResumePoint.initial(checkpoint) if initial else ResumePoint.of(checkpoint)
    (tmp_path / "checkpoints").rename(tmp_path / "on another machine")
    for name in left:
        (tmp_path / name).mkdir()
    seen = rf"{re.escape(socket.gethostname())} does not see .*checkpoints/00000007 \(.*mount the same storage under"
    with pytest.raises(CheckpointError, match=seen):
        point.open()
    for name in left:
        (tmp_path / name).rmdir()
    (tmp_path / "on another machine").rename(tmp_path / "checkpoints")
    (tmp_path / "checkpoints" / "00000007" / "manifest.json").unlink()
    with pytest.raises(CheckpointError, match=r"^can't read .*manifest.json: No such file"):
        point.open()


def test_rows_that_are_not_of_the_table_are_refused(tmp_path):
    class Wrong:
        def iterate(self, table, rows_per_chunk):
            yield np.arange(3), np.zeros((3, 2), np.float32)

    with pytest.raises(CheckpointError, match="save them with the tables"):
        write_rows(Disk(), tmp_path, Wrong(), [("user", 5)])
    world = World()
    world.ids[0] = np.arange(995, 1005)
    world.train(1, share=1)
    checkpoint = save(opened(tmp_path / "c"), world)
    with pytest.raises(CheckpointError, match="ids 995 to 1004 of table 'user' of 1000 rows"):
        load(checkpoint)


def test_rows_are_written_and_read_without_pytorch():
    code = "import sys, bagpipe.checkpoint.directory; sys.exit('torch' in sys.modules or 'pyarrow' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0


def test_facts_come_back(tmp_path):
    facts = msgspec.structs.replace(FACTS, trainers=2, data="abc")
    manifest = save(opened(tmp_path), World(), facts=facts).manifest
    assert (manifest.trainers, manifest.data, manifest.config, manifest.base) == (2, "abc", {"seed": 3}, None)
