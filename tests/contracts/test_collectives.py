"""What every `Collective` promises, whatever carries it: in memory, and over gloo's sockets."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager

import numpy as np
import pytest
import torch

from bagpipe.errors import BagpipeError, DeadlineError, PipelineError
from bagpipe.trainer.collective import Groups, memory_groups, sum_in_rank_order
from bagpipe.trainer.meeting import MeetingPoint
from bagpipe.trainer.process_group import open_groups

SIZE = 3
PATIENT_S = 60.0


@contextmanager
def in_memory(deadline_s):
    yield memory_groups(SIZE, deadline_s=deadline_s)


@contextmanager
def over_gloo(deadline_s):
    """Each rank in a thread of its own: nothing of torch.distributed's global state is used."""
    meeting = MeetingPoint()
    with ThreadPoolExecutor(SIZE) as pool:

        def join(rank):
            return open_groups(rank, SIZE, meeting if rank == 0 else meeting.address, deadline_s=deadline_s)

        ranks = list(pool.map(join, range(SIZE)))
    try:
        yield [groups.critical for groups in ranks]
    finally:
        with ThreadPoolExecutor(SIZE) as pool:  # each waits a little for the others
            list(pool.map(Groups.close, ranks))
        meeting.close()


@pytest.fixture(params=[in_memory, over_gloo], ids=["memory", "gloo"])
def opened(request):
    """A context of the ends of a group, for a deadline."""
    return request.param


def on_all(groups, function, but=()):
    """What the function gives for each rank's end, each in a thread; errors are given too."""

    def called(group):
        try:
            return function(group)
        except BagpipeError as error:
            return error

    with ThreadPoolExecutor(SIZE) as pool:
        return list(pool.map(called, [group for group in groups if group.rank not in but]))


def swap(group, lengths, turn=0, what="the rows"):
    """Everyone sends everyone numbers that say from whom they are; what has come."""
    send = [torch.full((lengths[group.rank][peer],), 100.0 * turn + 10 * group.rank + peer) for peer in range(SIZE)]
    receive = [torch.empty(lengths[peer][group.rank]) for peer in range(SIZE)]
    group.exchange(send, receive, what).wait()
    return [part.tolist() for part in receive]


def swapped(rank, lengths, turn=0):
    return [[100.0 * turn + 10 * peer + rank] * lengths[peer][rank] for peer in range(SIZE)]


@pytest.mark.parametrize(
    "lengths",
    [[[2] * 3] * 3, [[0, 5, 1], [70_000, 3, 0], [0, 0, 2]], [[0] * 3] * 3, [[0, 0, 0], [1, 0, 0], [0, 0, 0]]],
    ids=["even", "uneven", "empty", "one"],
)
def test_parts_of_any_size_arrive(opened, lengths):
    with opened(PATIENT_S) as groups:
        found = on_all(groups, lambda group: swap(group, lengths))
    assert found == [swapped(rank, lengths) for rank in range(SIZE)]


def test_exchanges_that_are_under_way_at_once_keep_their_order(opened):
    turns = [[[(a + 2 * b + turn) % 4 for b in range(SIZE)] for a in range(SIZE)] for turn in range(6)]

    def all_at_once(group):
        pending, rooms = [], []
        for turn, lengths in enumerate(turns):
            send = [torch.full((lengths[group.rank][p],), 100.0 * turn + 10 * group.rank + p) for p in range(SIZE)]
            rooms.append([torch.empty(lengths[peer][group.rank]) for peer in range(SIZE)])
            pending.append((send, group.exchange(send, rooms[-1], f"turn {turn}")))
        for _, each in pending:
            each.wait()
        return [[part.tolist() for part in room] for room in rooms]

    with opened(PATIENT_S) as groups:
        found = on_all(groups, all_at_once)
    assert found == [[swapped(rank, lengths, turn) for turn, lengths in enumerate(turns)] for rank in range(SIZE)]


def test_bits_travel_as_they_are(opened):
    bits = torch.tensor([0x7F800001, -1, 1, -(2**31), 0x7FC12345, 0], dtype=torch.int32)

    def send(group):
        receive = [torch.empty(len(bits)) for _ in range(SIZE)]
        group.exchange([bits.view(torch.float32)] * SIZE, receive, "bits").wait()
        return [part.view(torch.int32).tolist() for part in receive]

    with opened(PATIENT_S) as groups:
        assert on_all(groups, send) == [[bits.tolist()] * SIZE] * SIZE


@pytest.mark.parametrize("length", [0, 1, 2, 1001])
@pytest.mark.parametrize("total", [None, 7.0])
def test_sums_in_rank_order_have_the_bits_that_numpy_defines(opened, length, total):
    drawn = np.random.default_rng(length)
    parts = (drawn.standard_normal((SIZE, length)) * 10.0 ** drawn.integers(-6, 7, (SIZE, length))).astype(np.float32)
    parts[:, :1] = -0.0
    expected = np.zeros(length, np.float32)
    for part in parts:
        expected += part
    if total is not None:
        expected /= np.float32(total)

    def add(group):
        buffer = torch.from_numpy(parts[group.rank].copy())
        sum_in_rank_order(group, buffer, "gradients", total).add().wait()
        return buffer.numpy().tobytes()

    with opened(PATIENT_S) as groups:
        assert on_all(groups, add) == [expected.tobytes()] * SIZE


@pytest.mark.parametrize(
    "send",
    [
        [torch.empty(1)],
        [torch.empty(1), torch.empty(1, dtype=torch.float64), torch.empty(1)],
        [torch.empty(1, 1), torch.empty(1), torch.empty(1)],
        [torch.empty(1), torch.empty(4)[::2], torch.empty(1)],
        [torch.empty(2), torch.empty(1), torch.empty(1)],
    ],
    ids=["too few", "float64", "matrix", "strided", "own size"],
)
def test_what_can_not_be_sent_is_refused_and_nothing_was_done(opened, send):
    lengths = [[1] * SIZE] * SIZE
    with opened(PATIENT_S) as groups:
        with pytest.raises(PipelineError, match="the vectors"):
            groups[0].exchange(send, [torch.empty(1) for _ in range(SIZE)], "the vectors")
        assert on_all(groups, lambda group: swap(group, lengths)) == [swapped(rank, lengths) for rank in range(SIZE)]


def test_who_does_not_come_is_named_when_the_deadline_is_over(opened):
    with opened(0.5) as groups:
        found = on_all(groups, lambda group: swap(group, [[4] * SIZE] * SIZE, what="rows of iteration 5"), but=[1])
    assert any(isinstance(error, DeadlineError) for error in found), found
    for error in found:  # the second one may have been told by the first
        assert isinstance(error, DeadlineError | PipelineError)
        assert "rows of iteration 5" in str(error)
        assert "trainer" in str(error)
    assert any("trainer 1" in str(error) for error in found), found


@pytest.mark.parametrize("reason", [ValueError("the disk is full"), "the disk is full"], ids=["error", "text"])
def test_who_aborts_ends_the_waits_of_all_and_is_named_with_the_reason(opened, reason):
    with opened(PATIENT_S) as groups:

        def wait_or_abort(group):
            if group.rank == 2:
                return group.abort(reason)
            return swap(group, [[4] * SIZE] * SIZE, what="rows of iteration 5")

        found = on_all(groups, wait_or_abort)
        for error in found[:2]:
            assert isinstance(error, PipelineError), error
            assert "rows of iteration 5" in str(error)
        told = [error for error in found[:2] if "trainer 2" in str(error) and "the disk is full" in str(error)]
        assert told, found
        for group in groups:
            with pytest.raises(PipelineError, match="rows of iteration 6"):
                swap(group, [[4] * SIZE] * SIZE, what="rows of iteration 6")


@pytest.mark.parametrize("lengths", [[[4] * SIZE] * SIZE, [[1, 2, 3]] * SIZE], ids=["other name", "other size"])
def test_trainers_that_are_out_of_step_are_told(opened, lengths):
    with opened(PATIENT_S) as groups:
        uneven = lengths[0] != [4] * SIZE

        def go(group):
            ahead = group.rank == 1
            own = [[4] * SIZE] * SIZE if not uneven or not ahead else lengths
            return swap(group, own, what="iteration 4" if ahead and not uneven else "iteration 3")

        for error in on_all(groups, go):
            assert isinstance(error, PipelineError), error


def test_what_was_sent_before_closing_arrives_and_a_closed_end_refuses(opened):
    lengths = [[2] * SIZE] * SIZE
    with opened(PATIENT_S) as groups:

        def swap_and_close(group):
            found = swap(group, lengths)
            group.close()
            group.close()
            return found

        assert on_all(groups, swap_and_close) == [swapped(rank, lengths) for rank in range(SIZE)]
        for group in groups:
            with pytest.raises(PipelineError, match="one more"):
                swap(group, lengths, what="one more")
            group.close()
