"""Waits in which threads are held up at random, so that a wake-up that can be lost is; one that is lost is told."""

from __future__ import annotations

import random
import time

from bagpipe.errors import DeadlineError
from bagpipe.waits import Waits

LOOK_S, GRACE_S = 1.0, 10.0
"""From one look of somebody asleep at its condition to the next, and how late the wake-up may be once that holds."""


class Strained(Waits):
    """Conditions, and whoever evaluates them, are held up at random.

    Whoever is still asleep although its condition holds, and is not woken within the grace of a slow machine, has
    missed its wake-up: DeadlineError. Its own look wakes nobody.
    """

    def __init__(self, pause, look_s=LOOK_S, grace_s=GRACE_S):
        super().__init__()
        self.pause, self.look_s, self.grace_s = pause, look_s, grace_s
        self.waits = 0
        """How many have been waited for."""

    def until(self, what, ready, deadline_s):
        """Slowly."""

        def slow():
            self.pause()
            found = ready()
            self.pause()
            return found

        self.waits += 1
        self.pause()
        super().until(what, slow, deadline_s)

    def changed(self):
        """Slowly."""
        self.pause()
        super().changed()
        self.pause()

    def _sleep(self, parked, deadline_s):
        until = time.monotonic() + deadline_s
        while not super()._sleep(parked, min(self.look_s, until - time.monotonic())):
            if parked.ready() and not super()._sleep(parked, self.grace_s):
                raise DeadlineError("a wake-up was lost")
            if time.monotonic() > until:
                return False
        return True


def make_pause(seed):
    """Lets other threads run, more or less long, more or less often. Threads draw from it in any order."""
    drawn, often = random.Random(seed), random.Random(seed).choice([0.1, 0.5, 0.9])

    def pause():
        if drawn.random() < often:
            time.sleep(drawn.choice([0, 0, 0, 1e-6, 3e-5, 3e-4]))

    return pause
