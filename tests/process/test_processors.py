"""Data processors as processes: one order whatever happens to them, and none is left when nobody reads (I1, I2)."""

from __future__ import annotations

import gc
import logging
import os
import signal
import subprocess
import sys
import time
from itertools import islice
from pathlib import Path

import pytest

from bagpipe.data import Shards, generated, write
from bagpipe.data.processors import pool
from bagpipe.errors import DeadlineError, PipelineError, ShardError

SAMPLES, BATCH = 9000, 7
"""64 batches are read at once, so these are 21 groups an epoch."""


def flatten(batch):
    tensors = [batch.dense, batch.labels]
    for ids in batch.sparse.values():
        tensors += [part for part in (ids.values, ids.offsets, ids.weights) if part is not None]
    return batch.number, list(batch.sparse), [(t.dtype, tuple(t.shape), t.numpy().tobytes()) for t in tensors]


@pytest.fixture(scope="module")
def shards(tmp_path_factory):
    path = tmp_path_factory.mktemp("data") / "tiny"
    write(generated("tiny", SAMPLES), path, shard_samples=2500)
    return Shards(path)


@pytest.fixture(scope="module")
def expected(shards):
    return [flatten(batch) for batch in shards.batches(BATCH, epochs=2, seed=3)]


class Started(list):
    """The processes started during a test, in order."""

    def __init__(self):
        super().__init__()
        self.processors = {}
        """Who reads the batches of each place in the order."""


@pytest.fixture(autouse=True)
def started(monkeypatch):
    """Notes the processes of a test; none may be there at its end."""
    started = Started()
    start = pool.Processor._start

    def note(processor, group):
        processor._deadline_s = pool.DEADLINE_S
        process, channel = start(processor, group)
        started.append(process)
        started.processors[processor.place] = processor
        return process, channel

    monkeypatch.setattr(pool.Processor, "_start", note)
    yield started
    assert all(process.returncode is not None for process in started)
    assert not any(is_there(process.pid) for process in started)


def is_there(pid):
    """Whether a process runs; one that has ended and waits for its parent does not."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except FileNotFoundError:
        return False


def wait_until(condition, seconds=30.0):
    until = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < until, "waited too long"
        time.sleep(0.02)


@pytest.mark.parametrize(("processes", "start"), [(1, 0), (2, 5), (3, 1286)])
def test_batches_are_those_of_one_process_whatever_the_number_of_processors(shards, expected, processes, start):
    reading = pool.read(shards, BATCH, epochs=2, seed=3, processes=processes, start=start)
    assert [flatten(batch) for batch in reading] == expected[start:]


def test_a_processor_that_is_killed_or_stuck_is_replaced_and_the_order_stays(shards, expected, started, caplog):
    reading = pool.read(shards, BATCH, epochs=2, seed=3, processes=2)
    found = []

    def take(count):
        found.extend(flatten(batch) for batch in islice(reading, count))

    with caplog.at_level(logging.WARNING, "bagpipe"):
        take(1)
        os.kill(started[1].pid, signal.SIGKILL)  # before anything of it was taken
        take(200)
        os.kill(started[0].pid, signal.SIGSTOP)
        started.processors[0]._deadline_s = 0.5
        take(500)  # what had arrived, and what its successor reads
        os.kill(started[-1].pid, signal.SIGKILL)
        take(10_000)
    assert found == expected
    assert len(started) == 5
    texts = [record.getMessage() for record in caplog.records]
    assert len(texts) == 3
    assert f"process {started[1].pid}" in texts[0]
    assert "was killed; was there not enough memory?; another one takes its place" in texts[0]
    assert "gave nothing for 0.5 s" in texts[1]


def test_batches_are_not_made_without_end_and_a_consumer_who_stops_ends_everything(shards, started):
    reading = pool.read(shards, BATCH, epochs=10**6, processes=2)
    next(reading)
    pids = [process.pid for process in started]

    def sleeping():
        return [Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] for pid in pids] == ["S", "S"]

    wait_until(sleeping)  # for slots
    slots = [slot for processor in started.processors.values() for slot in processor._slots]
    assert sum(os.fstat(slot.descriptor).st_size for slot in slots) < 2 * pool.SLOTS * 64 * BATCH * 1000
    for process in started:
        names = [(task / "comm").read_text() for task in Path(f"/proc/{process.pid}/task").iterdir()]
        assert len([name for name in names if "jemalloc" not in name]) == 1  # pyarrow's allocator tidies up in its own
        os.kill(process.pid, signal.SIGINT)  # not theirs
    assert sum(1 for _ in islice(reading, 200)) == 200
    assert len(started) == 2
    del reading
    gc.collect()
    assert not any(map(is_there, pids))


PARENT = """
import sys, time
from bagpipe.data import Shards
from bagpipe.data.processors import pool

start = pool.Processor._start
def note(processor, group):
    found = start(processor, group)
    print(found[0].pid, flush=True)
    return found
pool.Processor._start = note
reading = pool.read(Shards(sys.argv[1]), 7, epochs=10**6, processes=2)
next(reading)
print("reading", flush=True)
time.sleep(60)
"""


def test_a_consumer_who_is_killed_takes_its_processors_along(shards):
    with subprocess.Popen(
        [sys.executable, "-c", PARENT, str(shards.path)], stdout=subprocess.PIPE, text=True
    ) as parent:
        pids = [int(parent.stdout.readline()) for _ in range(2)]
        assert parent.stdout.readline() == "reading\n"
        assert all(map(is_there, pids))
        parent.kill()
    wait_until(lambda: not any(map(is_there, pids)))


def test_a_bad_shard_is_named_where_its_batches_would_have_been(tmp_path, started):
    write(generated("tiny", 5000), tmp_path / "data", shard_samples=1000)
    file = tmp_path / "data" / "shard-00003.bin"
    file.write_bytes(file.read_bytes()[:-1] + b"!")
    data = Shards(tmp_path / "data")
    numbers, text = read_until_error(pool.read(data, 10, processes=2))
    assert (numbers, text) == read_until_error(Shards(tmp_path / "data").batches(10))
    assert len(numbers) >= 256
    assert "shard-00003.bin is corrupt" in text
    assert len(started) == 2


def read_until_error(reading):
    """The batches before an error, and its text."""
    numbers = []
    try:
        for batch in reading:
            numbers.append(batch.number)
    except ShardError as error:
        return numbers, str(error)
    raise AssertionError("no error")


@pytest.mark.parametrize(
    ("module", "how"), [("this", "ended with code 0"), ("bagpipe_is_not_there", "ended with code 1")]
)
def test_three_deaths_in_a_row_are_an_error(shards, started, monkeypatch, module, how):
    monkeypatch.setattr(pool, "CHILD", module)
    with pytest.raises(PipelineError, match=rf"data processor 0 \(process \d+, at batch 4\) {how}.*so did 2 before it"):
        next(pool.read(shards, BATCH, processes=1, start=4))
    assert len(started) == 3


def test_three_processors_that_give_nothing_in_time_are_an_error(shards, started, monkeypatch):
    monkeypatch.setattr(pool, "DEADLINE_S", 0.05)
    with pytest.raises(DeadlineError, match=r"data processor 0 .* gave nothing for 0\.05 s.*raise deadline_s"):
        next(pool.read(shards, BATCH, processes=1))
    assert len(started) == 3


def test_an_interpreter_that_can_not_be_started_is_an_error(shards, started, monkeypatch):
    monkeypatch.setattr(sys, "executable", "/no/such/python")
    with pytest.raises(PipelineError, match="data processor 0 can't be started"):
        next(pool.read(shards, BATCH, processes=2))
    assert started == []
