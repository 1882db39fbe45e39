"""The life of a prepared loader: every `for` is one iteration, nothing runs when none does, and no error is lost."""

from __future__ import annotations

import gc
import os
import signal
import subprocess
import sys
import textwrap
import threading
import time
from pathlib import Path

import pytest
import torch

import bagpipe
from bagpipe.errors import BagpipeError, ModelError, StoreError
from harness.plain import assert_same_bits, loss_of, make_batches, make_net, nothing_left, threads_left  # noqa: F401
from harness.twice import SMALL, adagrad, assert_equal_to_plain, epochs, run

pytestmark = pytest.mark.usefixtures("nothing_left")
DEADLINE_S = 60


def prepared(loader=None, **options):
    model = make_net()
    batches = make_batches() if loader is None else loader
    return bagpipe.prepare(model, adagrad(model), batches, **SMALL | options)


def train(model, optimizer, batch):
    optimizer.zero_grad()
    loss_of(model, batch).backward()
    optimizer.step()


def refuse_writes(loader):
    """The store of the iteration under way takes nothing more."""

    def write_many(*_, **__):
        raise StoreError("disk full")

    loader.loop.store.write_many = write_many


def own_threads():
    return [each.name for each in threading.enumerate() if each.name.startswith("bagpipe")]


def test_no_thread_runs_before_between_and_after_iterations():
    model, optimizer, loader = prepared()
    seen = []
    for _ in range(2):
        assert threads_left() == []
        for batch in loader:
            seen.append(len(own_threads()))
            train(model, optimizer, batch)
    assert threads_left() == []
    assert min(seen) > 0


def test_what_is_counted_is_that_of_one_epoch():
    class Slow(list):
        def __iter__(self):
            for batch in super().__iter__():
                time.sleep(0.01)
                yield batch

    model, optimizer, loader = prepared(Slow(make_batches()))
    for batch in loader:
        train(model, optimizer, batch)
    counts = loader.stats()
    assert counts["iterations"] == 8
    assert counts["data_wait_seconds"] > 0
    batches = iter(loader)
    counts = loader.stats()
    assert counts["iterations"] == counts["fetched_rows"] == counts["data_wait_seconds"] == 0
    batches.close()


def test_the_loader_is_opened_in_the_thread_and_at_the_time_of_the_for():
    class Loader:
        def __init__(self):
            self.opened = []

        def __iter__(self):
            self.opened.append(threading.current_thread())
            return iter(make_batches())

    loader = Loader()
    model, optimizer, batches = prepared(loader)
    loader.opened.clear()
    opened = iter(batches)
    assert loader.opened == [threading.current_thread()]
    train(model, optimizer, next(opened))
    batches.close()


@pytest.mark.parametrize("end", ["break", "exception", "close", "with", "new for", "del"])
def test_every_end_writes_all_rows_and_stops(end):
    model, optimizer, loader = prepared()

    def part():
        for place, batch in enumerate(loader):
            train(model, optimizer, batch)
            if place < 3:
                continue
            if end == "exception":
                raise KeyError("end")
            if end == "close":
                loader.close()
            break

    if end == "exception":
        with pytest.raises(KeyError):
            part()
    elif end == "with":
        with loader:
            held = iter(loader)
            for _ in range(4):
                train(model, optimizer, next(held))
    elif end in ("new for", "del"):
        held = iter(loader)
        for _ in range(4):
            train(model, optimizer, next(held))
        if end == "del":
            del held
        else:
            again = iter(loader)
            del again
    else:
        part()
    assert threads_left() == []

    def first_four(model, optimizer, loader, log):
        for batch in list(loader)[:4]:
            train(model, optimizer, batch)

    torch.manual_seed(1)
    plain = run(first_four, False).weights
    for name, value in model.state_dict().items():
        torch.testing.assert_close(value, plain[name])


USES = {
    "the next for": lambda model, optimizer, loader: iter(loader),
    "close": lambda model, optimizer, loader: loader.close(),
    "flush": lambda model, optimizer, loader: loader.flush(),
    "the optimizer's state": lambda model, optimizer, loader: optimizer.state_dict(),
    "a step": lambda model, optimizer, loader: optimizer.step(),
    "evaluation": lambda model, optimizer, loader: evaluate(model),
    "the model's state": lambda model, optimizer, loader: model.state_dict(),
    "export": lambda model, optimizer, loader: bagpipe.export(model, "never-written.safetensors"),
}


def evaluate(model):
    with torch.no_grad():
        return model(make_batches(1, seed=3)[0])


@pytest.mark.parametrize("use", USES.values(), ids=USES)
def test_an_error_while_a_break_closes_is_raised_at_the_next_use(use, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    model, optimizer, loader = prepared()
    for place, batch in enumerate(loader):
        train(model, optimizer, batch)
        if place == 3:
            refuse_writes(loader)
            break
    with pytest.raises(BagpipeError, match="disk full"):
        use(model, optimizer, loader)
    assert threads_left() == []
    assert list(tmp_path.iterdir()) == []


def test_an_error_of_the_loader_comes_with_its_batch():
    def failing():
        yield from make_batches(4)
        raise ZeroDivisionError("bad line 5")

    class Loader:
        def __iter__(self):
            return failing()

    model, optimizer, loader = prepared(Loader())
    trained = 0

    def part():
        nonlocal trained
        for batch in loader:
            train(model, optimizer, batch)
            trained += 1

    for _ in range(2):  # and it may be read again
        with pytest.raises(ZeroDivisionError, match="bad line 5"):
            part()
    assert trained == 8
    assert threads_left() == []


def test_a_new_for_ends_the_one_before():
    model, optimizer, loader = prepared()
    first = iter(loader)
    train(model, optimizer, next(first))
    second = iter(loader)
    train(model, optimizer, next(second))
    with pytest.raises(ModelError, match=r"another iteration of this loader has begun.*one at a time"):
        next(first)
    assert sum(1 for _ in second) == 7


def test_two_iterations_at_once_are_refused_and_do_no_harm():
    def script(model, optimizer, loader, log):
        if not isinstance(loader, list):
            with pytest.raises(ModelError, match="one at a time"):
                list(zip(loader, loader, strict=True))
        epochs(model, optimizer, loader, log)

    assert_equal_to_plain(script)


def test_the_collector_may_end_an_iteration_in_another_thread():
    """It must not wait there; what is left is ended at the next use."""
    model, optimizer, loader = prepared()

    def left_in_a_cycle():
        held = iter(loader)
        for _ in range(3):
            train(model, optimizer, next(held))
        cycle = [held]
        cycle.append(cycle)

    gc.collect()
    gc.disable()
    try:
        left_in_a_cycle()
        collector = threading.Thread(target=gc.collect)
        collector.start()
        collector.join(DEADLINE_S)
        assert not collector.is_alive()
    finally:
        gc.enable()
    expected = run(lambda m, o, batches, _: [train(m, o, batch) for batch in batches[:3]], False).weights
    for name, value in model.state_dict().items():
        torch.testing.assert_close(value, expected[name])
    epochs(model, optimizer, loader, [])
    assert threads_left() == []


def test_an_iterator_held_and_forgotten_does_not_keep_threads():
    model, optimizer, loader = prepared()
    held = iter(loader)
    train(model, optimizer, next(held))
    del model, optimizer, loader, held
    gc.collect()
    assert threads_left() == []


def test_a_kept_exception_keeps_nothing_running():
    """As `sys.last_value` in a notebook."""
    model, optimizer, loader = prepared()
    kept = None
    try:
        for batch in loader:
            train(model, optimizer, batch)
            raise KeyboardInterrupt
    except KeyboardInterrupt as error:
        kept = error
    evaluate(model)
    epochs(model, optimizer, loader, [])
    assert threads_left() == []
    assert kept is not None


@pytest.mark.parametrize("use", ["evaluation", "state_dict", "close"])
def test_after_a_close_the_model_evaluates_and_trains_again(use):
    model, optimizer, loader = prepared()
    epochs(model, optimizer, loader, [], number=1)
    for _ in range(2):
        loader.close()
    assert len(evaluate(model) if use == "evaluation" else model.state_dict()) > 0
    epochs(model, optimizer, loader, [])


def test_a_step_outside_of_the_loop_moves_nothing():
    model, optimizer, loader = prepared()
    before = model.state_dict()
    optimizer.step()
    assert_same_bits(before, model.state_dict())
    epochs(model, optimizer, loader, [])
    after = model.state_dict()
    optimizer.zero_grad()
    optimizer.step()
    assert_same_bits(after, model.state_dict())


class Arrived(BaseException):
    """What the handler of a signal raises."""


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM, signal.SIGUSR1, signal.SIGHUP])
@pytest.mark.parametrize("place", ["before dense parameters", "between", "after rows"])
def test_a_signal_in_the_middle_of_a_step_changes_both_or_neither(place, number):
    """At three places within the third step."""
    steps = 0

    def interrupt():
        nonlocal steps
        steps += 1
        if steps == 3:
            os.kill(os.getpid(), number)

    def handler(*_):
        raise Arrived

    former = signal.signal(number, handler)
    monkeypatch = pytest.MonkeyPatch()
    try:
        model = make_net()
        optimizer = adagrad(model)
        dense_step, loader = torch.optim.Adagrad.step, make_batches()

        def interrupted_step(self, closure=None):
            if place == "before dense parameters":
                interrupt()
            dense_step(self, closure)
            if place == "between":
                interrupt()

        monkeypatch.setattr(torch.optim.Adagrad, "step", interrupted_step)
        monkeypatch.setattr("bagpipe.prepared._PREPARED", {})
        model, optimizer, loader = bagpipe.prepare(model, optimizer, loader, **SMALL)
        done = -1

        def part():
            nonlocal done
            for count, batch in enumerate(loader):
                if place == "after rows":
                    apply = loader.loop._joint.apply
                    loader.loop._joint.apply = lambda *given, apply=apply: (apply(*given), interrupt())[0]
                optimizer.zero_grad()
                loss_of(model, batch).backward()
                done = count
                optimizer.step()
                if place == "after rows":
                    loader.loop._joint.apply = apply

        with pytest.raises(Arrived):
            part()
    finally:
        signal.signal(number, former)
        monkeypatch.undo()
    found = model.state_dict()
    both, neither = (
        run(lambda m, o, batches, _, n=number: [train(m, o, batch) for batch in batches[:n]], False).weights
        for number in (done + 1, done)
    )
    close = [all(torch.allclose(found[name], given[name], atol=1e-5) for name in given) for given in (both, neither)]
    assert sum(close) == 1
    assert threads_left() == []


SCRIPT = """
import sys, os, time, signal
sys.path[:0] = {path!r}
import torch
from test_prepare_life import *
class Blocking:
    def __iter__(self):
        yield from make_batches(3)
        time.sleep(600)
if __name__ == "__main__":
    model, optimizer, loader = prepared({loader} store={store!r})
"""
EXITS = {
    "an iterator held": ("held = iter(loader); train(model, optimizer, next(held)); print('end')", 0),
    "an exception": ("for batch in loader: 1 / 0", 1),
    "Ctrl-C": ("for batch in loader: os.kill(os.getpid(), signal.SIGINT); time.sleep(600)", -signal.SIGINT),
    "SIGTERM": ("for batch in loader: os.kill(os.getpid(), signal.SIGTERM); time.sleep(600)", -signal.SIGTERM),
}


def run_script(body, store="memory", loader="", tmp_path=None):
    here = [str(Path(__file__).parent), str(Path(__file__).parents[1])]
    text = SCRIPT.format(path=here, loader=loader, store=store) + textwrap.indent(body, "    ")
    environment = os.environ | {"OMP_NUM_THREADS": "1"} | ({} if tmp_path is None else {"TMPDIR": str(tmp_path)})
    return subprocess.run(
        [sys.executable, "-c", text], capture_output=True, text=True, timeout=DEADLINE_S, check=False, env=environment
    )


@pytest.mark.parametrize(("body", "code"), EXITS.values(), ids=EXITS)
def test_the_interpreter_ends_as_it_would_without_us(body, code, tmp_path):
    done = run_script(body, tmp_path=tmp_path)
    assert done.returncode == code, done.stderr
    assert "Fatal" not in done.stderr
    assert "bagpipe-exit" not in done.stderr


def test_the_interpreter_ends_while_the_loader_blocks(tmp_path):
    done = run_script("held = iter(loader); next(held); print('end')", loader="Blocking(),", tmp_path=tmp_path)
    assert (done.returncode, done.stdout) == (0, "end\n"), done.stderr


def test_rows_in_files_are_closed_when_the_interpreter_ends(tmp_path):
    store = tmp_path / "rows"
    done = run_script(
        "held = iter(loader)\nfor batch in held:\n    train(model, optimizer, batch)\n    1 / 0",
        str(store),
        tmp_path=tmp_path,
    )
    assert done.returncode == 1, done.stderr
    assert "ZeroDivisionError" in done.stderr
    assert "Fatal" not in done.stderr
    model, optimizer, loader = prepared(store=str(store))
    epochs(model, optimizer, loader, [])
