"""A run whose oracle and data processors answer over a network in memory, or over sockets."""

from __future__ import annotations

from contextlib import ExitStack

from bagpipe.config import load_config
from bagpipe.data.service import DataProcessorService, RemoteBatches
from bagpipe.oracle.service import OracleService
from bagpipe.store import MemoryStore
from bagpipe.trainer.remote_plans import RemotePlans
from bagpipe.training import prepare, train_remote
from bagpipe.wire.in_order import Patience
from bagpipe.wire.simulated import SimulatedNetwork

RUN = bytes(range(16))
HASTY = Patience(retry_s=0.05, deadline_s=30.0)
FAULTS = {"delay": (0.0, 0.003), "loss": 0.1, "duplicate": 0.1, "reorder": 0.2}
SETTINGS = [
    *("data.preset=tiny", "data.samples=500", "data.shuffle=true", "batch_size=36", "epochs=2"),
    *("model.name=wide_deep", "model.dim=3"),
]
"""13 batches an epoch, the last one short; a weighted bag, a shared table, a table without a size."""

LONG = ["epochs=6"]
"""So many that they can't all be on their way when the first few are trained."""


def make_job(path, *settings):
    """A small run."""
    return prepare(load_config(None, [*SETTINGS, *settings]), path)


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
        state, _ = train_remote(self.job, self.plans(), MemoryStore(self.job.model()[2]), report)
        return state
