"""One line a role: live on a terminal, plain and not too many elsewhere."""

from __future__ import annotations

import io

import pytest

from bagpipe.cli.output import PlainConsole
from bagpipe.cluster import display
from bagpipe.cluster.display import StatusLines


@pytest.fixture
def clock(monkeypatch):
    now = [100.0]
    monkeypatch.setattr(display.time, "monotonic", lambda: now[0])
    return now


def test_plain_lines_say_what_is_new_at_once_and_figures_only_now_and_then(clock):
    out = io.StringIO()
    with StatusLines(PlainConsole(file=out)) as show:
        show("trainer 0", "is placed")
        show("trainer 0", "starts on [host]")
        for iteration in range(1, 30):
            clock[0] += 1
            show("trainer 0", f"iteration {iteration} of 30, loss {1 / iteration:.3f}")
            show("server 0", "3 rows")
    assert out.getvalue().splitlines() == [
        "trainer 0: is placed",
        "trainer 0: starts on [host]",
        "trainer 0: iteration 1 of 30, loss 1.000",
        "server 0: 3 rows",
        "trainer 0: iteration 11 of 30, loss 0.091",
        "trainer 0: iteration 21 of 30, loss 0.048",
    ]


def test_a_terminal_has_one_line_a_role_and_in_the_end_none():
    out = io.StringIO()
    console = PlainConsole(file=out, force_terminal=True, width=60)
    with StatusLines(console) as show:
        show("trainer 0", "iteration 1")
        show("server 0", "2 rows")
        show("trainer 0", "iteration 2")
        assert out.getvalue().count("server 0") == 2
    assert out.getvalue().endswith("\x1b[2K")


def test_a_script_that_prints_itself_has_plain_lines_on_a_terminal_too():
    out = io.StringIO()
    with StatusLines(PlainConsole(file=out, force_terminal=True), live=False) as show:
        show("trainer 0", "runs train.py")
    assert out.getvalue() == "trainer 0: runs train.py\n"
