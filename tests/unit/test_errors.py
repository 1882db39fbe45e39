"""Errors keep their type and their fields when they are put in other words, and between processes."""

from __future__ import annotations

import pickle

import pytest

from bagpipe import errors
from bagpipe.cluster.settings import Failure
from bagpipe.errors import (
    BagpipeError,
    ClusterError,
    GenerationOverError,
    PeerLostError,
    PipelineError,
    StoreError,
    again,
    named_error,
)
from bagpipe.wire.messages import Failed

FIELDS = {PeerLostError: {"rank": 3}, GenerationOverError: {"generation": 4}}
KINDS = [each for each in vars(errors).values() if isinstance(each, type) and issubclass(each, BagpipeError)]


@pytest.mark.parametrize("kind", KINDS)
def test_every_error_is_the_same_in_other_words_and_in_other_processes(kind):
    error = kind("it broke", **FIELDS.get(kind, {}))
    failed, failure = Failed.of(error), Failure.of(error)
    for each in (
        again(error, "in other words"),
        named_error(failed.error, failed.message, failed.fields),
        named_error(failure.kind, failure.message, failure.fields),
        pickle.loads(pickle.dumps(error)),
    ):
        assert type(each) is kind
        assert str(each) in ("it broke", "in other words")
        assert each.fields == FIELDS.get(kind, {})


@pytest.mark.parametrize(
    ("kind", "fields"),
    [
        *[(name, {}) for name in ("SystemExit", "annotations", "again", "__name__", "", "PeerLostError")],
        ("PeerLostError", {"generation": 1}),
        ("StoreError", {"rank": 1}),
        ("ConfigError", {"rank": 1}),
        ("GenerationOverError", {"generation": 1, "rank": 1}),
        ("GenerationOverError", {"message": 1}),
        ("GenerationOverError", {"self": 1}),
    ],
)
def test_what_another_process_says_can_only_become_an_error_of_ours(kind, fields):
    error = named_error(kind, "it broke", fields, ClusterError)
    assert type(error) is ClusterError
    assert str(error) == "it broke"
    assert type(named_error(kind, "it broke", fields)) is PipelineError


def test_what_came_of_the_end_of_a_generation_is_told_as_that():
    over = GenerationOverError("all begin anew", 5)
    wrapped, last = StoreError("halfway"), ClusterError("trainer 1 failed with StoreError")
    wrapped.__cause__, last.__cause__ = over, wrapped
    failure = Failure.of(last)
    assert (failure.kind, failure.fields) == ("GenerationOverError", {"generation": 5})
    assert failure.message == "trainer 1 failed with StoreError"
    assert Failure.of(wrapped.with_traceback(None)).kind == "GenerationOverError"
    assert Failure.of(StoreError("generation 5 is over")).kind == "StoreError"
