"""Each way to break exactness is put in at a seam, in plans, store or group, and is noticed: the other tests can fail.

"checker": the run-time checker names a row, and without it the bits would differ. "rule": it does, though the bits
would be the same. "error": a typed error. "bits": only the comparison with the reference shows it. Without a defect
nothing is noticed.
"""

from __future__ import annotations

import functools

import pytest

from bagpipe.errors import BagpipeError, ConsistencyError
from harness import sabotage
from harness.explorer import explorer
from harness.sabotage import NOTHING, Sabotage
from harness.trainers import DESIGNS, World, run, run_alone
from harness.world import make_batches

ALONE = World(make_batches(12, size=4, seed=2, rows=30), trainers=1)
TOGETHER = World(make_batches(8, size=5), trainers=3)
SEEDS = range(8)
SMALL = {"cache": 30, "lookahead": 3}
ROOMY = {"cache": 300}
LRU = {"cache": 22, "policy": "lru"}
NOCACHE = {"cache": 30, "policy": "nocache"}


@functools.cache
def expected(trainers):
    return (ALONE if trainers == 1 else TOGETHER).reference()


def alone(defect, seed, **settings):
    """One trainer, every second time with write-backs that are as late as can be."""
    late = frozenset({"write-back"} if seed % 2 else ())
    return run_alone(ALONE, explorer(seed, last=late), sabotage=defect, **settings)


def together(defect, seed, **settings):
    """Three trainers with a barrier in the middle."""

    def loop(one):
        for number, batch in enumerate(one.batches()):
            one.train(batch)
            if number == 4:
                one.loader.flush()

    late = ("write-back",) if seed % 2 else ()
    return run(TOGETHER, seed, last=late, loop=loop, sabotage=defect, **({"cache": 36} | settings))


def noticed(train, defect, seed, **settings):
    """What a run shows: "checker", "error" or "bits", and what it says; None if all is as it should be."""
    try:
        found = train(defect, seed, **settings)
    except BagpipeError as error:
        cause: BaseException | None = error
        while cause is not None and not isinstance(cause, ConsistencyError):
            cause = cause.__cause__
        return ("error", str(error)) if cause is None else ("checker", str(cause))
    except AssertionError as error:  # of the harness: trainers differ from each other
        return "bits", str(error)
    differing = expected(1 if train is alone else 3).differing(found.state)
    return ("bits", str(differing[:3])) if differing else None


def assert_noticed(train, defect, by, **settings):
    found = next(filter(None, (noticed(train, defect, seed, **settings) for seed in SEEDS)), None)
    assert found is not None, f"nothing was noticed in {len(SEEDS)} schedules"
    assert found[0] == ("checker" if by == "rule" else by), found
    if found[0] == "checker":
        assert all(part in found[1] for part in ("row ", "of table ", "iteration ")), found
        unchecked = any(noticed(train, defect, seed, check=False, **settings) for seed in SEEDS)
        assert unchecked == (by == "checker"), found


@pytest.mark.parametrize("settings", [SMALL, ROOMY, LRU, NOCACHE], ids=str)
def test_one_trainer_without_a_defect_is_exact_and_raises_no_alarm(settings):
    assert [noticed(alone, NOTHING, seed, **settings) for seed in range(4)] == [None] * 4


@pytest.mark.parametrize("design", DESIGNS)
def test_trainers_without_a_defect_are_exact_and_raise_no_alarm(design):
    assert [noticed(together, NOTHING, seed, design=design) for seed in range(2)] == [None] * 2


@pytest.mark.parametrize(
    ("defect", "settings"),
    [
        ("fetches_do_not_wait", SMALL),
        ("fetches_wait_for_one_less", SMALL),
        ("fetches_wait_for_one_less", LRU),
        ("insertions_do_not_wait", SMALL),
        ("victims_do_not_wait", LRU),
        ("fetched_rows_are_mixed_up", SMALL),
        ("other_slots_are_named", SMALL),
        ("a_fetch_is_left_out", SMALL),
        ("an_eviction_is_left_out", SMALL),
        ("victims_are_left_out", LRU),
        ("rows_leave_an_iteration_early", SMALL),
    ],
)
def test_a_wrong_plan_is_noticed(defect, settings):
    assert_noticed(alone, getattr(sabotage, defect), "checker", **settings)


@pytest.mark.parametrize("store", sabotage.STORES, ids=lambda store: store.__name__)
def test_a_store_with_a_defect_is_noticed(store):
    assert_noticed(alone, Sabotage(store=store), "checker", **SMALL)


@pytest.mark.parametrize("store", [sabotage.WritesLate, sabotage.ChangesABit], ids=lambda store: store.__name__)
def test_a_store_that_loses_what_nobody_reads_again_is_noticed_at_the_end(store):
    assert_noticed(alone, Sabotage(store=store), "bits", **ROOMY)


@pytest.mark.parametrize(
    ("defect", "design", "by"),
    [
        *(("fetches_do_not_wait", design, "checker") for design in DESIGNS),
        ("fetches_wait_for_one_less", "owned", "checker"),
        *(("insertions_do_not_wait", design, "checker") for design in DESIGNS),
        ("delayed_vectors_are_not_sent", "owned", "checker"),
        ("delayed_vectors_are_not_sent", "partitioned", "checker"),
        ("one_owner_leaves_out_updates", "owned", "checker"),
        ("one_owner_leaves_out_updates", "partitioned", "checker"),
        *(("rows_are_updated_twice", design, "checker") for design in DESIGNS),
        ("one_copy_is_not_updated", "replicated", "error"),
        ("one_copy_is_not_updated", "lrpp", "error"),
        *(("a_row_is_written_by_nobody", design, "checker") for design in DESIGNS),
        ("a_row_is_written_by_two", "replicated", "rule"),
        ("a_row_is_written_by_two", "lrpp", "checker"),
        ("copies_are_not_given_up", "replicated", "rule"),
        ("copies_are_not_given_up", "lrpp", "checker"),
        *(("plans_change_places", design, "error") for design in DESIGNS),
    ],
)
def test_a_wrong_plan_of_a_trainer_is_noticed(defect, design, by):
    assert_noticed(together, getattr(sabotage, defect), by, design=design)


@pytest.mark.parametrize("store", [sabotage.WritesLate, sabotage.AnswersEarly], ids=lambda store: store.__name__)
@pytest.mark.parametrize("design", DESIGNS)
def test_a_store_of_several_trainers_with_a_defect_is_noticed(store, design):
    assert_noticed(together, Sabotage(store=store), "checker", design=design)


CHANGES = (sabotage.drops, sabotage.doubles, sabotage.swaps, sabotage.delivers_old)


@pytest.mark.parametrize("change", [*CHANGES, sabotage.does_not_wait], ids=lambda change: change.__name__)
@pytest.mark.parametrize(
    ("about", "design", "by"),
    [
        ("gradients of iteration", "owned", "bits"),  # one trainer updates a row: nobody has another copy
        ("gradients of iteration", "replicated", "checker"),
        ("delayed gradients", "partitioned", "bits"),
        ("delayed gradients", "lrpp", "checker"),
        ("rows of iteration", "owned", "checker"),
        ("delayed rows", "partitioned", "checker"),
        ("rows fetched", "partitioned", "checker"),
        ("dense gradients", "owned", "bits"),
    ],
)
def test_a_wrong_exchange_is_noticed(change, about, design, by):
    if change is sabotage.does_not_wait and by == "bits":
        by = "error"  # what has not come is not a number
    assert_noticed(together, change(about), by, design=design)


def test_a_bit_that_changes_on_the_way_is_noticed():
    for about, design, by in (
        ("rows of iteration", "owned", "checker"),
        ("gradients of iteration", "lrpp", "checker"),
        ("gradients of iteration", "partitioned", "bits"),
    ):
        assert_noticed(together, sabotage.changes_a_bit(about), by, design=design)


class Planned(Exception):
    """What an exchange fails with."""


@pytest.mark.parametrize("about", ["gradients of iteration 3", "delayed gradients of iteration 3", "dense gradients"])
@pytest.mark.parametrize("design", DESIGNS)
def test_an_error_of_one_trainer_ends_all_and_is_raised_with_its_cause(about, design):
    error = Planned("bits have rotted")
    with pytest.raises(Exception, match="bits have rotted") as caught:
        together(sabotage.fails(about, error), 0, design=design)
    causes = [caught.value]
    while causes[-1].__cause__ is not None:
        causes.append(causes[-1].__cause__)
    assert error in causes
