"""As much of Ray as the driver of a launch uses, played by objects: answers come when a test says so."""

from __future__ import annotations

from types import SimpleNamespace

from bagpipe.cluster.member import Member
from bagpipe.cluster.settings import Report


class RayError(Exception):
    pass


class Call:
    """An answer that is there after it was asked for so many times."""

    def __init__(self, answer, after=0):
        self.answer, self.after = answer, after


class Played:
    """As much of Ray as the watch uses; each wait is a moment."""

    exceptions = SimpleNamespace(RayError=RayError)

    def __init__(self, clock):
        self.clock = clock

    def wait(self, calls, num_returns=1, timeout=None):
        self.clock[0] += timeout or 0.0
        for call in calls:
            call.after -= 1
        done = [call for call in calls if call.after < 0]
        return done, [call for call in calls if call not in done]

    def get(self, call, timeout=None):
        if isinstance(call.answer, Exception):
            raise call.answer
        return call.answer

    def kill(self, actor, no_restart):
        actor.killed = True


class Actor:
    """Gives the answers of each method in turn, the last one for ever; to what it does not know, None."""

    killed = False

    def __init__(self, **answers):
        self.answers = {name: list(given) for name, given in answers.items()}
        self.ask = SimpleNamespace(remote=self._next)
        self.asked = []

    def _next(self, method, *arguments):
        self.asked.append((method, *arguments))
        given = self.answers.get(method, [Call(None)])
        return given.pop(0) if len(given) > 1 else Call(given[0].answer, given[0].after)


def members(**actors):
    """Roles by name, such as server_0."""
    return {role.replace("_", " "): Member(actor) for role, actor in actors.items()}


def reports(role, line, printed=b""):
    return Call({role: Report(line, printed)})
