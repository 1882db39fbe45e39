"""A user's script on several trainers that are threads of one process, as under `bagpipe launch`: sockets on loopback
between them for plans, memory for gradients and rows.
"""

from __future__ import annotations

import threading
from contextlib import contextmanager
from unittest.mock import patch

from bagpipe.cluster.context import Launch
from bagpipe.config import load_config
from bagpipe.store import MemoryStore
from bagpipe.store.versioned import VersionedStore
from bagpipe.store.views import shared_views
from bagpipe.together import run_threads
from bagpipe.trainer.collective import Groups
from bagpipe.trainer.stages import Threads
from bagpipe.world import World
from harness.collectives import strict_groups

DEADLINE_S = 60.0


class InThreads(Launch):
    """Trainers that meet in memory."""

    def open_groups(self):
        return self.world.groups(self.trainer, next(self.meetings))

    def driver(self):
        return self.world.drivers[self.trainer]


class Trainers:
    """N trainers; each calls `harness.flat.prepare` with `options(rank)`."""

    def __init__(self, trainers=2, *settings, store=None, recorded=False, **launch):
        """`store` is one that another run has left; `launch` has more of what trainers are told."""
        self.trainers = trainers
        self.recorded, self.launch = recorded, launch
        self.config = load_config(None, [f"trainers={trainers}", *settings])
        self.drivers = [Threads(DEADLINE_S) for _ in range(trainers)]
        self.store = store
        self._groups, self._views = {}, []
        self._lock = threading.Lock()
        self._here = threading.local()

    def options(self, rank):
        """Where rows are."""
        return {"store": lambda layouts: self._view(rank, layouts)}

    def run(self, script, others=None):
        """Run `script(rank)` on the first trainer, and `others` or the same on all others; their results."""
        with self._launched():
            scripts = [script] + [others or script] * (self.trainers - 1)
            return run_threads([self._of_rank(*each) for each in enumerate(scripts)], 2 * DEADLINE_S)

    def failures(self, script, others=None):
        """The same where trainers fail: what each raised, or None."""

        def caught(function):
            def run(rank):
                try:
                    function(rank)
                except Exception as error:
                    return error

            return run

        return self.run(caught(script), caught(others or script))

    def groups(self, rank, number):
        """This rank's end of the groups of a meeting."""
        with self._lock:
            if number not in self._groups:
                ends = [strict_groups(self.trainers, self._notify, DEADLINE_S) for _ in range(3)]
                self._groups[number] = [Groups(*of_rank) for of_rank in zip(*ends, strict=True)]
            return self._groups[number][rank]

    def _view(self, rank, layouts):
        with self._lock:
            if self.store is None:
                self.store = VersionedStore(MemoryStore(layouts)) if self.recorded else MemoryStore(layouts)
            if not self._views:
                notify = [lambda rank=rank: self.drivers[rank].notify() for rank in range(self.trainers)]
                self._views = shared_views(self.store, self.trainers, notify)
            return self._views[rank]

    def _of_rank(self, rank, script):
        hosts = ["127.0.0.1"] * self.trainers
        launch = InThreads(self.config, (), bytes(16), None, rank, self.trainers, hosts, **self.launch)
        object.__setattr__(launch, "world", self)

        def run():
            self._here.launch = launch
            return script(rank)

        return run

    def _notify(self):
        for driver in self.drivers:
            driver.notify()

    @contextmanager
    def _launched(self):
        def here():
            return self._here.launch

        with patch.object(World, "from_environment", here):
            yield
