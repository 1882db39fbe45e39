"""Marks and checkpoints as a store over servers offers them, and as they go wrong on the way."""

from __future__ import annotations

import pytest

from bagpipe.checkpoint.point import ResumePoint
from bagpipe.errors import CheckpointError, DeadlineError, StoreError, WireError
from bagpipe.wire.messages import NotYet, Written
from bagpipe.wire.recovery_messages import Confirm, Load, Mark, Save, Saved, Worked
from harness.calls import CUT
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
    assert read(store, rows(1, 2))[:, 0].tolist() == [2, 1], "its number was not that of the save again"
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
        with pytest.raises((WireError, StoreError), match="this is generation 1"):
            call()
    world.store(generation=1).confirm()


# What goes wrong on the way


@pytest.mark.parametrize("lost", [Mark, Save, Saved])
def test_what_has_an_unknown_outcome_ends_the_store_since_its_number_is_taken(worlds, lost) -> None:
    world = worlds(2)
    store = world.store(patience=FAST)
    store.write(0, rows(1, 2, 3), full(1, 3))
    world.overhear(1, lambda message, *answer: None if isinstance(message.body, lost) else answer)
    with pytest.raises(DeadlineError, match=r"waited 3\d s for .* from server 1 at server-1, .*says nothing"):
        world.save(store, 5)
    with pytest.raises(StoreError, match=r"servers were asked for .*, and not all have answered"):
        store.write(0, rows(1, 2, 3), full(2, 3))


@pytest.mark.parametrize("lost", [Mark, Save, Saved, Load])
def test_what_was_ordered_is_done_once_though_its_answers_are_cut(worlds, lost) -> None:
    """Whoever asks again on the next connection gets the outcome of what was done."""
    world = worlds(2, seed=2)
    store = world.store(patience=FAST)
    for turn in range(1, 4):
        store.write(0, rows(1, 2, 3), full(turn, 3))
        cuts = [0, 0]
        for server in range(2):

            def cut(message, *answer, server=server, cuts=cuts, turn=turn):
                if not isinstance(message.body, lost) or cuts[server] == turn:
                    return answer
                cuts[server] += 1
                return CUT

            world.overhear(server, cut)
        point = world.save(store, turn)
        store.write(0, rows(1, 2, 3), full(9, 3))
        store.restore(point, NAMES)
        assert read(store, rows(1, 2, 3))[:, 0].tolist() == [turn] * 3
        assert cuts == [turn, turn]
        assert store._session.sequences == {k: world.servers[k]._orders[0].last for k in range(2)}


@pytest.mark.parametrize("slow", [Save, Saved, Load])
def test_work_without_progress_has_an_end_and_with_progress_none(worlds, slow) -> None:
    world = worlds(1)
    store, now = world.store(patience=FAST), world.network.now
    server, waiting = world.servers[0], []

    def slowly(message, body, buffers):
        """Words pass; the first work has progress each time, and is done in the end, the second one has none."""
        if isinstance(body, NotYet) and isinstance(message.body, slow):
            (work,) = (each for each in server._held._works.values() if not each.is_over)
            if not stuck and now() > before + 3 * FAST.work_s:
                waiting.pop()()
            elif not stuck:
                work.progress += 1
        return body, buffers

    def background(work) -> None:
        asked = list(server._held._works)[-1][1]
        waiting.append(work) if asked in slow_numbers else work()

    slow_numbers = {{Save: 3, Saved: 4, Load: 5}[slow] + 5 * turn for turn in range(2)}
    server._background = background
    world.overhear(0, slowly)
    for stuck in (False, True):
        before = now()
        store.write(0, rows(1), full(1, 1))
        if stuck:
            with pytest.raises(DeadlineError, match=r"waited 3\d s for .* from server 0 at server-0, which works on"):
                store.restore(world.save(store, 2), NAMES)
            assert now() - before < 2 * FAST.work_s
        else:
            store.restore(world.save(store, 1), NAMES)
            assert 3 * FAST.work_s < now() - before < 4 * FAST.work_s, "it is waited for as long as it goes on"


def test_an_answer_of_another_kind_is_not_believed(worlds) -> None:
    for asked, told, named in (
        (Confirm, Worked(), "Worked came where Confirmed was due"),
        (Mark, Worked(), "Worked came where Written 1 was due"),
        (Mark, Written(2), "Written came where Written 1 was due"),
        (Save, Written(2), "Written came where Worked 2 was due"),
        (Save, Worked(), "Worked came where Worked 2 was due"),  # without files
    ):
        world = worlds(1)
        store = world.store()
        world.overhear(
            0,
            lambda message, *answer, asked=asked, told=told: (told, ()) if isinstance(message.body, asked) else answer,
        )
        with pytest.raises(WireError, match=named):
            store.confirm() if asked is Confirm else world.save(store, 1)


def test_files_that_a_server_tells_wrongly_are_no_checkpoint(worlds) -> None:
    world = worlds(1)
    store = world.store()
    world.overhear(
        0,
        lambda _, body, buffers: (body, [memoryview(b'[{"name": 1}]')] if isinstance(body, Worked) else buffers),
    )
    with pytest.raises(CheckpointError, match="a server told wrongly what files it wrote"):
        world.save(store, 1)
    assert list(world.directory.iterdir()) == []
