"""What goes wrong while a model trains, or ends it, leaves rows as the reference has them."""

from __future__ import annotations

import errno
import os
import signal
import subprocess
import sys
import textwrap
from pathlib import Path

import pytest
import torch

from bagpipe.errors import BatchError, CapacityError, GradientError, StoreError, ValueRangeError
from bagpipe.trainer.pipeline import Pipeline
from bagpipe.trainer.stages import Threads
from bagpipe.trainer.update import RowUpdate
from harness.plain import (
    assert_same_bits,
    loss_of,
    make_batches,
    make_net,
    nothing_left,  # noqa: F401
    threads_left,
    train_fast,
)
from harness.started import adagrad, start, step, train

pytestmark = pytest.mark.usefixtures("nothing_left")


# Batches, gradients and disks


@pytest.mark.parametrize("policy", ["lookahead", "lru"])
def test_a_later_batch_too_large_for_the_cache_ends_the_data(policy):
    batches = make_batches()[:4] + make_batches(1, size=60, seed=9) + make_batches()
    rows = adagrad()
    net, optimizer, loader = start(batches, rows=rows, cache=22, policy=policy)
    named = r"iteration 4 needs \d+ rows of tables 'user', 'item' \(rows of 8 floats\) at once.* at least \d+ rows"
    with pytest.raises(CapacityError, match=named):
        train(net, optimizer, loader)
    assert rows.updates == 4
    assert_same_bits(train_fast(make_net(), batches[:4], adagrad()), net.state_dict())


@pytest.mark.parametrize("accumulate", [1, 2])
@pytest.mark.parametrize("bad", [20, -1])
def test_an_id_out_of_range_in_the_middle_is_named_and_the_rows_are_written_back(bad, accumulate):
    batches = make_batches()
    batches[5] = batches[5] | {"item": batches[5]["item"].clone()}
    batches[5]["item"][2, 1] = bad
    rows = adagrad()
    net, optimizer, loader = start(batches, rows=rows, accumulate=accumulate)
    named = rf"batch 5: feature 'item' has id {bad}, out of range for table 'item' \(20 rows\)"
    with pytest.raises(ValueRangeError, match=named):
        train(net, optimizer, loader)
    assert rows.updates == (5 if accumulate == 1 else 3)
    if accumulate == 1:
        assert_same_bits(train_fast(make_net(), batches[:5], adagrad()), net.state_dict())


def test_a_batch_that_lacks_a_feature_ends_the_data():
    batches = make_batches()
    del batches[3]["user"]
    rows = adagrad()
    net, optimizer, loader = start(batches, rows=rows)
    with pytest.raises(BatchError, match="batch 3 has no ids of feature 'user'"):
        train(net, optimizer, loader)
    assert rows.updates == 3


@pytest.mark.parametrize("value", [float("nan"), float("inf")])
def test_a_gradient_that_is_not_finite_stops_before_the_update(value):
    rows = adagrad()
    net, optimizer, loader = start(rows=rows)
    named = r"iteration 3: the gradient of row \d+ of table '\w+' is not finite"
    for number, batch in enumerate(loader):
        if number < 3:
            step(net, batch, optimizer)
            continue
        optimizer.zero_grad()
        (loss_of(net, batch) * value).backward()
        with pytest.raises(GradientError, match=named):
            optimizer.step()
        break
    assert rows.updates == 3
    assert_same_bits(train_fast(make_net(), make_batches()[:3], adagrad()), net.state_dict())


@pytest.mark.parametrize("policy", ["nocache", "lookahead"])
def test_a_full_disk_surfaces_as_a_store_error_without_a_hang(monkeypatch, policy):
    """Where every row leaves at once, in the loop; where they stay to the end, when it ends."""

    def full(*_):
        raise OSError(errno.ENOSPC, "No space left on device")

    rows = adagrad()
    net, optimizer, loader = start(rows=rows, store="mapped", driver=Threads(20), policy=policy, cache=60, depth=1)
    monkeypatch.setattr(os, "posix_fallocate", full)
    with pytest.raises(StoreError, match="No space left") as caught:
        train(net, optimizer, loader)
    assert caught.value.errno == errno.ENOSPC
    assert rows.updates < 8 or policy == "lookahead"


# Signals


INTERRUPTED = """
    import os, signal, sys, threading, time
    sys.path.insert(0, {tests!r})
    import torch
    torch.set_num_threads(1)
    import bagpipe
    from harness.plain import loss_of, make_batches, make_net, sgd, threads_left

    batches = make_batches(400, seed=1)
    net, rows = make_net(), bagpipe.optim.Adagrad(0.1)
    optimizer = sgd(net.parameters())
    net, optimizer, loader = bagpipe.prepare(net, optimizer, batches, rows=rows, cache=60, store=bagpipe.Files())
    done = 0
    def interrupt():
        while done < 20:
            time.sleep(0.0005)
        time.sleep({delay})
        os.kill(os.getpid(), signal.{signal})
    if {signal!r} == "SIGTERM":
        signal.signal(signal.SIGTERM, lambda *_: sys.exit(7))
    threading.Thread(target=interrupt).start()
    try:
        for batch in loader:
            optimizer.zero_grad()
            loss_of(net, batch).backward()
            optimizer.step()
            done = rows.updates
    except (KeyboardInterrupt, SystemExit) as error:
        print(type(error).__name__)
    assert threads_left() == [], threads_left()
    torch.save((rows.updates, net.state_dict()), sys.argv[1])
"""


@pytest.mark.parametrize(
    ("name", "error", "delay"), [("SIGINT", "KeyboardInterrupt", 0.0037), ("SIGTERM", "SystemExit", 0.0)]
)
def test_a_real_signal_ends_the_loop_between_two_updates(tmp_path, name, error, delay):
    script = textwrap.dedent(INTERRUPTED.format(tests=str(Path(__file__).parents[1]), delay=delay, signal=name))
    result = subprocess.run(
        [sys.executable, "-c", script, str(tmp_path / "state.pt")], capture_output=True, text=True, timeout=120
    )
    assert result.stdout.strip() == error, result.stderr
    updates, found = torch.load(tmp_path / "state.pt")
    assert 20 <= updates < 400
    assert_same_bits(train_fast(make_net(), make_batches(400, seed=1)[:updates], adagrad()), found)


def test_a_signal_while_a_batch_is_waited_for_ends_the_loop(monkeypatch):
    expected = train_fast(make_net(), make_batches()[:4], adagrad())
    rows = adagrad()
    net, optimizer, loader = start(rows=rows, check=True, store="mapped")
    wait = Pipeline.wait

    def interrupted(self):
        if rows.updates == 4:
            signal.raise_signal(signal.SIGINT)
        return wait(self)

    monkeypatch.setattr(Pipeline, "wait", interrupted)
    with pytest.raises(KeyboardInterrupt):
        train(net, optimizer, loader)
    assert threads_left() == []
    assert loader.loop.closed
    assert_same_bits(expected, net.state_dict())


def test_a_signal_during_an_update_waits_until_it_is_done(monkeypatch):
    expected = train_fast(make_net(), make_batches()[:4], adagrad())
    rows = adagrad()
    net, optimizer, loader = start(rows=rows, check=True)
    applied = RowUpdate.apply

    def apply(*arguments):
        if rows.updates == 3:
            signal.raise_signal(signal.SIGINT)
        return applied(*arguments)

    monkeypatch.setattr(RowUpdate, "apply", apply)
    with pytest.raises(KeyboardInterrupt):
        train(net, optimizer, loader)
    assert rows.updates == 4
    assert_same_bits(expected, net.state_dict())
