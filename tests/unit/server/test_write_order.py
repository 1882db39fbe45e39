"""Every write is decided once and in order, whatever arrives in whatever order."""

from __future__ import annotations

import itertools

import pytest
from bagpipe.server.membership import REFUSALS_KEPT, WriteOrder

from bagpipe.errors import WireError
from bagpipe.wire.messages import Failed, Written


def test_whatever_arrives_each_number_is_applied_once_and_in_order() -> None:
    for arriving in itertools.product(range(1, 5), repeat=5):
        order, applied = WriteOrder(0), []
        for number in arriving:
            expected = order.last + 1

            def apply(number: int = number, applied: list[int] = applied) -> Written:
                applied.append(number)
                return Written(number)

            if number > expected:
                with pytest.raises(WireError, match=f"{expected} is missing"):
                    order.decide(number, apply)
            else:
                assert order.decide(number, apply) == (Written(number), number == expected)
        assert applied == list(range(1, order.last + 1))


def test_a_refusal_is_the_answer_to_every_copy() -> None:
    order = WriteOrder(0)
    refusal = Failed("StoreError", "the disk is full", decided=True)
    assert order.decide(1, lambda: refusal) == (refusal, True)
    assert order.decide(1, lambda: Written(1)) == (refusal, False)
    assert order.decide(2, lambda: Written(2)) == (Written(2), True)
    assert order.decide(1, lambda: Written(1)) == (refusal, False)


def test_what_raises_decides_nothing() -> None:
    order = WriteOrder(3)

    def malformed() -> Written:
        raise WireError("no ids")

    with pytest.raises(WireError, match="no ids"):
        order.decide(1, malformed)
    assert order.last == 0
    assert order.decide(1, lambda: Written(1)) == (Written(1), True)


def test_numbers_begin_at_one() -> None:
    with pytest.raises(WireError, match="write 0 of trainer 3: they are counted from 1"):
        WriteOrder(3).decide(0, lambda: Written(0))


def test_refusals_take_no_more_room_than_announced() -> None:
    order = WriteOrder(0)
    for number in range(1, 200):
        order.decide(number, lambda number=number: Failed("StoreError", str(number), decided=True))
    assert len(order._refusals) == REFUSALS_KEPT
    assert order.decide(199, lambda: Written(199))[0] == Failed("StoreError", "199", decided=True)
