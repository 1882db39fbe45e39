"""Groups in memory: every interleaving of ranks, and every way in which an exchange can fail."""

import random
import threading

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from bagpipe.errors import ConsistencyError, DeadlineError, PipelineError, StoreError
from bagpipe.trainer.collective import memory_groups, sum_in_rank_order
from bagpipe.trainer.stages import Threads, Wait
from harness.collectives import strict_groups
from harness.examples import examples
from harness.explorer import Seeded


def numbers(rank, peer, turn, length):
    return torch.full((length,), float(rank * 100 + peer * 10 + turn))


def turns(group, lengths, done):
    """A stage: one exchange after the other, each with sizes of its own."""
    for turn, table in enumerate(lengths):
        send = [numbers(group.rank, peer, turn, table[group.rank][peer]) for peer in range(group.size)]
        receive = [torch.empty(table[peer][group.rank]) for peer in range(group.size)]
        pending = group.exchange(send, receive, f"turn {turn}")
        yield Wait(f"turn {turn}", pending.ready)
        pending.wait()
        for peer, values in enumerate(receive):
            assert torch.equal(values, numbers(peer, group.rank, turn, table[peer][group.rank]))
        done.append((group.rank, turn))


@examples(40)
@given(st.integers(1, 4), st.integers(0, 5), st.integers(0, 2**20))
def test_every_rank_receives_what_was_sent_to_it_whatever_the_schedule(size, count, seed):
    drawn = random.Random(seed)
    lengths = [[[drawn.randrange(4) for _ in range(size)] for _ in range(size)] for _ in range(count)]
    done = []
    driver = Seeded(seed)
    driver.start({str(group.rank): turns(group, lengths, done) for group in memory_groups(size)})
    driver.join()
    assert sorted(done) == [(rank, turn) for rank in range(size) for turn in range(count)]


def test_drivers_in_threads_are_told_of_arrivals():
    drivers = [Threads(20) for _ in range(3)]
    groups = memory_groups(3, lambda: [driver.notify() for driver in drivers])
    done = []
    lengths = [[[2] * 3] * 3] * 4
    for driver, group in zip(drivers, groups, strict=True):
        driver.start({"turns": turns(group, lengths, done)})
    for driver in drivers:
        driver.join()
    assert len(done) == 12


def test_a_rank_may_be_several_exchanges_ahead_and_reuse_what_it_sent():
    ahead, behind = memory_groups(2)
    buffer = torch.empty(1)
    pending = []
    for turn in range(3):
        buffer = torch.tensor([float(turn)])
        pending.append(ahead.exchange([torch.empty(0), buffer], [torch.empty(0), torch.empty(0)], f"turn {turn}"))
        assert not pending[-1].ready()
    for turn in range(3):
        received = torch.empty(1)
        behind.exchange([torch.empty(0)] * 2, [received, torch.empty(0)], f"turn {turn}").wait()
        assert received.item() == turn
    assert all(each.ready() for each in pending)
    for each in reversed(pending):
        each.wait()
        each.wait()


def test_bits_travel_as_they_are():
    groups = memory_groups(2)
    bits = torch.tensor([0x7F800001, -1, 1, -(2**31), 0x7FC12345], dtype=torch.int32)
    received = torch.empty(5)
    groups[0].exchange([torch.empty(0), bits.view(torch.float32)], [torch.empty(0)] * 2, "bits")
    groups[1].exchange([torch.empty(0)] * 2, [received, torch.empty(0)], "bits").wait()
    assert torch.equal(received.view(torch.int32), bits)


def test_what_is_to_be_received_can_not_be_read_before_it_was_waited_for():
    groups = strict_groups(2)
    received = torch.zeros(3)
    groups[1].exchange([torch.ones(3), torch.ones(0)], [torch.empty(0)] * 2, "x")
    pending = groups[0].exchange([torch.ones(0)] * 2, [torch.empty(0), received], "x")
    assert pending.ready()
    assert received.isnan().all()
    pending.wait()
    assert received.tolist() == [1, 1, 1]


def test_a_buffer_that_changes_while_it_is_sent_is_found():
    group = strict_groups(1)[0]
    sent = torch.ones(2)
    pending = group.exchange([sent], [torch.empty(2)], "the vectors")
    sent[0] = 5
    with pytest.raises(ConsistencyError, match="the vectors: trainer 0 changed a buffer"):
        pending.wait()


def test_ranks_that_disagree_on_a_size_are_told_who_and_how_many():
    groups = memory_groups(2)
    groups[1].exchange([torch.ones(3), torch.ones(0)], [torch.empty(0)] * 2, "the gradients")
    pending = groups[0].exchange([torch.ones(0)] * 2, [torch.empty(0), torch.empty(2)], "the gradients")
    for _ in range(2):
        with pytest.raises(PipelineError, match="the gradients: trainer 1 sent 3 numbers, trainer 0 expects 2"):
            pending.wait()


def test_ranks_that_are_out_of_step_are_told_where_each_is():
    groups = memory_groups(2)
    empty = [torch.empty(0)] * 2
    groups[1].exchange(empty, empty, "iteration 4")
    with pytest.raises(PipelineError, match="trainer 0 is at iteration 3, trainer 1 at iteration 4"):
        groups[0].exchange(empty, empty, "iteration 3").wait()


@pytest.mark.parametrize(
    ("send", "message"),
    [
        ([torch.empty(1)], "1 tensors to send for 2 trainers"),
        ([torch.empty(1), torch.empty(1, dtype=torch.float64)], "for trainer 1 is torch.float64"),
        ([torch.empty(1, 1), torch.empty(1)], r"shape \(1, 1\)"),
        ([torch.empty(1), torch.empty(4)[::2]], r"strides \(2,\)"),
        ([torch.empty(2), torch.empty(1)], "trainer 0 sends itself 2 numbers and expects 1"),
    ],
)
def test_what_can_not_be_exchanged_is_refused_before_anything_is_sent(send, message):
    groups = memory_groups(2, deadline_s=0.01)
    with pytest.raises(PipelineError, match=message):
        groups[0].exchange(send, [torch.empty(1)] * 2, "x")
    with pytest.raises(DeadlineError):
        groups[1].exchange([torch.empty(1)] * 2, [torch.empty(1)] * 2, "x").wait()


def test_a_rank_that_skips_an_exchange_ends_in_a_deadline_that_names_it():
    groups = memory_groups(3, deadline_s=0.05)
    empty = [torch.empty(0)] * 3
    groups[1].exchange(empty, empty, "the rows of iteration 7")
    with pytest.raises(DeadlineError, match=r"waited 0.05 s for the rows of iteration 7 from trainer 2: is it"):
        groups[0].exchange(empty, empty, "the rows of iteration 7").wait()


def test_the_waits_of_others_end_at_once_with_the_cause_when_a_rank_aborts():
    groups = memory_groups(3)
    empty = [torch.empty(0)] * 3
    cause = StoreError("disk full")
    caught = []

    def waits(group):
        with pytest.raises(PipelineError, match=r"gradients can.t .* trainer 2 failed: StoreError: disk full") as e:
            group.exchange(empty, empty, "gradients").wait()
        caught.append(e.value)

    threads = [threading.Thread(target=waits, args=(group,)) for group in groups[:2]]
    for thread in threads:
        thread.start()
    groups[2].abort(cause)
    for thread in threads:
        thread.join(10)
    assert [error.__cause__ for error in caught] == [cause, cause]
    for group in groups:
        with pytest.raises(PipelineError, match="disk full"):
            group.exchange(empty, empty, "more")


def test_a_rank_that_has_closed_is_not_waited_for_but_what_it_sent_arrives():
    groups = memory_groups(2)
    received = torch.empty(1)
    groups[1].exchange([torch.ones(1), torch.empty(0)], [torch.empty(0)] * 2, "last")
    groups[1].close()
    groups[1].close()
    groups[0].exchange([torch.empty(0)] * 2, [torch.empty(0), received], "last").wait()
    assert received.item() == 1
    pending = groups[0].exchange([torch.empty(0)] * 2, [torch.empty(0)] * 2, "more")
    assert pending.ready()
    with pytest.raises(PipelineError, match="more can't be exchanged, trainer 1 has left: it has closed the group"):
        pending.wait()
    with pytest.raises(PipelineError, match="closed"):
        groups[1].exchange([torch.empty(0)] * 2, [torch.empty(0)] * 2, "x")


@examples(60)
@given(st.integers(1, 4), st.integers(0, 9), st.sampled_from([None, 0.0, 3.0, 7.0]), st.integers(0, 2**20))
def test_sums_are_taken_in_rank_order_and_equal_on_all_ranks(size, length, total, seed):
    drawn = np.random.default_rng(seed)
    values = (drawn.standard_normal((size, length)) * 10.0 ** drawn.integers(-4, 5, (size, length))).astype(np.float32)
    values[drawn.random(values.shape) < 0.2] = -0.0
    expected = np.zeros(length, np.float32)
    for each in values:
        expected += each
    if total is not None:
        with np.errstate(all="ignore"):
            expected /= np.float32(total)
    groups = memory_groups(size)
    buffers = [torch.from_numpy(each.copy()) for each in values]
    halves = [sum_in_rank_order(group, buffer, "x", total) for group, buffer in zip(groups, buffers, strict=True)]
    assert all(half.ready() for half in halves)
    pending = [half.add() for half in drawn.permutation(np.array(halves, object))]
    for each in pending:
        each.wait()
    for buffer in buffers:
        np.testing.assert_array_equal(buffer.numpy().view(np.int32), expected.view(np.int32))
