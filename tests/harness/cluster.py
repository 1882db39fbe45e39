"""A whole run in one process that survives the death of its roles: a `Crew` for `bagpipe.recovery.Supervisor`.

Memory goes with the role that had it. Checkpoints stay, in a directory.
"""

from __future__ import annotations

import os
from contextlib import ExitStack, closing, contextmanager, suppress
from functools import partial
from types import SimpleNamespace
from unittest.mock import patch

from bagpipe.checkpoint.directory import complete_points
from bagpipe.checkpoint.disk import Disk
from bagpipe.cluster.context import RoleWorld
from bagpipe.cluster.settings import Wiring
from bagpipe.data.service import DataProcessorService, RemoteBatches
from bagpipe.failpoints import Killed, acting_as, armed
from bagpipe.oracle.service import OracleService
from bagpipe.recovery import RolesLost, Supervisor
from bagpipe.server.client import RemoteStore
from bagpipe.server.rows_state import Safety
from bagpipe.server.server import EmbeddingServer
from bagpipe.trainer.collective import Groups
from bagpipe.trainer.remote_plans import RemotePlans
from bagpipe.trainer.stages import Wait
from bagpipe.training import train_in
from bagpipe.wire.client import Patience
from harness.collectives import strict_groups
from harness.roles import (
    Attempt,
    Life,
    PatientLock,
    Plot,
    Posts,
    ScheduledOutbox,
    Thread,
    Worker,
    current,
    give_way,
    in_background,
    living,
)

RUN = bytes(range(16))
DISK = ("create", "open", "make_directory", "rename", "unlink", "remove_directory", "sync_directory")


def session(generation):
    """What oracles and trainers call the run in a generation, as those of a launch do."""
    return Wiring(RUN, None, None).session(generation)


class Crew:
    """All roles of a run, by name: trainer-0, ..., server-0, ..., oracle, processor-0, ..."""

    def __init__(
        self, job, directory, *, seed=0, servers=1, processors=1, plot=None, grace=20, rollback=True, history=None,
        **faults,
    ):  # fmt: skip
        """`directory` is what outlives every process; `faults` are those of the network."""
        self.rollback, self.history = rollback, history
        self.checkpoints = directory / "checkpoints"
        self.generation = 0
        self.job, self.directory, self.seed, self.grace = job, directory, seed, grace
        self.num_servers = servers
        self.trainers = [f"trainer-{rank}" for rank in range(job.config.trainers)]
        self.server_roles = [f"server-{number}" for number in range(servers)]
        self.processors = [f"processor-{place}" for place in range(processors)]
        self.network = Posts(seed, **faults)
        self.plot = plot or Plot()
        self.plot.crew = self
        self.lives, self.lost = {}, {}
        self.servers, self.services = {}, {}
        self.done = 0
        self.order, self.settings = job.data_order(), job.plan_settings()
        self.current = None
        self.num_attempts = 0
        self.steps = []
        """Whose turn it was, in each attempt."""
        for role in [*self.server_roles, *self.processors, "oracle", *self.trainers]:
            self.start(role)

    # what tests do

    def kill(self, role, cause):
        """The role is gone, with its memory."""
        life = self.lives[role]
        if not life.alive:
            return
        life.die()
        self.network.bury(life)
        self.servers.pop(role, None)
        service = self.services.pop(role, None)
        if service is not None:  # its threads end with the process
            service._pool.shutdown(cancel_futures=True)
        self.lose(role, cause)

    def cut_off(self, role, cause):
        """The role is thought to be dead, and lives on by itself; what it sends arrives later."""
        if self.lives[role].alive and not self.lives[role].cut_off:
            self.lives[role].cut_off = True
            self.lose(role, cause)

    def lose(self, role, cause):
        """What the supervisor will hear of."""
        self.lost[role] = cause
        if self.current is not None:
            self.current.lost[role] = cause

    def close(self):
        """Let go of everything."""
        for role in list(self.lives):
            self.kill(role, "the end")
        self.network.close()

    # what the supervisor asks for

    def attempt(self, generation, point, went_on):
        self.raise_losses()
        self.num_attempts += 1
        attempt = Attempt(self.seed + 1000 * self.num_attempts, self.grace, when_idle=self.network.pass_time)
        self.current = attempt
        self.steps.append(attempt.together.steps)
        oracle = _Oracle(self, attempt, self.lives["oracle"], point.done)
        groups = [Groups(*ends) for ends in zip(*(strict_groups(len(self.trainers)) for _ in range(3)), strict=True)]
        job = self.job.made(len(self.trainers))
        for rank, role in enumerate(self.trainers):
            trainer = _Trainer(self, attempt, self.lives[role], rank, oracle, job, groups[rank], point, went_on)
            attempt.add(self.lives[role], trainer.run)
        attempt.add(self.lives["oracle"], oracle.run, awaited=False)
        attempt.at_step(40, lambda: self.network.deliver_late(some=False))
        try:
            attempt.run()
        finally:
            self.current = None
        if attempt.succeeded:
            return attempt.results["trainer-0"]
        self.raise_losses()
        raise next(iter(attempt.failed.values()))

    def abandon(self, generation):
        self.generation = generation
        self._each_server(lambda server: server.abandon(generation))

    def restart(self, roles):
        for role in roles:
            if self.lives[role].cut_off:  # who hangs is ended, as far as it can be reached
                self.kill(role, "")
                del self.lost[role]
            if not self.lives[role].alive:
                self.start(role)
        self.raise_losses()

    def points(self):
        told = [path for role in self.server_roles for path in self._server(role, lambda server: server.checkpoints())]
        return complete_points(told, self.checkpoints)

    def return_to(self, point):
        self._each_server(lambda server: server.recover(self.generation, point))

    def _each_server(self, ask):
        for role in self.server_roles:
            self._server(role, ask)
        self.raise_losses()

    def _server(self, role, ask):
        """Ask a server, which may die of it."""
        result = None
        with living(self.lives[role]), suppress(Killed):
            if role in self.servers:
                result = ask(self.servers[role])
        if not self.lives[role].alive:
            self.raise_losses()
        return result

    def start(self, role):
        """A new life."""
        life = self.lives[role] = Life(role)
        kind, _, number = role.partition("-")
        with living(life):
            if kind == "server":
                server = EmbeddingServer(
                    server=int(number), servers=self.num_servers, run=RUN, generation=self.generation,
                    safety=self._safety(), clock=self.network.now, waits=self.network.waits, background=in_background,
                )  # fmt: skip
                self.servers[role] = server
                self.network.listen(role, server.handle)
            elif kind == "processor":
                service = DataProcessorService(
                    lambda handler: self.network.listen(role, handler), self.order,
                    run=RUN, processor=int(number), processors=len(self.processors),
                )  # fmt: skip
                service.start()
                self.services[role] = service

    def _safety(self):
        return Safety(self.rollback, self.history, (self.checkpoints,))

    def raise_losses(self):
        """Tell the supervisor who is gone since it last heard of somebody."""
        lost, self.lost = self.lost, {}
        if lost:
            raise RolesLost(lost)


class _Oracle:
    """The loop of an oracle."""

    def __init__(self, crew, attempt, life, start):
        self.crew, self.attempt, self.start = crew, attempt, start
        self.driver = attempt.driver(life)
        settings = crew.settings
        self.outbox = ScheduledOutbox(settings.trainers, 4, self.driver, crew.network.waits)

    def run(self):
        crew = self.crew
        first = crew.settings.first_needed(self.start)
        batches = RemoteBatches(crew.network, crew.processors, crew.order, run=RUN, start=first)
        listen = partial(crew.network.listen, "oracle")
        service = OracleService(listen, batches, crew.settings, run=session(crew.generation), done=self.start)
        service._outbox = self.outbox
        service._listening = crew.network.listen("oracle", service.handle)
        with closing(service._listening):
            service._work()
            self.driver.wait(Wait("trainers to end", lambda: self.attempt.succeeded))


class _Trainer:
    """The loop of a trainer."""

    def __init__(self, crew, attempt, life, rank, oracle, job, groups, point, went_on):
        self.crew, self.life, self.rank, self.oracle, self.job = crew, life, rank, oracle, job
        self.groups, self.point, self.went_on = groups, point, went_on
        self.driver = attempt.driver(life)

    def run(self):
        crew, rank, outbox = self.crew, self.rank, self.oracle.outbox
        self.driver.wait(Wait("the oracle", lambda: outbox.has(rank)))
        run = session(crew.generation)
        plans = RemotePlans(crew.network, "oracle", run=run, trainer=rank, done=self.point.done)
        self.driver.also["plan"] = lambda: outbox.has(rank, plans._answers.next)
        store = RemoteStore(
            self.job.model()[2], crew.server_roles, crew.network, run=RUN, generation=crew.generation, trainer=rank,
            trainers=len(crew.trainers), shared_memory=False, watch=self._gone, patience=Patience(retry_s=1.0),
        )  # fmt: skip
        groups = _MortalGroups(self.groups, self.life) if len(crew.trainers) > 1 else None
        world = RoleWorld(
            self.job.config, plans, store, groups, stages=self.driver,
            resume=self.point, checkpoints=crew.checkpoints, recovers=True, generation=crew.generation,
            token=f"{crew.seed % 2**16:04x}{crew.generation:04x}",
        )  # fmt: skip
        return train_in(world, self.job, self._report, self.job.checkpointing(crew.checkpoints))

    def _report(self, iterations, note):
        self.crew.done = iterations
        self.went_on()

    def _gone(self, server):
        return None if self.crew.lives[f"server-{server}"].alive else "died"


class _MortalGroups(Groups):
    """Groups of a trainer that, once dead, says nothing to the others."""

    def __init__(self, groups, life):
        super().__init__(*(_Mortal(group, life) for group in (groups.critical, groups.delayed, groups.dense)))


class _Mortal:
    def __init__(self, group, life):
        self._group, self._life = group, life
        self.rank, self.size = group.rank, group.size

    def exchange(self, *arguments):
        return self._heard(lambda: self._group.exchange(*arguments))

    def abort(self, reason):
        if self._life.alive and not self._life.cut_off:
            self._group.abort(reason)

    def close(self):
        if self._life.alive and not self._life.cut_off:
            self._group.close()

    def _heard(self, exchange):
        self._life.check()
        return _Never() if self._life.cut_off else exchange()


class _Never:
    """An exchange that nobody answers."""

    def ready(self):
        return False


@contextmanager
def mortal():
    """Files of roles that die: they are closed as by the operating system, and nothing more is done to any."""

    def wrapped(operation):
        def call(disk, *arguments):
            life = current()
            if life is not None:
                life.check()
            made = operation(disk, *arguments)
            if life is not None and hasattr(made, "close"):
                life.on_death.append(made.close)
            return made

        return call

    with ExitStack() as stack:
        for name in DISK:
            stack.enter_context(patch.object(Disk, name, wrapped(getattr(Disk, name))))
        for name in ("fsync", "fdatasync"):  # what was written outlives the death of a process without them
            stack.enter_context(patch.object(os, name, lambda _: None))
        stack.enter_context(patch("bagpipe.trainer.background.threading", SimpleNamespace(Thread=Thread)))
        stack.enter_context(patch("bagpipe.trainer.background.Worker", Worker))
        stack.enter_context(patch("bagpipe.server.client.Lock", PatientLock))
        stack.enter_context(patch("bagpipe.checkpoint.directory.pause", give_way))
        yield


def run_crew(make, restarts_max=20):
    """The summary of a run, the crew that `make` makes, and the supervisor; everything is let go of."""
    lines = []
    with mortal():
        crew = make()
        supervisor = Supervisor(crew, restarts_max, lines.append)
        with armed(crew.plot), acting_as("supervisor"):
            try:
                _, summary = supervisor.run()
            finally:
                crew.close()
    return summary, crew, supervisor
