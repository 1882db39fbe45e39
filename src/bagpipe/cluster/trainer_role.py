"""The trainer as a role: trains a configuration, or runs a script of the user's with the servers of the launch.

Nothing of an iteration goes through Ray; what Ray's own threads take of this process meanwhile is measured.
"""

from __future__ import annotations

import os
import runpy
import signal
import sys
import threading
import time
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from bagpipe.allocator import keep_freed_memory
from bagpipe.cluster import context
from bagpipe.cluster.keeper import children_of
from bagpipe.cluster.roles import Role, told
from bagpipe.cluster.settings import Report, ScriptTask, TrainerTask
from bagpipe.config import Config, parse_config
from bagpipe.errors import ClusterError
from bagpipe.trainer.remote_plans import RemotePlans
from bagpipe.training import Job, Summary, open_job, train_remote
from bagpipe.wire.sockets import SocketNetwork


@dataclass(frozen=True)
class Trained:
    """What a trainer gives back."""

    summary: Summary
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
        self._ray_threads = _threads()
        """Those that were there before any of ours."""

    @told
    def prepare(self, config: Mapping[str, Any], threads: int) -> None:
        """Open the data; everything that takes time and needs no other role."""
        keep_freed_memory()
        torch.set_num_threads(threads)
        self._job = open_job(parse_config(dict(config)), Path())

    @told
    def report(self) -> Report:
        """How it is."""
        self._ray_threads.add(threading.get_native_id())
        return Report(self.line(), b"" if self._output is None else self._output.news())

    @told
    def train(self, task: TrainerTask) -> Trained:
        """Train to the end."""
        job = self._job
        assert job is not None, "prepare comes first"
        network = SocketNetwork(task.wiring.client)
        plans = RemotePlans(network, task.oracle, run=task.wiring.run, trainer=task.trainer)
        store = _launch_of(task, job.config).open_store(job.model()[2])
        first_at: list[float] = []
        ours = threading.get_native_id()

        def report(done: int, note: str) -> None:
            self._line = f"iteration {done:,} of {job.iterations:,}, {note}"
            if not first_at:
                first_at.append(time.time())

        before = _processor_s(self._ray_threads - {ours})
        state, summary = train_remote(job, plans, store, report)
        ray_s = _processor_s(self._ray_threads - {ours}) - before
        summary["parameters_sha256"] = state.sha256()
        network.close()
        self._line = "is done"
        return Trained(summary, first_at[0], summary["seconds"], ray_s)

    @told
    def run_script(self, task: ScriptTask) -> int:
        """Run a script as Python would, with `bagpipe.accelerate` finding the servers; its exit code."""
        torch.set_num_threads(task.threads)
        self._line = f"runs {Path(task.script).name}"
        if not Path(task.script).is_file():
            raise ClusterError(f"{self.name}: there is no {task.script} on its machine: put it there too")
        with suppress(OSError):  # it may not be on this machine
            os.chdir(task.directory)
        sys.argv = [task.script, *task.arguments]
        sys.path.insert(0, str(Path(task.script).parent))
        try:
            with context.within(_launch_of(task, parse_config(dict(task.config)))):
                runpy.run_path(task.script, run_name="__main__")
        except SystemExit as ended:
            return _exit_code(ended)
        self._line = "is done"
        return 0

    def line(self) -> str:
        """How far it is."""
        return self._line

    @told
    def stop(self) -> None:
        """End what it has started; it is no longer needed."""
        for child in children_of(os.getpid()):
            with suppress(ProcessLookupError):
                os.kill(child, signal.SIGKILL)


def _launch_of(task: TrainerTask | ScriptTask, config: Config) -> context.Launch:
    wiring = task.wiring
    return context.Launch(config, task.servers, wiring.run, wiring.client, task.trainer, task.trainers)


def _exit_code(ended: SystemExit) -> int:
    if ended.code is None or isinstance(ended.code, int):
        return ended.code or 0
    sys.stderr.write(f"{ended.code}\n")
    return 1


def _threads() -> set[int]:
    return {int(task.name) for task in Path("/proc/self/task").iterdir()}


def _processor_s(threads: set[int]) -> float:
    """Seconds that these threads have run so far."""
    total_ns = 0
    for thread in threads:
        with suppress(OSError):
            total_ns += int(Path(f"/proc/self/task/{thread}/schedstat").read_text(encoding="ascii").split()[0])
    return total_ns / 1e9
