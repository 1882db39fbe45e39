"""The roles of a run as Ray actors, for a `Supervisor`: placed, started, told what to do, ended and replaced.

A lost role gets a new process; all others keep theirs, and what they hold of an attempt that is over has no effect any
more (I2). So that nobody is mistaken for another, an actor of Ray is one process: Ray never restarts it by itself.
"""

from __future__ import annotations

import os
import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Collection, Mapping
from contextlib import closing, suppress
from pathlib import Path
from types import ModuleType
from typing import Any, Generic, TypeVar

from bagpipe._version import __version__
from bagpipe.checkpoint.directory import complete_points
from bagpipe.checkpoint.point import START, ResumePoint
from bagpipe.cluster.interface import LOOPBACK
from bagpipe.cluster.member import Member
from bagpipe.cluster.placement import Placement
from bagpipe.cluster.post import POSTS
from bagpipe.cluster.request import Request
from bagpipe.cluster.resources import Need
from bagpipe.cluster.settings import ScriptTask, Team, TrainerTask, Wiring
from bagpipe.cluster.shared_directory import Sight
from bagpipe.cluster.spare import Spare
from bagpipe.cluster.trainer_role import Trained
from bagpipe.cluster.watch import WAIT_S, Watch
from bagpipe.cluster.wiring import wire
from bagpipe.config import memory_bytes, store_memory_bytes
from bagpipe.errors import BagpipeError, ClusterError
from bagpipe.job import Job
from bagpipe.recovery import RolesLost
from bagpipe.resuming import CHECKPOINTS
from bagpipe.server.process import ServerOptions
from bagpipe.wire.keys import Address, parse_address

START_S = 180.0
STOP_S = 30.0
RETURN_S = 1800.0
"""How long servers may take to read a checkpoint."""
SERVER_BYTES = 500_000_000
"""What a server holds of its node's memory in Ray's books, if nothing is said."""
ORACLE = "oracle"
ResultT = TypeVar("ResultT")


class RayCrew(ABC, Generic[ResultT]):
    """A `Crew` on a Ray that is connected."""

    def __init__(self, request: Request, ray: ModuleType, watch: Watch, run_dir: Path) -> None:
        self.request, self.ray, self.watch = request, ray, watch
        self.run_dir, self.name = run_dir.resolve(), os.urandom(8).hex()
        self.reached_at = {"ray": time.time()}
        """When it had come so far, by the clock of this machine."""
        self.servers = [
            Need(f"server {number}", request.server_cores, memory_bytes=request.server_memory or SERVER_BYTES)
            for number in range(request.servers)
        ]
        self.trainers = [Need(f"trainer {number}", request.threads) for number in range(request.trainers)]
        self.others: list[Need] = []
        """What else an attempt needs."""
        self.board = self.servers[0].role
        """With whom trainers leave word while they work."""
        self.working: dict[str, Any] = {}
        """Calls of trainers that were not seen to end."""
        self.wiring: Wiring | None = None
        self._one_machine = True
        self._generation = 0
        self._placement: Placement | None = None
        self.spare = Spare(ray, wanted=request.keeps_spare)

    @property
    def done(self) -> int:
        """Iterations that are over, as last heard."""
        return self.watch.done

    def attempt(self, generation: int, point: ResumePoint, went_on: Callable[[], None]) -> ResultT:
        """Have all work from this point to the end."""
        self._generation = generation
        self._bring_up()
        if generation == 0 and point != START:
            self.return_to(point)
        return self.work(generation, point, went_on)

    @abstractmethod
    def work(self, generation: int, point: ResumePoint, went_on: Callable[[], None]) -> ResultT:
        """One attempt; everybody is there."""

    def abandon(self, generation: int) -> None:
        """Have servers refuse what was before, and all others leave off; a trainer that does not is replaced."""
        self._generation = generation
        watch = self.watch
        calls = {need.role: watch.ask(need.role, "abandon", generation) for need in self.servers if self._is_up(need)}
        failed = self.gather_all(calls, "leave off", START_S)
        # Such a one may still write what is of an earlier generation, while others return.
        watch.end([*failed], f"it could not leave off and was ended: {'; '.join(map(str, failed.values()))}")
        calls = {need.role: watch.ask(need.role, "leave_off") for need in self.others if need.role in watch.members}
        self.leave_off()
        self.gather_all(calls, "leave off", START_S)

    def leave_off(self) -> None:
        """Return when no trainer works any more; what they say does not matter.

        Who is late is replaced too, and not lost: an iteration or a checkpoint of a trainer that is well may take long.
        """
        calls = {role: call for role, call in self.working.items() if role in self.watch.members}
        self.working = dict(calls)
        self.gather_all(calls, "leave off", self.watch.stuck_s, heard=self.working.pop, is_loss=False)

    def restart(self, roles: Collection[str]) -> None:  # noqa: ARG002 - it knows itself who is missing
        """Give all who are missing a new process."""
        self._bring_up()

    def points(self) -> Collection[ResumePoint]:
        """The complete checkpoints of the run, wherever servers, trainers and this process know of one."""
        calls = {need.role: self.watch.ask(need.role, "checkpoints") for need in self.servers}
        told = self.watch.gather(calls, "tell its checkpoints", START_S).values()
        return complete_points({Path(path) for paths in told for path in paths}, self.checkpoints)

    def return_to(self, point: ResumePoint) -> None:
        """Have all servers return there; an error of one is raised when all have answered."""
        calls = {need.role: self.watch.ask(need.role, "recover", self._generation, point) for need in self.servers}
        try:
            self.watch.gather(calls, f"return to {point}", RETURN_S)
        except BagpipeError:
            self.gather_all(calls, f"return to {point}", RETURN_S)
            raise

    @property
    def checkpoints(self) -> Path:
        """Where checkpoints of the run are."""
        return self.run_dir / CHECKPOINTS

    @property
    def places(self) -> tuple[str, ...]:
        """Where servers may keep checkpoints, in or below."""
        more = self.request.checkpoints
        # The run's own first: it was empty, and one who comes back finds nothing there that is of another run.
        return (str(self.checkpoints), *(() if more is None else (str(more.resolve()),)))

    def stop(self) -> None:
        """The run is over: have all end in order."""
        stopping = {role: self.watch.ask(role, "stop") for role in reversed(self.watch.members)}
        with suppress(RolesLost):  # who died now is not needed any more
            self.watch.gather(stopping, "stop", STOP_S)

    def close(self) -> None:
        """End every process, whatever state it is in, and give everything back."""
        for role in list(self.watch.members):
            self.watch.members[role].dismiss(self.ray)
            self.watch.forget(role)
        self.spare.close()
        if self._placement is not None:
            self._placement.close()

    def gather_all(
        self,
        calls: Mapping[str, Any],
        what: str,
        deadline_s: float,
        *,
        heard: Callable[[str], object] = lambda _: None,
        is_loss: bool = True,
    ) -> dict[str, BagpipeError]:
        """Return when all have answered, with the errors of those who had one; then who was lost is told of.

        Who is late is ended, which counts as lost too unless told otherwise.
        """
        losses: dict[str, str] = {}
        failed: dict[str, BagpipeError] = {}
        left, until = dict(calls), time.monotonic() + deadline_s
        while left and time.monotonic() < until:
            done, _ = self.ray.wait([*left.values()], timeout=WAIT_S)
            for role in [role for role, call in left.items() if call in done]:
                try:
                    self.watch.take(role, left.pop(role))
                except RolesLost as loss:
                    losses |= loss.losses
                except BagpipeError as error:
                    failed[role] = error  # it was cut short, or could not begin
                heard(role)
        try:
            self.watch.end([*left], f"it did not {what} within {deadline_s:g} s")
        except RolesLost as loss:
            losses |= loss.losses if is_loss else {}
        if losses:
            raise RolesLost(losses)
        return failed

    def teams(self) -> dict[str, Team]:
        """For each trainer where all of them are, and where they meet: at the first one."""
        roles = [need.role for need in self.trainers]
        where = tuple(parse_address(self.host(role)).host for role in roles)
        meeting = None
        if len(roles) > 1:
            first = roles[0]
            meeting = self.watch.gather({first: self.watch.ask(first, "meet", where[0])}, "listen", START_S)[first]
        return {role: Team(number, where, meeting) for number, role in enumerate(roles)}

    def addresses(self) -> tuple[str, ...]:
        """Of all servers, in order."""
        return tuple(self.watch.members[need.role].address for need in self.servers)

    def host(self, role: str) -> str:
        """Where a role listens, on a port that the system chooses."""
        introduction = self.watch.members[role].introduction
        assert introduction is not None, "all have introduced themselves"
        return str(Address(LOOPBACK if self._one_machine else introduction.address, 0))

    def _bring_up(self) -> None:
        """Return when every role has a process that has said where it is, and every server listens."""
        needs = [*self.trainers, *self.others, *self.servers]  # trainers take longest to be ready
        if self._placement is None:
            self._placement = Placement(self.ray, self.servers, [*self.trainers, *self.others])
        for need in needs:
            if need.role not in self.watch.members:
                self._make(need, self._placement)
        self._introduce()
        self._prove_directory()
        self._wire()
        self.prepare()
        starting = {
            need.role: self.watch.ask(need.role, "start", self._server_options(number), self.wiring)
            for number, need in enumerate(self.servers)
            if not self._is_up(need)
        }
        for role, address in self.watch.gather(starting, "start", START_S).items():
            self.watch.members[role].address = address

    def prepare(self) -> None:
        """Have new processes begin with what takes time."""

    def _is_up(self, need: Need) -> bool:
        return need.role in self.watch.members and bool(self.watch.members[need.role].address)

    def _make(self, need: Need, placement: Placement) -> None:
        actor = self.spare.take(need.role)
        if actor is None:
            kind = POSTS[need.role.partition(" ")[0]]
            options = placement.options(need) | {"max_restarts": 0, "max_task_retries": 0}
            actor = self.ray.remote(kind).options(**options).remote(need.role)
        self.watch.members[need.role] = Member(actor)
        self.watch.show(need.role, "is placed")

    def _introduce(self) -> None:
        new = [role for role, member in self.watch.members.items() if member.introduction is None]
        calls = {role: self.watch.ask(role, "introduce", self.request.interface, self.watch.logs) for role in new}
        for role, introduction in self.watch.gather(calls, "start", START_S).items():
            self.watch.members[role].introduced(introduction)
            self.watch.show(role, f"starts on {introduction.host}")
            if introduction.version != __version__:
                raise ClusterError(
                    f"{role} on {introduction.host} runs bagpipe {introduction.version}, this is {__version__}: "
                    "install the same release on all machines"
                )
        self.reached_at.setdefault("roles", time.time())

    def _prove_directory(self) -> None:
        """Have new trainers and servers show that they see the directory of checkpoints, where there may be any."""
        config = self.request.config
        is_saved = self.request.script is None and config.checkpoint.retained
        if not (config.recovery.restarts_max or is_saved or self.request.checkpoints):
            return
        roles = [need.role for need in (*self.trainers, *self.servers)]
        new = [role for role in roles if not self.watch.members[role].sees]
        for directory in map(Path, self.places):
            with closing(Sight(directory)) as sight:
                calls = {role: self.watch.ask(role, "prove", str(sight.place), sight.token) for role in new}
                self.watch.gather(calls, "see the directory of checkpoints", START_S)
                sight.check(new)
        for role in new:
            self.watch.members[role].sees = True

    def _wire(self) -> None:
        """Choose addresses and keys; as long as a server is left they stay."""
        known = {role: member.introduction for role, member in self.watch.members.items()}
        introductions = {role: introduction for role, introduction in known.items() if introduction is not None}
        hosts, wiring = wire(introductions, self.request.interface, self.request.config.wire.security)
        if self.wiring is None or not any(self._is_up(need) for need in self.servers):
            self.wiring = wiring
            self._one_machine = all(parse_address(host).host == LOOPBACK for host in hosts.values())
        elif self._one_machine and len({introduction.machine for introduction in introductions.values()}) > 1:
            raise ClusterError(
                "a lost role came back on another machine, and the others listen on this one only: name a network "
                "with --interface, so that all can be reached from anywhere"
            )

    def _server_options(self, number: int) -> ServerOptions:
        config, request, need = self.request.config, self.request, self.servers[number]
        assert self.wiring is not None, "addresses and keys are chosen"
        rows = config.rows_directory(self.run_dir if self._one_machine else None)
        recover = config.recovery.restarts_max > 0
        limit = config.store_memory
        return ServerOptions(
            address=self.host(need.role),
            server=number,
            servers=len(self.servers),
            run=self.wiring.run,
            store="memory" if config.store == "memory" else "mapped",
            directory=None if rows is None else str(rows.resolve()),
            memory_max=request.server_memory,
            resident_max=None if limit is None else store_memory_bytes(limit, config.store),
            generation=self._generation,
            rollback=recover,
            history_max=memory_bytes("recovery.history", config.recovery.history) if recover else None,
            checkpoints=(*self.places, *([] if config.init_from is None else [str(config.init_from.parent)])),
        )


class TrainingCrew(RayCrew[list[Trained]]):
    """Trains a configuration: with oracle and data processors."""

    def __init__(self, request: Request, ray: ModuleType, watch: Watch, run_dir: Path, job: Job) -> None:
        super().__init__(request, ray, watch, run_dir)
        self.job = job
        self.processors = [Need(f"processor {number}", 1.0) for number in range(request.processors)]
        self.others = [Need(ORACLE, 1.0), *self.processors]

    def prepare(self) -> None:
        """Have trainers open the data."""
        settings = self.request.config.model_dump(mode="json")
        for need in self.trainers:
            member = self.watch.members[need.role]
            if member.preparing is None:
                member.preparing = self.watch.ask(need.role, "prepare", settings, self.request.threads)

    def work(self, generation: int, point: ResumePoint, went_on: Callable[[], None]) -> list[Trained]:
        """Start data processors and oracle, and have all trainers train."""
        watch, wiring, done = self.watch, self.wiring, point.done
        assert wiring is not None
        order, settings = self.job.data_order(), self.job.plan_settings()
        first, processors = settings.first_needed(done), len(self.processors)
        calls = {
            need.role: watch.ask(
                need.role, "start", self.host(need.role), order, wiring, number, processors, generation, first
            )
            for number, need in enumerate(self.processors)
        }
        sources = [*watch.gather(calls, "start", START_S).values()]
        planning = watch.ask(ORACLE, "start", self.host(ORACLE), sources, order, settings, wiring, generation, done)
        oracle = watch.gather({ORACLE: planning}, "start", START_S)[ORACLE]
        watch.gather({need.role: watch.members[need.role].preparing for need in self.trainers}, "prepare", START_S)
        teams = self.teams()
        self.reached_at.setdefault("started", time.time())
        servers, files, board = self.addresses(), str(self.checkpoints), watch.members[self.board].actor
        for role, team in teams.items():
            task = TrainerTask(wiring, servers, oracle, team, generation, point, files)
            self.working[role] = watch.ask(role, "train", task, board)
        answers = watch.follow(
            dict(self.working),
            self.board,
            generation=generation,
            done=done,
            went_on=went_on,
            meanwhile=self.spare.keep,
        )
        return [*answers.values()]


class ScriptCrew(RayCrew[list[int]]):
    """Runs a script of the user's on all trainers; what comes back are exit codes."""

    def work(self, generation: int, point: ResumePoint, went_on: Callable[[], None]) -> list[int]:
        """Run it from its first line; `prepare` goes on from the point."""
        watch, request, wiring = self.watch, self.request, self.wiring
        assert wiring is not None
        assert request.script is not None
        script, settings, here = str(request.script.resolve()), request.config.model_dump(mode="json"), str(Path.cwd())
        board, servers = watch.members[self.board].actor, self.addresses()
        for role, team in self.teams().items():
            task = ScriptTask(
                wiring, servers, script, request.arguments, here, settings, request.threads, team, generation, point,
                self.places, self.name,
            )  # fmt: skip
            self.working[role] = watch.ask(role, "run_script", task, board)
        following = dict(self.working)
        return [
            *watch.follow(
                following, self.board, generation=generation, done=point.done, went_on=went_on, heed=False
            ).values()
        ]

    def leave_off(self) -> None:
        """A script may leave anything behind in its process, so each run of it has a new one."""
        for role in self.working:
            if role in self.watch.members:
                self.watch.members[role].end(self.ray)
                self.watch.forget(role)
        self.working.clear()
