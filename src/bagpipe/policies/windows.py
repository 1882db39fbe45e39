"""How long each window of policy `windowed` is: fixed, as a list says, or as the times of the run say.

As in cDLRM (section 4) the first length follows from how long a batch takes to plan and fetch, against how long it
trains, and it grows while training stalls. Plans then depend on time, and the result does not: a window can cost
traffic but no bit. What was chosen is a list that a later run can be given, which then makes the same plans.
"""

from __future__ import annotations

from typing import Protocol

from bagpipe.policy_options import MEASURED, parse_windows

WINDOW = 16
"""Batches of a window where the lookahead is "auto", and the shortest that is chosen by times."""
WINDOW_MAX = 256
"""The longest one that is chosen: its batches lie in memory."""
STALLED = 0.05
"""Training that waits for rows for this part of the time has stalled."""


class Times(Protocol):
    """What a trainer has measured so far."""

    iterations: int
    stall_s: float
    plan_s: float
    fetch_s: float
    windows: str
    """Where the lengths that were chosen are kept."""

    def seconds(self) -> float:
        """Now, since any moment."""
        ...


class Windows:
    """The lengths of windows, one after the other."""

    def __init__(self, option: str, lookahead: int) -> None:
        """By the policy option `windows`; if it is empty, or to begin with, a window has `lookahead` batches."""
        self._measured = option == MEASURED
        self._list = parse_windows(option) if option and not self._measured else [(0, lookahead)]
        self.length = self._list[0][1]
        self.most = max(self.length, WINDOW_MAX) if self._measured else max(length for _, length in self._list)
        """No window is longer."""
        self.times: Times | None = None
        """Of the trainer that it chooses for; None: there is nothing to go by."""
        self._since: tuple[float, int, float] | None = None
        """When the last window was chosen, and iterations and stalled seconds until then."""
        self._chosen = False

    def advance(self, begin: int, *, crowded: bool) -> None:
        """A window begins with this iteration. `crowded`: the last one did not fit its ways, so none is longer."""
        if not self._measured:
            self.length = [length for first, length in self._list if first <= begin][-1]
        elif self.times is not None:
            length = self.length if crowded else min(self.most, self._by_times(self.times))
            if length != self.length:
                self.length = length
                self._list.append((begin, length))
            self.times.windows = ",".join([str(self._list[0][1]), *(f"{b}:{n}" for b, n in self._list[1:])])

    def _by_times(self, times: Times) -> int:
        """The first choice goes by the ratio of times, once a window was trained; later ones by stalls."""
        now = times.seconds(), times.iterations, times.stall_s
        before = self._since
        if before is None or now[1] - before[1] < self.length:
            self._since = before or now
            return self.length
        self._since = now
        elapsed, trained, stalled = (b - a for a, b in zip(before, now, strict=True))
        if not self._chosen:
            self._chosen = True
            prefetch_s, train_s = (times.plan_s + times.fetch_s) / times.iterations, (elapsed - stalled) / trained
            return max(self.length, int(WINDOW * prefetch_s / train_s) if train_s > 0 else 0)
        return self.length + -(-self.length // 2) if stalled > STALLED * elapsed else self.length
