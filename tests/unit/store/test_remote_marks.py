"""Marks, what is kept with them and files of their rows, as a store over servers offers them and as they go wrong."""

from __future__ import annotations

import random

import pytest

from bagpipe.checkpoint.directory import Checkpoints
from bagpipe.errors import CheckpointError, DeadlineError, StoreError, WireError
from bagpipe.wire.messages import Message
from bagpipe.wire.recovery_messages import AskWork, Keep, Mark, Working
from harness.marked import (
    NAMES,
    fixture_worlds,  # noqa: F401
    full,
    read,
    rows,
)
from harness.remote_world import FAST, TROUBLE

# What a store offers


def test_rows_written_after_a_mark_are_undone(worlds) -> None:
    world = worlds(2, **TROUBLE)
    store = world.store()
    store.write(0, rows(1, 2), full(1, 2))
    store.mark(10)
    store.write(0, rows(2, 3), full(2, 2))
    store.mark(20)
    store.write(1, rows(1), full(3, 1, table=1))
    assert store.marks() == [10, 20]
    store.return_to(10)
    assert store.marks() == [10]
    assert read(store, rows(1, 2, 3))[:, 0].tolist() == [1, 1, 3]
    assert [store.num_rows(table) for table in range(2)] == [2, 0]
    store.write(0, rows(3), full(5, 1))
    store.mark(20)
    store.forget(20)
    assert store.marks() == [20]
    with pytest.raises(StoreError, match=r"there is no mark 10: there are \[20\]"):
        store.return_to(10)
    assert read(store, rows(3))[0, 0] == 5, "what is refused has changed nothing"


@pytest.mark.parametrize("shared_memory", [False, True])
def test_what_is_kept_comes_back_however_long_it_is(worlds, shared_memory) -> None:
    world = worlds(2, **TROUBLE)
    store = world.store(shared_memory=shared_memory)
    other = world.store(shared_memory=shared_memory)
    blobs = {"trainer-0": random.Random(0).randbytes(17_000_001), "trainer-1": b"", "trainer-2": b"short"}
    for name, blob in blobs.items():
        store.keep(5, name, blob)
    store.mark(5)
    assert store.kept(5) == blobs == other.kept(5)
    assert store.kept(4) == {}
    store.keep(5, "trainer-2", b"another")
    assert other.kept(5)["trainer-2"] == b"another"
    assert world.servers[1].kept(5) == {}, "server 0 keeps it"
    store.mark(6)
    store.forget(6)
    assert store.kept(5) == {}


def test_a_checkpoint_has_the_rows_of_its_mark_while_others_are_written(worlds) -> None:
    world = worlds(1)
    store = world.store()
    store.write(0, rows(1, 2, 3), full(1, 3))
    store.mark(1)
    store.write(0, rows(2, 4), full(9, 2))
    pending = Checkpoints(world.directory).begin(1)
    entries = store.save(1, pending.directory, NAMES, compress="zstd")
    assert [(entry.name, entry.rows[0].rows) for entry in entries] == [("rows-0-00000.safetensors.zst", 3)]
    store.mark(2)
    since = store.save(2, Checkpoints(world.directory).begin(2).directory, NAMES, since=1)
    assert since[0].rows[0].rows == 2


@pytest.mark.parametrize("place", ["elsewhere", "run-0/../elsewhere", "run-0/checkpoints/link/inside"])
def test_a_directory_that_the_servers_were_not_told_of_is_refused(worlds, tmp_path, place) -> None:
    world = worlds(2)
    (tmp_path / "elsewhere" / "inside").mkdir(parents=True)
    world.directory.mkdir(parents=True)
    (world.directory / "link").symlink_to(tmp_path / "elsewhere")
    store = world.store()
    store.mark(1)
    with pytest.raises(StoreError, match=r"checkpoints in .*: server 0 was told at its start to use only"):
        store.save(1, tmp_path / place, NAMES)
    with pytest.raises(StoreError, match="was told at its start"):
        store.load(1, tmp_path / place, NAMES)
    assert list((tmp_path / "elsewhere" / "inside").iterdir()) == []
    store.write(0, rows(1), full(1, 1))
    assert read(store, rows(1))[0, 0] == 1


def test_a_checkpoint_that_is_not_there_or_of_another_model_is_named_and_the_store_can_load_another(worlds) -> None:
    world = worlds(2)
    store = world.store()
    store.write(0, rows(1, 2), full(1, 2))
    store.mark(1)
    world.save(store, 1)
    store.write(0, rows(1), full(2, 1))
    for done, names, named in ((2, NAMES, "no checkpoint after 2"), (1, ["ad", "other"], "of another model")):
        with pytest.raises(CheckpointError, match=named):
            store.load(done, world.directory, names)
    with pytest.raises(StoreError, match="1 names for 2 tables"):
        store.load(1, world.directory, ["ad"])
    assert read(store, rows(1, 2))[:, 0].tolist() == [2, 1], "nothing has changed"
    (damaged,) = (world.directory / "00000001").glob("rows-1-*")
    whole = damaged.read_bytes()
    damaged.write_bytes(whole[:-1] + bytes([whole[-1] ^ 1]))
    with pytest.raises(CheckpointError, match=r"server 1 at server-1: .* is damaged"):
        store.load(1, world.directory, NAMES)
    with pytest.raises(StoreError, match="failed halfway"):
        read(store, rows(1))
    damaged.write_bytes(whole)
    store.load(1, world.directory, NAMES)
    assert read(store, rows(1, 2))[:, 0].tolist() == [1, 1]


def test_a_full_disk_is_told_to_whoever_saves_and_training_goes_on(worlds) -> None:
    world = worlds(2)
    store = world.store()
    store.write(0, rows(*range(50)), full(1, 50))
    store.mark(1)
    missing = world.directory / ".tmp-00000001"
    with pytest.raises(CheckpointError, match=r"server \d at server-\d: writing .*\.tmp-00000001/rows-"):
        store.save(1, missing, NAMES)
    store.write(0, rows(1), full(2, 1))
    store.mark(2)
    world.save(store, 2)


# What goes wrong on the way


def test_a_mark_whose_outcome_is_unknown_ends_the_store_since_its_number_is_taken(worlds) -> None:
    world = worlds(2)
    store = world.store(patience=FAST)
    store.write(0, rows(1, 2, 3), full(1, 3))
    handle = world.servers[1].handle

    def silent(peer, message, reply):
        handle(peer, message, (lambda _: None) if isinstance(message.body, Mark) else reply)

    world.listeners[1].close()
    world.listeners[1] = world.network.listen("server-1", silent)
    with pytest.raises(StoreError, match=r"server 1 at server-1 did not answer for .* asked for mark 5"):
        store.mark(5)
    with pytest.raises(StoreError, match="servers were asked for mark 5, and not all have answered"):
        store.write(0, rows(1, 2, 3), full(2, 3))


def test_work_without_progress_has_an_end(worlds) -> None:
    world = worlds(1)
    store = world.store(patience=FAST)
    store.mark(1)
    handle = world.servers[0].handle

    def never(peer, message, reply):
        if isinstance(message.body, AskWork):
            reply(Message(message.run, message.generation, message.request, Working(7)))
        else:
            handle(peer, message, reply)

    world.listeners[0].close()
    world.listeners[0] = world.network.listen("server-0", never)
    before = world.network.now()
    with pytest.raises(DeadlineError, match=r"no progress with files of mark 1 .* server 0 at server-0"):
        store.save(1, Checkpoints(world.directory).begin(1).directory, NAMES)
    assert world.network.now() - before < 3 * FAST.deadline_s


def test_a_server_that_gives_up_pieces_again_and_again_is_not_asked_for_ever(worlds) -> None:
    world = worlds(1)
    store = world.store()
    handle, asked = world.servers[0].handle, []

    def forgetful(peer, message, reply):
        if isinstance(message.body, Keep):
            asked.append(message.body.offset)
            world.servers[0]._marking._pieces.clear()
        handle(peer, message, reply)

    world.listeners[0].close()
    world.listeners[0] = world.network.listen("server-0", forgetful)
    with pytest.raises(StoreError, match="was given up by the server 4 times"):
        store.keep(1, "trainer-0", bytes(9 << 20))
    assert asked.count(0) == 4


@pytest.mark.parametrize("lie", ["size", "checksum", "length"])
def test_kept_bytes_that_are_not_as_announced_are_refused(worlds, lie) -> None:
    world = worlds(1)
    store = world.store()
    store.keep(1, "trainer-0", b"something")
    store.mark(1)
    handle = world.servers[0].handle

    def lying(peer, message, reply):
        def answer(said):
            body = said.body
            if type(body).__name__ == "Kept" and lie != "length":
                (blob,) = body.blobs
                changed = {"size": (blob.name, 1 << 40, blob.crc32), "checksum": (blob.name, blob.num_bytes, 1)}[lie]
                said = Message(said.run, said.generation, said.request, type(body)([type(blob)(*changed)]))
            elif type(body).__name__ == "Blob" and lie == "length":
                said = Message(said.run, said.generation, said.request, body, [said.buffers[0][:3]])
            reply(said)

        handle(peer, message, answer)

    world.listeners[0].close()
    world.listeners[0] = world.network.listen("server-0", lying)
    with pytest.raises(WireError, match=r"trainer-0"):
        store.kept(1)


def test_an_answer_of_another_kind_is_not_believed(worlds) -> None:
    world = worlds(1)
    store = world.store()
    world.listeners[0].close()
    world.listeners[0] = world.network.listen(
        "server-0",
        lambda _, message, reply: reply(Message(message.run, message.generation, message.request, Working(0))),
    )
    for call in (store.marks, lambda: store.keep(1, "a", b""), lambda: store.kept(1), lambda: store.mark(1)):
        with pytest.raises(WireError, match="a server answered Working where"):
            call()
