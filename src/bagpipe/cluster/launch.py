"""`bagpipe launch`: places, starts, watches and ends the roles of a run. The result is that of `bagpipe train` (I1).

However it ends, nothing that was started here stays: actors and placement groups are removed from a cluster that was
joined, and a Ray of our own is ended with every process of it.
"""

from __future__ import annotations

import os
import shutil
import time
from collections.abc import Callable
from contextlib import ExitStack, closing, redirect_stdout, suppress
from dataclasses import dataclass, replace
from pathlib import Path
from types import ModuleType
from typing import Any, Literal

import torch

from bagpipe._version import __version__
from bagpipe.cluster.interface import LOOPBACK
from bagpipe.cluster.log import LogPlace
from bagpipe.cluster.oracle_role import OracleRole
from bagpipe.cluster.placement import Placement
from bagpipe.cluster.processor_role import ProcessorRole
from bagpipe.cluster.resources import Need
from bagpipe.cluster.role import Role
from bagpipe.cluster.server_role import ServerRole
from bagpipe.cluster.session import OwnRay, disconnect, exit_codes_kept, join
from bagpipe.cluster.settings import Introduction, ScriptTask, Team, TrainerTask, Wiring
from bagpipe.cluster.trainer_role import Trained, TrainerRole
from bagpipe.cluster.watch import Watch
from bagpipe.config import Config, store_memory_bytes
from bagpipe.errors import ClusterError, ConfigError
from bagpipe.job import Job, claim, prepare
from bagpipe.results import Summary, joined_summary, write_summary
from bagpipe.server.process import ServerOptions
from bagpipe.wire.endpoint import Address, parse_address
from bagpipe.wire.keys import Security, new_keys

START_S = 180.0
STOP_S = 30.0
SERVER_BYTES = 500_000_000
"""What a server holds of its node's memory in Ray's books, if nothing is said."""
ORACLE = "oracle"


@dataclass(frozen=True)
class Request:
    """What is to be launched."""

    config: Config
    servers: int = 1
    processors: int = 1
    address: str | None = None
    """Of a Ray cluster; None: one of our own on this machine."""
    interface: str | None = None
    """Where roles listen: its name, address or network. None: loopback on one machine, else as Ray's nodes."""
    run_dir: Path | None = None
    script: Path | None = None
    """Run by the trainer in place of the configuration's model and data."""
    arguments: tuple[str, ...] = ()
    server_memory: int | None = None
    """Bytes: reserved, and the most that a server takes. None: no limit, and a little is reserved."""
    server_cores: float = 1.0
    trainer_cores: int | None = None
    """Of each trainer. None: as many as torch uses here; on this machine alone, trainers share them."""
    trainer_gpus: float = 0.0
    """Of each trainer."""

    def __post_init__(self) -> None:
        for name, value in (("--servers", self.servers), ("--processors", self.processors)):
            if value < 1:
                raise ConfigError(f"{name} is {value}: give at least 1")
        if self.script is not None and not self.script.is_file():
            raise ConfigError(f"there is no script {self.script}: check the path")

    @property
    def trainers(self) -> int:
        """Who share each batch."""
        return self.config.trainers

    @property
    def threads(self) -> int:
        """Of each trainer. Bits can depend on it: with one trainer it is the same as in one process."""
        here = torch.get_num_threads()
        share = here if self.address is not None else max(1, here // self.trainers)
        return self.config.threads or self.trainer_cores or share


@dataclass(frozen=True)
class Launched:
    """How a launch went."""

    summary: Summary
    trained: Trained | None
    """What the first trainer has said; None for a script."""
    reached_at: dict[str, float]
    """When it had come so far, by the clock of this machine: "ray" is connected, "roles" have begun, have "started"."""
    exit_code: int = 0


def launch(request: Request, show: Callable[[str, str], None], echo: Callable[[str], object] | None = None) -> Launched:
    """Run the roles to the end. Logs of a run that failed stay in its directory; of one that was stopped, nothing.

    `show` is told the name of a role and how it is; `echo` is given what a script prints.
    """
    config = _resolved(request.config, request.servers)
    request = replace(request, config=config)
    with exit_codes_kept(), ExitStack() as stack:
        own = stack.enter_context(closing(OwnRay(cores=_own_cores(request)))) if request.address is None else None
        job = prepare(config, request.run_dir) if request.script is None else None
        run_dir = job.run_dir if job is not None else claim(request.run_dir, config)
        try:
            logs = LogPlace.make(run_dir / "logs")
            # Ray prints what it has to say about its processes; standard output is for the result.
            stack.enter_context(redirect_stdout(stack.enter_context(logs.ray())))
            stack.callback(disconnect)
            ray = join(str(request.address)) if own is None else own.connect()
            watch = Watch(ray, logs, show, echo=echo if job is None else None)
            launched = _Run(request, ray, watch, run_dir).go(job)
        except BaseException as error:
            _keep_logs(run_dir, not isinstance(error, Exception))
            raise
        logs.finish()
        return launched


class _Run:
    """One run on a Ray that is connected."""

    def __init__(self, request: Request, ray: ModuleType, watch: Watch, run_dir: Path) -> None:
        self.request, self.ray, self.watch, self.run_dir = request, ray, watch, run_dir
        self.reached_at = {"ray": time.time()}
        self.servers = [
            Need(f"server {number}", request.server_cores, memory_bytes=request.server_memory or SERVER_BYTES)
            for number in range(request.servers)
        ]
        self.trainers = [
            Need(f"trainer {number}", request.threads, request.trainer_gpus) for number in range(request.trainers)
        ]
        fed = request.script is None
        self.processors = [Need(f"processor {number}", 1.0) for number in range(request.processors if fed else 0)]
        self.oracles = [Need(ORACLE, 1.0)] if fed else []

    def go(self, job: Job | None) -> Launched:
        """Place, start, follow and end all roles."""
        placement = Placement(self.ray, self.servers, [*self.trainers, *self.oracles, *self.processors])
        try:
            self._make_actors(placement)
            introductions = self._introduce()
            launched = self._run_script(introductions) if job is None else self._train(job, introductions)
            stopping = {role: self.watch.ask(role, "stop") for role in reversed(self.watch.actors)}
            self.watch.gather(stopping, "stop", STOP_S)
            return launched
        finally:
            for actor in self.watch.actors.values():
                with suppress(Exception):  # it, or all of Ray, may be gone
                    self.ray.kill(actor, no_restart=True)
            placement.close()

    def _make_actors(self, placement: Placement) -> None:
        """Trainers first, which take longest to be ready."""
        kinds: list[tuple[type[Role], list[Need]]] = [
            (TrainerRole, self.trainers),
            (OracleRole, self.oracles),
            (ProcessorRole, self.processors),
            (ServerRole, self.servers),
        ]
        for kind, needs in kinds:
            actor = self.ray.remote(kind)
            for need in needs:
                options = placement.options(need) | {"max_restarts": 0, "max_task_retries": 0}
                self.watch.actors[need.role] = actor.options(**options).remote(need.role)
                self.watch.show(need.role, "is placed")

    def _introduce(self) -> dict[str, Introduction]:
        calls = {
            role: self.watch.ask(role, "introduce", self.request.interface, self.watch.logs)
            for role in self.watch.actors
        }
        introductions = self.watch.gather(calls, "start", START_S)
        self.reached_at["roles"] = time.time()
        for role, introduction in introductions.items():
            self.watch.show(role, f"starts on {introduction.host}")
            if introduction.version != __version__:
                raise ClusterError(
                    f"{role} on {introduction.host} runs bagpipe {introduction.version}, this is {__version__}: "
                    "install the same release on all machines"
                )
        return introductions

    def _train(self, job: Job, introductions: dict[str, Introduction]) -> Launched:
        watch, config = self.watch, self.request.config
        settings = config.model_dump(mode="json")
        preparing = {
            need.role: watch.ask(need.role, "prepare", settings, self.request.threads) for need in self.trainers
        }
        hosts, wiring = wire(introductions, self.request.interface, config.wire.security)
        order = job.data_order()
        starting = self._start_servers(hosts, wiring) | {
            need.role: watch.ask(need.role, "start", hosts[need.role], order, wiring, number, len(self.processors))
            for number, need in enumerate(self.processors)
        }
        addresses = watch.gather(starting, "start", START_S)
        processors = [addresses[need.role] for need in self.processors]
        planning = watch.ask(ORACLE, "start", hosts[ORACLE], processors, order, job.plan_settings(), wiring)
        oracle = watch.gather({ORACLE: planning}, "start", START_S)[ORACLE]
        watch.gather(preparing, "open the data", START_S)
        teams = self._teams(hosts)
        self.reached_at["started"] = time.time()
        servers = tuple(addresses[need.role] for need in self.servers)
        tasks = {role: TrainerTask(wiring, servers, oracle, team) for role, team in teams.items()}
        calls = {role: watch.ask(role, "train", task, self._board()) for role, task in tasks.items()}
        trained: list[Trained] = [*watch.follow(calls).values()]
        summary = trained[0].summary if len(trained) == 1 else joined_summary([each.summary for each in trained])
        return Launched(write_summary(job, summary), trained[0], self.reached_at)

    def _run_script(self, introductions: dict[str, Introduction]) -> Launched:
        watch, request = self.watch, self.request
        assert request.script is not None
        hosts, wiring = wire(introductions, request.interface, request.config.wire.security)
        addresses = watch.gather(self._start_servers(hosts, wiring), "start", START_S)
        servers, script = tuple(addresses[need.role] for need in self.servers), str(request.script.resolve())
        settings, here = request.config.model_dump(mode="json"), str(Path.cwd())
        tasks = {
            role: ScriptTask(wiring, servers, script, request.arguments, here, settings, request.threads, team)
            for role, team in self._teams(hosts).items()
        }
        calls = {role: watch.ask(role, "run_script", task, self._board()) for role, task in tasks.items()}
        codes: list[int] = [*watch.follow(calls).values()]
        code = next((code for code in codes if code), 0)
        summary = {"script": str(request.script), "exit_code": code, "run_dir": str(self.run_dir)}
        return Launched(summary, None, self.reached_at, code)

    def _teams(self, hosts: dict[str, str]) -> dict[str, Team]:
        """For each trainer where all of them are, and where they meet: at the first one."""
        roles = [need.role for need in self.trainers]
        where = tuple(parse_address(hosts[role]).host for role in roles)
        meeting = None
        if len(roles) > 1:
            first = roles[0]
            meeting = self.watch.gather({first: self.watch.ask(first, "meet", where[0])}, "listen", START_S)[first]
        return {role: Team(number, where, meeting) for number, role in enumerate(roles)}

    def _board(self) -> Any:
        """Who keeps word of trainers while they work."""
        return self.watch.actors[self.servers[0].role]

    def _start_servers(self, hosts: dict[str, str], wiring: Wiring) -> dict[str, Any]:
        config, request = self.request.config, self.request
        limit = config.store_memory
        here = all(parse_address(host).host == LOOPBACK for host in hosts.values())
        calls = {}
        for number, need in enumerate(self.servers):
            rows = self.run_dir.resolve() / "rows" / f"server-{number}"
            options = ServerOptions(
                address=hosts[need.role],
                server=number,
                servers=len(self.servers),
                run=wiring.run,
                store=config.store,
                directory=str(rows) if here and config.store == "mapped" else None,
                memory_max=request.server_memory,
                resident_max=None if limit is None else store_memory_bytes(limit, config.store),
            )
            calls[need.role] = self.watch.ask(need.role, "start", options, wiring)
        return calls


def wire(
    introductions: dict[str, Introduction], interface: str | None, security: Literal["curve", "none"]
) -> tuple[dict[str, str], Wiring]:
    """Where each role listens, and with which keys: loopback on one machine, else as asked and encrypted."""
    one_machine = len({introduction.machine for introduction in introductions.values()}) == 1
    addresses = {
        role: Address(LOOPBACK if one_machine and interface is None else introduction.address, 0)
        for role, introduction in introductions.items()
    }
    local = [role for role, address in addresses.items() if address.is_local]
    if local and not one_machine:
        role = local[0]
        raise ClusterError(
            f"{role} on {introductions[role].host} has the address {addresses[role].host}, which other machines can't "
            "reach: name a network that all have, such as --interface eth0 or --interface 10.0.0.0/24"
        )
    listener: Security = None
    client: Security = None
    if len(local) < len(addresses):
        listener, client = new_keys() if security == "curve" else ("none", "none")
    hosts = {role: str(address) for role, address in addresses.items()}
    return hosts, Wiring(os.urandom(16), listener, client)


def _resolved(config: Config, servers: int) -> Config:
    """With paths that mean the same in any directory."""
    path = config.data.path
    data = config.data if path is None else config.data.model_copy(update={"path": path.resolve()})
    return config.model_copy(update={"data": data, "servers": servers})


def _own_cores(request: Request) -> float:
    """All roles share this machine, as threads of one process do; only each trainer by itself is held to its cores."""
    trainers = request.trainers * min(request.threads, len(os.sched_getaffinity(0)))
    return trainers + request.servers * request.server_cores + 1 + request.processors


def _keep_logs(run_dir: Path, nothing: bool) -> None:
    """Of a run that failed only what its roles said stays."""
    for part in run_dir.iterdir() if run_dir.exists() else ():
        if part.name != "logs":
            shutil.rmtree(part, ignore_errors=True) if part.is_dir() else part.unlink(missing_ok=True)
    logs = run_dir / "logs"
    if logs.exists():
        LogPlace(logs, "").finish()
    if nothing or not logs.exists() or not any(logs.iterdir()):
        shutil.rmtree(run_dir, ignore_errors=True)
        with suppress(OSError):
            Path("runs").rmdir()  # if no other run is in it
