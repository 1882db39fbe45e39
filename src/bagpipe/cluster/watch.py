"""The driver's end of all roles: asks them, waits for answers with a deadline (I7), and notices when one is lost.

A role whose process died, or that did not answer in time and was ended for it, is a loss (`RolesLost`), which a run may
recover from. A role that failed ends the run with the error that it had.
"""

from __future__ import annotations

import re
import time
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from types import ModuleType
from typing import Any

from bagpipe.cluster.log import LogPlace, Tail
from bagpipe.cluster.member import KILLED, Member
from bagpipe.cluster.settings import Failure, Report
from bagpipe.errors import (
    BagpipeError,
    ClusterError,
    DeadlineError,
    GenerationOverError,
    PeerLostError,
    PipelineError,
    named_error,
)
from bagpipe.recovery import RolesLost

POLL_S = 1.0
HURRY_S = 0.1
"""How often it is asked while people wait for a run to go on."""
WAIT_S = 0.2
"""How long Ray is asked at once: Ctrl-C and SIGTERM are heard in between."""
REPORT_S = 30.0
LOST_S = 3.0
"""How long to look for a role that was lost, when another one complains."""
STUCK_S = 30.0

Show = Callable[[str, str], None]
"""Told the name of a role and how it is."""


@dataclass
class Watch:
    """All roles that have a process, by name."""

    ray: ModuleType
    logs: LogPlace
    show: Show
    members: dict[str, Member] = field(default_factory=dict)
    echo: Callable[[str], object] | None = None
    """Is given what the role that is followed prints."""
    stuck_s: float = STUCK_S
    """A role that says nothing for so long while others work is ended."""
    done: int = 0
    """Iterations that are over, as last heard."""

    def ask(self, role: str, method: str, *arguments: Any) -> Any:
        """Begin a call; one after the other is worked on."""
        return self.members[role].actor.ask.remote(method, *arguments)

    def gather(self, calls: Mapping[str, Any], what: str, deadline_s: float) -> dict[str, Any]:
        """The answers of these roles; the first error is raised. Who is late is ended, and lost."""
        until = time.monotonic() + deadline_s
        answers: dict[str, Any] = {}
        while len(answers) < len(calls):
            left = [call for role, call in calls.items() if role not in answers]
            self.ray.wait(left, num_returns=len(left), timeout=WAIT_S)
            for role, call in calls.items():
                if role not in answers and self.is_done(call):
                    answers[role] = self.take(role, call)
            if time.monotonic() > until:
                self.end([role for role in calls if role not in answers], f"it did not {what} within {deadline_s:g} s")
        return answers

    def is_done(self, call: Any) -> bool:
        """Whether there is an answer."""
        return bool(self.ray.wait([call], timeout=0)[0])

    def take(self, role: str, call: Any) -> Any:
        """The answer of a role, which must be there; errors are raised."""
        try:
            answer = self.ray.get(call, timeout=WAIT_S)
        except self.ray.exceptions.RayError as error:
            if role in self.members:
                self.members[role].end(self.ray)  # who only can't be reached must not come back
                self.forget(role)
            raise RolesLost({role: reason(str(error))}) from error
        if isinstance(answer, Failure):
            raise named(answer, role, self.logs.path(role))
        return answer

    def forget(self, role: str) -> None:
        """This process counts no more."""
        member = self.members.pop(role, None)
        if member is not None:
            member.close()

    def end(self, roles: list[str], cause: str) -> None:
        """End the processes of these roles, if there are any; that is a loss too."""
        for role in roles:
            if role in self.members:
                self.members[role].end(self.ray)
                self.forget(role)
        if roles:
            raise RolesLost(dict.fromkeys(roles, cause))

    def check(self) -> None:
        """RolesLost if processes on this machine are gone: faster than Ray tells it."""
        self.end([role for role, member in self.members.items() if member.is_dead], KILLED)

    def follow(
        self,
        calls: Mapping[str, Any],
        board: str,
        *,
        generation: int = 0,
        done: int = 0,
        went_on: Callable[[], None] = lambda: None,
        heed: bool = True,
        meanwhile: Callable[[], None] = lambda: None,
    ) -> dict[str, Any]:
        """The answers of roles that work together for long; meanwhile all are watched, and say how they are.

        Those who work leave word with the role `board`. When one fails, so do those who work with it. The error is that
        of a role that was lost, or else of the one that did not only miss another. What the first one prints is echoed.
        `went_on` is called once it has finished more than `done` iterations. Those who `heed` it leave off soon when
        they hear that their generation is over; a user's script may not. `meanwhile` is called now and then.
        """
        following = _Following(self, calls, board, generation, heed)
        self.done, waits = done, True
        try:
            while len(following.answers) < len(calls):
                self.check()
                following.step(HURRY_S if waits else POLL_S)
                if waits and self.done > done:
                    waits = False
                    went_on()
                elif not waits:
                    meanwhile()
            with suppress(RolesLost):  # who dies now is not needed any more
                self.last_reports()
        finally:
            following.echo()
        return {role: following.answers[role] for role in calls}

    def last_reports(self) -> None:
        """Have everybody say once more how they are, and all that they have printed."""
        asked = list(self.members)
        while asked:
            answers = self.gather({role: self.ask(role, "report") for role in asked}, "report", REPORT_S)
            for role, reports in answers.items():  # what a role says itself is newer than what it left with another
                self.note({other: report for other, report in reports.items() if other != role})
            for role, reports in answers.items():
                self.note({role: reports[role]})
            asked = [role for role, reports in answers.items() if any(each.printed for each in reports.values())]

    def note(self, reports: Mapping[str, Report]) -> None:
        """Roles are like that now."""
        for role, report in reports.items():
            self.show(role, report.line)
            self.done = max(self.done, report.done)
            if report.printed:
                with self.logs.path(role).open("ab") as file:
                    file.write(report.printed)


class _Following:
    """Roles at work."""

    def __init__(self, watch: Watch, calls: Mapping[str, Any], board: str, generation: int, heed: bool) -> None:
        self._watch, self._calls, self._board, self._generation, self._heed = watch, calls, board, generation, heed
        self._printed = Tail(watch.logs.path(next(iter(calls))))
        self._reports: dict[str, Any] = {}
        now = time.monotonic()
        self._heard = dict.fromkeys(watch.members, now)
        self._looked = self._polled = now
        self.answers: dict[str, Any] = {}

    def step(self, poll_s: float) -> None:
        """Wait a moment, and take what has come."""
        watch, now = self._watch, time.monotonic()
        self._skip_time(now)
        self.echo()
        if now >= self._polled + poll_s:
            self._polled = now
            self._poll()
            self._end_stuck(now)
        working = [call for role, call in self._calls.items() if role not in self.answers]
        done, _ = watch.ray.wait(working, timeout=min(max(self._polled + poll_s - time.monotonic(), 0.01), WAIT_S))
        for role, call in self._calls.items():
            if call in done:
                self.answers[role] = self._take_or_blame(role)

    def echo(self) -> None:
        """Pass on what the first one has printed."""
        if self._watch.echo is not None and (text := self._printed.news()):
            self._watch.echo(text)

    def _skip_time(self, now: float) -> None:
        """While this process was stopped itself, nobody could be heard."""
        gap, self._looked = now - self._looked, now
        if gap > 2 * POLL_S:
            self._heard = {role: heard + gap for role, heard in self._heard.items()}

    def _poll(self) -> None:
        """Ask all but those that work; they leave word with another."""
        watch = self._watch
        for role in list(watch.members):
            if role in self._reports and watch.is_done(self._reports[role]):
                self._note(role, watch.take(role, self._reports.pop(role)))
            if role not in self._reports and (role not in self._calls or role in self.answers):
                self._reports[role] = watch.ask(role, "report")

    def _note(self, role: str, reports: Mapping[str, Report]) -> None:
        self._heard |= dict.fromkeys([role, *reports], time.monotonic())
        self._watch.note(reports)

    def _end_stuck(self, now: float) -> None:
        """Those who work can be heard only while the one that they leave word with can be."""
        watch = self._watch
        silent = [role for role in watch.members if now - self._heard.get(role, now) > watch.stuck_s]
        stuck = [role for role in silent if role not in self._calls or now - self._heard[self._board] < 3 * POLL_S]
        watch.end(stuck, f"it said nothing for {watch.stuck_s:g} s and was ended")

    def _take_or_blame(self, role: str) -> Any:
        """The answer of a role; where it failed, the error of the one that is to blame."""
        try:
            return self._watch.take(role, self._calls[role])
        except BagpipeError as error:
            self._blame_others(role, error)
            raise

    def _blame_others(self, failed: str, error: BagpipeError) -> None:
        """Raise what another role has told since, or that it was lost, if that is why a role failed.

        Those who work are told to leave off. All others must answer once more: who can't is lost. Where all are well,
        and only the connection between two of them broke, the one that was missed is ended, and lost.
        """
        watch, now = self._watch, time.monotonic()
        missed = isinstance(error, PipelineError | GenerationOverError | DeadlineError)
        until = now + (watch.stuck_s if missed else LOST_S)
        others = {role: call for role, call in self._calls.items() if role != failed and role not in self.answers}
        self._reports |= {
            role: watch.ask(role, "report")
            for role in watch.members
            if role not in self._reports and role not in self._calls
        }
        if self._board in watch.members:
            watch.ask(self._board, "end_generation", self._generation)
        told = {failed: error}
        while (others or self._reports) and time.monotonic() < until:
            watch.check()
            done, _ = watch.ray.wait([*others.values(), *self._reports.values()], timeout=WAIT_S)
            for role in [role for role, call in self._reports.items() if call in done]:
                self._note(role, watch.take(role, self._reports.pop(role)))
            for role in [role for role, call in others.items() if call in done]:
                try:
                    watch.take(role, others.pop(role))
                except BagpipeError as other:
                    told[role] = other
        if missed:
            late = [*self._reports, *(others if self._heed else ())]
            watch.end(late, f"it did not answer for {watch.stuck_s:g} s and was ended")
        own = [each for each in told.values() if not self._is_over(each)]
        cause = next((each for each in own if not isinstance(each, PipelineError)), None)
        if cause is not None and (isinstance(error, PipelineError) or self._is_over(error)):
            raise cause
        if len(told) == len(self._calls) > 1 and all(isinstance(each, PeerLostError) for each in own):
            missed_role = f"trainer {error.rank}" if isinstance(error, PeerLostError) else failed
            watch.end([missed_role], f"its connection to another trainer broke and it was ended: {error}")

    def _is_over(self, error: BagpipeError) -> bool:
        """Whether somebody was only told that all begin anew."""
        return isinstance(error, GenerationOverError) and error.generation == self._generation


def named(failure: Failure, role: str, log: Path) -> BagpipeError:
    """The error of a role as the type that it names; of one that nobody foresaw the log tells more."""
    error = named_error(failure.kind, f"{role}: {failure.message}", failure.fields, ClusterError)
    if type(error) is ClusterError:
        error = ClusterError(f"{failure.message}; see {log}")
    error.role = role
    return error


def reason(text: str) -> str:
    """What Ray says about a lost actor, in a line: it says much, most of it about itself.

    For people: nothing is decided by it.
    """
    if "Worker unexpectedly exits with a connection error" in text:
        return KILLED
    if "is unavailable" in text:
        return "its process can't be reached any more: it, its machine, or Ray there is gone"
    if "node has died" in text or "node was terminated" in text:
        return "its machine, or Ray there, is gone"
    for pattern in (r"No module named '[^']+'", r"Worker exit detail: [^\n.]*", r"The actor is dead because [^\n.]*"):
        found = re.search(pattern, text)
        if found:
            return found[0]
    return text.strip().partition("\n")[0].rstrip(".") or "Ray does not say why"
