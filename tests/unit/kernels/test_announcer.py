"""The word about compiling: once, only when it takes long, only for our own kernels; and whether it is so."""

import json
import logging
import os
import subprocess
import sys
from types import SimpleNamespace

import pytest
from numba.core.event import Event, EventStatus

from bagpipe import kernels


class Function:
    def __init__(self, module, place="somewhere"):
        self.__module__ = module
        self.py_func = self
        self.stats = SimpleNamespace(cache_path=place)


def compile_one(announcer, module="bagpipe.kernels.any", place="somewhere"):
    data = {"dispatcher": Function(module, place)}
    announcer.notify(Event("numba:compile", EventStatus.START, data))
    announcer.notify(Event("numba:compile", EventStatus.END, data))


@pytest.fixture
def clock(monkeypatch):
    """Every look at the clock is 0.4 s later than the last."""
    ticks = iter(range(1000))
    monkeypatch.setattr(kernels.time, "perf_counter", lambda: 0.4 * next(ticks))


@pytest.mark.usefixtures("clock")
def test_compiling_that_takes_long_is_explained_once(caplog):
    announcer = kernels.Announcer()
    with caplog.at_level(logging.WARNING, "bagpipe"):
        said = []
        for _ in range(6):
            compile_one(announcer)
            said.append(len(caplog.records))
    assert said == [0, 0, 0, 1, 1, 1]
    assert "another kind of processor" in caplog.text


@pytest.mark.usefixtures("clock")
def test_where_kernels_can_not_be_kept_the_word_says_so_and_what_to_do(caplog):
    announcer = kernels.Announcer()
    with caplog.at_level(logging.WARNING, "bagpipe"):
        for _ in range(6):
            compile_one(announcer, place=None)
    assert "at every start" in caplog.text
    assert "NUMBA_CACHE_DIR" in caplog.text


@pytest.mark.usefixtures("clock")
def test_kernels_of_other_packages_are_none_of_our_business(caplog):
    announcer = kernels.Announcer()
    with caplog.at_level(logging.WARNING, "bagpipe"):
        for _ in range(9):
            compile_one(announcer, "somebody.else")
    assert not caplog.records


@pytest.mark.usefixtures("clock")
def test_functions_compiled_for_another_are_counted_with_it(caplog):
    announcer = kernels.Announcer()
    data = {"dispatcher": Function("bagpipe.kernels.any")}
    with caplog.at_level(logging.WARNING, "bagpipe"):
        announcer.notify(Event("numba:compile", EventStatus.START, data))
        for _ in range(9):
            compile_one(announcer)
        announcer.notify(Event("numba:compile", EventStatus.END, data))
        compile_one(announcer)
    assert not caplog.records  # nine inner ones inside one outer that took one tick


COUNT = """
import json
from numba.core import event

class Count(event.Listener):
    compiled = 0
    def on_start(self, event):
        self.compiled += 1
    def on_end(self, event):
        pass

event.register("numba:compile", count := Count())
from bagpipe.doctor import examine
from bagpipe.kernels.rank_sum import sum_parts
import torch
sum_parts(torch.ones(3, 5), sums := torch.empty(5))
assert sums.tolist() == [3.0] * 5
found = next(check for check in examine() if check.name == "compiled kernels")
print(json.dumps([count.compiled, found.ok, found.found, found.remedy]))
"""


def start(directory, **environment):
    """What a new process compiles, and what `bagpipe doctor` says there of kept kernels."""
    environment = os.environ | {"NUMBA_CACHE_DIR": str(directory)} | environment
    done = subprocess.run([sys.executable, "-c", COUNT], capture_output=True, text=True, env=environment, check=False)
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout)


def test_kernels_are_compiled_again_only_on_another_kind_of_processor(tmp_path):
    first, ok, found, _ = start(tmp_path)
    assert first > 0
    assert ok
    assert str(tmp_path) in found
    own = start(tmp_path)[0]
    assert own < first, "the doctor compiles a function of its own, and that alone"
    assert start(tmp_path, NUMBA_CPU_NAME="generic")[0] == first
    assert start(tmp_path, NUMBA_CPU_NAME="generic")[0] == own


def test_without_a_directory_to_keep_them_in_every_start_compiles_and_works(tmp_path):
    nowhere = {"NUMBA_CACHE_LOCATOR_CLASSES": "IPythonCacheLocator"}  # which is for notebooks only
    first, ok, _, remedy = start(tmp_path, **nowhere)
    assert ok is None
    assert "NUMBA_CACHE_DIR" in remedy
    assert start(tmp_path, **nowhere)[0] == first > 0
