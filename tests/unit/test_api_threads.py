"""Nothing outlives its epoch: no thread, no temporary directory, no worker process; and no cache its loader."""

from __future__ import annotations

import gc
import multiprocessing
import os
import subprocess
import sys
import textwrap
import threading
import time
import weakref
from pathlib import Path

import pytest
import torch
from torch.utils.data import DataLoader

from bagpipe.cache import RowCache
from bagpipe.errors import DeadlineError, PipelineError
from bagpipe.trainer import stages
from bagpipe.trainer.stages import Threads
from harness.plain import (
    directories_left,
    loss_of,
    make_batches,
    nothing_left,  # noqa: F401
    threads_left,
)
from harness.started import start, step, train

pytestmark = pytest.mark.usefixtures("nothing_left")


def begin(num_batches=2, **options):
    """In the middle of an epoch."""
    options = {"store": "mapped", "threads": 2} | options
    net, optimizer, loader = start(options.pop("loader", None), **options)
    iterator = iter(loader)
    for _ in range(num_batches):
        step(net, next(iterator), optimizer)
    return net, optimizer, loader, iterator


def test_a_loader_that_is_not_used_leaks_nothing():
    net, optimizer, loader = start(store="mapped")
    assert threads_left(0) == []
    assert directories_left() == [], "files of rows have no names"
    del net, optimizer, loader
    gc.collect()
    assert threads_left(0) == []


def test_a_loader_that_is_dropped_in_the_middle_ends_by_itself():
    net, optimizer, loader, iterator = begin()
    assert threads_left(0) != []
    watched = [weakref.ref(each) for each in (loader, loader.loop)]
    del net, optimizer, loader, iterator
    gc.collect()
    assert [each() for each in watched] == [None, None]
    assert threads_left() == []
    assert directories_left() == []


@pytest.mark.parametrize("end", ["break", "close", "last batch"])
def test_the_cache_is_given_back_when_training_is_over(end):
    """After its last batch an epoch leaves it to the next one."""
    net, optimizer, loader, iterator = begin()
    sizes = [part.numel() for part in loader.loop.cache.data]
    assert sizes == [50 * 8]  # all rows that there are
    if end == "last batch":
        for batch in iterator:
            step(net, batch, optimizer)
        assert [part.numel() for part in loader.loop.cache.data] == sizes
        assert threads_left(0) == []
    if end == "break":
        iterator.close()
    else:
        loader.close()
    assert [part.numel() for part in loader.loop.cache.data] == [0]
    assert threads_left(0) == []
    with torch.no_grad():
        net(make_batches()[0])
    optimizer.zero_grad()
    train(net, optimizer, loader)


def test_closing_twice_and_before_the_first_batch_is_fine():
    for num_batches in (0, 3):
        _, _, loader, _ = begin(num_batches)
        loader.close()
        loader.close()
        assert threads_left(0) == []


def test_worker_processes_of_the_loader_end_with_the_loop():
    batches = DataLoader(range(600), batch_size=6, num_workers=2, collate_fn=collate, prefetch_factor=2)
    _, _, loader, iterator = begin(loader=batches, lookahead=2)
    assert len(multiprocessing.active_children()) == 2
    iterator.close()
    loader.close()
    until = time.monotonic() + 10
    while multiprocessing.active_children() and time.monotonic() < until:
        time.sleep(0.01)
    assert multiprocessing.active_children() == []


def collate(numbers):
    ids = torch.tensor(numbers).reshape(-1, 1)
    size = len(ids)
    return {"user": ids % 30, "item": ids % 20, "dense": torch.ones(size, 2), "label": torch.ones(size)}


def test_a_defect_in_a_background_thread_surfaces_with_its_cause_and_leaves_nothing(monkeypatch):
    monkeypatch.setattr(RowCache, "copy_out", lambda *_: {}["missing"])
    _, _, loader, iterator = begin(1, policy="nocache", driver=Threads(20))

    def go_on():
        with loader:
            for _ in iterator:
                pass

    with pytest.raises(PipelineError, match="write-back thread failed: KeyError") as caught:
        go_on()
    assert isinstance(caught.value.__cause__, KeyError)


def test_a_loader_that_blocks_is_named_by_every_wait(monkeypatch):
    """The loop waits for a batch until its deadline; leaving it waits for the loader, but not forever."""
    monkeypatch.setattr(stages, "LOADER_S", 0.2)
    released = threading.Event()

    def blocking():
        yield from make_batches()[:2]
        released.wait(30)

    net, _, loader, iterator = begin(0, loader=blocking(), driver=Threads(0.3), lookahead=1)
    # With a lookahead of one the first batch is planned as soon as it is read.
    loss_of(net, next(iterator))
    with pytest.raises(DeadlineError, match=r"waited 0.3 s for the rows of the next batch; the stages wait for: plan"):
        for _ in iterator:
            pass
    assert loader.loop.closed
    released.set()


def test_leaving_a_loop_whose_loader_blocks_ends_with_a_named_error(monkeypatch):
    monkeypatch.setattr(stages, "LOADER_S", 0.2)
    reached, released = threading.Event(), threading.Event()

    def blocking():
        yield from make_batches()[:3]
        reached.set()
        released.wait(30)

    _, _, loader, held = begin(1, loader=blocking(), lookahead=1)
    assert reached.wait(10)
    with pytest.raises(DeadlineError, match=r"bagpipe-plan did not end within 0 s.*does the loader block"):
        loader.close()
    assert threads_left(0) == ["bagpipe-plan"]
    released.set()
    del held


def test_many_models_leave_no_more_than_one():
    before = threading.active_count()
    for _ in range(5):
        _, _, loader, _ = begin(3)
        with loader:
            pass
    assert threading.active_count() == before


LEFT_OPEN = """
    import sys
    sys.path.insert(0, {tests!r})
    import bagpipe
    from harness.plain import loss_of, make_batches, make_net, sgd

    net = make_net()
    optimizer, store = sgd(net.parameters()), bagpipe.Files()
    net, optimizer, loader = bagpipe.prepare(net, optimizer, make_batches(), cache=40, store=store)
    {loop}
        optimizer.zero_grad()
        loss_of(net, batch).backward()
        optimizer.step()
        if number == 3:
            break
    print(net.state_dict()["user.weight"].shape)
"""


@pytest.mark.parametrize("held", ["enumerate(loader)", "held"])
def test_a_script_that_breaks_off_without_a_with_block_ends_cleanly(held, tmp_path):
    loop = f"held = enumerate(loader)\n    for number, batch in {held}:"
    script = textwrap.dedent(LEFT_OPEN.format(tests=str(Path(__file__).parents[1]), loop=loop))
    environment = os.environ | {"TMPDIR": str(tmp_path)}
    result = subprocess.run(
        [sys.executable, "-W", "error", "-c", script], capture_output=True, text=True, timeout=120, env=environment
    )
    assert (result.returncode, result.stderr) == (0, "")
    assert result.stdout == "torch.Size([30, 4])\n"
    assert list(tmp_path.glob("bagpipe-*")) == []
