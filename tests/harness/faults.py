"""Small runs with faults, compared bit by bit with the same run undisturbed."""

from __future__ import annotations

import atexit
import gc
import os
import random
import shutil
import tempfile
import threading
import time
from contextlib import contextmanager
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path

from bagpipe.checkpoint.directory import Checkpoints
from bagpipe.errors import BagpipeError
from bagpipe.failpoints import NAMES, Fault, FaultInjected
from bagpipe.training import train_reference
from harness.cluster import Crew, run_crew
from harness.roles import Plot
from harness.served import make_job, quiet

SEED = int(os.environ.get("BAGPIPE_CHAOS_SEED", random.randrange(1_000_000)))
"""Of what long tests draw; another each time, and printed at the end."""
SETTINGS = ["epochs=1", "batch_size=12", "data.samples=110", "data.held_out=0.05", "cache=100", "lookahead=4"]
SETTINGS += [
    "recovery.every=2",
    "checkpoint.every=4",
    "checkpoint.keep=1",
    "model.name=deepfm",
]


@dataclass(frozen=True)
class World:
    """How many of each role there are, and what else a run is like."""

    trainers: int = 2
    servers: int = 2
    processors: int = 1
    settings: tuple[str, ...] = ()


SMALL = World(1, 1)
USUAL = World(2, 2)
LARGE = World(3, 2, 2)
WAITING = World(settings=("lookahead=2",))
"""Rows stay for a short time, so that reads often have to wait for what another trainer writes back."""


@lru_cache
def job_of(world):
    """The run of a world."""
    directory = tempfile.mkdtemp(prefix="bagpipe-crew-")
    atexit.register(shutil.rmtree, directory, ignore_errors=True)
    return make_job(Path(directory) / "run", *SETTINGS, f"trainers={world.trainers}", *world.settings)


@lru_cache
def expected(world):
    """What it comes to."""
    return train_reference(job_of(world), quiet)[0].sha256()


@dataclass
class Ended:
    """How a run went."""

    reaches: dict
    happened: list
    incidents: list
    seconds: float
    differs: bool
    crew: Crew
    last_kept: int | None
    """The iterations of its last checkpoint."""


@contextmanager
def nothing_left():
    """No thread stays."""
    before = set(threading.enumerate())
    yield
    gc.collect()  # generators that the dead were in the middle of, which a process would not have left
    left = [thread for thread in threading.enumerate() if thread not in before]
    for thread in left:
        thread.join(10)
    assert not any(thread.is_alive() for thread in left), f"threads are left: {left}"


def run(world, *faults, victims=None, seed=0, restarts_max=20, **options):
    """Train to the end in spite of these faults; nothing may stay, and no role may be left hanging."""
    plot = Plot(*faults, victims=victims)
    start = time.monotonic()
    with nothing_left(), tempfile.TemporaryDirectory(prefix="bagpipe-crew-") as directory:
        summary, crew, supervisor = run_crew(
            lambda: Crew(
                job_of(world), Path(directory), seed=seed, servers=world.servers, processors=world.processors,
                plot=plot, **options,
            ),
            restarts_max,
        )  # fmt: skip
        seconds = time.monotonic() - start
        last = Checkpoints(crew.checkpoints).latest()
    differs = summary["parameters_sha256"] != expected(world)
    return Ended(dict(plot.reaches), plot.happened, supervisor.incidents, seconds, differs, crew, last and last.done)


def error_of(world, fault, **options):
    """What a run with an error ends with; None where it goes on and has the bits of an undisturbed one."""
    with nothing_left():
        try:
            ended = run(world, fault, **options)
        except (BagpipeError, FaultInjected) as error:
            return error
    assert not ended.differs, f"other bits after {fault}"
    assert not ended.incidents, f"{fault} was taken for a death"
    return None


def survives(world, *faults, victims=None, seed=0, **options):
    """The same, and the bits are those of an undisturbed run; all faults have happened."""
    ended = run(world, *faults, victims=victims, seed=seed, **options)
    told = ", ".join(map(str, faults))
    assert not ended.differs, f"other bits after {told} (seed {seed}, {world})"
    assert {fault for _, fault in ended.happened} == set(faults), f"not all of {told} happened (seed {seed}, {world})"
    assert ended.incidents, f"nobody noticed {told}"
    job = job_of(world)
    assert job.config.checkpoint.every is None or ended.last_kept == job.iterations, f"no last checkpoint after {told}"
    return ended


@lru_cache
def undisturbed(world, seed=0):
    """How often each role reaches each point where nothing goes wrong, as (role, name) to a number."""
    ended = run(world, seed=seed)
    assert not ended.differs
    assert not ended.incidents
    return ended.reaches


def roles_at(world, name, seed=0):
    """Who reaches a point, and how often."""
    return {role: count for (role, found), count in undisturbed(world, seed).items() if found == name and role}


def random_faults(world, seed, number):
    """So many deaths anywhere, by a seed."""
    choose = random.Random(seed)
    found = undisturbed(world).items()
    reached = sorted((role, name, count) for (role, name), count in found if role and name not in BY_SCHEDULE)
    return [
        Fault(name, "kill", choose.randint(1, count), role) for role, name, count in choose.choices(reached, k=number)
    ]


RECOVERY = [name for name in NAMES if name.startswith("recovery.")]
"""Reached by the supervisor: others die there."""
AFTERWARDS = ["resume.loaded", "server.return.begun", "server.return.done", "server.loaded", "layer.dropped"]
"""Reached in a recovery only."""
USUALLY = [name for name in NAMES if name not in {*RECOVERY, *AFTERWARDS}]
BY_SCHEDULE = ["server.read.parked"]
"""How often these are reached depends on the seed of the schedule."""

SERVER_LOST = Fault("server.write.applied", at=20, role="server-1")
"""Which has to come back from a checkpoint."""


def reached_after(name):
    """Options of a run in which this point is reached after a server was lost, and who reaches it how often."""
    reaches = _after_a_loss(())
    return {}, {role: count for (role, found), count in reaches.items() if found == name and role}


@lru_cache
def _after_a_loss(options):
    ended = run(USUAL, SERVER_LOST, **dict(options))
    assert not ended.differs
    return ended.reaches
