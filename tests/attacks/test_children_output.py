"""Processes that are ended in the middle of a line: what they had printed is there."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from contextlib import contextmanager

import pytest

from bagpipe.cluster.log import LogPlace, Tail

ENDS = [signal.SIGTERM, signal.SIGKILL, signal.SIGABRT]
ROLE = """
import logging, os, sys
from pathlib import Path
from bagpipe.cluster.log import LogPlace, RoleLog
log = RoleLog(LogPlace(Path(sys.argv[1]), sys.argv[2]), "trainer 0")
print("a line")
print("loss 0.5, ", end="")
sys.stderr.write("half a war")
sys.stdout.write("half a line, and half a character: \\u00e9")
logging.getLogger("bagpipe").info("a record")
print("no end", end="")
os.write(int(sys.argv[3]), log.news() or b"here")
signal = sys.stdin.readline()
"""
COMMAND = """
import os, sys, time
import bagpipe.cli as cli
def app(**_):
    print("half a line", end="")
    os.write(int(sys.argv.pop()), b"ready")
    time.sleep(600)
cli.app = app
cli.main()
"""
SERVER = """
import logging, os, sys
from bagpipe.server import process
def serve(options, security, announce, stop):
    logging.getLogger("bagpipe").info("a record")
    sys.stdout.write("half a line")
    os.write(2, b"")
    announce(process.Ready("tcp://127.0.0.1:1", 0, 1, os.getpid()))
    stop.wait(60)
    logging.getLogger("bagpipe").info("the last record")
process.serve = serve
process.main()
"""


@contextmanager
def started(program, *words, **streams):
    """A process, and what it says when it is ready."""
    ours, theirs = os.pipe()
    process = subprocess.Popen(
        [sys.executable, "-c", program, *words, str(theirs)], stdin=subprocess.PIPE, pass_fds=[theirs], **streams
    )
    os.close(theirs)
    try:
        yield process, os.read(ours, 1 << 16)
    finally:
        os.close(ours)
        process.kill()
        process.communicate()


@pytest.mark.parametrize("number", ENDS)
def test_what_a_role_printed_is_in_its_log(number, tmp_path):
    place = LogPlace.make(tmp_path / "logs")
    with started(ROLE, str(place.directory), place.mark) as (process, ready):
        assert ready == b"here"
        process.send_signal(number)
        assert process.wait(30) == -number
    printed = Tail(place.path("trainer 0")).news()
    assert printed.startswith("a line\nloss 0.5, half a warhalf a line, and half a character: é")
    assert "INFO a record\n" in printed
    assert "no end" in printed


def test_what_a_role_on_another_machine_printed_is_told_before_it_ends_its_line(tmp_path):
    place = LogPlace.make(tmp_path / "logs")
    with started(ROLE, str(place.directory), "another") as (_, told):
        assert told.startswith(b"a line\nloss 0.5, half a warhalf a line")
        assert told.endswith(b"no end")


@pytest.mark.parametrize(("number", "code"), [(signal.SIGTERM, 143), (signal.SIGINT, 130)])
def test_what_a_command_printed_comes_out_and_it_says_why_it_ends(number, code):
    with started(COMMAND, stdout=subprocess.PIPE, stderr=subprocess.PIPE) as (process, _):
        process.send_signal(number)
        out, errors = process.communicate(timeout=30)
    assert (process.returncode, out) == (code, b"half a line")
    assert b"Interrupted: stopped by" in errors


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_what_a_server_logged_is_there_to_its_last_record(number):
    process = subprocess.Popen(
        [sys.executable, "-c", SERVER], stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.PIPE
    )
    try:
        process.stdin.write(b"{}\n")
        process.stdin.flush()
        ready = process.stdout.readline()
        assert json.loads(ready.removeprefix(b"half a line"))["servers"] == 1
        process.send_signal(number)
        _, errors = process.communicate(timeout=30)
    finally:
        process.kill()
        process.communicate()
    lines = errors.decode().splitlines()
    assert [line.rpartition("INFO ")[2] for line in lines] == [
        "a record", f"{signal.Signals(number).name}: ending", "the last record",
    ]  # fmt: skip


def test_a_role_that_prints_what_is_no_text_keeps_on(tmp_path):
    place = LogPlace.make(tmp_path / "logs")
    program = ROLE.replace("half a line, and half a character: \\u00e9", "\\ud800 \\x1b[2J")
    with started(program, str(place.directory), place.mark) as (process, ready):
        assert ready == b"here"
        process.communicate(b"\n", timeout=30)
        assert process.returncode == 0
    assert "? \x1b[2J" in Tail(place.path("trainer 0")).news()
