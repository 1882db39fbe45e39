"""Promise I7: the stages of a training loop hand over thousands of times, each held up at random, and none hangs."""

from __future__ import annotations

import sys

import pytest

from bagpipe.errors import BagpipeError
from bagpipe.trainer.pipeline import Pipeline
from bagpipe.trainer.stages import Threads
from harness.strain import Strained, make_pause
from harness.world import OPTIMIZERS, assert_identical, make_batches, train_prepared, train_reference

BATCHES = make_batches(14, last=3)


@pytest.fixture(autouse=True)
def impatient():
    """Threads that compute give way as often as they can."""
    before = sys.getswitchinterval()
    sys.setswitchinterval(1e-6)
    yield
    sys.setswitchinterval(before)


def strained(seed, *given, deadline_s=60.0):
    driver = Threads(deadline_s)
    driver._waits = Strained(make_pause(seed), *given)
    return driver


def train(driver, seed):
    """Two epochs; rows stay in the cache between them, or not."""
    return train_prepared(
        BATCHES, OPTIMIZERS["adagrad"](), "wide_deep", check=seed % 2 == 0, cache=60 + seed % 20, driver=driver,
        lookahead=(1, 3, "auto")[seed % 3], policy=("lookahead", "lru", "belady")[seed % 3], depth=1 + seed % 3,
        epochs=2,
    )[0]  # fmt: skip


@pytest.fixture(scope="module")
def expected():
    return train_reference(BATCHES * 2, OPTIMIZERS["adagrad"](), "wide_deep")[0]


def assert_none_lost(seeds, expected):
    hand_overs = 0
    for seed in seeds:
        driver = strained(seed)
        assert_identical(expected, train(driver, seed))
        hand_overs += driver._waits.waits
    return hand_overs


def test_no_stage_of_a_training_loop_misses_its_wake_up(expected):
    assert assert_none_lost(range(8), expected) > 2000


@pytest.mark.long
def test_no_stage_misses_its_wake_up_under_long_stress(expected):
    assert assert_none_lost(range(8, 200), expected) > 50_000


@pytest.mark.parametrize("silent", ["close"])
def test_a_notification_that_is_left_out_is_found(monkeypatch, silent):
    """Of what the training loop tells its stages, where nothing that comes later makes up for it."""
    told = getattr(Pipeline, silent)

    def in_silence(self, *given):
        notify, self._driver.notify = self._driver.notify, lambda: None
        try:
            return told(self, *given)
        finally:
            self._driver.notify = notify

    monkeypatch.setattr(Pipeline, silent, in_silence)

    def train_all():
        for seed in range(20):
            train(strained(seed, 0.05, 1.0, deadline_s=5.0), seed)

    with pytest.raises(BagpipeError, match="a wake-up was lost"):
        train_all()
