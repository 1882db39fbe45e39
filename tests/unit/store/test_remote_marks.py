"""Marks and checkpoints as a store over servers offers them, and as they go wrong on the way."""

from __future__ import annotations

import pytest

from bagpipe.checkpoint.directory import Checkpoints
from bagpipe.checkpoint.point import ResumePoint
from bagpipe.errors import CheckpointError, DeadlineError, StoreError, WireError
from bagpipe.wire.messages import Message, Open
from bagpipe.wire.recovery_messages import AskWork, Mark, Save, Saved, Worked, Working
from harness.marked import (
    NAMES,
    fixture_worlds,  # noqa: F401
    full,
    read,
    rows,
)
from harness.remote_world import FAST, TROUBLE

# What a store offers


@pytest.mark.parametrize("rollback", [True, False])
def test_rows_written_after_a_checkpoint_are_undone(worlds, rollback) -> None:
    world = worlds(2, safety={"rollback": rollback}, **TROUBLE)
    store = world.store()
    store.write(0, rows(1, 2), full(1, 2))
    first = world.save(store, 10)
    store.write(0, rows(2, 3), full(2, 2))
    store.mark(20)
    store.write(1, rows(1), full(3, 1, table=1))
    with pytest.raises(StoreError, match="mark 15 comes after mark 20"):
        store.mark(15)
    store.restore(first, NAMES)
    assert read(store, rows(1, 2, 3))[:, 0].tolist() == [1, 1, 3]
    assert [store.num_rows(table) for table in range(2)] == [2, 0]
    store.write(0, rows(3), full(5, 1))
    second = world.save(store, 20)
    store.write(0, rows(1, 3), full(7, 2))
    for point, expected in ((second, [1, 1, 5]), (first, [1, 1, 3]), (second, [1, 1, 5])):
        store.restore(point, NAMES)
        assert read(store, rows(1, 2, 3))[:, 0].tolist() == expected


def test_a_checkpoint_has_the_rows_of_its_mark_while_others_are_written(worlds) -> None:
    world = worlds(1)
    store = world.store()
    store.write(0, rows(1, 2, 3), full(1, 3))
    store.mark(1)
    store.write(0, rows(2, 4), full(9, 2))
    entries = store.save(1, world.checkpoints.begin(1).directory, NAMES)
    assert [(entry.name, entry.rows[0].rows) for entry in entries] == [("rows-0-00000.safetensors", 3)]
    store.saved(1, world.directory / "00000001")
    store.mark(2)
    since = store.save(2, world.checkpoints.begin(2).directory, NAMES, since=1)
    assert since[0].rows[0].rows == 2


@pytest.mark.parametrize("place", ["elsewhere", "run-0/../elsewhere", "run-0/checkpoints/link/inside"])
def test_a_directory_that_the_servers_were_not_told_of_is_refused(worlds, tmp_path, place) -> None:
    world = worlds(2)
    (tmp_path / "elsewhere" / "inside").mkdir(parents=True)
    world.directory.mkdir(parents=True)
    (world.directory / "link").symlink_to(tmp_path / "elsewhere")
    store = world.store()
    store.mark(1)
    for call in (
        lambda: store.save(1, tmp_path / place, NAMES),
        lambda: store.saved(1, tmp_path / place),
        lambda: store.restore(ResumePoint(1, tmp_path / place, ""), NAMES),
    ):
        with pytest.raises(StoreError, match=r"checkpoints in .*: server 0 was told at its start to use only"):
            call()
    assert list((tmp_path / "elsewhere" / "inside").iterdir()) == []
    store.write(0, rows(1), full(1, 1))
    assert read(store, rows(1))[0, 0] == 1


def test_a_checkpoint_that_is_not_there_or_of_another_model_is_named_and_the_store_can_load_another(worlds) -> None:
    world = worlds(2, safety={"rollback": False})
    store = world.store()
    store.write(0, rows(1, 2, 5), full(1, 3))
    point = world.save(store, 1)
    store.write(0, rows(1), full(2, 1))
    for wrong, names, named in (
        (ResumePoint(2, world.directory / "00000002", point.checksum), NAMES, "no checkpoint .*00000002"),
        (ResumePoint(1, point.checkpoint, "00"), NAMES, "written anew meanwhile"),
        (point, ["ad", "other"], "of another model"),
    ):
        with pytest.raises(CheckpointError, match=named):
            store.restore(wrong, names)
    with pytest.raises(StoreError, match="1 names for 2 tables"):
        store.restore(point, ["ad"])
    assert read(store, rows(1, 2))[:, 0].tolist() == [2, 1], "nothing has changed"
    (damaged,) = point.checkpoint.glob("rows-1-*")
    whole = damaged.read_bytes()
    damaged.write_bytes(whole[:-1] + bytes([whole[-1] ^ 1]))
    with pytest.raises(CheckpointError, match=r"server 1 at server-1: .* is damaged"):
        store.restore(point, NAMES)
    for call in (lambda: read(store, rows(1)), lambda: store.mark(3), store.confirm):
        with pytest.raises(StoreError, match="failed halfway"):
            call()
    with pytest.raises(StoreError, match="half replaced: load a checkpoint"):
        read(world.store(), rows(1, 2, 5))
    damaged.write_bytes(whole)
    store.restore(point, NAMES)
    assert read(store, rows(1, 2))[:, 0].tolist() == [1, 1]


def test_a_full_disk_is_told_to_whoever_saves_and_training_goes_on(worlds) -> None:
    world = worlds(2)
    store = world.store()
    store.write(0, rows(*range(50)), full(1, 50))
    store.mark(1)
    missing = world.directory / ".tmp-00000001"
    with pytest.raises(CheckpointError, match=r"server \d at server-\d: can't write .*\.tmp-00000001/rows-"):
        store.save(1, missing, NAMES)
    store.write(0, rows(1), full(2, 1))
    world.save(store, 2)


def test_nothing_is_made_durable_for_a_generation_that_is_over(worlds) -> None:
    """A trainer that was cut off, and thought to be dead, has written all files of a checkpoint."""
    world = worlds(2, **TROUBLE)
    store = world.store()
    store.write(0, rows(1), full(1, 1))
    point = world.save(store, 1)
    store.confirm()
    store.mark(2)
    with world.checkpoints.begin(2) as pending:
        pending.add(store.save(2, pending.directory, NAMES))
        world.servers[0].recover(1, point)  # the others will be, in a moment
        with pytest.raises(WireError, match="this is generation 1"):
            pending.commit(point.open().manifest, store.confirm)
    assert [path.name for path in world.directory.iterdir()] == ["00000001"]
    world.servers[1].recover(1, point)
    for call in (
        lambda: store.mark(3),
        lambda: store.save(2, pending.directory, NAMES),
        lambda: store.saved(2, world.directory / "00000002"),
        lambda: store.restore(point, NAMES),
        store.confirm,
    ):
        with pytest.raises(WireError, match="this is generation 1"):
            call()
    world.store(generation=1).confirm()


# What goes wrong on the way


@pytest.mark.parametrize("lost", [Mark, Save, Saved])
def test_what_has_an_unknown_outcome_ends_the_store_since_its_number_is_taken(worlds, lost) -> None:
    world = worlds(2)
    store = world.store(patience=FAST)
    store.write(0, rows(1, 2, 3), full(1, 3))

    def silent(handle, peer, message, reply):
        handle(peer, message, (lambda _: None) if isinstance(message.body, lost) else reply)

    world.replace(1, silent)
    with pytest.raises(StoreError, match=r"server 1 at server-1 did not answer for .* asked for"):
        world.save(store, 5)
    with pytest.raises(StoreError, match=r"servers were asked for .*, and not all have answered"):
        store.write(0, rows(1, 2, 3), full(2, 3))


@pytest.mark.parametrize("slow", [Save, Saved])
def test_work_without_progress_has_an_end_and_with_progress_none(worlds, slow) -> None:
    world = worlds(1)
    store, numbers, until = world.store(patience=FAST), set(), 3 * FAST.deadline_s
    now = world.network.now

    def slowly(handle, peer, message, reply):
        body = message.body
        if isinstance(body, slow):
            numbers.add(body.sequence)
        if isinstance(body, AskWork) and body.sequence in numbers and (now() < until or body.sequence > 4):
            told = Working(int(min(now(), until) // 10))
            reply(Message(message.run, message.generation, message.request, told))
        else:
            handle(peer, message, reply)

    world.replace(0, slowly)
    world.save(store, 1)  # numbers 1 to 3
    assert until < now() < 2 * until, "it is waited for as long as it goes on"
    store.write(0, rows(1), full(1, 1))
    before = now()
    with pytest.raises(DeadlineError, match=r"no progress with .* server 0 at server-0"):
        world.save(store, 2)
    assert now() - before < 2 * FAST.deadline_s


def test_an_answer_of_another_kind_is_not_believed(worlds) -> None:
    world = worlds(1)
    store = world.store()
    store.mark(1)

    def wrong(handle, peer, message, reply):
        told = Worked() if isinstance(message.body, AskWork) else Working(0)
        if isinstance(message.body, Open | Save):
            handle(peer, message, reply)
        else:
            reply(Message(message.run, message.generation, message.request, told))

    world.replace(0, wrong)
    place = Checkpoints(world.directory).begin(1).directory
    for call, named in (
        (store.confirm, "answered Working where Confirmed"),
        (lambda: store.save(1, place, NAMES), "answered Worked where Worked"),
        (lambda: store.mark(2), "answered Working where"),
    ):
        with pytest.raises(WireError, match=named):
            call()


def test_files_that_a_server_tells_wrongly_are_no_checkpoint(worlds) -> None:
    world = worlds(1)
    store = world.store()

    def lying(handle, peer, message, reply):
        def answer(said):
            if isinstance(said.body, Worked):
                said = Message(said.run, said.generation, said.request, said.body, [memoryview(b'[{"name": 1}]')])
            reply(said)

        handle(peer, message, answer)

    world.replace(0, lying)
    with pytest.raises(CheckpointError, match="a server told wrongly what files it wrote"):
        world.save(store, 1)
    assert list(world.directory.iterdir()) == []
