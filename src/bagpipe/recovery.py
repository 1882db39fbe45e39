"""What happens when a part of a run is lost: all go back to the newest complete checkpoint, and replay.

One path for every fault, so that there are few states to be right in (I2). Nothing here knows processes, Ray or torch:
a `Crew` does what is asked of it, be it made of Ray actors or of objects in one process under a seeded scheduler.
"""

from __future__ import annotations

import logging
import time
from collections import Counter
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass
from typing import Generic, Protocol, TypeVar

from bagpipe.checkpoint.point import START, ResumePoint
from bagpipe.errors import CheckpointError, ClusterError, StoreError
from bagpipe.failpoints import reach

_log = logging.getLogger(__name__)
ResultT_co = TypeVar("ResultT_co", covariant=True)
ResultT = TypeVar("ResultT")


class RolesLost(Exception):
    """Roles are gone, or were ended because they hung: why, by name. A run can go on without their memory."""

    def __init__(self, losses: Mapping[str, str]) -> None:
        assert losses, "somebody was lost"
        super().__init__("; ".join(f"{role} was lost: {cause}" for role, cause in losses.items()))
        self.losses = dict(losses)


@dataclass(frozen=True, slots=True)
class Incident:
    """One role that was lost, and what became of the run."""

    role: str
    cause: str
    done_before: int
    """Iterations that were over when it was noticed, as far as anybody had said."""
    done_after: int
    """Iterations that were over where the run went back to."""
    seconds: float
    """From notice of the loss to the next iteration that was finished."""


class Crew(Protocol[ResultT_co]):
    """Those who work on a run, by the name of their role. Every method may raise RolesLost; other errors end the run.

    What belongs to an earlier generation has no effect any more once `abandon` of a later one has returned: who was
    thought dead and comes back can't write.
    """

    @property
    def done(self) -> int:
        """Iterations that are over, as last heard."""

    def attempt(self, generation: int, point: ResumePoint, went_on: Callable[[], None]) -> ResultT_co:
        """Have all work from this point to the end; `went_on` is called when an iteration is finished.

        Each attempt is like a fresh run that begins with batch `point.done`; only rows are where they are.
        """

    def abandon(self, generation: int) -> None:
        """The attempt before is over, from now on it is this generation: return when all who are left have heard it."""

    def restart(self, roles: Collection[str]) -> None:
        """Return when these have come back, with nothing in their memory.

        Where a recovery begins anew they are asked for again: who is back already stays as it is.
        """

    def points(self) -> Collection[ResumePoint]:
        """The complete checkpoints of the run: those that servers name, and all that lie in its directory.

        A listing alone is not trusted: on shared storage it may lag behind what a server has been told.
        """

    def return_to(self, point: ResumePoint) -> None:
        """Return when the rows of all servers are as they were there.

        StoreError or CheckpointError if the checkpoint is damaged: another point may then be asked for.
        """


class Supervisor(Generic[ResultT]):
    """Has a crew work until the run is over, and brings it back on its feet after every loss."""

    def __init__(
        self,
        crew: Crew[ResultT],
        restarts_max: int,
        log: Callable[[str], None] = _log.warning,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """A role is started again up to `restarts_max` times; `log` is told what happens, in a line each."""
        self._crew, self._restarts_max, self._log, self._clock = crew, restarts_max, log, clock
        self._restarts: Counter[str] = Counter()
        self._open: list[tuple[str, str, int, float]] = []
        """Losses after which no iteration was finished yet: role, cause, iterations done, when."""
        self._point = START
        self.generation = 0
        """Of membership; each recovery adds 1."""
        self.incidents: list[Incident] = []
        """What happened so far, and was recovered from."""

    def run(self, start: ResumePoint = START) -> ResultT:
        """Run to the end from `start`; ClusterError when a role was lost more often than allowed."""
        self._point = start
        lost: dict[str, None] = {}
        while True:
            try:
                if lost:
                    self._point = self._recover(lost, start)
                    lost = {}
                result = self._crew.attempt(self.generation, self._point, self._went_on)
            except RolesLost as loss:
                lost |= dict.fromkeys(loss.losses)
                self._note(loss.losses)
            else:
                self._went_on()
                return result

    def _note(self, losses: Mapping[str, str]) -> None:
        now, done = self._clock(), self._crew.done
        for role, cause in losses.items():
            if self._restarts[role] >= self._restarts_max:
                error = ClusterError(f"{role} was lost: {cause}{_again(self._restarts_max)}")
                error.role = role
                raise error
            self._restarts[role] += 1
            self._open.append((role, cause, done, now))
            self._log(f"{role} was lost: {cause}")

    def _recover(self, lost: Collection[str], start: ResumePoint) -> ResumePoint:
        """Bring everybody to one point; a loss meanwhile begins it anew."""
        self.generation += 1
        reach("recovery.begun")
        self._crew.abandon(self.generation)
        reach("recovery.ended")
        self._crew.restart(lost)
        reach("recovery.restarted")
        point = self._go_back(start)
        reach("recovery.returned")
        return point

    def _go_back(self, start: ResumePoint) -> ResumePoint:
        """Return rows to the newest point at which nothing is damaged; what is shows only when it is read."""
        # What was before its start may be of another number of trainers, and so of other bits.
        points = {start} | {point for point in self._crew.points() if point.done > start.done}
        while True:
            point = max(points, key=lambda point: point.done)
            reach("recovery.chosen")
            self._log(f"going back to {point}")
            try:
                self._crew.return_to(point)
            except (StoreError, CheckpointError) as error:
                points.remove(point)
                if not points:
                    raise
                self._log(f"{point} can't be returned to: {error}")
            else:
                return point

    def _went_on(self) -> None:
        """An iteration was finished: what was lost before is made good."""
        open_incidents, self._open = self._open, []
        for role, cause, done_before, noticed_at in open_incidents:
            seconds = self._clock() - noticed_at
            before = max(done_before, self._point.done)  # what was told last may be older than the last checkpoint
            self.incidents.append(Incident(role, cause, before, self._point.done, seconds))
        if open_incidents:
            longest = max(incident.seconds for incident in self.incidents[-len(open_incidents) :])
            self._log(f"went on from {self._point} after {longest:.1f} s")


def _again(restarts_max: int) -> str:
    if restarts_max == 0:
        return "; with recovery.restarts_max = 0 nothing is started again"
    return f"; it was started again {restarts_max} times, as often as recovery.restarts_max allows"
