"""A whole run in one process that survives the death of its roles: a `Crew` for `bagpipe.recovery.Supervisor`."""

from __future__ import annotations

from contextlib import closing

from bagpipe.data.service import DataProcessorService, RemoteBatches
from bagpipe.failpoints import armed
from bagpipe.oracle.service import OracleService
from bagpipe.recovery import RolesLost, Supervisor
from bagpipe.server.core import EmbeddingServer
from bagpipe.store.remote import RemoteStore
from bagpipe.trainer.collective import memory_groups
from bagpipe.trainer.remote_plans import RemotePlans
from bagpipe.trainer.stages import Wait
from bagpipe.trainer.sync import Groups
from bagpipe.training import train_remote
from scheduled import Attempt, Life, Plot, Posts, ScheduledOutbox, living

RUN = bytes(range(16))


class ServedRows(RemoteStore):
    """Rows on servers, which are asked for only when they would answer at once: nothing else could run meanwhile."""

    servers = ()

    def reached(self, after):
        return all(server is None or server.reached >= after for server in self.servers)


class Crew:
    """All roles of a run, by name: trainer-0, ..., server-0, ..., oracle, processor-0, ..."""

    def __init__(self, job, directory, *, seed=0, servers=1, processors=1, plot=None, grace=20, **faults):
        """`directory` is what outlives every process; `faults` are those of the network."""
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
        attempt = self.current = Attempt(self.seed + 1000 * self.num_attempts, self.grace)
        oracle = _Oracle(self, attempt, self.lives["oracle"], point.done)
        groups = [Groups(*ends) for ends in zip(*(memory_groups(len(self.trainers)) for _ in range(3)), strict=True)]
        job = self.job.made(len(self.trainers))
        for rank, role in enumerate(self.trainers):
            trainer = _Trainer(self, attempt, self.lives[role], rank, oracle, job, groups[rank], generation, went_on)
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
        pass

    def restart(self, roles):
        for role in roles:
            if self.lives[role].cut_off:  # who hangs is ended, as far as it can be reached
                self.kill(role, "")
            if not self.lives[role].alive:
                self.lost.pop(role, None)
                self.start(role)
        self.raise_losses()

    def marks(self):
        return {}

    def checkpoint(self):
        return None

    def return_to(self, point):
        for role in self.server_roles:
            self.kill(role, "")
            self.lost.pop(role)
            self.start(role)
        self.raise_losses()

    def start(self, role):
        """A new life."""
        life = self.lives[role] = Life(role)
        kind, _, number = role.partition("-")
        with living(life):
            if kind == "server":
                server = EmbeddingServer(server=int(number), servers=self.num_servers, run=RUN, clock=self.network.now)
                self.servers[role] = server
                self.network.listen(role, server.handle)
            elif kind == "processor":
                service = DataProcessorService(
                    lambda handler: self.network.listen(role, handler), self.order,
                    run=RUN, processor=int(number), processors=len(self.processors),
                )  # fmt: skip
                service.start()
                self.services[role] = service

    def raise_losses(self):
        """Tell the supervisor who is gone."""
        if self.lost:
            raise RolesLost(self.lost)


class _Oracle:
    """The loop of an oracle."""

    def __init__(self, crew, attempt, life, start):
        self.crew, self.attempt, self.start = crew, attempt, start
        self.driver = attempt.driver(life)
        settings = crew.settings
        self.outbox = ScheduledOutbox(settings.trainers, 4, self.driver)

    def run(self):
        crew = self.crew
        batches = RemoteBatches(crew.network, crew.processors, crew.order, run=RUN, start=self.start)
        service = OracleService(lambda handler: crew.network.listen("oracle", handler), batches, crew.settings, run=RUN)
        service._outbox = self.outbox
        service._listening = crew.network.listen("oracle", service.handle)
        with closing(service._listening):
            service._work()
            self.driver.wait(Wait("trainers to end", lambda: self.attempt.succeeded))


class _Trainer:
    """The loop of a trainer."""

    def __init__(self, crew, attempt, life, rank, oracle, job, groups, generation, went_on):
        self.crew, self.life, self.rank, self.oracle, self.job = crew, life, rank, oracle, job
        self.groups, self.generation, self.went_on = groups, generation, went_on
        self.driver = attempt.driver(life)
        self.plans = None

    def run(self):
        crew, rank, outbox = self.crew, self.rank, self.oracle.outbox
        self.driver.wait(Wait("the oracle", lambda: outbox.has(rank)))
        self.plans = plans = RemotePlans(crew.network, "oracle", run=RUN, trainer=rank)
        self.driver.also["plan"] = lambda: outbox.has(rank, plans._answers.next)
        store = ServedRows(
            self.job.model()[2], crew.server_roles, crew.network, run=RUN, generation=self.generation,
            trainer=rank, trainers=len(crew.trainers), shared_memory=False, watch=self._gone,
        )  # fmt: skip
        store.servers = [crew.servers.get(role) for role in crew.server_roles]
        groups = _MortalGroups(self.groups, self.life)
        peers = groups if len(crew.trainers) > 1 else None
        return train_remote(self.job, plans, store, self._report, peers, self.driver)

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

    def all_reduce(self, *arguments):
        return self._heard(lambda: self._group.all_reduce(*arguments))

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


def run_crew(crew, restarts_max=20):
    """State and summary of a run, and the supervisor; everything is let go of."""
    lines = []
    supervisor = Supervisor(crew, restarts_max, lines.append)
    with armed(crew.plot):
        try:
            state, summary = supervisor.run()
        finally:
            crew.close()
    return state, summary, supervisor
