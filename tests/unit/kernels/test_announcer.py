"""The word about compiling: once, only when it takes long, only for our own kernels."""

import logging

import pytest
from numba.core.event import Event, EventStatus

from bagpipe import kernels


class Function:
    def __init__(self, module):
        self.__module__ = module
        self.py_func = self


def compile_one(announcer, module="bagpipe.kernels.any"):
    data = {"dispatcher": Function(module)}
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
    assert "once" in caplog.text


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
