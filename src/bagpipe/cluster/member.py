"""The process that has a role now, as the driver knows it. When it is lost, another one takes its place."""

from __future__ import annotations

import os
import select
import signal
from contextlib import suppress
from dataclasses import dataclass
from types import ModuleType
from typing import Any

from bagpipe.cluster.role import machine
from bagpipe.cluster.settings import Introduction

KILLED = "its process ended without a word: it was killed, maybe for lack of memory, or crashed"
GONE_S = 5.0
"""How long a process may take to end after SIGKILL."""


@dataclass
class Member:
    """One process."""

    actor: Any
    introduction: Introduction | None = None
    address: str = ""
    """Where it listens, once it was started; of those that outlast an attempt."""
    sees: bool = False
    """Whether it has shown that it sees the directory of checkpoints."""
    preparing: Any = None
    """Its call, once it was asked to prepare."""
    _descriptor: int | None = None

    def introduced(self, introduction: Introduction) -> None:
        """It has said where it is; one of this machine is watched from now on."""
        self.introduction = introduction
        if introduction.machine == machine():
            with suppress(OSError):  # it has ended already, as Ray will tell
                self._descriptor = os.pidfd_open(introduction.pid)

    @property
    def is_dead(self) -> bool:
        """Whether the process is known to have ended."""
        return self._descriptor is not None and self._ended(0.0)

    def dismiss(self, ray: ModuleType) -> None:
        """Have Ray end it; that takes seconds where a process is stopped."""
        with suppress(Exception):  # it, or all of Ray, may be gone
            ray.kill(self.actor, no_restart=True)

    def end(self, ray: ModuleType) -> None:
        """Kill it, and return when it is gone if that can be seen from here."""
        self.dismiss(ray)
        if self._descriptor is not None:
            with suppress(ProcessLookupError):
                signal.pidfd_send_signal(self._descriptor, signal.SIGKILL)
            self._ended(GONE_S)

    def close(self) -> None:
        """Watch it no more; a second call does nothing."""
        if self._descriptor is not None:
            os.close(self._descriptor)
            self._descriptor = None

    def _ended(self, within_s: float) -> bool:
        assert self._descriptor is not None
        ended = select.poll()
        ended.register(self._descriptor, select.POLLIN)
        return bool(ended.poll(within_s * 1000))
