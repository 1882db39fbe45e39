"""How trainers in processes of their own find each other, and what stops them. Exchanges: tests/process."""

import os
import socket
import time
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress

import pytest
import torch

from bagpipe.errors import ConfigError, DeadlineError, GenerationOverError, PeerLostError, PipelineError
from bagpipe.trainer.meeting import Meeting, MeetingPoint, join_address, listening_at, sentence, split_address
from bagpipe.trainer.process_group import open_groups


@pytest.fixture
def point():
    point = MeetingPoint()
    yield point
    point.close()


def test_one_trainer_needs_nobody():
    with open_groups(0, 1, "nowhere:1") as groups:
        for group in (groups.critical, groups.delayed, groups.dense):
            received = torch.empty(2)
            group.exchange([torch.ones(2)], [received], "x").wait()
            assert received.tolist() == [1, 1]


@pytest.mark.parametrize(
    ("rank", "size", "message"),
    [(2, 2, "rank 2 of 2 trainers: give a number from 0 to 1"), (-1, 2, "rank -1 of 2")],
)
def test_ranks_that_do_not_exist_are_refused(rank, size, message):
    with pytest.raises(ConfigError, match=message):
        open_groups(rank, size, "127.0.0.1:0")


def test_a_meeting_point_listens_on_one_interface_and_stops():
    point = MeetingPoint()
    host, port = split_address(point.address)
    assert host == "127.0.0.1"
    socket.create_connection((host, port), 5).close()
    with pytest.raises(ConfigError, match="can't meet at"):
        MeetingPoint(port=port)
    point.close()
    point.close()
    with pytest.raises(OSError, match="refused"):
        socket.create_connection((host, port), 5)
    again = listening_at(f"localhost:{port}")
    assert split_address(again.address)[1] == port
    again.close()


def test_trainers_that_do_not_come_are_named(point):
    with pytest.raises(DeadlineError, match=r"trainer 1 waited 0.3 s at .* for trainers 0, 2 of 3: is it running"):
        open_groups(1, 3, point.address, deadline_s=0.3)


def test_a_meeting_point_that_nobody_opened_is_named():
    with socket.socket() as unused:
        unused.bind(("127.0.0.1", 0))
        address = join_address(*unused.getsockname())
        with pytest.raises(DeadlineError, match=f"trainer 1 did not reach trainer 0 at {address} within 1 s"):
            open_groups(1, 2, address, deadline_s=1.0)


def test_trainers_that_do_not_fit_together_are_refused(point):
    first = Meeting(point.address, 0, 1, "run", 5.0)
    first.gather("joined", "trainers = 1")
    with pytest.raises(ConfigError, match="two trainers have rank 0"):
        Meeting(point.address, 0, 1, "run", 5.0).gather("joined", "trainers = 1")
    with pytest.raises(ConfigError, match="trainer 0 has trainers = 1, trainer 1 has trainers = 2"):
        Meeting(point.address, 1, 2, "run", 5.0).gather("joined", "trainers = 2")
    Meeting(point.address, 0, 1, "another run", 5.0).gather("joined", "trainers = 1")


@pytest.fixture
def joined(point):
    """Two trainers with a line to each other."""
    meetings = [Meeting(point.address, rank, 2, "run", 20.0) for rank in range(2)]
    with ThreadPoolExecutor(2) as pool:
        list(pool.map(lambda meeting: meeting.connect("127.0.0.1"), meetings))
    yield meetings
    for meeting in meetings:
        meeting.close()
        meeting.close()


def test_a_reason_is_told_once_and_heard_as_often_as_one_asks(joined):
    first, second = joined
    first.tell(ValueError("ä" * 5000))
    first.tell("another")
    for _ in range(2):
        reason = second.hear(0)
        assert reason.text.startswith("ValueError: äää")
        assert len(reason.text.encode()) <= 2000
        assert (reason.trainer, reason.lost) == (0, None)
    assert second.hear(1) is None, "nobody tells itself"


def test_who_lost_another_says_whom_and_who_heard_of_it_passes_it_on(joined):
    joined[0].tell(PeerLostError("gone", 7), "rows")
    reason = joined[1].hear(0)
    assert (reason.lost, reason.exchange) == (7, "rows")
    joined[1].tell(reason)
    assert joined[0].hear(1) == reason


def test_an_end_without_a_word_is_known_at_once_and_a_silent_trainer_is_waited_for(joined):
    begin = time.monotonic()
    assert joined[1].hear(0, 0.5) is None
    assert time.monotonic() - begin >= 0.5
    joined[0].close()
    assert joined[1].hear(0, 1e9) is None
    joined[0].tell("too late")
    joined[1].tell("nobody hears it")


def test_a_word_that_is_late_is_waited_for(joined):
    with ThreadPoolExecutor(1) as pool:
        heard = pool.submit(joined[1].hear, 0, 60.0)
        time.sleep(0.3)
        joined[0].tell("at last")
        assert heard.result(60).text == "at last"


def test_the_word_of_one_that_has_heard_nobody_and_gone_is_still_heard(joined):
    for meeting in joined:
        meeting.tell(f"{meeting.rank} stops")
    joined[1].close()  # with what the other told it unread, so with a reset
    assert joined[0].hear(1).text == "1 stops"


def test_who_connects_without_the_token_is_cut_and_hinders_nobody(point):
    meetings = [Meeting(point.address, rank, 2, "run", 20.0) for rank in range(2)]
    with ThreadPoolExecutor(1) as pool:
        first = pool.submit(meetings[0].connect, "127.0.0.1")
        address, _ = meetings[1].store.get("line/0").decode().split()
        for hello in (b"", bytes(20), b"GET / HTTP/1.0\r\nHost: x\r\n\r\n"):
            with socket.create_connection(split_address(address), 5) as stranger, suppress(OSError):  # a reset
                stranger.sendall(hello)
                stranger.shutdown(socket.SHUT_WR)
                assert stranger.recv(1) == b""
        meetings[1].connect("127.0.0.1")
        first.result(20)
    meetings[1].tell("it works")
    assert meetings[0].hear(1).text == "it works"
    for meeting in meetings:
        meeting.close()


def test_a_line_that_never_comes_is_not_waited_for_endlessly(point):
    with pytest.raises(PipelineError, match=r"trainer 0 can't connect to the others from 127.0.0.1: they did not come"):
        Meeting(point.address, 0, 2, "run", 0.3).connect("127.0.0.1")
    with pytest.raises(PipelineError, match="trainer 1 can't connect to the others"):
        Meeting(point.address, 1, 2, "another", 0.3).connect("127.0.0.1")


def test_a_trainer_that_is_told_to_leave_off_waits_for_nobody(point):
    over = GenerationOverError("all begin anew", 3)
    for wait in (lambda meeting: meeting.gather("joined", "x"), lambda meeting: meeting.connect("127.0.0.1")):
        meeting = Meeting(point.address, 1, 2, os.urandom(4).hex(), 60.0, lambda: over)
        with pytest.raises(GenerationOverError, match="does not wait for the others any more: all begin anew") as ended:
            wait(meeting)
        assert ended.value.generation == 3


@pytest.mark.parametrize("address", ["", "host", ":1", "host:", "host:x"])
def test_addresses_that_are_none_are_refused(address):
    with pytest.raises(ConfigError, match="is not host:port"):
        split_address(address)


def test_addresses_are_taken_apart_as_they_were_joined():
    for host in ("10.0.0.1", "fe80::1"):
        assert split_address(join_address(host, 5)) == (host, 5)


def test_what_torch_says_is_cut_to_its_first_sentence():
    long = "[/__w/gloo/tcp/pair.cc:553] Connection closed by peer [10.0.0.1]:25. This is typically caused by ...\nframe"
    assert sentence(RuntimeError(long)) == "Connection closed by peer [10.0.0.1]:25"
    assert sentence(RuntimeError("")) == "RuntimeError"
