"""The namespaces that benchmarks put trainers and servers into."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from itertools import permutations

import pytest

from benchmarks import namespaces
from benchmarks.namespaces import SERVERS, TRAINER, NamespaceError, joined_namespaces


def listed():
    return subprocess.run(["ip", "netns", "list"], capture_output=True, text=True, check=True).stdout


@pytest.fixture
def joined():
    try:
        with joined_namespaces() as found:
            yield found
    except NamespaceError as error:
        pytest.skip(str(error))


def test_both_sides_are_joined_by_a_link_whose_rate_can_be_set_and_lifted(joined):
    listening = "import socket; s = socket.create_server(('', 5000)); print(flush=True); print(s.accept()[1][0])"
    with subprocess.Popen(joined.command(SERVERS, [sys.executable, "-c", listening]), stdout=subprocess.PIPE) as server:
        server.stdout.readline()
        calling = f"import socket; socket.create_connection(('{joined.host(SERVERS)}', 5000), 10).close()"
        subprocess.run(joined.command(TRAINER, [sys.executable, "-c", calling]), check=True)
        assert server.stdout.readline().decode().strip() == joined.host(TRAINER)
    show = joined.command(TRAINER, ["tc", "qdisc", "show", "dev", namespaces.DEVICE])
    joined.limit(100_000_000)
    assert "tbf" in subprocess.run(show, capture_output=True, text=True, check=True).stdout
    joined.limit(None)
    assert "tbf" not in subprocess.run(show, capture_output=True, text=True, check=True).stdout


def test_of_three_sides_each_reaches_the_others_and_every_direction_is_limited():
    sides = ["one", "two", "three"]
    try:
        with joined_namespaces(sides) as joined:
            joined.limit(80_000_000)
            counts = {
                (sender, receiver): _sent(joined, sender, receiver) for sender, receiver in permutations(sides, 2)
            }
            ports = [("tc", "-n", namespace, "qdisc", "show", "dev", device) for namespace, device in joined._ends()]
            shown = [subprocess.run(port, capture_output=True, text=True, check=True).stdout for port in ports]
    except NamespaceError as error:
        pytest.skip(str(error))
    assert len(ports) == 6
    assert all("rate 80Mbit" in each for each in shown)
    assert all(1_000_000 < count < 1_200_000 for count in counts.values()), counts


def _sent(joined, sender, receiver):
    """Bytes that the sender's end has counted for a million bytes to the receiver."""
    receiving = (
        "import socket; s = socket.create_server(('', 5001)); print(flush=True); c = s.accept()[0]\n"
        "while c.recv(1 << 20): pass"
    )
    sending = (
        "import socket; from pathlib import Path\n"
        f"sent = Path('{namespaces._COUNTERS}/tx_bytes'); before = int(sent.read_text())\n"
        f"s = socket.create_connection(('{joined.host(receiver)}', 5001), 10)\n"
        "s.sendall(bytes(1_000_000)); s.shutdown(1); s.recv(1); print(int(sent.read_text()) - before)"
    )
    with subprocess.Popen(joined.command(receiver, [sys.executable, "-c", receiving]), stdout=subprocess.PIPE) as other:
        other.stdout.readline()
        command = joined.command(sender, [sys.executable, "-c", sending])
        return int(subprocess.run(command, capture_output=True, text=True, check=True).stdout)


@pytest.mark.parametrize("ended_by", [signal.SIGINT, signal.SIGTERM])
def test_they_are_gone_after_their_use_however_it_ends(joined, ended_by):
    code = (
        "import signal, subprocess, sys\nfrom benchmarks.namespaces import joined_namespaces\n"
        "with joined_namespaces():\n    print(flush=True)\n    signal.pause()"
    )
    with subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE, stderr=subprocess.DEVNULL) as child:
        child.stdout.readline()
        assert f"-{child.pid}-" in listed()
        child.send_signal(ended_by)
    assert f"-{child.pid}-" not in listed()
    assert f"-{os.getpid()}-" in listed()


def test_what_a_killed_process_left_behind_is_removed_by_the_next(joined):
    code = (
        "import os\nfrom benchmarks.namespaces import joined_namespaces\n"
        "with joined_namespaces():\n    os.kill(os.getpid(), 9)"
    )
    with subprocess.Popen([sys.executable, "-c", code]) as child:
        child.wait()
    assert f"-{child.pid}-" in listed()
    namespaces._remove_abandoned()
    assert f"-{child.pid}-" not in listed()
    assert f"-{os.getpid()}-" in listed()


def test_where_there_are_no_tools_it_says_so(monkeypatch):
    monkeypatch.setenv("PATH", "")
    with pytest.raises(NamespaceError, match="there is no `ip` here"), joined_namespaces():
        pass


def test_a_command_that_is_refused_is_told_with_what_it_said():
    with pytest.raises(NamespaceError, match=r"`sh -c .*` failed: Operation not permitted"):
        namespaces._do("sh", "-c", "echo RTNETLINK: >&2; echo Operation not permitted >&2; exit 2")
