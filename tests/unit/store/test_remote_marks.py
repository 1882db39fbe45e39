"""Marks and checkpoints of rows on servers: whatever the network does and whoever dies, replay gives the same bits."""

from __future__ import annotations

import random

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from bagpipe.checkpoint.directory import Checkpoints
from bagpipe.errors import CheckpointError, DeadlineError, StoreError, WireError
from bagpipe.store.links import Patience
from bagpipe.store.recovering import marks_of_servers, recover_servers
from bagpipe.wire.messages import Message
from bagpipe.wire.recovery_messages import AskWork, Keep, Mark, Working
from marked import FACTS, NAMES, RUN, TABLES, Marking, read, some_rows
from simulated_disk import SimulatedDisk

TROUBLE = {"delay": (0.0, 0.3), "loss": 0.1, "duplicate": 0.2, "reorder": 0.3}
EVERY = 4
FAST = Patience(retry_s=0.5, deadline_s=20.0, trainers_s=3.0)


@pytest.fixture
def worlds(tmp_path):
    made = []

    def make(*arguments, **options):
        made.append(Marking(tmp_path / f"run-{len(made)}", *arguments, **options))
        return made[-1]

    yield make
    for world in made:
        world.close()


def rows(*numbers):
    return np.array(numbers, np.int64)


def full(number, num_rows, table=0):
    return np.full((num_rows, TABLES[table].width), number, np.float32)


# Bits


def iterate(stores, iteration, seed):
    """One iteration of two trainers, who write rows of their own; what it writes depends on its number alone."""
    for trainer, store in enumerate(stores):
        rng = np.random.default_rng([seed, iteration, trainer])
        parts = [(table, ids * 2 + trainer, values) for table, ids, values in some_rows(rng)]
        store.write_many(parts, passed=iteration)


def run_undisturbed(path, seed, iterations):
    world = Marking(path, seed=seed, journal=False)
    stores = [world.store(trainer=trainer, trainers=2) for trainer in range(2)]
    for iteration in range(iterations):
        iterate(stores, iteration, seed)
    found = world.rows()
    world.close()
    return found


def crashed(disk, rng):
    """What is left of a disk: anything that was not synced may be gone."""
    length = len(disk.log)
    return disk.crashed(length, frozenset(number for number in disk.unsynced(length) if rng.random() < 0.5))


class Trained:
    """A run of two trainers over two servers that dies and comes back as a seed says."""

    def __init__(self, path, seed, shared, counted_on, network):
        self.rng, self.seed, self.shared, self.counted_on = random.Random(seed), seed, shared, counted_on
        disks = {} if shared else {"disks": {number: SimulatedDisk() for number in range(2)}}
        self.world = Marking(path, seed=seed, disk=SimulatedDisk() if shared else None, **disks, **network)
        self.done = self.base = 0
        self.saved = None
        self.stores = [self.world.store(trainer=trainer, trainers=2) for trainer in range(2)]

    def run(self, iterations, num_faults=3):
        faults = sorted(self.rng.randrange(1, iterations) for _ in range(num_faults))
        while self.done < iterations:
            if faults and self.done >= faults[0]:
                faults.pop(0)
                self.suffer()
            iterate_from(self.stores, self.done, self.base, self.seed)
            self.done += 1
            if self.done % EVERY == 0:
                self.mark()
        found = self.world.rows()
        self.world.close()
        return found

    def mark(self):
        done, first = self.done, self.stores[0]
        first.keep(done, "trainer-0", b"%d" % done)
        first.mark(done)
        if self.shared and self.rng.random() < 0.5:
            self.world.save(first, done)
            self.saved = done
        first.forget(done - EVERY)

    def suffer(self):
        """Some servers die; then all go back to a point that all can go back to, and trainers begin anew."""
        world, rng = self.world, self.rng
        for number in rng.choice([[0], [1], [0, 1], []]):
            world.kill(number)
            if not self.shared:  # its whole machine died
                world.disks[number] = crashed(world.disks[number], rng)
            world.start(number)
        common = set.intersection(*(set(server.marks()) for server in world.servers))
        point, files = max(common, default=None), None
        if self.saved is not None and (point is None or rng.random() < 0.3):
            point, files = self.saved, world.directory
        elif point is not None:
            assert world.servers[0].kept(point) == {"trainer-0": b"%d" % point}
        world.recover(point, files)
        world.checkpoints.continue_from(point if point == self.saved else None)
        self.done = point or 0
        self.base = 0 if self.counted_on else self.done
        late = {"passed": self.done - 1} if self.counted_on else {}
        options = {"generation": world.generation, "trainers": 2, **late}
        self.stores = [world.store(trainer=trainer, **options) for trainer in range(2)]


@settings(max_examples=25, deadline=None, suppress_health_check=list(HealthCheck))
@given(
    seed=st.integers(0, 10**6), shared=st.booleans(), trouble=st.sampled_from([{}, TROUBLE]), counted_on=st.booleans()
)
def test_after_any_deaths_a_return_and_a_replay_give_the_same_bits(tmp_path_factory, seed, shared, trouble, counted_on):
    expected = run_undisturbed(tmp_path_factory.mktemp("expected"), seed, 20)
    assert Trained(tmp_path_factory.mktemp("run"), seed, shared, counted_on, trouble).run(20) == expected


@pytest.mark.long
@pytest.mark.parametrize("seed", range(100))
def test_after_many_deaths_returns_and_replays_give_the_same_bits(tmp_path_factory, seed):
    expected = run_undisturbed(tmp_path_factory.mktemp("expected"), seed, 60)
    network = [{}, TROUBLE][seed // 4 % 2]
    run = Trained(tmp_path_factory.mktemp("run"), seed, seed % 2 == 1, seed // 2 % 2 == 1, network)
    assert run.run(60, num_faults=15) == expected


def iterate_from(stores, done, base, seed):
    """As `iterate`; the trainers' own count of iterations begins at `base`."""
    for trainer, store in enumerate(stores):
        rng = np.random.default_rng([seed, done, trainer])
        parts = [(table, ids * 2 + trainer, values) for table, ids, values in some_rows(rng)]
        store.write_many(parts, passed=done - base)
    if done > base:  # what every trainer has passed is read at once
        read(stores[0], rows(1, 2), after=done - base)
        read(stores[1], rows(1, 2), after=done - base - 1)


@pytest.mark.parametrize("servers", [1, 2, 3])
@pytest.mark.parametrize("network", [{}, TROUBLE], ids=["calm", "trouble"])
def test_a_checkpoint_of_two_servers_is_loaded_by_any_number(worlds, servers, network) -> None:
    world = worlds(2, seed=3, **network)
    store, rng = world.store(), np.random.default_rng(0)
    for done in range(1, 4):
        for _ in range(5):
            store.write_many(some_rows(rng))
        store.keep(done, "trainer-0", b"state %d" % done)
        store.mark(done)
        world.save(store, done)
        expected = world.rows()
    store.write_many(some_rows(rng))
    other = worlds(servers, seed=4, journal=False, **network)
    other.path = world.path
    for number in range(servers):
        other.kill(number)
        other.start(number)
    loaded = other.store()
    loaded.write(0, rows(10**6), full(1, 1))
    loaded.load(3, world.directory, NAMES)
    assert other.rows() == expected
    assert loaded.marks() == [3]
    loaded.write(0, rows(10**6), full(1, 1))
    loaded.return_to(3)
    assert other.rows() == expected
    assert Checkpoints(world.directory).open(3).blob("trainer-0") == b"state 3"


def test_a_server_comes_back_from_the_checkpoint_and_its_journal(worlds) -> None:
    world = worlds(2)
    store, rng = world.store(), np.random.default_rng(0)
    for done in range(1, 6):
        store.write_many(some_rows(rng))
        store.mark(done)
        if done == 3:
            world.save(store, done)
    expected = world.rows()
    store.write_many(some_rows(rng))
    journal = world.path / "journal" / "server-1"
    assert not (journal / "start.writes").exists(), "what a checkpoint holds is not kept twice"
    world.kill(1)
    world.start(1, generation=1)
    assert world.servers[1].marks() == [3, 4, 5]
    world.generation = 1
    world.recover(5)
    assert world.rows() == expected
    assert [server.marks()[-1] for server in world.servers] == [5, 5]


@pytest.mark.parametrize("lost", [None, 0])
def test_a_checkpoint_gives_what_was_not_kept_with_its_mark_in_time(worlds, lost) -> None:
    world = worlds(2)
    store = world.store()
    store.write_many(some_rows(np.random.default_rng(0)))
    store.keep(1, "trainer-1", b"one")
    store.mark(1)
    with Checkpoints(world.directory).begin(1) as pending:
        pending.add(store.save(1, pending.directory, NAMES))
        for name in ("trainer-0", "trainer-1"):
            pending.write_blob(name, name.encode())
        pending.commit(FACTS)
    expected = world.rows()
    assert world.servers[0].usable_marks(2) == []
    if lost is not None:
        world.kill(lost)
        world.start(lost)
    world.recover(1, world.directory)
    assert world.rows() == expected
    assert world.servers[0].kept(1) == {"trainer-0": b"trainer-0", "trainer-1": b"trainer-1"}
    assert world.servers[1].kept(1) == {}


def test_where_nothing_is_left_of_a_server_all_return_to_the_checkpoint_or_the_beginning(worlds) -> None:
    world = worlds(2, journal=False)
    store, rng = world.store(), np.random.default_rng(0)
    store.write_many(some_rows(rng))
    store.keep(1, "trainer-0", b"one")
    store.mark(1)
    world.save(store, 1)
    expected = world.rows()
    store.write_many(some_rows(rng))
    store.mark(2)
    world.kill(0)
    world.start(0)
    assert [server.marks() for server in world.servers] == [[], [1, 2]]
    with pytest.raises(StoreError, match=r"server 0 has no mark 2, but \[\]"):
        world.recover(2)
    with pytest.raises(StoreError, match="server 0 could not be recovered"):
        world.store(generation=world.generation)
    world.recover(1, world.directory)
    assert world.rows() == expected
    assert world.servers[0].kept(1) == {"trainer-0": b"one"}
    assert [server.usable_marks(1) for server in world.servers] == [[1], []]
    world.store(generation=world.generation).write_many(some_rows(rng))
    world.recover(None)
    assert world.rows() == [{}, {}]
    again = world.store(generation=world.generation)
    assert again.marks() == []
    assert read(again, rows(5)).tolist() == [[5, 5, 5]]


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


# Recovery by message


@pytest.mark.parametrize("network", [{}, TROUBLE], ids=["calm", "trouble"])
def test_servers_are_recovered_by_message_and_who_belongs_to_the_past_is_told_at_once(worlds, network) -> None:
    world = worlds(2, seed=5, **network)
    old = world.store(patience=Patience(retry_s=0.5, deadline_s=3600.0))
    old.write(0, rows(1, 2, 3), full(1, 3))
    old.mark(1)
    old.write(0, rows(1, 2, 3), full(2, 3))
    options = {"run": RUN, "generation": 3}
    assert marks_of_servers(world.network, world.addresses, **options) == [[1], [1]]
    recover_servers(world.network, world.addresses, done=1, checkpoints=world.directory, **options)
    before = world.network.now()
    for call in (lambda: read(old, rows(1)), lambda: old.write(0, rows(1), full(9, 1)), lambda: old.mark(2)):
        with pytest.raises((WireError, StoreError), match=r"this is generation 3|halfway"):
            call()
    assert world.network.now() - before < 60, "patience is for those who may come back"
    new = world.store(generation=3)
    assert read(new, rows(1, 2, 3))[:, 0].tolist() == [1, 1, 1]
    new.write(0, rows(1), full(5, 1))
    recover_servers(world.network, world.addresses, done=1, checkpoints=world.directory, **options)
    assert read(new, rows(1))[0, 0] == 5, "a copy of the message that began a generation does nothing"
    with pytest.raises(StoreError, match="generation 3 is at work on server 0"):
        recover_servers(world.network, world.addresses, done=None, **options)
    with pytest.raises(WireError, match="a message of generation 2"):
        recover_servers(world.network, world.addresses, run=RUN, generation=2, done=1)
    with pytest.raises(StoreError, match="was told at its start"):
        recover_servers(world.network, world.addresses, run=RUN, generation=4, done=1, checkpoints=world.path.parent)
    assert read(new, rows(1))[0, 0] == 5


def test_a_read_that_waits_when_a_generation_ends_is_told_so(worlds) -> None:
    world = worlds(1)
    old = world.store(trainer=0, trainers=2)
    handle = world.servers[0].handle

    def recover_meanwhile(peer, message, reply):
        handle(peer, message, reply)
        if world.servers[0].stats().parked:
            world.recover(None)

    world.listeners[0].close()
    world.listeners[0] = world.network.listen("server-0", recover_meanwhile)
    with pytest.raises(WireError, match="this is generation 1"):
        read(old, rows(1), after=7)
    assert world.servers[0].stats().parked == 0


def test_who_comes_before_a_recovery_is_over_waits_and_not_for_ever(worlds) -> None:
    world = worlds(1)
    world.servers[0].abandon(1)
    with pytest.raises(DeadlineError, match=r"was not ready for \d+ s, since its rows are being replaced"):
        world.store(generation=1, patience=FAST)
    world.servers[0].recover(1)
    world.store(generation=1)


def test_trainers_that_count_on_read_what_was_written_before_them(worlds) -> None:
    world = worlds(1)
    store = world.store()
    store.write_many([(0, rows(1), full(1, 1))], passed=9)
    store.mark(10)
    world.recover(10)
    first, second = (
        world.store(generation=1, trainer=trainer, trainers=2, passed=9, patience=FAST) for trainer in range(2)
    )
    assert read(first, rows(1), after=9)[0, 0] == 1
    first.write_many([], passed=10)
    world.servers[0]._members.watermark._parked_max = 0  # so that it comes again by itself
    with pytest.raises(DeadlineError, match=r"for trainers 1 \(at 9\)"):
        read(first, rows(1), after=10)
    second.write_many([], passed=10)
    assert read(first, rows(1), after=10)[0, 0] == 1


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
