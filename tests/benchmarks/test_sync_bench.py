"""What trainers exchange, counted small: designs relate as they must, whatever the data."""

import pytest

from bagpipe.oracle.assign import ASSIGNERS
from bagpipe.oracle.design import DESIGNS
from benchmarks.sync import BENCHMARK, STATES, TRAINERS, VARIANTS, _Size, count


@pytest.fixture(scope="module")
def results():
    found = [result for result in BENCHMARK.run(True) if result["trainers"] == TRAINERS]
    return {(result["assign"], result["design"], result["row_optimizer"]): result for result in found}


def test_every_assignment_and_design_is_counted(results):
    assert set(results) == {(assign, *variant) for assign in ASSIGNERS for variant in VARIANTS}


@pytest.mark.parametrize("assign", ASSIGNERS)
def test_designs_differ_as_they_must(results, assign):
    owned, partitioned, replicated, lrpp = (results[assign, design, None] for design in DESIGNS)
    assert replicated["rows"] == replicated["unique_rows"]
    assert lrpp["rows"] < replicated["rows"]
    assert lrpp["rows_critical"] == replicated["rows_critical"], "a row that the next iteration uses does not leave"
    assert owned["bytes_a_trainer"] < partitioned["bytes_a_trainer"] < lrpp["bytes_a_trainer"]
    for result in owned, partitioned, replicated, lrpp:
        assert 0 < result["rows_critical"] <= result["rows"] <= result["unique_rows"]
        assert 0 < result["bytes_a_trainer_critical"] <= result["bytes_a_trainer"]
        assert result["bytes_by_iteration"]["8"] == result["bytes_a_trainer"]


@pytest.mark.parametrize("assign", ASSIGNERS)
def test_rows_that_change_their_owners_cost_less_the_less_state_they_have(results, assign):
    of_states = [results[assign, "owned", optimizer] for optimizer in (*STATES, None)]
    sent = [result["bytes_a_trainer"] for result in of_states]
    assert sent == sorted(sent)
    assert sent[0] < 0.9 * sent[-1]
    assert [result["rows_moved"] > 0 for result in of_states] == [True, True, True, True, False]


def test_copies_cost_more_than_an_all_reduce_where_there_are_many_trainers():
    """Every user of a row sends its gradient to all others; with an all-reduce every trainer sends what it would."""
    small = _Size(0.01, 1_024, 4, 100_000, (4,), 2)
    ratios = [
        result["bytes_a_trainer"] / result["bytes_a_trainer_all_reduce"]
        for trainers in (2, 32)
        for result in count("contiguous", small, trainers, [("replicated", None)])
    ]
    assert ratios[0] < 1 < ratios[1]


@pytest.mark.parametrize("design", ["owned", "partitioned"])
def test_placing_samples_by_their_rows_makes_fewer_of_them_change_hands(results, design):
    """With `partitioned` it is the communication-aware partitioned cache of the paper's section 3.3."""
    aware, as_they_come = (results[assign, design, None] for assign in ("aware", "contiguous"))
    assert aware["rows"] < as_they_come["rows"]
    assert aware["rows_elsewhere"] < as_they_come["rows_elsewhere"]
    assert aware["vectors_elsewhere"] < as_they_come["vectors_elsewhere"]


@pytest.mark.parametrize("assign", ASSIGNERS)
def test_owners_of_a_partition_are_chosen_by_the_votes_of_uses_as_those_of_owned(results, assign):
    owned, partitioned = (results[assign, design, None] for design in ("owned", "partitioned"))
    assert owned["rows"] == partitioned["rows"]
    assert owned["rows_elsewhere"] == partitioned["rows_elsewhere"]
