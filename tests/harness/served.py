"""A run whose oracle and data processors answer over a network in memory, or over sockets."""

from __future__ import annotations

from contextlib import ExitStack
from dataclasses import fields, replace

from bagpipe.cluster.context import RoleWorld
from bagpipe.config import load_config
from bagpipe.data.service import DataProcessorService, RemoteBatches
from bagpipe.job import Job, prepare
from bagpipe.oracle.service import OracleService
from bagpipe.store import MemoryStore
from bagpipe.store.views import shared_views
from bagpipe.together import run_threads
from bagpipe.trainer.collective import Groups
from bagpipe.trainer.remote_plans import RemotePlans
from bagpipe.trainer.stages import Threads
from bagpipe.training import train_in
from bagpipe.wire.client import Patience
from benchmarks.simulated import SimulatedNetwork
from harness.collectives import strict_groups

RUN = bytes(range(16))
HASTY = Patience(retry_s=0.05, deadline_s=30.0)
FAULTS = {"delay": (0.0, 0.003), "breaks": 0.1}
SETTINGS = [
    *("data.preset=tiny", "data.samples=500", "data.shuffle=true", "batch_size=36", "epochs=2"),
    *("model.name=wide_deep", "model.dim=3", "cache=1000"),
]
"""13 batches an epoch, the last one short; a weighted bag, a shared table, a table without a size. The default cache
has millions of places, which take longer to prepare than these runs to train."""

LONG = ["epochs=6"]
"""So many that they can't all be on their way when the first few are trained."""


class Made(Job):
    """A run whose trainers are threads: models are made before, with PyTorch's one random generator."""

    models = ()

    def made(self, trainers):
        """The same run with so many models, one for each call of `model`."""
        job = replace(self)
        object.__setattr__(job, "models", [super(Made, self).model() for _ in range(trainers)])
        return job

    def model(self):
        return self.models.pop() if self.models else super().model()


def make_job(path, *settings):
    """A small run."""
    job = prepare(load_config(None, [*SETTINGS, *settings]), path)
    return Made(**{field.name: getattr(job, field.name) for field in fields(job)})


def quiet(*_):
    """Reports nothing."""


class Served:
    """Data processors and an oracle on a simulated network; closed with the `with` block."""

    def __init__(self, job, processors=1, *, batches=None, room=8, seed=0, settings=None, **faults):
        self.job, self.order = job, job.data_order()
        self.network = SimulatedNetwork(seed, real_time=True, **faults)
        self.settings = settings or job.plan_settings()
        self.room = room
        self.num_processors = processors
        self._stack = ExitStack()
        self.batches = batches
        self.processors = []
        self.oracle = None

    def __enter__(self):
        self._stack.callback(self.network.close)
        if self.batches is None:
            self.processors = [self.start_processor(place) for place in range(self.num_processors)]
        self.oracle = self.start_oracle()
        return self

    def __exit__(self, *_):
        self._stack.close()

    def listen(self, address):
        return lambda handler: self.network.listen(address, handler)

    def start_processor(self, place):
        processor = DataProcessorService(
            self.listen(f"processor-{place}"), self.order, run=RUN, processor=place, processors=self.num_processors
        )
        processor.start()
        self._stack.callback(processor.close)
        return processor

    def remote_batches(self):
        addresses = [processor.address for processor in self.processors]
        return RemoteBatches(self.network, addresses, self.order, run=RUN, patience=HASTY)

    def start_oracle(self, settings=None):
        batches = self.remote_batches() if self.batches is None else self.batches
        oracle = OracleService(self.listen("oracle"), batches, settings or self.settings, run=RUN, room=self.room)
        oracle.start()
        self._stack.callback(oracle.close)
        return oracle

    def plans(self, **options):
        return RemotePlans(self.network, "oracle", run=RUN, patience=HASTY, **options)

    def train(self, report=quiet):
        """The state of a training run over the network."""
        return self.train_all(report)[0][0]

    def train_all(self, report=quiet):
        """State and summary of each trainer; several are threads that exchange through memory."""
        job, trainers = self.job, self.job.config.trainers
        rows = MemoryStore(job.model()[2])
        if trainers == 1:
            return [train_in(RoleWorld(job.config, self.plans(), rows), job, report, hold=True)]
        job = job.made(trainers)
        drivers = [Threads(60) for _ in range(trainers)]

        def notify():
            for driver in drivers:
                driver.notify()

        ends = [strict_groups(trainers, notify, deadline_s=60) for _ in range(3)]
        groups = [Groups(*of_rank) for of_rank in zip(*ends, strict=True)]
        stores = shared_views(rows, trainers, [driver.notify for driver in drivers])

        def abort(error):
            groups[0].abort(error)
            for driver in drivers:
                driver.abort(error)

        def loop(rank):
            plans = self.plans(trainer=rank)
            world = RoleWorld(job.config, plans, stores[rank], groups[rank], stages=drivers[rank])
            return lambda: train_in(world, job, quiet if rank else report, hold=True)

        return run_threads([loop(rank) for rank in range(trainers)], 60, abort)
