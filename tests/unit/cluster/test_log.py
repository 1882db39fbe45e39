"""Logs of roles: in the run directory where it can be seen, over the reports where not, and to the last byte."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

from bagpipe.cluster.log import LogPlace, Tail

PRINT = """
import os, sys
from pathlib import Path
from bagpipe.cluster.log import LogPlace, RoleLog
log = RoleLog(LogPlace(Path(sys.argv[1]), sys.argv[2]), "server 1")
print("one"); sys.stderr.write("two\\n"); os.write(1, b"three\\n")
import logging; logging.getLogger("x").info("four")
news = [log.news(), log.news()]
with open(sys.argv[3], "wb") as file: file.write(b"|".join(news))
os.abort()
"""


def printed(place, mark, told):
    subprocess.run([sys.executable, "-c", PRINT, str(place), mark, str(told)], timeout=60, check=False)
    return told.read_bytes()


def test_a_role_that_sees_the_run_directory_prints_there_and_how_it_crashed_is_there_too(tmp_path):
    place = LogPlace.make(tmp_path / "logs")
    assert printed(place.directory, place.mark, tmp_path / "told") == b"|"
    lines = place.path("server 1").read_text().splitlines()
    assert lines[:3] == ["one", "two", "three"]
    assert lines[3].endswith("INFO four")
    assert any("Fatal Python error: Aborted" in line for line in lines)


def test_a_role_that_sees_another_directory_of_that_name_tells_what_it_prints(tmp_path):
    place = LogPlace.make(tmp_path / "logs")
    news, nothing = printed(place.directory, "another", tmp_path / "told").split(b"|")
    assert news.startswith(b"one\ntwo\nthree\n")
    assert nothing == b""
    assert [path.name for path in Path(place.directory).iterdir()] == [".mark"]


def test_a_finished_log_place_holds_logs_only(tmp_path):
    place = LogPlace.make(tmp_path / "logs")
    assert place.is_here
    place.finish()
    assert not place.is_here
    assert list(place.directory.iterdir()) == []


def test_the_tail_of_a_file_is_text_also_where_a_letter_comes_in_two_parts(tmp_path):
    path = tmp_path / "log"
    tail = Tail(path)
    assert tail.news() == ""
    path.write_bytes("aü".encode()[:2])
    assert tail.news() == "a"
    path.write_bytes("aüb".encode())
    assert tail.news() == "üb"
    assert tail.news() == ""
