"""Promise I1 for 365 settings at random, of one to four trainers: the bits are those of the reference."""

from __future__ import annotations

import pytest

from harness.covering import few
from harness.settings import CHOICES, difference, spread

NUMBER, IN_SHORT = 365, 25


def test_every_value_of_every_setting_comes_in_the_short_run_already():
    for name, seen in spread(range(IN_SHORT)).items():
        wanted = set(CHOICES[name]) - ({200, 7} if name == "lookahead" else set())
        assert wanted <= seen, name


@pytest.mark.parametrize("number", [79, 133, 282, 343])
def test_a_cache_that_keeps_all_rows_has_room_for_whatever_one_trainer_uses(number):
    """Policy ideal in the design owned: the first batch told of fewer rows of one trainer than a later one has."""
    assert difference(number) == ""


@pytest.mark.parametrize("number", few(IN_SHORT, NUMBER))
def test_settings_at_random_have_the_bits_of_the_reference(number):
    assert difference(number) == ""
