"""Trainers over gloo in one process, whose connections break without a word."""

from __future__ import annotations

import time
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager

import pytest
import torch

from bagpipe.errors import BagpipeError, DeadlineError, GenerationOverError, PeerLostError, PipelineError
from bagpipe.trainer.collective import Groups
from bagpipe.trainer.meeting import MeetingPoint
from bagpipe.trainer.process_group import open_groups


@contextmanager
def critical_groups(size, deadline_s):
    meeting = MeetingPoint()
    with ThreadPoolExecutor(size) as pool:
        places = [meeting] + [meeting.address] * (size - 1)
        opened = list(pool.map(lambda rank: open_groups(rank, size, places[rank], deadline_s=deadline_s), range(size)))
        yield [groups.critical for groups in opened]
        list(pool.map(Groups.close, opened))
    meeting.close()


@pytest.fixture
def ends():
    """The critical groups of two trainers."""
    with critical_groups(2, 0.5) as groups:
        yield groups


class Swallowing:
    """A connection that takes what is sent and loses it: gloo is told of other tags than the peer waits for."""

    def __init__(self, backend):
        self._backend = backend

    def send(self, tensors, peer, tag):
        self._backend.send(tensors, peer, tag + 7)
        return self

    def wait(self, _timeout):
        return True

    def __getattr__(self, name):
        return getattr(self._backend, name)


def failure(group, length=3, what="the rows of iteration 5"):
    try:
        rooms = [torch.empty(length) for _ in range(group.size)]
        group.exchange([torch.ones(length)] * group.size, rooms, what).wait()
    except BagpipeError as error:
        return error


def of_both(ends, *arguments):
    with ThreadPoolExecutor(2) as pool:
        return list(pool.map(lambda group: failure(group, *arguments), ends))


def die(group):
    """As a process that is killed: all its connections end without a word."""
    group._disconnect()
    group._meeting.close()


@pytest.mark.parametrize("length", [3, 100_000])
def test_a_connection_that_says_nothing_any_more_is_a_lost_peer_when_both_are_late(ends, length):
    for group in ends:
        group.backend = Swallowing(group.backend)
    errors = of_both(ends, length)
    for rank, error in enumerate(errors):
        assert isinstance(error, PeerLostError), errors
        assert error.rank == 1 - rank
        assert "the rows of iteration 5" in str(error)
        with pytest.raises(PeerLostError, match="iteration 6 can't be exchanged"):
            ends[rank].exchange([torch.ones(1)] * 2, [torch.ones(1)] * 2, "iteration 6")


def test_one_that_skips_an_exchange_is_late_and_not_lost(ends):
    error = failure(ends[0])
    assert isinstance(error, DeadlineError)
    assert "trainer 0 waited 0.5 s for the rows of iteration 5 from trainer 1" in str(error)


def test_the_other_end_of_a_group_that_was_aborted_hears_why_or_that_its_peer_is_lost(ends):
    ends[1].abort(ValueError("the disk is full"))
    error = failure(ends[0])
    assert type(error) is PipelineError
    assert "trainer 1 has stopped: ValueError: the disk is full" in str(error)


def test_one_whose_peer_is_gone_without_a_word_has_lost_it(ends):
    die(ends[1])
    error = failure(ends[0])
    assert isinstance(error, PeerLostError)
    assert error.rank == 1


def test_one_who_hears_of_a_lost_trainer_through_another_names_the_lost_one():
    with critical_groups(3, 20) as groups:
        die(groups[1])
        first = failure(groups[0])
        assert (type(first), first.rank) == (PeerLostError, 1)
        # Which connection of its own a trainer finds broken first is chance: here the one to the messenger.
        error = groups[2].broken("rows from trainer 0", 0, "rows", RuntimeError("reset"))
        assert (type(error), error.rank) == (PeerLostError, 1)
        assert "the connection to trainer 0 broke: reset; trainer 0 has lost trainer 1" in str(error)


@pytest.mark.parametrize("told", [PeerLostError("it lost trainer 1", 1), ValueError("the disk is full")])
def test_a_word_that_comes_after_the_connection_broke_is_waited_for(told):
    """As where gloo has ended the connections of a trainer that is late, and that is slow to say so."""
    with critical_groups(3, 60) as groups, ThreadPoolExecutor(1) as pool:
        groups[0]._disconnect()
        heard = pool.submit(failure, groups[2])
        time.sleep(0.5)
        assert not heard.done(), "whom to blame is not known"
        groups[0].fail(told)
        error = heard.result(60)
        if isinstance(told, PeerLostError):
            assert (type(error), error.rank) == (PeerLostError, 1)
        else:
            assert type(error) is PipelineError
            assert "trainer 0 has stopped: ValueError: the disk is full" in str(error)


def test_who_hears_through_another_why_a_third_has_stopped_names_the_third():
    with critical_groups(3, 20) as groups:
        groups[1].abort(ValueError("the disk is full"))
        for rank, peer in ((0, 1), (2, 0)):
            error = groups[rank].broken(f"rows from trainer {peer}", peer, "rows", RuntimeError("reset"))
            assert type(error) is PipelineError
            assert str(error).endswith("trainer 1 has stopped: ValueError: the disk is full")


def test_the_end_of_a_generation_is_that_for_all_and_nobody_is_to_blame():
    over = GenerationOverError("all begin anew", 3)
    with critical_groups(3, 20) as groups:
        groups[1].abort(over)
        errors = [groups[0].broken("rows from trainer 1", 1, "rows", RuntimeError("reset"))]
        errors.append(groups[2].broken("rows from trainer 0", 0, "rows", RuntimeError("reset")))
        errors += map(failure, groups)
    assert [(type(error), error.generation) for error in errors] == [(GenerationOverError, 3)] * 5


def test_long_names_are_cut_alike_and_told_apart_by_what_is_left(ends):
    name = "ä" * 400
    assert of_both(ends, 2, name) == [None, None]
    assert of_both(ends, 2, f" {name} ") == [None, None]
