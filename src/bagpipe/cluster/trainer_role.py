"""A trainer as a role: trains a configuration, or runs a script of the user's with the servers of the launch.

It does so in the main thread, as Python programs do, and so can't be asked meanwhile: a thread leaves word of it with
another role every second. Nothing of an iteration goes through Ray; what its threads take of this process is measured.
Trainers talk to each other over torch.distributed, and one that fails tells the others why.
"""

from __future__ import annotations

import os
import runpy
import signal
import sys
import threading
import time
from collections.abc import Iterator, Mapping
from contextlib import ExitStack, closing, contextmanager, suppress
from dataclasses import dataclass, replace
from itertools import count
from pathlib import Path
from typing import Any

import torch

from bagpipe.allocator import keep_freed_memory
from bagpipe.cluster import context
from bagpipe.cluster.attempt import Attempt
from bagpipe.cluster.extra import import_ray
from bagpipe.cluster.keeper import children_of
from bagpipe.cluster.role import Role, told
from bagpipe.cluster.settings import ScriptTask, TrainerTask
from bagpipe.config import Config, parse_config
from bagpipe.errors import ClusterError
from bagpipe.job import Job, open_job
from bagpipe.results import Summary
from bagpipe.trainer.collective import Groups
from bagpipe.trainer.meeting import MeetingPoint
from bagpipe.trainer.remote_plans import RemotePlans
from bagpipe.training import train_in
from bagpipe.wire.stream import SocketNetwork

REPORT_S = 0.25
"""How often it leaves word, and hears whether its generation is over."""


@dataclass(frozen=True)
class Trained:
    """What a trainer gives back."""

    summary: Summary
    """With `parameters_sha256` of the first one."""
    first_iteration_at: float
    """When it had finished, in seconds of the clock of its machine."""
    training_s: float
    ray_s: float
    """Of processor time that threads of Ray took in this process while it trained."""


class TrainerRole(Role):
    """One trainer."""

    def __init__(self, name: str) -> None:
        super().__init__(name)
        self._line = "starts"
        self._job: Job | None = None
        self._meeting: MeetingPoint | None = None
        self._done = 0
        self._ray_threads = _threads() - {threading.get_native_id()}
        """Those that were there before any of ours; later also the one that calls Ray."""

    @told
    def prepare(self, config: Mapping[str, Any], threads: int) -> None:
        """Open the data; everything that takes time and needs no other role."""
        keep_freed_memory()
        torch.set_num_threads(threads)
        self._job = open_job(parse_config(dict(config)), Path())

    @told
    def meet(self, host: str) -> str:
        """Let other trainers find this one, the first, at a new point; the address."""
        if self._meeting is not None:
            self._meeting.close()
        self._meeting = MeetingPoint(host)
        return self._meeting.address

    @told
    def train(self, task: TrainerTask, board: Any) -> Trained:
        """Train to the end, or until the generation is over; word of it is left with the actor `board`."""
        with self._leaving_word(board, task.generation) as attempt:
            return self._train(task, attempt)

    @told
    def run_script(self, task: ScriptTask, board: Any) -> int:
        """Run a script as Python would, with `bagpipe.prepare` finding the servers; its exit code."""
        with self._leaving_word(board, task.generation) as attempt:
            return self._run_script(task, attempt)

    def line(self) -> str:
        """How far it is."""
        return self._line

    def done(self) -> int:
        """Iterations that are over."""
        return self._done

    @told
    def stop(self) -> None:
        """End what it has started; it is no longer needed."""
        if self._meeting is not None:
            self._meeting.close()
        for child in children_of(os.getpid()):
            with suppress(ProcessLookupError):
                os.kill(child, signal.SIGKILL)

    def _train(self, task: TrainerTask, attempt: Attempt) -> Trained:
        job = self._job
        assert job is not None, "prepare comes first"
        iterations, first_at = job.iterations, list[float]()
        self._done = task.resume.done

        def report(done: int, note: str) -> None:
            self._done = done
            self._line = f"iteration {done:,} of {iterations:,}, {note}"
            if not first_at and done > task.resume.done:  # it evaluates before, and says so too
                first_at.append(time.time())

        with ExitStack() as stack:
            network = SocketNetwork(task.wiring.client)
            launch = self._launch(task, job.config, attempt)
            run = task.wiring.session(task.generation)
            plans = RemotePlans(
                network,
                task.oracle,
                run=run,
                trainer=launch.trainer,
                done=task.resume.done,
                on_connect=lambda plans: attempt.on_end(plans.abandon),
            )
            stack.callback(plans.close)
            store = launch.open_store(job.model()[2])
            stack.callback(store.close)
            groups = stack.enter_context(_joined(launch)) if launch.trainers > 1 else None
            before = _processor_s(self._ray_threads)
            checkpoints = Path(task.checkpoints) if task.checkpoints else None
            if checkpoints is not None and checkpoints.parent.is_dir():
                job = replace(job, run_dir=checkpoints.parent)
            world = context.RoleWorld(
                job.config,
                plans,
                store,
                groups,
                resume=task.resume,
                checkpoints=checkpoints,
                recovers=launch.recovers,
                generation=task.generation,
                token=launch.token,
            )
            _, summary = train_in(world, job, report, job.checkpointing(checkpoints))
            after = _processor_s(self._ray_threads)
            ray_s = sum(after[thread] - before.get(thread, 0.0) for thread in after)
        self._line = "is done"
        return Trained(summary, first_at[0] if first_at else time.time(), summary["seconds"], ray_s)

    def _run_script(self, task: ScriptTask, attempt: Attempt) -> int:
        torch.set_num_threads(task.threads)
        self._line = f"runs {Path(task.script).name}"
        if not Path(task.script).is_file():
            raise ClusterError(f"{self.name}: there is no {task.script} on its machine: put it there too")
        with suppress(OSError):  # it may not be on this machine
            os.chdir(task.directory)
        sys.argv = [task.script, *task.arguments]
        sys.path.insert(0, str(Path(task.script).parent))
        try:
            with self._launch(task, parse_config(dict(task.config)), attempt).entered():
                runpy.run_path(task.script, run_name="__main__")
        except SystemExit as ended:
            return _exit_code(ended)
        self._line = "is done"
        return 0

    def _launch(self, task: TrainerTask | ScriptTask, config: Config, attempt: Attempt) -> context.Launch:
        wiring, team = task.wiring, task.team
        return context.Launch(
            config,
            task.servers,
            wiring.run,
            wiring.client,
            team.trainer,
            team.trainers,
            team.hosts,
            self._meeting or team.meeting,
            wiring.listener,
            recovers=config.recovery.restarts_max > 0,
            generation=task.generation,
            attempt=attempt,
            resume=task.resume,
            checkpoints=task.checkpoints if isinstance(task, ScriptTask) else (),
            name=task.name if isinstance(task, ScriptTask) else "",
            meetings=count(task.generation << 20),
        )

    @contextmanager
    def _leaving_word(self, board: Any, generation: int) -> Iterator[Attempt]:
        """The only calls of Ray while the trainer works; by their answers it hears that its generation is over."""
        over, attempt = threading.Event(), Attempt()

        def leave() -> None:
            while attempt.over is None and not over.wait(REPORT_S):
                heard = _answer(board.ask.remote("leave", self.name, self.own_report(), generation), over)
                if not heard and not over.is_set():
                    attempt.abandon(generation)

        thread = threading.Thread(target=leave, name="bagpipe-report", daemon=True)
        thread.start()
        assert thread.native_id is not None
        self._ray_threads.add(thread.native_id)
        try:
            yield attempt
        finally:
            over.set()
            thread.join()


@contextmanager
def _joined(launch: context.Launch) -> Iterator[Groups]:
    """Connected to all other trainers, who are told if this one fails."""
    with closing(launch.open_groups()) as groups:
        try:
            yield groups
        except BaseException as error:
            groups.abort(error)
            raise


def _answer(call: Any, over: threading.Event) -> bool:
    """What the other actor says; False also where it is gone, and when it is not waited for any more."""
    ray = import_ray()
    try:
        while not ray.wait([call], timeout=REPORT_S)[0]:
            if over.is_set():
                return False
        return bool(ray.get(call))
    except ray.exceptions.RayError:
        return False


def _exit_code(ended: SystemExit) -> int:
    if ended.code is None or isinstance(ended.code, int):
        return ended.code or 0
    sys.stderr.write(f"{ended.code}\n")
    return 1


def _threads() -> set[int]:
    return {int(task.name) for task in Path("/proc/self/task").iterdir()}


def _processor_s(threads: set[int]) -> dict[int, float]:
    """Seconds that each of these threads has run so far, of those that are there."""
    found = {}
    for thread in threads:
        with suppress(OSError):
            text = Path(f"/proc/self/task/{thread}/schedstat").read_text(encoding="ascii")
            found[thread] = int(text.split()[0]) / 1e9
    return found
