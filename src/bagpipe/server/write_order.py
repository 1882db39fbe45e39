"""The write-backs of one trainer, decided once and in order whatever the network does (I4).

Every sequence number has one outcome, applied or refused, and it is the answer to every copy of that write. Had a
refusal no number, a late copy could be applied after its sender was told that nothing has changed.
"""

from __future__ import annotations

from collections.abc import Callable
from threading import Lock

from bagpipe.errors import WireError
from bagpipe.wire.messages import Failed, Written

Outcome = Written | Failed

REFUSALS_KEPT = 64


class WriteOrder:
    """What has become of one trainer's writes."""

    def __init__(self, trainer: int) -> None:
        self.trainer = trainer
        self.lock = Lock()
        """Held while a write is decided, so that copies of it wait for the outcome; taken by whoever calls."""
        self.last = 0
        """The last number that was decided."""
        self._refusals: dict[int, Failed] = {}

    def decide(self, number: int, apply: Callable[[], Outcome]) -> tuple[Outcome, bool]:
        """The outcome of this write, and whether it was decided now; raises if one before it is missing.

        What `apply` raises decides nothing: it must be certain that another copy would raise it too.
        """
        if number < 1:
            raise WireError(f"write {number} of trainer {self.trainer}: they are counted from 1")
        if number <= self.last:
            return self._refusals.get(number, Written(number)), False
        if number != self.last + 1:
            raise WireError(
                f"write {number} of trainer {self.trainer} came after write {self.last}: {self.last + 1} is missing"
            )
        outcome = apply()
        self.last = number
        if isinstance(outcome, Failed):
            self._refusals[number] = outcome
            if len(self._refusals) > REFUSALS_KEPT:
                del self._refusals[min(self._refusals)]
        return outcome, True
