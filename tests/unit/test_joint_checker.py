"""The checker of several trainers looks at every row, is quiet about what is right, and costs nothing where it is off.

That it notices defects is in tests/exact/test_sabotage.py.
"""

from __future__ import annotations

import pytest

from harness.explorer import Together
from harness.trainers import DESIGNS, Several, World
from harness.world import assert_identical, make_batches

BATCHES = make_batches(8, size=5)
WORLD = World(BATCHES, trainers=3)


def with_barrier(one):
    """A loop with a barrier in its middle."""
    for number, batch in enumerate(one.batches()):
        one.train(batch)
        if number == 4:
            one.loader.flush()


@pytest.mark.parametrize("design", DESIGNS)
def test_every_row_of_every_batch_is_looked_at(design):
    several = Several(WORLD, Together(1), design=design, cache=36)
    assert_identical(WORLD.reference(), several.run(with_barrier).state)
    for one in several.ones:
        assert one.loop._checker.checked_rows == one.loop._pipeline.traffic.unique_rows > 0


@pytest.mark.parametrize("design", DESIGNS)
def test_threads_raise_no_false_alarm(design):
    for policy in ("lookahead", "lru"):
        Several(WORLD, design=design, cache=36, policy=policy).run(with_barrier)


def test_it_costs_nothing_where_it_is_off():
    several = Several(WORLD, Together(0), check=False)
    assert [one.loop._checker for one in several.ones] == [None] * 3
    several.run()
