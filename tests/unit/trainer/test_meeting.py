"""How trainers in processes of their own find each other, and what stops them. Exchanges: tests/process."""

import socket

import pytest
import torch

from bagpipe.errors import ConfigError, DeadlineError
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


def test_a_reason_is_left_once_and_found_by_others(point):
    first, second = (Meeting(point.address, rank, 2, "run", 5.0) for rank in range(2))
    assert second.reasons() == {}
    first.tell(ValueError("ä" * 5000))
    first.tell("another")
    reasons = second.reasons()
    assert list(reasons) == [0]
    assert reasons[0].text.startswith("ValueError: äää")
    assert len(reasons[0].text.encode()) <= 2000
    second.close()
    assert second.reasons() == {}
    second.tell("too late")
    point.close()
    assert first.reasons() == {}


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
