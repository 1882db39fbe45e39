"""Which checkpoints there are, what builds on what, and when an old one may go."""

from __future__ import annotations

import json
import logging
import os
from pathlib import Path

import msgspec
import pytest
from xxhash import xxh64_hexdigest

from bagpipe.checkpoint.directory import Checkpoints, complete_points
from bagpipe.checkpoint.manifest import RunFacts, decode_manifest
from bagpipe.checkpoint.point import directory_name
from bagpipe.errors import CheckpointError, ConfigError
from harness.checkpointed import DIRECTORY, FACTS, TABLES, World, load, opened, save
from harness.disk import SimulatedDisk


def run(dones, world=None, full_every=100, **options):
    """Checkpoints of one run, on a simulated disk; every so many are full."""
    checkpoints = opened(disk=SimulatedDisk(), **options)
    world = world or World(rows=8)
    world.train(0, share=1)  # so that it takes long until changes take more room than all rows
    for number, done in enumerate(dones):
        world.train(done, share=0.1)
        save(checkpoints, world, full=number % full_every == 0)
    return checkpoints, world


def numbers(checkpoints):
    return [checkpoint.done for checkpoint in checkpoints.list()]


@pytest.mark.parametrize(
    ("keep", "full_every", "expected"),
    [
        (1, 1, [70]),
        (2, 1, [60, 70]),
        (1, 3, [70]),
        (1, 4, [50, 60, 70]),
        (2, 3, [40, 50, 60, 70]),
        (3, 3, [40, 50, 60, 70]),
        (4, 3, [40, 50, 60, 70]),
        (5, 3, [10, 20, 30, 40, 50, 60, 70]),
    ],
)
def test_the_last_ones_stay_with_all_that_they_build_on(keep, full_every, expected):
    checkpoints, world = run([10, 20, 30, 40, 50, 60, 70], keep=keep, full_every=full_every)
    assert numbers(checkpoints) == expected
    assert load(checkpoints.latest()) == world.state()
    assert [path for path in checkpoints.disk.contents() if "/." in path] == []


def test_nothing_goes_before_the_new_one_was_read_back_and_has_its_name():
    checkpoints, _ = run([10, 20], keep=1, full_every=1)
    disk, done = checkpoints.disk, []
    for name in ("unlink", "remove_directory", "rename", "open", "sync_directory"):
        original = getattr(disk, name)

        def noted(path, *rest, name=name, original=original):
            done.append((name, path.name if name == "open" else path.parts[2][:5] if len(path.parts) > 2 else "/"))
            return original(path, *rest)

        setattr(disk, name, noted)
    world = World(rows=8)
    world.train(30)
    save(checkpoints, world, full=True)
    assert numbers(checkpoints) == [30]
    named = done.index(("rename", ".tmp-"))
    assert [step for step in done[:named] if step[0] in ("unlink", "remove_directory", "rename")] == []
    assert ("open", "rows-0-00000.safetensors") in done[:named]
    assert ("open", "trainer-0.safetensors") in done[:named]
    assert ("open", "manifest.json") in done[:named]
    assert done[named + 1] == ("sync_directory", "/")
    assert ("unlink", ".old-") in done[named + 2 :]


@pytest.mark.parametrize("name", ["rows-0-00000.safetensors", "trainer-0.safetensors", "manifest.json"])
def test_a_file_that_reads_back_as_something_else_never_becomes_visible(name):
    checkpoints, _ = run([10], keep=1)
    disk = checkpoints.disk
    original = disk.open

    def lying(path):
        file = original(path)
        if path.name == name and ".tmp-" in str(path):
            file.file.data[5] ^= 1
        return file

    disk.open = lying
    world = World(rows=8)
    world.train(20)
    with pytest.raises(CheckpointError, match=name):
        save(checkpoints, world)
    assert numbers(checkpoints) == [10]
    assert [path for path in disk.contents() if "/." in path] == []


def test_a_run_that_goes_on_builds_on_what_it_says_it_goes_on_from():
    checkpoints, world = run([10, 20], keep=9)
    again = opened(disk=checkpoints.disk, keep=9)
    world.train(30)
    assert save(again, world).chain == [30]
    again = opened(disk=checkpoints.disk, keep=9)
    again.continue_from(30)
    world.train(40)
    assert save(again, world).chain == [30, 40]
    world.train(50)
    assert save(again, world, full=True).chain == [50]
    assert load(again.open(40))
    again.continue_from(None)
    assert again.begin(60).base is None


def test_a_run_that_went_back_replaces_the_future_that_it_left():
    checkpoints, _ = run([10, 20, 30], keep=9)
    again = opened(disk=checkpoints.disk, keep=9)
    other = World(rows=8)
    other.train(10)
    other.train(20, share=1)
    again.continue_from(10)
    left = load(again.open(30))
    assert again.discard_after(10) == [20, 30]
    checkpoint = save(again, other)
    assert checkpoint.chain == [10, 20]
    assert numbers(again) == [10, 20]
    assert load(checkpoint) != left


def test_what_came_after_one_can_be_given_up_once_that_one_is_verified():
    checkpoints, world = run([10, 20, 30, 40], keep=9, full_every=2)
    path = DIRECTORY / directory_name(20) / "trainer-0.safetensors"
    data = checkpoints.disk.contents()[str(path)]
    checkpoints.disk.write_file(path, b"")
    with pytest.raises(CheckpointError, match="trainer-0"):
        checkpoints.discard_after(20)
    checkpoints.disk.write_file(path, data)
    assert checkpoints.discard_after(20) == [30, 40]
    assert numbers(checkpoints) == [10, 20]
    world.train(25)
    assert save(checkpoints, world, full=True).chain == [25]


def test_a_base_that_is_another_than_it_was_is_refused():
    checkpoints, _ = run([10, 20], keep=9)
    other, _ = run([10], World(rows=3), keep=9)
    path = DIRECTORY / directory_name(10)
    for name, data in other.disk.contents().items():
        if name.startswith(str(path)) and data is not None:
            checkpoints.disk.write_file(Path(name), data)
    with pytest.raises(CheckpointError, match="00000010 is not what /checkpoints/00000020 builds on"):
        checkpoints.open(20)
    assert numbers(checkpoints) == [10]


def test_two_runs_in_one_directory_are_noticed_before_their_rows_mix():
    checkpoints, world = run([10], keep=9)
    other, theirs = opened(disk=checkpoints.disk, keep=9), World(rows=8)
    theirs.train(10, share=1)
    save(other, theirs)
    world.train(20)
    with pytest.raises(CheckpointError, match="00000010 is another run's by now: give each run a directory of its own"):
        save(checkpoints, world)
    theirs.train(20)
    assert load(save(other, theirs)) == theirs.state()


def test_directories_of_others_with_numbers_for_names_stay(tmp_path):
    photo = tmp_path / "20240101" / "photo.jpg"
    photo.parent.mkdir()
    photo.touch()
    checkpoints, world = opened(tmp_path, keep=1), World()
    for done in (10, 20):
        world.train(done)
        save(checkpoints, world, full=True)
    assert checkpoints.prune() == []
    assert photo.exists()
    assert numbers(checkpoints) == [20]


@pytest.mark.parametrize("name", [".tmp-mine", ".old-00000010", ".tmp-00000010-0-notes", ".tmp-00000010-0123abcd-1"])
def test_directories_of_others_that_begin_like_leftovers_stay(tmp_path, name):
    notes, leftover = tmp_path / name / "notes.txt", tmp_path / ".tmp-00000010-0-0123abcd"
    for directory in (notes.parent, leftover):
        directory.mkdir()
    notes.touch()
    opened(tmp_path).begin(20).abandon()
    assert notes.exists()
    assert not leftover.exists()


def test_one_of_other_tables_can_not_build_on_it():
    checkpoints, world = run([10], keep=9)
    other = msgspec.structs.replace(TABLES[0], optimizer="sgd")
    world.train(20)
    with pytest.raises(CheckpointError, match=r"can't build on .*00000010.* has optimizer rowwise_adagrad in"):
        save(checkpoints, world, facts=RunFacts(tables=(other, TABLES[1])))
    assert numbers(checkpoints) == [10]
    assert save(checkpoints, world).chain == [10, 20]


def test_what_builds_on_nothing_is_no_checkpoint(caplog):
    checkpoints, world = run([10, 20, 30], keep=9)
    disk = checkpoints.disk
    disk.rename(DIRECTORY / directory_name(20), DIRECTORY / "elsewhere")
    assert numbers(checkpoints) == [10]
    assert "there is no checkpoint /checkpoints/00000020" in checkpoints.scan()[-1].problem
    assert checkpoints.latest().done == 10
    world.train(40)
    with caplog.at_level(logging.WARNING):
        assert save(checkpoints, world).chain == [40]
    assert "the next checkpoint has all rows, since the last one can't be built on" in caplog.text


def test_pruning_verifies_the_newest_first():
    checkpoints, _ = run([10, 20, 30, 40], keep=9, full_every=2)
    few = opened(disk=checkpoints.disk, keep=1)
    path = DIRECTORY / directory_name(30) / "rows-0-00000.safetensors"
    data = checkpoints.disk.contents()[str(path)]
    checkpoints.disk.write_file(path, data[:-1] + b"\xff")
    with pytest.raises(CheckpointError, match="rows-0-00000"):
        few.prune()
    assert numbers(few) == [10, 20, 30, 40]
    checkpoints.disk.write_file(path, data)
    assert few.prune() == [10, 20]
    assert numbers(few) == [30, 40]
    assert few.prune() == []


def test_one_that_can_not_be_opened_stays_until_its_time_has_come():
    checkpoints, world = run([10, 20, 30], keep=2, full_every=1)
    path = DIRECTORY / directory_name(30) / "manifest.json"
    checkpoints.disk.write_file(path, b"")
    world.train(40)
    save(checkpoints, world, full=True)
    assert [found.done for found in checkpoints.scan()] == [20, 30, 40]
    world.train(50)
    save(checkpoints, world, full=True)
    assert [found.done for found in checkpoints.scan()] == [40, 50]


def test_leaving_without_a_commit_leaves_nothing():
    checkpoints, _ = run([10])
    before = checkpoints.disk.contents()
    with checkpoints.begin(20) as pending:
        pending.write_blob("trainer-0", b"x")
        assert checkpoints.disk.contents() != before
    assert checkpoints.disk.contents() == before
    pending.abandon()
    pending = checkpoints.begin(20)
    checkpoints.disk.create(pending.directory / "stranger").close()
    with pytest.raises(CheckpointError, match=r"'stranger'\] too many or too few"):
        pending.commit(FACTS)
    assert checkpoints.disk.contents() == before


def test_a_name_is_whole_or_it_is_not_looked_at(tmp_path):
    world = World()
    world.train(10)
    checkpoints = opened(tmp_path)
    save(checkpoints, world)
    (tmp_path / "00000020").symlink_to(tmp_path / "00000010", target_is_directory=True)
    (tmp_path / "30").mkdir()
    (tmp_path / "notes").mkdir()
    (tmp_path / "00000040").write_text("a file")
    (tmp_path / "99999999999999999999").mkdir()
    assert numbers(checkpoints) == [10]
    assert [found.done for found in checkpoints.scan()] == [10]
    with pytest.raises(CheckpointError, match="no checkpoint after 20 iterations"):
        checkpoints.open(20)
    (tmp_path / "00000050").mkdir()
    assert "manifest.json: No such file" in checkpoints.scan()[-1].problem
    (tmp_path / "00000010").rename(tmp_path / "00000060")
    assert "00000060 is of 10 iterations" in checkpoints.scan()[-1].problem


@pytest.mark.parametrize("name", ["rows-0-00000.safetensors", "trainer-0.safetensors", "manifest.json"])
def test_symbolic_links_and_pipes_are_not_read(tmp_path, name):
    world = World()
    world.train(10)
    checkpoints = opened(tmp_path / "c")
    path = save(checkpoints, world).directory / name
    path.rename(tmp_path / "elsewhere")
    path.symlink_to(tmp_path / "elsewhere")
    with pytest.raises(CheckpointError, match=f"{name}.*it is a symbolic link, which is not followed"):
        checkpoints.open(10).verify()
    path.unlink()
    os.mkfifo(path)
    with pytest.raises(CheckpointError, match=name):
        checkpoints.open(10).verify()


@pytest.mark.parametrize("name", ["../00000010/trainer-0.safetensors", "/etc/hostname", "a/b", ".."])
def test_a_manifest_that_names_a_file_elsewhere_is_refused(tmp_path, name):
    checkpoint = save(opened(tmp_path), World())
    path = checkpoint.directory / "manifest.json"
    record = json.loads(path.read_text())
    record.pop("checksum")
    record["files"][0]["name"] = name
    head = json.dumps(record).encode().removesuffix(b"}") + b","
    path.write_bytes(head + b'\n "checksum": "%s"\n}\n' % xxh64_hexdigest(head).encode())
    with pytest.raises(CheckpointError, match=r"\$\.files\[0\]\.name"):
        opened(tmp_path).open(0)
    record["files"][0]["name"] = "trainer-0.safetensors"
    head = json.dumps(record).encode().removesuffix(b"}") + b","
    assert decode_manifest(path, head + b'\n "checksum": "%s"\n}\n' % xxh64_hexdigest(head).encode())


def test_a_directory_is_made_with_its_parents_and_a_file_in_its_place_is_refused(tmp_path):
    assert save(opened(tmp_path / "a" / "b"), World()).done == 0
    (tmp_path / "file").write_text("")
    assert opened(tmp_path / "file").latest() is None
    with pytest.raises(CheckpointError, match="Not a directory"):
        opened(tmp_path / "file").begin(1)


def test_a_chain_is_made_full_when_its_changes_take_more_room_than_all_rows():
    checkpoints, world = opened(disk=SimulatedDisk(), keep=99), World(rows=400)
    world.train(0, share=1)
    chains = []
    for done in range(1, 30):
        world.train(done, share=0.2)
        chains.append(save(checkpoints, world).chain)
        assert load(checkpoints.latest()) == world.state()
    full = [chain[0] for chain in chains if len(chain) == 1]
    assert full[0] == 1
    assert 4 <= full[1] - full[0] <= 8
    assert 4 <= full[2] - full[1] <= 8


def test_those_for_recovery_go_with_the_next_one_and_those_of_the_user_stay():
    checkpoints, world = opened(disk=SimulatedDisk(), keep=2), World(rows=8)
    for done in range(1, 13):
        world.train(done, share=1)
        save(checkpoints, world, full=True, retained=done % 3 == 0)
        wanted = [*range(3, done + 1, 3)][-2:]
        assert numbers(checkpoints) == sorted({*wanted, done})


def test_all_trainers_write_into_one_directory_and_the_first_one_waits_for_their_states():
    disk = SimulatedDisk()
    first, other = (opened(disk=disk, generation=2, token="0123abcd") for _ in range(2))
    other.write_state(10, "trainer-1", b"one")
    with first.begin(10) as pending:
        pending.write_blob("trainer-0", b"zero")
        pending.take_states(["trainer-1"])
        checkpoint = pending.commit(FACTS)
    assert (checkpoint.blob("trainer-0"), checkpoint.blob("trainer-1")) == (b"zero", b"one")
    assert checkpoint.manifest.generation == 2
    other.write_state(20, "trainer-1", b"one")  # it is ahead: a leftover of nobody
    with first.begin(15) as pending:
        pending.commit(FACTS)
    with first.begin(20) as pending:
        pending.take_states(["trainer-1"])
    later = opened(disk=disk, generation=3)
    later.begin(30).abandon()
    assert not [path for path in disk.contents() if "/." in path]


def test_one_who_is_not_to_go_on_names_nothing():
    checkpoints, world = run([10])

    def refuse():
        raise CheckpointError("generation 1 goes on")

    world.train(20)
    pending = checkpoints.begin(20)
    with pytest.raises(CheckpointError, match="generation 1 goes on"):
        pending.commit(FACTS, refuse)
    assert numbers(checkpoints) == [10]
    later = opened(disk=checkpoints.disk, generation=1)
    checkpoints.begin(20)
    save(later, world)
    late = checkpoints.begin(20)
    with pytest.raises(CheckpointError, match="was written by generation 1 of the run, and this is 0"):
        late.commit(FACTS)
    assert load(later.open(20)) == world.state()


def test_points_are_found_by_name_and_by_listing():
    checkpoints, _ = run([10, 20])
    disk, elsewhere = checkpoints.disk, Path("/elsewhere")
    other, world = Checkpoints(elsewhere, disk=disk), World(rows=3)
    world.train(30)
    save(other, world)
    told = [DIRECTORY / directory_name(20), DIRECTORY / directory_name(25), elsewhere / directory_name(30)]
    found = complete_points(told, DIRECTORY, disk)
    assert sorted(point.done for point in found) == [10, 20, 30]
    hidden = disk.directories
    disk.directories = lambda path: [name for name in hidden(path) if name != directory_name(20) or listed]
    listed = False
    assert sorted(point.done for point in complete_points([], DIRECTORY, disk)) == [10]
    listed = True
    assert all(point.open(disk).done == point.done for point in found)


@pytest.mark.parametrize("options", [{"keep": 0}, {"keep": 2.5}, {"keep": "3"}], ids=str)
def test_options_out_of_range_are_refused(options):
    with pytest.raises(ConfigError, match=f"checkpoint.{next(iter(options))}"):
        Checkpoints(DIRECTORY, **options)


@pytest.mark.parametrize("moment", ["open", "rename"])
def test_a_state_that_comes_to_a_checkpoint_that_was_given_up_is_no_error_of_its_trainer(tmp_path, moment):
    """The first trainer says what went wrong, and is not outrun by one that only finds the directory gone."""
    first, other = (Checkpoints(tmp_path / "checkpoints", token="0123abcd") for _ in range(2))
    pending, inner = first.begin(10, full=True), getattr(other.disk, moment)

    def given_up_before(*arguments):
        pending.abandon()
        return inner(*arguments)

    setattr(other.disk, moment, given_up_before)
    other.write_state(10, "trainer-1", b"one")
    assert first.numbers() == []


def test_a_state_that_can_not_be_written_is_an_error(tmp_path):
    checkpoints = Checkpoints(tmp_path / "checkpoints")

    def full(*_):
        raise OSError(28, "No space left on device")

    with checkpoints.begin(10, full=True):
        checkpoints.disk.rename = full
        with pytest.raises(CheckpointError, match="No space left"):
            checkpoints.write_state(10, "trainer-1", b"one")
