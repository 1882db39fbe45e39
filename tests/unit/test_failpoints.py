"""Points where a process can be made to die: off they do nothing, on they do what was asked, once."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
import threading
from pathlib import Path

import pytest

from bagpipe import failpoints
from bagpipe.errors import ConfigError
from bagpipe.failpoints import NAMES, Fault, FaultInjected, Faults, Killed, acting_as, armed, parse, reach

POINT = "server.write.applied"
ROOT = Path(__file__).parents[2]


def reach_often(times, name=POINT):
    for _ in range(times):
        reach(name)
    return times


def test_each_point_says_what_has_happened():
    assert NAMES
    assert all(name == name.lower() and "." in name and line and not line.endswith(".") for name, line in NAMES.items())


def test_every_point_stands_in_the_code_and_no_other_does():
    placed = {
        name
        for path in (ROOT / "src").rglob("*.py")
        for name in re.findall(r"\breach\(\s*\"([^\"]+)\"", path.read_text(encoding="utf-8"))
    }
    assert placed == set(NAMES)


def test_every_point_is_documented_with_what_has_happened():
    text = (ROOT / "docs" / "guarantees.md").read_text(encoding="utf-8")
    documented = dict(re.findall(r"^\| `([a-z_.]+)` \| (.*) \|$", text, re.MULTILINE))
    assert documented == NAMES
    assert f"at {len(NAMES)} points" in text


def test_nothing_happens_while_nothing_is_armed():
    assert failpoints._plan is None
    assert reach_often(10) == 10


def test_a_fault_happens_when_its_point_is_reached_for_the_nth_time_and_not_again():
    with armed(Faults(Fault(POINT, at=3))) as plan:
        assert reach_often(2) == 2
        with pytest.raises(Killed, match=r"server\.write\.applied=kill@3"):
            reach(POINT)
        reach_often(5)
    assert plan.reaches["", POINT] == 8
    assert plan.happened == [("", Fault(POINT, at=3))]


def test_a_kill_is_not_caught_by_who_handles_errors():
    assert not issubclass(Killed, Exception)


def test_a_fault_of_a_role_waits_for_that_role():
    with armed(Faults(Fault(POINT, at=2, role="server-1"))):
        with acting_as("server-0"):
            reach_often(5)
        with acting_as("server-1"):
            reach(POINT)
            with pytest.raises(Killed, match="server-1"):
                reach(POINT)


def test_without_a_role_each_counts_for_itself_and_the_first_one_has_the_fault():
    with armed(Faults(Fault(POINT, "fail", at=2))) as plan:
        with acting_as("server-0"):
            reach(POINT)
        with acting_as("server-1"):
            reach(POINT)
            with pytest.raises(FaultInjected, match="server-1"):
                reach(POINT)
        with acting_as("server-0"):
            reach_often(3)
    assert [role for role, _ in plan.happened] == ["server-1"]


def test_other_threads_act_as_the_process_does(monkeypatch):
    monkeypatch.setattr(failpoints, "_process", "oracle")
    with armed(Faults()) as plan, acting_as("server-0"):
        thread = threading.Thread(target=reach, args=[POINT])
        thread.start()
        thread.join()
        reach(POINT)
    assert plan.reaches == {("oracle", POINT): 1, ("server-0", POINT): 1}


def test_a_pause_lasts_as_long_as_it_says(monkeypatch):
    slept = []
    monkeypatch.setattr(failpoints.time, "sleep", slept.append)
    with armed(Faults(Fault(POINT, "pause", seconds=2.5))):
        reach(POINT)
    assert slept == [2.5]


def test_what_was_armed_before_is_armed_again():
    outer, inner = Faults(), Faults()
    with armed(outer):
        with pytest.raises(RuntimeError), armed(inner):
            raise RuntimeError
        reach(POINT)
    assert failpoints._plan is None
    assert (len(outer.reaches), len(inner.reaches)) == (1, 0)


def test_a_text_reads_as_it_is_written():
    text = "server-0/server.write.applied=kill@3, oracle.plan.made=pause:0.5@2,trainer-1/mark.met=fail@1"
    faults = parse(text)
    assert faults == [
        Fault(POINT, "kill", 3, "server-0"),
        Fault("oracle.plan.made", "pause", 2, None, 0.5),
        Fault("mark.met", "fail", 1, "trainer-1"),
    ]
    assert parse(",".join(map(str, faults))) == faults
    assert parse(" ") == []


@pytest.mark.parametrize(
    "text",
    [
        *("server.write.applied", "server.write.applied=kill", "server.write.applied=kill@0", "=kill@1"),
        *("server.write.applied=pause@1", "server.write.applied=pause:-1@1", "server.write.applied=die@1"),
        *("a b/server.write.applied=kill@1", "server.write.applied=kill@1;mark.met=kill@1"),
    ],
)
def test_a_text_that_is_no_fault_is_refused(text):
    with pytest.raises(ConfigError, match="failpoint"):
        parse(text)


def test_unknown_names_are_refused_everywhere():
    with pytest.raises(ConfigError, match=r"no failpoint 'server\.write\.aplied'.*NAMES"):
        parse("server.write.aplied=kill@1")
    with pytest.raises(ConfigError, match="'nowhere'"):
        Fault("nowhere")
    with armed(Faults()), pytest.raises(ConfigError, match="'nowhere'"):
        reach("nowhere")
    with pytest.raises(ConfigError, match="from 1"):
        Fault(POINT, at=0)


PROGRAM = "from bagpipe.failpoints import name_process, reach\nname_process('server-0')\nfor _ in range(3): reach('{}')"


def run_process(directory, text, name=POINT):
    """How a process ends that reaches a point three times."""
    environment = os.environ | {failpoints.VARIABLE: text, failpoints.ONCE_VARIABLE: str(directory or "")}
    program = [sys.executable, "-c", PROGRAM.format(name)]
    return subprocess.run(program, env=environment, capture_output=True, text=True, timeout=60)


def test_a_real_process_is_killed_once_of_all_that_share_a_directory(tmp_path):
    text = f"server-0/{POINT}=kill@2"
    assert run_process(tmp_path, text).returncode == -signal.SIGKILL
    assert [path.name for path in tmp_path.iterdir()] == [text.replace("/", ":")]
    assert run_process(tmp_path, text).returncode == 0
    assert run_process(None, text).returncode == -signal.SIGKILL
    assert run_process(None, text.replace("server-0", "server-1")).returncode == 0


def test_a_real_process_that_is_told_nonsense_says_so():
    ended = run_process(None, "nowhere=kill@1")
    assert ended.returncode != 0
    assert "there is no failpoint 'nowhere'" in ended.stderr
