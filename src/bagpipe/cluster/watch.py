"""The driver's end of all roles: asks them, waits for answers with a deadline (I7), and notices when one is lost.

A role that died ends the run with a ClusterError that names it and the reason; a role that failed ends it with the
error that it had.
"""

from __future__ import annotations

import re
import time
from collections.abc import Callable, Container, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from types import ModuleType
from typing import Any

from bagpipe import errors
from bagpipe.cluster.log import LogPlace, Tail
from bagpipe.cluster.settings import Failure, Report
from bagpipe.errors import BagpipeError, ClusterError, DeadlineError, PipelineError

POLL_S = 1.0
WAIT_S = 0.2
"""How long Ray is asked at once: Ctrl-C and SIGTERM are heard in between."""
REPORT_S = 30.0
LOST_S = 3.0
"""How long to look for a role that was lost, when another one complains."""

Show = Callable[[str, str], None]
"""Told the name of a role and how it is."""


@dataclass
class Watch:
    """All roles, by name."""

    ray: ModuleType
    logs: LogPlace
    show: Show
    actors: dict[str, Any] = field(default_factory=dict)
    echo: Callable[[str], object] | None = None
    """Is given what the role that is followed prints."""

    def ask(self, role: str, method: str, *arguments: Any) -> Any:
        """Begin a call."""
        return getattr(self.actors[role], method).remote(*arguments)

    def gather(self, calls: Mapping[str, Any], what: str, deadline_s: float) -> dict[str, Any]:
        """The answers of these roles; the first error is raised."""
        until = time.monotonic() + deadline_s
        answers: dict[str, Any] = {}
        while len(answers) < len(calls):
            left = [call for role, call in calls.items() if role not in answers]
            self.ray.wait(left, num_returns=len(left), timeout=WAIT_S)
            for role, call in calls.items():
                if role not in answers and self.is_done(call):
                    answers[role] = self.take(role, call)
            if time.monotonic() > until:
                late = ", ".join(role for role in calls if role not in answers)
                raise DeadlineError(f"{late} did not {what} within {deadline_s:g} s: see {self.logs.directory}")
        return answers

    def is_done(self, call: Any) -> bool:
        """Whether there is an answer."""
        return bool(self.ray.wait([call], timeout=0)[0])

    def take(self, role: str, call: Any) -> Any:
        """The answer of a role, which must be there; errors are raised."""
        try:
            answer = self.ray.get(call, timeout=WAIT_S)
        except self.ray.exceptions.RayError as error:
            raise ClusterError(f"{role} was lost: {reason(str(error))}; see {self.logs.path(role)}") from error
        if isinstance(answer, Failure):
            raise named(answer, role, self.logs.path(role))
        return answer

    def follow(self, calls: Mapping[str, Any]) -> dict[str, Any]:
        """The answers of roles that work together for long; meanwhile all are watched, and say how they are.

        When one fails, so do those who work with it. The error is that of a role that was lost, or else of the one that
        did not only miss another. What the first one prints is echoed.
        """
        reports: dict[str, Any] = {}
        printed = Tail(self.logs.path(next(iter(calls))))
        answers: dict[str, Any] = {}
        next_poll = 0.0
        try:
            while len(answers) < len(calls):
                self._echo(printed)
                if time.monotonic() >= next_poll:
                    next_poll = time.monotonic() + POLL_S
                    self._poll(calls, reports)
                working = [call for role, call in calls.items() if role not in answers]
                done, _ = self.ray.wait(working, timeout=min(max(next_poll - time.monotonic(), 0.01), WAIT_S))
                for role, call in calls.items():
                    if call in done:
                        answers[role] = self._take_or_blame(role, calls, answers, reports)
            self.last_reports()
        finally:
            self._echo(printed)
        return {role: answers[role] for role in calls}

    def last_reports(self) -> None:
        """Have everybody say once more how they are, and all that they have printed."""
        asked = list(self.actors)
        while asked:
            answers = self.gather({role: self.ask(role, "report") for role in asked}, "report", REPORT_S)
            for role, reports in answers.items():  # what a role says itself is newer than what it left with another
                self._note({other: report for other, report in reports.items() if other != role})
            for role, reports in answers.items():
                self._note({role: reports[role]})
            asked = [role for role, reports in answers.items() if any(each.printed for each in reports.values())]

    def _take_or_blame(
        self, role: str, calls: Mapping[str, Any], answers: Mapping[str, Any], reports: dict[str, Any]
    ) -> Any:
        """The answer of a role; where it failed, the error of the one that is to blame."""
        try:
            return self.take(role, calls[role])
        except BagpipeError as error:
            if not self._was_lost(error):
                others = {each: call for each, call in calls.items() if each != role and each not in answers}
                self._blame_others(error, others, reports)
            raise

    def _blame_others(self, error: BagpipeError, calls: Mapping[str, Any], reports: dict[str, Any]) -> None:
        """Raise what another role has told since, or that it was lost, if that is why a role failed."""
        until = time.monotonic() + LOST_S
        left, told = dict(calls), list[BagpipeError]()
        while (left or reports) and time.monotonic() < until:
            done, _ = self.ray.wait([*left.values(), *reports.values()], timeout=WAIT_S)
            for role in [role for role, call in reports.items() if call in done]:
                self._note(self.take(role, reports.pop(role)))
            for role in [role for role, call in left.items() if call in done]:
                try:
                    self.take(role, left.pop(role))
                except BagpipeError as other:
                    if self._was_lost(other):
                        raise
                    told.append(other)
        cause = next((each for each in told if not isinstance(each, PipelineError)), None)
        if isinstance(error, PipelineError) and cause is not None:
            raise cause

    def _poll(self, busy: Container[str], calls: dict[str, Any]) -> None:
        """Ask all but those that work; they leave word with another."""
        for role in self.actors:
            if role in calls and self.is_done(calls[role]):
                self._note(self.take(role, calls.pop(role)))
            if role not in calls and role not in busy:
                calls[role] = self.ask(role, "report")

    def _was_lost(self, error: BagpipeError) -> bool:
        """Whether Ray has said it, and not the role itself."""
        return isinstance(error.__cause__, self.ray.exceptions.RayError)

    def _echo(self, printed: Tail) -> None:
        if self.echo is not None and (text := printed.news()):
            self.echo(text)

    def _note(self, reports: Mapping[str, Report]) -> None:
        for role, report in reports.items():
            self.show(role, report.line)
            if report.printed:
                with self.logs.path(role).open("ab") as file:
                    file.write(report.printed)


def named(failure: Failure, role: str, log: Path) -> BagpipeError:
    """The error of a role as the type that it names; of one that nobody foresaw the log tells more."""
    kind = getattr(errors, failure.kind, None)
    if not (isinstance(kind, type) and issubclass(kind, BagpipeError)) or kind is ClusterError:
        return ClusterError(f"{failure.message}; see {log}")
    return kind(f"{role}: {failure.message}")


def reason(text: str) -> str:
    """What Ray says about a lost actor, in a line: it says much, most of it about itself."""
    if "Worker unexpectedly exits with a connection error" in text:
        return "its process ended without a word: it was killed, maybe for lack of memory, or crashed"
    if "node has died" in text or "node was terminated" in text:
        return "its machine, or Ray there, is gone"
    for pattern in (r"No module named '[^']+'", r"Worker exit detail: [^\n.]*", r"The actor is dead because [^\n.]*"):
        found = re.search(pattern, text)
        if found:
            return found[0]
    return text.strip().partition("\n")[0].rstrip(".") or "Ray does not say why"
