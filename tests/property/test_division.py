"""Plans divided among trainers: no stale value anywhere, each update once on each holder, nothing sent for nobody."""

from __future__ import annotations

from random import Random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from bagpipe.oracle.design import DESIGNS
from bagpipe.oracle.tables import OracleTable
from bagpipe.policies import POLICIES
from definitions.division import Trainers, check_waits, divided, tight_places
from harness.examples import examples

TABLES = [OracleTable("a", 24), OracleTable("b", None, ("b0", "b1"), group=1), OracleTable("c", 5)]
CAPACITY = [14, 17]
NUM_FEATURES = 4
SAMPLE = st.tuples(st.integers(0, 23), st.integers(0, 30), st.integers(0, 30), st.integers(0, 4))


@st.composite
def traces(draw):
    """A number of trainers, and for each batch the samples of each; a trainer may have none, a batch may not."""
    trainers = draw(st.integers(2, 4))
    part = st.lists(SAMPLE, max_size=2)
    batch = st.lists(part, min_size=trainers, max_size=trainers).filter(any)
    return trainers, draw(st.lists(batch, min_size=1, max_size=12))


@pytest.mark.parametrize("design", DESIGNS)
@pytest.mark.parametrize("delayed", [True, False])
@given(trace=traces(), policy=st.sampled_from(sorted(POLICIES)), lookahead=st.sampled_from([1, 2, 3, 7, "auto"]))
@examples(60)
def test_every_trainer_always_has_the_newest_value(design, delayed, trace, policy, lookahead):
    trainers, batches = trace
    capacity = [40, 60] if policy == "ideal" else CAPACITY
    found = divided(
        TABLES, capacity, batches, trainers, design=design, delayed=delayed, policy=policy, lookahead=lookahead
    )
    assert [plan.iteration for plan, _ in found] == list(range(len(batches)))
    replicas = design in ("replicated", "lrpp")
    Trainers(TABLES, trainers, replicas).run(found, batches)
    if not replicas:
        check_waits(found, TABLES, capacity)
    if not delayed:
        for _, parts in found:
            assert all(not len(part.sync.later_updated) and part.sync.later_values.empty for part in parts)


@given(
    trace=traces(),
    costs=st.lists(st.sampled_from([0.1, 1.1, 2.1]), min_size=3, max_size=3),
    policy=st.sampled_from(["lookahead", "lru"]),
    lookahead=st.sampled_from([1, 2, 5, "auto"]),
    delayed=st.booleans(),
)
@examples(80)
def test_rows_go_to_their_next_users_and_one_trainer_at_a_time_has_them_to_write(
    trace, costs, policy, lookahead, delayed
):
    trainers, batches = trace
    options = {"delayed": delayed, "policy": policy, "lookahead": lookahead}
    found = divided(TABLES, CAPACITY, batches, trainers, costs=costs, **options)
    Trainers(TABLES, trainers).run(found, batches)


@given(
    trace=traces(),
    design=st.sampled_from(["owned", "partitioned"]),
    costs=st.sampled_from([(), (0.1, 0.1, 0.1), (1.1, 0.1, 2.1)]),
    policy=st.sampled_from(sorted({*POLICIES} - {"ideal"})),
    lookahead=st.sampled_from([1, 2, 3, 7, "auto"]),
    delayed=st.booleans(),
    spare=st.integers(0, 6),
    alike=st.sampled_from([None, 0, 1]),
)
@examples(150)
def test_rows_have_places_at_their_owners_and_guests_come_for_one_plan(
    trace, design, costs, policy, lookahead, delayed, spare, alike
):
    """`alike`: a group whose slots are numbered alike, as there are too few of them for guests."""
    trainers, batches = trace
    places = tight_places(CAPACITY, [4 * (group != alike) for group in range(2)], trainers, spare)
    found = divided(
        TABLES, CAPACITY, batches, trainers, design=design, costs=costs, delayed=delayed, policy=policy,
        lookahead=lookahead, places=places,
    )  # fmt: skip
    Trainers(TABLES, trainers).run(found, batches)
    check_waits(found, TABLES, places.capacity)


def test_rows_move_where_there_are_places_to_spare():
    random = Random(3)
    batches = [[[tuple(random.randrange(size) for size in (24, 31, 31, 5))] for _ in range(3)] for _ in range(60)]
    moved = {}
    for spare in (None, 0, 6):
        places = None if spare is None else tight_places(CAPACITY, [2, 2], 3, spare)
        found = divided(TABLES, CAPACITY, batches, 3, costs=(0.1,) * 3, lookahead="auto", places=places)
        system = Trainers(TABLES, 3)
        system.run(found, batches)
        moved[spare] = system.moved
    assert moved[0] < moved[6] <= moved[None]
    assert moved[6] > 0.9 * moved[None], moved


def test_a_row_whose_next_uses_are_another_trainers_goes_there_with_its_state():
    uses = [{0}, {0}, {1}, {1}, {1}, {0, 1}]
    found, batches = exclusive("owned", uses, lookahead=2, costs=[2.1])
    system = Trainers([OracleTable("only", 8)], 3)
    system.run(found, batches)
    moved = [[len(part.sync.values.ids) for part in parts] for _, parts in found]
    assert moved[1] == [0, 1, 0], "trainer 1 uses it next, and after that"
    assert sum(map(sum, moved)) == 1
    staying, _ = exclusive("owned", uses, lookahead=2)
    assert not any(len(part.sync.values.ids) for _, parts in staying for part in parts)


@given(trace=traces(), lookahead=st.sampled_from([2, 5, "auto"]))
@examples(60)
def test_owners_send_less_than_those_of_a_partition(trace, lookahead):
    trainers, batches = trace
    sent = {}
    for design in ("owned", "partitioned"):
        system = Trainers(TABLES, trainers)
        system.run(divided(TABLES, CAPACITY, batches, trainers, design=design, lookahead=lookahead), batches)
        sent[design] = system.sent
    assert sent["owned"] <= sent["partitioned"]


def exclusive(design, uses, **options):
    """The parts of a table with one row that certain trainers use in each batch."""
    batches = [[[(0,)] if rank in users else [(1,)] for rank in range(3)] for users in uses]
    return divided([OracleTable("only", 8)], [4], batches, 3, design=design, **options), batches


@pytest.mark.parametrize("design", DESIGNS)
def test_a_row_goes_from_one_user_to_several_and_back(design):
    found, batches = exclusive(design, [{0}, {0, 1, 2}, {2}, {1}, {0, 1}, {1}], lookahead=3)
    system = Trainers([OracleTable("only", 8)], 3, replicas=design in ("replicated", "lrpp"))
    system.run(found, batches)
    assert system.version[0, 0] == 6


def test_a_row_that_one_trainer_uses_and_that_leaves_is_its_own_in_lrpp():
    batches = [[[(0,)], [(1,)]], [[(0,)], [(0,)]]]
    found = divided([OracleTable("only", 8)], [4], batches, 2, design="lrpp", lookahead=2)
    first = [part.fetch.ids.tolist() for part in found[0][1]]
    assert first == [[0], [0, 1]], "row 0 stays and is everybody's; row 1 is used once"
    assert [part.evict.ids.tolist() for part in found[0][1]] == [[], [1]]
    assert [part.sync.updated.ids.tolist() for part in found[0][1]] == [[0], [0]]


def test_the_trainer_that_uses_a_row_most_owns_it():
    found, _ = exclusive("owned", [{0, 1}, {2}, {1, 2}, {2}], lookahead=4)
    takers = [rank for rank, part in enumerate(found[0][1]) if 0 in part.sync.updated.ids]
    assert takers == [2], "used three times by trainer 2, though not in the first batch"
    assert [part.fetch.ids.tolist() for part in found[0][1]][2] == [0, 1]
