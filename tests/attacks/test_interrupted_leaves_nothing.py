"""Ctrl-C at any point of a loop: when it is closed, no descriptor, thread, child, shared memory or file is left."""

from __future__ import annotations

import gc
import os
import signal
import tempfile
import threading
import time
from contextlib import contextmanager, suppress
from pathlib import Path

import pytest
import torch

import bagpipe
from bagpipe.cluster.keeper import children_of
from bagpipe.failpoints import armed
from harness.plain import loss_of, make_batches, make_net, threads_left
from harness.seams import prepared, trained

LOOP = (
    "trainer.plan.received", "trainer.fetch.read", "trainer.fetch.inserted", "trainer.evict.copied",
    "trainer.evict.written", "trainer.batch.given", "trainer.step.begun", "trainer.step.updated",
)  # fmt: skip
SAVED = (
    "mark.flushed", "mark.met", "mark.asked", "mark.over", "checkpoint.begun", "checkpoint.rows.written",
    "checkpoint.blobs.written", "checkpoint.manifest.written", "checkpoint.confirmed", "checkpoint.renamed",
    "checkpoint.complete", "checkpoint.saved", "checkpoint.pruned", "layer.merged",
)  # fmt: skip
ON_SERVERS = ("remote.write.begun", "remote.write.acknowledged")


class Interrupt:
    """Ctrl-C where a point is reached for the n-th time, in whatever thread."""

    def __init__(self, name, at):
        self.name, self.at, self.count, self.counting = name, at, 0, threading.Lock()

    def reached(self, name):
        with self.counting:
            self.count += name == self.name
            due = name == self.name and self.count == self.at
        if due:
            signal.raise_signal(signal.SIGINT)


def held():
    """Open descriptors with what they are open on, children, and temporary files; those that are not Python's own."""
    descriptors = {}
    for each in Path("/proc/self/fd").iterdir():
        with suppress(OSError):  # of this very listing
            descriptors[int(each.name)] = str(each.readlink())
    files = sorted(str(path) for path in Path(tempfile.gettempdir()).rglob("*"))
    return descriptors, sorted(children_of(os.getpid())), files


@contextmanager
def nothing_is_left(seconds=10.0):
    """What a block has opened is closed when it ends, as soon as threads have noticed."""
    gc.collect()
    before, threads = held(), threading.enumerate()
    yield
    until = time.monotonic() + seconds
    while (held() != before or threads_left(0, threads)) and time.monotonic() < until:
        gc.collect()
        time.sleep(0.02)
    assert threads_left(0, threads) == []
    assert held() == before


@pytest.fixture(autouse=True)
def temporary(tmp_path, monkeypatch):
    """Files for a while are seen here; what is loaded once was loaded."""
    place = tmp_path / "temporary"
    place.mkdir()
    monkeypatch.setattr(tempfile, "tempdir", str(place))
    train("memory", None)


def train(store, checkpoint):
    model = make_net()
    optimizer = torch.optim.Adagrad(model.parameters(), lr=0.1)
    loader = None
    try:
        model, optimizer, loader = bagpipe.prepare(
            model, optimizer, make_batches(6), cache=bagpipe.Cache(40, lookahead=2), store=store, checkpoint=checkpoint
        )
        loader.register_for_checkpointing()
        for batch in loader:
            optimizer.zero_grad()
            loss_of(model, batch).backward()
            optimizer.step()
    finally:
        if loader is not None:
            loader.close()
            loader.loop.store.close()


def interrupt(name, at, call):
    """Call something that is interrupted at a point."""
    plan = Interrupt(name, at)
    with nothing_is_left(), suppress(KeyboardInterrupt), armed(plan):
        call()
    assert signal.getsignal(signal.SIGINT) is signal.default_int_handler
    assert plan.count >= at, f"{name} is reached {plan.count} times"


def test_what_is_left_is_seen(tmp_path):
    with pytest.raises(AssertionError), nothing_is_left(0):
        left = tempfile.TemporaryFile()  # noqa: SIM115
    left.close()


@pytest.mark.parametrize("name", LOOP)
@pytest.mark.parametrize("store", ["memory", "files"])
def test_at_any_point_of_a_loop(name, store, tmp_path):
    place = store if store == "memory" else tmp_path / "rows"
    for at in (1, 3):
        interrupt(name, at, lambda: train(place, None))
    assert store == "memory" or list(place.iterdir()) == []


@pytest.mark.parametrize("name", [*LOOP, *SAVED])
@pytest.mark.parametrize("store", ["memory", "files"])
def test_at_any_point_of_a_loop_that_is_saved(name, store, tmp_path):
    place, kept = store if store == "memory" else tmp_path / "rows", tmp_path / "kept"
    interrupt(name, 1, lambda: train(place, bagpipe.Checkpointing(kept, every=2, keep=1)))
    left = [path.name for path in kept.iterdir()] if kept.exists() else []
    assert [each for each in left if not each.isdecimal() and not each.startswith(".")] == []


SETTINGS = {
    "data": {"preset": "tiny", "samples": 600, "held_out": 0.1, "processes": 1},
    "model": {"name": "wide_deep", "dim": 4},
    "batch_size": 64, "cache": 4_000, "threads": 1, "servers": 1,
}  # fmt: skip


SHORT = ("trainer.fetch.read", "trainer.step.begun", *ON_SERVERS)
MORE = [pytest.param(name, marks=pytest.mark.long) for name in LOOP if name not in SHORT]


@pytest.mark.parametrize("name", [*SHORT, *MORE])
def test_at_any_point_of_a_run_with_a_server_and_a_data_processor(name, tmp_path):
    """Their processes, connections and shared memory go too."""
    interrupt(name, 2, lambda: trained(prepared(SETTINGS, tmp_path / "run")))
