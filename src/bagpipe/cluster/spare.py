"""A process that is ready to take the place of any role that is lost: to start one and import PyTorch takes seconds.

It begins to get ready when a run has gone on for a moment, and another one does when it was taken.
"""

from __future__ import annotations

import time
from contextlib import suppress
from types import ModuleType
from typing import Any

from bagpipe.cluster.post import Post

SETTLE_S = 5.0
"""How long after a run has gone on: short runs need none, and what is behind has the processors first."""


class Spare:
    """At most one process; used by one thread."""

    def __init__(self, ray: ModuleType, wanted: bool) -> None:
        self._ray, self._wanted = ray, wanted
        self._actor: Any = None
        self._ready: Any = None
        self._since: float | None = None

    def keep(self) -> None:
        """To be called now and then while a run goes on: see to it that there is one."""
        if not self._wanted or self._actor is not None:
            return
        now = time.monotonic()
        if self._since is None:
            self._since = now
        elif now - self._since >= SETTLE_S:
            self._actor = self._ray.remote(Post).options(num_cpus=0, max_restarts=0, max_task_retries=0).remote()
            self._ready = self._actor.get_ready.remote()

    def take(self, role: str) -> Any:
        """The actor, with this role from now on; None if there is none. One that is not quite ready is ahead too."""
        actor, ready, self._actor, self._since = self._actor, self._ready, None, None
        if actor is None or self._is_lost(ready):
            return None
        actor.take_on.remote(role)
        return actor

    def close(self) -> None:
        """End it; a second call does nothing."""
        if self._actor is not None:
            with suppress(Exception):  # it, or all of Ray, may be gone
                self._ray.kill(self._actor, no_restart=True)
            self._actor = None

    def _is_lost(self, call: Any) -> bool:
        if not self._ray.wait([call], timeout=0)[0]:
            return False
        try:
            self._ray.get(call)
        except self._ray.exceptions.RayError:
            return True
        return False
